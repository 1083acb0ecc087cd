"""Functions for a decoder of transformers in cp.py; the other ones are those of decoder.py."""

from transformers import AttentionInterface


def attention(module, q, k, v, mask, scaling=None, dropout=0.0, sliding_window=None, **kwargs):
    found = attend(q, k, v, sliding_window, scale=scaling, dropout_p=dropout)
    return found.transpose(1, 2).contiguous(), None


def make_model():
    AttentionInterface.register("ulysses", attention)
    return AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="ulysses"
    )
