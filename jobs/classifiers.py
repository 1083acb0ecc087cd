"""torchvision's classifiers: create them, replace the norm, check them, load weights."""

import difflib
import itertools
import math
import re
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.cli import fail
from harness.state import check_weights
from harness.world import world


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
        load_weights(args, model, new_head=True)
    return model


def use_group_norm(module: nn.Module) -> None:
    """Replace BatchNorm by GroupNorm, which normalizes each image separately."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            groups = math.gcd(32, child.num_features)
            setattr(module, name, nn.GroupNorm(groups, child.num_features))
        else:
            use_group_norm(child)


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
    """Parameter groups of what is trained: one group."""
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def check_deterministic(name: str, model: nn.Module) -> None:
    """Reject models without a deterministic backward on a GPU: of torchvision's classifiers those
    with the pooling of AlexNet and VGG (docs of torch.use_deterministic_algorithms)."""
    pools = [module for module in model.modules() if isinstance(module, nn.AdaptiveAvgPool2d)]
    if any(pool.output_size not in (1, (1, 1)) for pool in pools):  # otherwise it is a plain mean
        why = f"{name} has AdaptiveAvgPool2d, which is deterministic in PyTorch on CPUs only"
        fail(f"--deterministic: {why}; use --device cpu, or another --model, such as resnet50")


OLD_NAMES = r"(denselayer\d+\.(?:norm|conv))\.(\d)"  # of DenseNets in torchvision's files
UNUSED = re.compile(r"(?i)aux|.*\.(running_mean|running_var|num_batches_tracked)$")


def load_weights(args, model: nn.Module, new_head: bool) -> None:
    """Load ``--weights``, without auxiliary heads and statistics of a BatchNorm that the model
    lacks. ``new_head``: a last layer for other classes is no error, but starts from scratch."""
    from libraries import weights

    expected = model.state_dict()
    found = imagenet_weights(args) if args.weights == "imagenet" else weights.load(args.weights)
    found = {re.sub(OLD_NAMES, r"\1\2", name): tensor for name, tensor in found.items()}
    found = {k: v for k, v in found.items() if k in expected or not UNUSED.match(k)}
    both = {k: (tuple(found[k].shape), tuple(v.shape)) for k, v in expected.items() if k in found}
    differ = {name: shapes for name, shapes in both.items() if shapes[0] != shapes[1]}
    heads = {name.rpartition(".")[0] for name in differ}
    if new_head and len(heads) == 1 and all(a[1:] == b[1:] for a, b in differ.values()):
        found |= {name: expected[name] for name in differ}
        [(theirs, *_), (ours, *_)] = next(iter(differ.values()))
        line = f"its {heads.pop()} is for {theirs} classes, and starts from scratch for {ours}"
        weights.say(f"--weights {args.weights}: {line}")
    why = f"does not fit --model {args.model} --norm {args.norm} with this dataset's classes"
    check_weights(model, found, f"--weights {args.weights} {why}")
    if not next(model.parameters()).is_meta:  # on the meta device it has no data
        model.load_state_dict(found)


def imagenet_weights(args) -> dict[str, Tensor]:
    """torchvision's weights, downloaded by one rank per machine and read by all."""
    import torchvision

    from libraries.download import fetch

    published = torchvision.models.get_model_weights(args.model).DEFAULT
    file = Path(torch.hub.get_dir(), "checkpoints", Path(published.url).name)
    load = partial(published.get_state_dict, check_hash=True)
    if why := fetch(published.url, file.is_file, load):
        use = f"download {published.url} elsewhere, and give the path of that file as --weights"
        fail(f"--weights imagenet: could not be downloaded ({why}); {use}")
    return load(progress=False)
