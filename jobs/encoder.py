"""An encoder that classifies text: DistilBERT's layers, from the library transformers."""

import difflib
import json
import re

import torch
from torch import Tensor, nn

from harness.cli import fail, import_optional
from harness.state import check_weights
from jobs import reviews
from jobs.model_parts import decay_matrices
from libraries import hub, weights

# Layers, heads and width. DistilBERT: Sanh et al. 2019, arXiv:1910.01108.
SIZES = {"encoder": None, "encoder-1x4x128": (1, 4, 128), "distilbert": (6, 12, 768)}


def size_of(name: str) -> tuple[int, int, int] | None:
    """Layers, heads and width of ``--model``; ``None`` if pretrained weights define them."""
    if name in SIZES:
        return SIZES[name]
    numbers = re.fullmatch(r"encoder-([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", name)
    if not numbers:
        close = difflib.get_close_matches(name, SIZES) or SIZES
        use = "encoder-LxHxD, such as encoder-1x4x128 for a layer of 4 heads and width 128"
        fail(f"--model {name} is not for --dataset reviews; try {', '.join(close)}, or {use}")
    layers, heads, width = map(int, numbers.groups())
    if width % heads:
        fail(f"--model {name}: width {width} is not divisible by {heads} heads; use a multiple")
    return layers, heads, width


check_model_name = size_of
parameter_groups = decay_matrices


class Encoder(nn.Module):
    """Tokens ``[batch, context]`` to logits ``[batch, classes]``.

    Its state dict contains all that is needed to use it: the configuration of ``model``, which is
    of transformers, and the ``tokenizer`` are buffers with the bytes of their JSON."""

    def __init__(self, model: nn.Module, tokenizer: str):
        super().__init__()
        self.encoder = model
        self.pad = model.config.pad_token_id
        config = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
        self.register_buffer("config", torch.tensor(list(config.encode()), dtype=torch.uint8))
        self.register_buffer("tokenizer", torch.tensor(list(tokenizer.encode()), dtype=torch.uint8))
        for module in model.modules():  # a buffer that is not in the state dict would be lost if
            module._non_persistent_buffers_set.clear()  # a model is made on meta: see FSDP

    def forward(self, tokens: Tensor) -> Tensor:
        # The library uses a 4-D mask, with dimensions for heads and queries, as it is. Otherwise it
        # checks whether the mask masks anything, for which the CPU would wait for the GPU.
        mask = (tokens != self.pad)[:, None, None, :]
        return self.encoder(input_ids=tokens, attention_mask=mask).logits


def make_model(args, classes: list[str]) -> Encoder:
    """``--model``, or the model of ``--weights``, on the CPU or the default device."""
    transformers = import_optional("transformers")
    tokenizer = reviews.make_tokenizer(args)
    if size := size_of(args.model):
        layers, heads, width = size
        config = transformers.DistilBertConfig(
            n_layers=layers, n_heads=heads, dim=width, hidden_dim=4 * width,
            vocab_size=len(tokenizer), max_position_embeddings=args.context,
        )  # fmt: skip
    else:
        config = hub.from_pretrained(args.weights, "AutoConfig")
        longest = getattr(config, "max_position_embeddings", args.context)
        if args.context > longest:
            fail(f"--context {args.context}: {args.weights} has {longest} positions; use no more")
    config.num_labels = len(classes)
    config.pad_token_id = tokenizer.pad_token_id
    for name, value in config.to_dict().items():  # all dropout probabilities
        if "drop" in name and isinstance(value, float):
            setattr(config, name, args.dropout)
    auto = "AutoModelForSequenceClassification"
    if size is None and torch.get_default_device().type != "meta":  # meta tensors have no data
        options = {"config": config, "dtype": torch.get_default_dtype()}
        model = hub.from_pretrained(args.weights, auto, **options)
    else:
        model = getattr(transformers, auto).from_config(config, dtype=torch.get_default_dtype())
    tokenizer.backend_tokenizer.no_padding()  # to use it on single texts
    tokenizer.backend_tokenizer.enable_truncation(args.context)
    model = Encoder(model, tokenizer.backend_tokenizer.to_str())
    if size and args.weights != "none":
        found = weights.load(args.weights)
        flags = f"--model {args.model} --context {args.context}"
        check_weights(model, found, f"--weights {args.weights} does not fit {flags} or this data")
        if not next(model.parameters()).is_meta:
            model.load_state_dict(found)
    return model
