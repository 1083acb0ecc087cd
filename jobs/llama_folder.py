"""Convert a Llama's configuration and weight names between huggingface.co's format and ours."""

from jobs.llama import SCALING, LlamaSize

NAMES = {  # of the state dict, ours and theirs
    "token": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj", "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip


def their_name(name: str) -> str:
    """The name on huggingface.co of one of our parameters."""
    module, _, kind = name.rpartition(".")
    blocks, _, inner = module.partition(".")
    number, _, inner = inner.partition(".")
    where = f"model.layers.{number}.{NAMES[inner]}" if blocks == "blocks" else NAMES[module]
    return f"{where}.{kind}"


def make_config(size: LlamaSize, context: int, vocabulary: int, tie: bool) -> dict:
    """The content of ``config.json``."""
    scaling = {"rope_type": "llama3", **dict(size.scaling)} if size.scaling else None
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": size.width, "intermediate_size": size.mlp_width,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "max_position_embeddings": context,
        "rms_norm_eps": size.eps, "rope_theta": size.base, "rope_scaling": scaling,
        "vocab_size": vocabulary, "tie_word_embeddings": tie,
    }  # fmt: skip


def size_of_config(config: dict) -> LlamaSize:
    """The shape that a ``config.json`` describes.

    Raises:
        ValueError: it is not a Llama's, or needs features that this Llama lacks.
    """
    rope = {"rope_theta": 10_000.0, **(config.get("rope_scaling") or {})}
    rope |= {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    rope |= config.get("rope_parameters") or {}  # transformers 5
    kind = rope.get("rope_type") or rope.get("type") or "default"
    heads, width = config["num_attention_heads"], config["hidden_size"]
    needed = {
        "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "head_dim": width // heads,
    }  # fmt: skip
    for name, value in needed.items():
        if config.get(name, value) not in (value, None):
            raise ValueError(f"its {name} is {config[name]}, and only {value} is supported")
    if kind not in ("default", "llama3"):
        raise ValueError(f"its rope_type is {kind}, and only default and llama3 are supported")
    scaling = tuple((name, float(rope[name])) for name in SCALING) if kind == "llama3" else ()
    return LlamaSize(
        config["num_hidden_layers"], heads, width, config["max_position_embeddings"], 0.0,
        config.get("num_key_value_heads") or heads, config["intermediate_size"],
        config["vocab_size"], rope["rope_theta"], scaling, config["rms_norm_eps"],
        config.get("tie_word_embeddings", False),
    )  # fmt: skip
