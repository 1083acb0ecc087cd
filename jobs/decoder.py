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
from harness.state import check_weights, load_file
from jobs import gpt, llama, llama_folder
from jobs.gpt import GPT, Decoder, Size
from jobs.llama import Llama, LlamaSize
from libraries import hub
from remote.storage import fetch_input

SIZES = gpt.SIZES | llama.SIZES
NAMES = "gpt-nano, gpt-mini, gpt2, llama3-8b, ... (docs/job.md), gpt-4x4x128 or llama-4x4x128"


def is_decoder(name: str | None) -> bool:
    """Whether ``--model`` names a decoder, even a misspelled one."""
    return re.match(r"gpt|(tiny)?llama", name or "") is not None


def is_folder(args) -> bool:
    """Whether ``--weights`` is a folder with a configuration, in the format of huggingface.co."""
    if args.weights == "none" or str(args.weights).endswith(".pt"):
        return False
    return Path(folder_of(args), "config.json").is_file()


def folder_of(args) -> Path:
    """The folder of ``--weights``: itself, or the folder of the file."""
    path = Path(fetch_input(args.weights, "--weights"))
    return path.parent if path.is_file() else path


def size_of(args) -> Size:
    """The shape of ``--model``, with ``--kv-heads`` and ``--mlp-width``; for ``--model llama``
    that in the folder ``--weights``."""
    if args.model != "llama":
        return size_of_name(args.model, args.kv_heads, args.mlp_width)
    if not Path(folder_of(args), "config.json").is_file():
        fail("--model llama takes its shape from --weights; give a folder with a config.json")
    return size_of_folder(folder_of(args))


@functools.cache
def size_of_folder(folder: Path) -> LlamaSize:
    try:
        return llama_folder.size_of_config(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        fail(f"--weights {folder}: config.json cannot be used ({why}); give another folder")


@functools.cache
def size_of_name(name: str, kv_heads: int | None, mlp_width: int | None) -> Size:
    numbers = re.fullmatch(r"(gpt|llama)-([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", name)
    if name not in SIZES and not numbers:
        close = difflib.get_close_matches(name, SIZES) or gpt.SIZES
        fail(
            f"--model {name} is no decoder; try {', '.join(close)}, or gpt-LxHxD or llama-LxHxD, "
            "such as gpt-4x4x128 for 4 layers of 4 heads and width 128"
        )
    if name in SIZES:
        size = SIZES[name]
    else:
        kind, *shape = numbers.groups()
        size = (Size if kind == "gpt" else LlamaSize)(*map(int, shape))
    if size.width % size.heads:
        fail(
            f"--model {name}: width {size.width} is not divisible by {size.heads} heads; "
            "use a multiple"
        )
    if not isinstance(size, LlamaSize):
        if kv_heads or mlp_width:
            fail(f"--kv-heads and --mlp-width need a Llama, and --model is {name}; leave them out")
        return dataclasses.replace(size, kv_heads=size.heads, mlp_width=4 * size.width)
    kv_heads = kv_heads or size.kv_heads or size.heads
    if size.heads % kv_heads:
        fail(f"--kv-heads {kv_heads} do not divide {size.heads} heads of {name}; use a divisor")
    if size.width // size.heads % 2:
        fail(f"--model {name}: head width {size.width // size.heads} is odd; use an even one")
    # Two thirds of a GPT's, as there are three matrices, and a multiple of 32.
    width = mlp_width or size.mlp_width or 32 * math.ceil(8 * size.width / 3 / 32)
    return dataclasses.replace(size, kv_heads=kv_heads, mlp_width=width)


def check_tensor_parallel(args, ranks: int, flag: str) -> None:
    """Check that the ranks divide the heads, the MLP, and with ``--sequence-parallel`` the
    positions.

    Args:
        flag: that sets the number of ranks, for the error message.
    """
    size = size_of(args)
    if size.kv_heads % ranks:
        fail(
            f"--model {args.model}: {size.kv_heads} heads are not divisible by {flag}; "
            "use a number of ranks that divides them"
        )
    if size.mlp_width % ranks:
        fail(f"--mlp-width {size.mlp_width} is not divisible by {flag}; use a multiple")
    if args.sequence_parallel and args.context % ranks:
        fail(f"--context {args.context} is not divisible by {flag}; use a multiple")


def check_model_name(name: str) -> None:
    """Nothing to check: :func:`jobs.text.fill_defaults` has looked up its size."""


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
    size, options, points = size_of(args), {"tie": bool(args.tie)}, code_points(args, vocabulary)
    if args.experts:
        options |= {"experts": args.experts, "top_k": args.top_k, "balance": args.balance}
    if isinstance(size, LlamaSize):
        return Llama(points, size, **options)
    return GPT(points, size, args.context, args.dropout, **options)


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
    buffers = [name for name, _ in model.named_buffers()]
    parameters = dict(model.named_parameters())
    if is_folder(args):
        their = {name: their_name(args, name) for name in parameters}
        hub.read_weights(folder_of(args), {their[n]: p for n, p in parameters.items()})
    elif args.weights != "none":
        weights = read_file(args, points)
        for name, parameter in parameters.items():
            set_whole(parameter, weights[name])
    else:
        for name, parameter in parameters.items():
            set_whole(parameter, draw(args, name, parameter.shape))
    for name in buffers:
        set_whole(model.get_buffer(name), points)


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


def their_name(args, name: str) -> str:
    return llama_folder.their_name("token.weight" if args.tie and name == "head.weight" else name)


def read_file(args, points: Tensor) -> dict[str, Tensor]:
    """Load a ``model.pt``, and check that it fits."""
    weights = load_file(fetch_input(args.weights, "--weights"), "--weights", mmap=True)
    flags = f"--model {args.model} --context {args.context}"
    flags += f" --experts {args.experts}" if args.experts else ""
    with torch.device("meta"):
        shapes = make_shapes(args, [chr(0)] * len(points))
    check_weights(shapes, weights, f"--weights {args.weights} does not fit {flags}")
    if not torch.equal(weights["vocabulary"], points):
        fail(
            f"--weights {args.weights} was trained on other characters than this text has; "
            "give the text that it was trained on"
        )
    return weights


def write_folder(args, weights: dict[str, Tensor], folder: Path) -> None:
    """For a Llama, write ``config.json``, ``model.safetensors`` and its tokenizer, as transformers
    reads them; for a GPT nothing."""
    size = size_of(args)
    if not isinstance(size, LlamaSize) or args.experts:
        return
    shared = "head.weight" if args.tie else ""
    theirs = {
        llama_folder.their_name(name): tensor
        for name, tensor in weights.items()
        if name not in ("vocabulary", shared)
    }
    context = size.context if is_folder(args) else args.context
    config = llama_folder.make_config(size, context, len(weights["token.weight"]), bool(args.tie))
    hub.write_folder(folder, config, theirs)
    if args.tokenizer == "hub":
        hub.copy_tokenizer(folder_of(args), folder)


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
    fail(
        f"--deterministic: PyTorch computes the loss of {name} deterministically on CPUs "
        "only; use --device cpu"
    )
