"""Which decoder a command line selects, a GPT or a Llama; its weights, initialized or read, whole
or in shards; and its parameter groups for the optimizer."""

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
from jobs.gpt import Decoder, Size
from jobs.llama import LlamaSize
from libraries import hub, weights

FAMILIES = {"gpt": (Size, gpt.SIZES), "llama": (LlamaSize, llama.SIZES)}  # a model: a file, a row
SIZES = {name: size for _, sizes in FAMILIES.values() for name, size in sizes.items()}


def size_of(args) -> Size:
    """The shape of ``--model``, with ``--kv-heads`` and ``--mlp-width``; for ``--model llama``
    that in the folder ``--weights``."""
    if args.model != "llama":
        return size_of_name(args.model, args.kv_heads, args.mlp_width)
    folder = hub.folder_of(args.weights)
    if not (folder / "config.json").is_file():
        fail("--model llama takes its shape from --weights; give a folder with a config.json")
    return LlamaSize(**hub.read_config(folder))


@functools.cache
def size_of_name(name: str, kv_heads: int | None, mlp_width: int | None) -> Size:
    family, _, shape = name.partition("-")
    if name in SIZES:
        size = SIZES[name]
    elif family in FAMILIES and re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", shape):
        size = FAMILIES[family][0](*map(int, shape.split("x")))
    else:
        close = difflib.get_close_matches(name, SIZES) or gpt.SIZES
        example = "such as gpt-4x4x128 for 4 layers of 4 heads and width 128"
        use = f"try {', '.join(close)}, or gpt-LxHxD or llama-LxHxD, {example}"
        fail(f"--model {name} is no decoder; {use}")
    if size.width % size.heads:
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
    if device.type != "meta":
        model.to_empty(device=device)
        init_weights(args, model, vocabulary)
    return model


def make_shapes(args, vocabulary: list[str]) -> Decoder:
    options = {"experts": args.experts, "top_k": args.top_k, "balance": args.balance}
    options["tie"] = bool(args.tie)
    return size_of(args).make_model(code_points(args, vocabulary), args, **options)


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
    parameters = dict(model.named_parameters())
    if args.weights == "none":
        for name, parameter in parameters.items():
            set_whole(parameter, draw(args, name, parameter.shape))
    elif weights.is_snapshot(args.weights) or not hub.is_folder(args.weights):
        read_ours(args, parameters, points)
    else:
        shared = "head.weight" in parameters and args.tie
        tied = {"token.weight": parameters.pop("head.weight")} if shared else {}
        hub.read_weights(hub.folder_of(args.weights), tied | parameters)
    for buffer in model.buffers():
        set_whole(buffer, points)


def set_whole(tensor: Tensor, whole: Tensor) -> None:
    """Fill a tensor; of a DTensor each rank keeps its shard, without communication."""
    if isinstance(tensor, DTensor):
        layout = tensor.device_mesh, tensor.placements
        whole = distribute_tensor(whole.to(tensor.device), *layout, src_data_rank=None)
    tensor.copy_(whole)


def draw(args, name: str, shape: torch.Size) -> Tensor:
    """Initial values of a parameter: a function of the seed and its name, so a rank need not draw
    parameters that it does not have."""
    if len(shape) == 1:  # of norms
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    name = "token.weight" if args.tie and name == "head.weight" else name
    rng = torch.Generator("cpu").manual_seed(args.seed << 32 ^ zlib.crc32(name.encode()))
    adds = name.endswith(("out.weight", "down.weight"))  # they add to the residual
    std = 0.02 / (math.sqrt(2 * size_of(args).layers) if adds else 1)
    return torch.empty(shape, device="cpu").normal_(std=std, generator=rng)


def read_ours(args, parameters: dict[str, Tensor], points: Tensor) -> None:
    """Fill parameters from a ``model.pt`` or a snapshot, and check that it fits."""
    shards = weights.shapes_of(args.weights)
    found = shards or weights.load(args.weights, mmap=True)
    flags = f"--model {args.model} --context {args.context}"
    flags += f" --experts {args.experts}" if args.experts else ""
    with torch.device("meta"):
        shapes = make_shapes(args, [chr(0)] * len(points))
    check_weights(shapes, found, f"--weights {args.weights} does not fit {flags}")
    if shards:
        found = {"vocabulary": torch.empty_like(points)}
        weights.read(args.weights, parameters | found)
    else:
        for name, parameter in parameters.items():
            set_whole(parameter, found[name])
    if not torch.equal(found["vocabulary"], points):
        why = "was trained on other characters than this text has"
        fail(f"--weights {args.weights} {why}; give the text that it was trained on")


def write_folder(args, weights: dict[str, Tensor], folder: Path) -> None:
    """For a Llama, write ``config.json``, ``model.safetensors`` and its tokenizer, as transformers
    reads them; for a GPT nothing. What the folder ``--weights`` says beyond the shape is kept, such
    as the tokens at which ``generate()`` stops, unless the text has other tokens."""
    size = size_of(args)
    if not size.on_the_hub or args.experts:
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


# ------------------------------------------------------------------------------------- optimizer


def parameter_groups(model: nn.Module) -> list[dict]:
    """Parameter groups: ``--weight-decay`` applies to matrices, not to norms and embeddings."""
    kinds = nn.LayerNorm, nn.RMSNorm, nn.Embedding
    kept = [module for module in model.modules() if isinstance(module, kinds)]
    kept = {id(p): p for module in kept for p in module.parameters()}
    decayed = [p for p in model.parameters() if id(p) not in kept]
    return [{"params": decayed}, {"params": list(kept.values()), "weight_decay": 0.0}]


def check_deterministic(name: str, model: nn.Module) -> None:
    """Reject decoders on a GPU, where PyTorch's reduction of a loss with a dimension besides batch
    and classes is not deterministic (``nll_loss2d_forward_out_cuda_template``)."""
    why = f"PyTorch computes the loss of {name} deterministically on CPUs only"
    fail(f"--deterministic: {why}; use --device cpu")
