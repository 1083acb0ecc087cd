"""Which decoder a command line selects, a GPT or a Llama; its weights, initialized or read, whole
or in shards; and its parameter groups for the optimizer."""

import dataclasses
import difflib
import functools
import json
import math
import re
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from harness.cli import fail
from harness.state import check_weights
from jobs import gpt, llama
from jobs.experts import balance_at_steps
from jobs.gpt import Decoder, Size
from jobs.llama import LlamaSize
from jobs.model_parts import decay_matrices
from libraries import hub, weights

FAMILIES = {"gpt": Size, **llama.FAMILIES}  # a model: a file, a row
SIZES = gpt.SIZES | llama.SIZES
parameter_groups = functools.partial(decay_matrices, spared=(nn.Embedding,))


def size_of(args) -> Size:
    """The shape of ``--model``, with ``--kv-heads``, ``--mlp-width``, ``--experts`` and
    ``--top-k``; for ``--model llama`` that in the folder ``--weights``."""
    own = {name: n for name in ("experts", "top_k") if (n := getattr(args, name))}
    if args.model != "llama":
        return dataclasses.replace(size_of_name(args.model, args.kv_heads, args.mlp_width), **own)
    folder = hub.folder_of(args.weights)
    if not (folder / "config.json").is_file():
        fail("--model llama takes its shape from --weights; give a folder with a config.json")
    size = LlamaSize(**hub.read_config(folder))
    for name, n in {**own, "kv_heads": args.kv_heads, "mlp_width": args.mlp_width}.items():
        if n not in (None, has := getattr(size, name)):
            why = f"the model in {args.weights} has {has or 'none'}"
            fail(f"--{name.replace('_', '-')} {n}: {why}; leave it out")
    return size


@functools.cache
def size_of_name(name: str, kv_heads: int | None, mlp_width: int | None) -> Size:
    family, _, shape = name.partition("-")
    if name in SIZES:
        size = SIZES[name]
    elif family in FAMILIES and re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", shape):
        size = FAMILIES[family](*map(int, shape.split("x")))
    else:
        close = difflib.get_close_matches(name, SIZES) or gpt.SIZES
        example = "such as gpt-4x4x128 for 4 layers of 4 heads and width 128"
        use = f"try {', '.join(close)}, or {'-, '.join(FAMILIES)}-LxHxD, {example}"
        fail(f"--model {name} is no decoder; {use}")
    if size.width % size.heads and not size.head_dim:
        why = f"width {size.width} is not divisible by {size.heads} heads"
        fail(f"--model {name}: {why}; use a multiple")
    return size.complete(name, kv_heads, mlp_width)


# -------------------------------------------------------------------------------------- weights
def make_model(args, vocabulary: list[str]) -> Decoder:
    """``--model`` with ``--context``, on the CPU or the default device. On the meta device it
    has no data, and gets its weights from :func:`init_weights`."""
    device = torch.empty(0).device
    with torch.device("meta"):
        model = make_shapes(args, vocabulary)
    if args.balance == "bias":
        balance_at_steps(model)
    if device.type != "meta":
        model.to_empty(device=device)
        init_weights(args, model, vocabulary)
    return model


def make_shapes(args, vocabulary: list[str]) -> Decoder:
    size, options = size_of(args), {"tie": bool(args.tie)}
    if size.experts:
        options |= {"experts": size.experts, "top_k": size.top_k, "balance": args.balance or 0.0}
    return size.make_model(code_points(args, vocabulary), args, **options)


def code_points(args, vocabulary: list[str]) -> list[int]:
    """Code points of the characters; for another tokenizer, the token ids."""
    hub_tokens = args.tokenizer == "hub"
    return list(range(len(vocabulary))) if hub_tokens else [ord(token) for token in vocabulary]


