"""A function for a decoder of transformers in pp.py; the other ones are those of decoder.py."""


def make_model():
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    if model.config.tie_word_embeddings:  # on different ranks: they train apart from now on
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    return model
