"""torchvision's classifiers: create them, replace the norm, check them, load weights."""

import difflib
import itertools
import math
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.cli import fail, fetch_input
from harness.state import check_weights, load_file
from harness.world import world
from libraries.download import fetch


def check_model_name(model: str) -> None:
    import torchvision

    names = torchvision.models.list_models(module=torchvision.models)
    if model not in names:
        close = difflib.get_close_matches(model, names) or ["resnet18", "resnet50"]
        fail(f"--model {model} is not a torchvision classifier; try {', '.join(close)}")


def make_model(args, classes: list[str]) -> nn.Module:
    """A torchvision classifier with one output per class, on the CPU or the default device."""
    import torchvision

    options = {}
    if args.model in ("googlenet", "inception_v3"):  # by default they have three outputs
        options = {"aux_logits": False, "init_weights": True}
    model = torchvision.models.get_model(args.model, num_classes=len(classes), **options)
    if args.norm == "group":
        use_group_norm(model)
    check_input(args, model)
    if args.norm == "sync":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.weights != "none":
        load_weights(args, model)
    return model


def use_group_norm(module: nn.Module) -> None:
    """Replace BatchNorm by GroupNorm, which normalizes each image separately."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            groups = math.gcd(32, child.num_features)
            setattr(module, name, nn.GroupNorm(groups, child.num_features))
        else:
            use_group_norm(child)


BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The BatchNorm layers, whose statistics change by amounts that half precision rounds away."""
    return [module for module in model.modules() if isinstance(module, BATCH_NORMS)]


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The children with parameters of every nn.Sequential or nn.ModuleList: residual blocks or
    layers in torchvision's models. A single BatchNorm is too small to count as a block."""
    for child in model.children():
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            parts = (part for part in child if not isinstance(part, BATCH_NORMS))
            yield from (part for part in parts if any(True for _ in part.parameters()))
        else:
            yield from blocks_of(child)


def units_of(model: nn.Module) -> list[nn.Module]:
    """What FSDP gathers at a time: the blocks; and a decoder's embedding and head, which with a
    large vocabulary are larger than a block, unless they share a matrix."""
    # Of an embedding under sequence parallelism; no operation in place follows.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    children = dict(model.named_children()) if hasattr(model, "unembed") else {}
    ends = [children[name] for name in ("token", "head") if name in children]
    tied = len(ends) == 2 and ends[0].weight is ends[1].weight
    return [*blocks_of(model), *([] if tied else ends)]


def check_input(args, model: nn.Module) -> None:
    """Run the shape of a batch through the model, without computing anything."""
    size = args.image_size
    at_once = args.batch_size // world().size // args.accumulate
    images = torch.empty(min(at_once, 2), 3, size, size, device="meta")
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    try:
        torch.func.functional_call(model, {name: t.to("meta") for name, t in tensors}, images)
    except (RuntimeError, ValueError, AssertionError) as error:
        why = f"cannot train on a batch of {at_once} images of {size}x{size} ({error})"
        fail(f"--model {args.model} {why}; use a larger --image-size or --batch-size")


def parameter_groups(model: nn.Module) -> list[dict]:
    """Parameter groups for an optimizer: one group."""
    return [{"params": list(model.parameters())}]


def check_deterministic(name: str, model: nn.Module) -> None:
    """Reject models without a deterministic backward on a GPU: of torchvision's classifiers those
    with the pooling of AlexNet and VGG (docs of torch.use_deterministic_algorithms)."""
    pools = [module for module in model.modules() if isinstance(module, nn.AdaptiveAvgPool2d)]
    if any(pool.output_size not in (1, (1, 1)) for pool in pools):  # otherwise it is a plain mean
        why = f"{name} has AdaptiveAvgPool2d, which is deterministic in PyTorch on CPUs only"
        fail(f"--deterministic: {why}; use --device cpu, or another --model, such as resnet50")


def load_weights(args, model: nn.Module) -> None:
    """Load ``--weights``: a complete ``model.pt``, or ImageNet's without the last layer."""
    expected = model.state_dict()
    if args.weights == "imagenet":
        weights = {k: v for k, v in imagenet_weights(args).items() if k in expected}
        weights = expected | {k: v for k, v in weights.items() if v.shape == expected[k].shape}
    else:
        weights = load_file(fetch_input(args.weights, "--weights"), "--weights")
    flags = f"--model {args.model} --norm {args.norm}"
    complaint = f"--weights {args.weights} does not fit {flags} with this dataset's classes"
    check_weights(model, weights, complaint)
    if not next(model.parameters()).is_meta:  # on the meta device it has no data
        model.load_state_dict(weights)


def imagenet_weights(args) -> dict[str, Tensor]:
    """torchvision's weights, downloaded by one rank per machine and read by all."""
    import torchvision

    weights = torchvision.models.get_model_weights(args.model).DEFAULT
    file = Path(torch.hub.get_dir(), "checkpoints", Path(weights.url).name)
    load = partial(weights.get_state_dict, check_hash=True)
    if why := fetch(weights.url, file.is_file, load):
        fail(f"--weights imagenet: could not be downloaded ({why}); give a file's path")
    return load(progress=False)
