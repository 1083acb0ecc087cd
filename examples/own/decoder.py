"""Functions for a decoder of transformers, to put in place of those of an example."""

from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = "model"  # of the Hub
DATA = "text.txt"
LENGTH = 1024  # tokens of a row
LR = 2e-5  # of all weights of a pretrained model; LoRA takes ten times as much


def make_model():  # without the dtype, a folder in bfloat16 would give a bfloat16 AdamW
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def layers_of(model):
    return model.model.layers


def make_data():
    with open(DATA, encoding="utf-8") as file:
        tokens = torch.tensor(AutoTokenizer.from_pretrained(FOLDER)(file.read())["input_ids"])
    rows = [tokens[i : i + LENGTH + 1] for i in range(0, len(tokens) - LENGTH, LENGTH)]
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]  # shifted by one
    few = 1 + len(rows) // 10  # for evaluation
    return rows[few:], rows[:few]


def forward(model, batch):  # with a cache, recomputed layers would get every key twice
    return model(batch["input_ids"], use_cache=False).logits.float()


def export(model, weights):
    if model.config.tie_word_embeddings:  # one tensor, which FSDP gathers under both of its names
        weights.pop("lm_head.weight", None)
    model.save_pretrained(f"{OUT}/best", state_dict=weights)
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(f"{OUT}/best")
