"""Which decoder a command line selects; its weights, initialized or read, whole or in shards; and
its parameter groups for the optimizer."""

import dataclasses
import json
import math
import zlib
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from harness.cli import fail
from harness.settings import fill
from harness.state import check_weights
from harness.world import this_script
from jobs.gpt import GPT, Decoder
from jobs.model_parts import decay_matrices
from jobs.sizes import LlamaSize, Size, size_of_name

parameter_groups = partial(decay_matrices, spared=(nn.Embedding,))


def has_pretrained(args) -> bool:
    """Whether ``--weights`` is a folder of the hub; a model.pt may be of any run of ours."""
    if args.weights == "none":
        return False
    from libraries import hub  # which other runs do not need

    return hub.is_folder(args.weights)


def size_of(args) -> Size:
    """The size of ``--model``, with ``--kv-heads``, ``--mlp-width``, ``--experts`` and
    ``--top-k``; for ``--model llama`` that in the folder ``--weights``."""
    given = {name: getattr(args, name) for name in ("experts", "top_k") if getattr(args, name)}
    if args.model != "llama":
        return dataclasses.replace(size_of_name(args.model, args.kv_heads, args.mlp_width), **given)
    from libraries import hub

    folder = hub.folder_of(args.weights)
    if not (folder / "config.json").is_file():
        fail("--model llama takes its shape from --weights; give a folder with a config.json")
    size = LlamaSize(**hub.read_config(folder))
    given |= {"kv_heads": args.kv_heads, "mlp_width": args.mlp_width}
    for name, n in given.items():
        has = getattr(size, name)
        if n not in (None, has):
            why = f"the model in {args.weights} has {has or 'none'}"
            fail(f"--{name.replace('_', '-')} {n}: {why}; leave it out")
    return size


def resolve_experts(args):
    """Fill in the defaults of a mixture of experts, and check its flags."""
    if this_script() == "pytorch_EP":
        args = fill(args, experts=8)
    if not args.experts:
        if args.top_k is not None or args.balance is not None:
            fail("--top-k and --balance are for a mixture of experts; add --experts 8")
        return args
    args = fill(args, top_k=1, balance=0.01)
    pipeline = hasattr(args, "pipeline_schedule") and getattr(args, "pp", 2) > 1
    parts = pipeline or args.accumulate > 1 or args.dtype == "float16"
    if parts and args.balance not in (0, "bias"):
        # They divide the loss, or scale it, but not the balancing loss.
        why = "is not for micro-batches or --dtype float16; use --balance bias, or 0"
        fail(f"--balance {args.balance:g} {why}")
    if args.balance == "bias" and this_script() == "pytorch_DP":
        fail("--balance bias: the replicas of nn.DataParallel forget what they counted; use 0.01")
    if args.top_k > args.experts:
        fail(f"--top-k {args.top_k} is more than --experts {args.experts}; use no more")
    return args