@torch.no_grad()
def init_weights(args, model: nn.Module, vocabulary: list[str]) -> None:
    """Initialize a model whose memory is allocated but empty, however it is sharded or cut into
    stages: from ``--weights``, or at random. Each rank initializes or reads one parameter at a
    time and keeps its shard: no rank has the whole model."""
    if args.tie and hasattr(model, "token") and hasattr(model, "head"):
        model.head.weight = model.token.weight  # allocation has separated them
    points = torch.tensor(code_points(args, vocabulary))
    parameters = {name: p for name, p in model.named_parameters() if ".lora_" not in name}
    buffers = dict(model.named_buffers())
    for name, buffer in buffers.items():
        set_whole(buffer, points if name == "vocabulary" else torch.zeros(buffer.shape))
    if args.weights == "none":
        for name, parameter in parameters.items():
            set_whole(parameter, draw(args, name, parameter.shape))
    elif weights.is_snapshot(args.weights) or not hub.is_folder(args.weights):
        read_ours(args, parameters | buffers, points)
    else:
        shared = "head.weight" in parameters and args.tie
        tied = {"token.weight": parameters.pop("head.weight")} if shared else {}
        kind, tie = size_of(args).kind, bool(args.tie)
        hub.read_weights(hub.folder_of(args.weights), kind, tied | parameters, tie=tie)


def set_whole(tensor: Tensor, whole: Tensor) -> None:
    """Fill a tensor; of a DTensor each rank keeps its shard, without communication."""
    if isinstance(tensor, DTensor):
        layout = tensor.device_mesh, tensor.placements
        whole = distribute_tensor(whole.to(tensor.device), *layout, src_data_rank=None)
    tensor.copy_(whole)


def draw(args, name: str, shape: torch.Size) -> Tensor:
    """Initial values of a parameter, by the seed and its name: a rank draws only those it has."""
    if len(shape) == 1:  # of norms
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    name = "token.weight" if args.tie and name == "head.weight" else name
    # Of a seed, the CPU's generator uses the lower 32 bits alone.
    rng = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode(), args.seed))
    adds = name.endswith(("out.weight", "down.weight", "experts.down"))  # they add to the residual
    std = 0.02 / (math.sqrt(2 * size_of(args).layers) if adds else 1)
    return torch.empty(shape, device="cpu").normal_(std=std, generator=rng)


def read_ours(args, tensors: dict[str, Tensor], points: Tensor) -> None:
    """Fill parameters and buffers from a ``model.pt`` or a snapshot, and check that it fits."""
    shards = weights.shapes_of(args.weights)
    found = shards or weights.load(args.weights, mmap=True)
    flags = f"--model {args.model} --context {args.context}"
    flags += f" --experts {args.experts}" if args.experts else ""
    with torch.device("meta"):
        shapes = make_shapes(args, [chr(0)] * len(points))
    check_weights(shapes, found, f"--weights {args.weights} does not fit {flags}")
    tensors = {name: tensor for name, tensor in tensors.items() if name in found}  # others: counts
    twin = None
    if args.tie and "token.weight" in tensors and "head.weight" in found:
        twin = tensors["head.weight"] = torch.empty_like(tensors["token.weight"])
    if shards:
        found = {"vocabulary": torch.empty_like(points)}
        weights.read(args.weights, tensors | found)
    else:
        for name, tensor in tensors.items():
            set_whole(tensor, found[name])
    if twin is not None:
        hub.check_tied(f"--weights {args.weights}", tensors["token.weight"], twin)
    if not torch.equal(found["vocabulary"], points):
        why = "was trained on other characters than this text has"
        fail(f"--weights {args.weights} {why}; give the text that it was trained on")


def write_folder(args, weights: dict[str, Tensor], folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer of a model that transformers
    has. What the folder ``--weights`` says beyond the shape is kept, such as the tokens at which
    ``generate()`` stops, unless the text has other tokens."""
    size = size_of(args)
    if not size.on_the_hub or size.experts and size.kind not in hub.MIXTURES:
        return
    if args.balance == "bias":  # which transformers would leave out
        return
    vocabulary, context = len(weights["token.weight"]), args.context
    source = hub.folder_of(args.weights) if hub.is_folder(args.weights) else None
    own = source and (args.tokenizer == "hub" or not hub.has_tokenizer(source))
    if own and args.model == "llama":  # otherwise its shape is another
        config = json.loads((source / "config.json").read_text())
        config |= {"vocab_size": vocabulary, "tie_word_embeddings": bool(args.tie)}
        hub.copy_files_beside(source, folder)
    else:
        context = size.context if source else context
        config = hub.make_config(size, context, vocabulary, bool(args.tie))
    left_out = {"vocabulary"} | ({"head.weight"} if args.tie else set())
    hub.write_folder(folder, config, {n: t for n, t in weights.items() if n not in left_out})
