"""Functions for a decoder of transformers in cp.py; the other ones are those of decoder.py."""

from transformers import AttentionInterface


def attention(module, q, k, v, mask, scaling=None, dropout=0.0, sliding_window=None, **kwargs):
    for name in ("softcap", "s_aux"):  # of Gemma 2, and the sinks of gpt-oss
        if kwargs.get(name) is not None:
            raise SystemExit(f"the attention of this model has {name}, which attend() does not")
    found = attend(q, k, v, sliding_window, scale=scaling, dropout_p=dropout)
    return found.transpose(1, 2).contiguous(), None


def replace_attention(model):
    AttentionInterface.register("ulysses", attention)
    model.set_attn_implementation("ulysses")