def check_tensor_parallel(args, ranks: int, flag: str, vocabulary: list[str]) -> None:
    """Check that the ranks, which ``flag`` sets, can split the model: heads, MLP, vocabulary and,
    with ``--sequence-parallel``, positions."""
    size = size_of(args)
    tokens = len(vocabulary)
    sequence = getattr(args, "sequence_parallel", None)  # None: by hand, always the vocabulary
    if size.kv_heads % ranks:
        why = f"{size.kv_heads} heads are not divisible by {flag}"
        fail(f"--model {args.model}: {why}; use a number of ranks that divides them")
    if size.mlp_width % ranks:
        fail(f"--mlp-width {size.mlp_width} is not divisible by {flag}; use a multiple")
    if sequence and args.context % ranks:
        fail(f"--context {args.context} is not divisible by {flag}; use a multiple")
    if sequence is not False and -(-tokens // ranks) * (ranks - 1) >= tokens:
        why = f"with {flag}, a rank gets none of the {tokens} tokens of the vocabulary"
        why = f"--sequence-parallel: {why}" if sequence else why
        fail(f"{why}; use fewer ranks, or --tokenizer bytes")


# -------------------------------------------------------------------------------------- weights
def make_model(args, vocabulary: list[str]) -> Decoder:
    """``--model`` with ``--context``, on the CPU or the default device. On the meta device it
    has no data, and gets its weights from :func:`init_weights`."""
    device = torch.empty(0).device
    with torch.device("meta"):
        model = make_shapes(args, vocabulary)
    if args.balance == "bias":
        from jobs.experts import balance_at_steps

        balance_at_steps(model)
    if device.type != "meta":
        model.to_empty(device=device)
        init_weights(args, model, vocabulary)
    return model


def make_shapes(args, vocabulary: list[str]) -> Decoder:
    """The model, on the default device, with weights that nobody has set."""
    size = size_of(args)
    points = code_points(args, vocabulary)
    options = {"tie": bool(args.tie)}
    if size.experts:
        options |= {"experts": size.experts, "top_k": size.top_k, "balance": args.balance or 0.0}
    if isinstance(size, LlamaSize):
        from jobs.llama import Llama

        return Llama(points, size, **options)
    return GPT(points, size, args.context, args.dropout, **options)


def code_points(args, vocabulary: list[str]) -> list[int]:
    """Code points of the characters; for another tokenizer, the token ids."""
    if args.tokenizer == "hub":
        return list(range(len(vocabulary)))
    return [ord(token) for token in vocabulary]


@torch.no_grad()
def init_weights(
    args, model: nn.Module, vocabulary: list[str], targets: dict[str, Tensor] | None = None
) -> None:
    """Initialize a model whose memory is allocated but empty, however it is sharded or cut into
    stages: from ``--weights``, or at random. Each rank initializes or reads one parameter at a
    time and keeps its shard: no rank has the whole model. ``targets``: tensors by name, to fill
    instead of its parameters, of which it may have stored some in other ways."""
    if args.tie and hasattr(model, "token") and hasattr(model, "head"):
        model.head.weight = model.token.weight  # allocation has separated them
    points = torch.tensor(code_points(args, vocabulary))
    own = {name: p for name, p in model.named_parameters() if ".lora_" not in name}
    parameters = targets or {name: p for name, p in own.items() if p.is_floating_point()}
    buffers = dict(model.named_buffers())
    for name, buffer in buffers.items():
        set_whole(buffer, points if name == "vocabulary" else torch.zeros(buffer.shape))
    if args.weights == "none":
        for name, parameter in parameters.items():
            set_whole(parameter, draw(args, name, parameter.shape))
        return
    from libraries import hub, weights

    if weights.is_snapshot(args.weights) or not hub.is_folder(args.weights):
        return read_ours(args, parameters | buffers, points)
    tied = {}
    if args.tie and "head.weight" in parameters:
        tied["token.weight"] = parameters.pop("head.weight")
    folder = hub.folder_of(args.weights)
    hub.read_weights(folder, size_of(args).kind, tied | parameters, tie=bool(args.tie))


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
    from libraries import hub, weights

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
    if args.tie:
        hub.check_tied(f"--weights {args.weights}", tensors.get("token.weight"), twin)
    if not torch.equal(found["vocabulary"], points):
        why = "was trained on other characters than this text has"
        fail(f"--weights {args.weights} {why}; give the text that it was trained on")


def write_folder(args, weights: dict[str, Tensor], folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer of a model that transformers
    has. What the folder ``--weights`` says beyond the shape is kept, such as the tokens at which
    ``generate()`` stops, unless the text has other tokens."""
    size = size_of(args)
    if not size.on_the_hub:
        return
    from libraries import hub

    if size.experts and size.kind not in hub.MIXTURES:
        return
    if args.balance == "bias":  # which transformers would leave out
        return
    vocabulary = len(weights["token.weight"])
    context = args.context
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
