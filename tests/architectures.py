"""Small models of many architectures, for test_architectures.py. Those of transformers are in
architectures.yaml."""

import inspect
from functools import partial
from pathlib import Path

import torch
import torchvision
import yaml
from torch import nn
from torch.utils._pytree import tree_leaves

IMAGES = torch.zeros(2, 3, 32, 32)
PLAIN = {"weights": None, "weights_backbone": None, "num_classes": 5}
LISTED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def listed(name):
    import transformers  # which takes seconds

    kind, shapes, sizes = LISTED[name]
    kind = getattr(transformers, kind)
    of = {key: torch.int64 if key in ("input_ids", "labels") else None for key in shapes}
    batch = {key: torch.zeros(shape, dtype=of[key]) for key, shape in shapes.items()}
    return kind(kind.config_class(**sizes)), batch


class TwoInputs(nn.Module):
    """Two floating-point inputs, and several outputs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.second = nn.Linear(6, 4)

    def forward(self, x, y):
        y = self.second(y)
        return self.first(x) + y, {"second": y}


class Denoiser(nn.Module):
    """A diffusion step: images with noise, and a time for each."""

    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, 8)
        sizes = ((3, 8), (8, 3))
        self.layers = nn.ModuleList(nn.Conv2d(*size, 3, padding=1) for size in sizes)

    def forward(self, noisy, time):
        x = self.layers[0](noisy) + self.time(time)[:, :, None, None]
        return self.layers[1](nn.functional.silu(x))


class Translator(nn.Transformer):
    def __init__(self):
        super().__init__(32, 4, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, source, target):
        return self.head(super().forward(source, target)).movedim(2, 1)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x, positions):
        return self.head(self.layer(x + positions)[0][:, -1])


def denoiser():
    batch = {"noisy": IMAGES, "time": torch.zeros(2, 1), "noise": IMAGES}
    return Denoiser(), batch, lambda out, batch: (out - batch["noise"]).square().mean()


def segmentation():
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(**PLAIN)
    return model, torch.zeros(2, 3, 64, 64), lambda out, _: out["out"].square().mean()


def clip():
    return *listed("clip"), lambda out, _: out.logits_per_text.square().mean()


ARCHITECTURES = {
    "two_inputs": lambda: (TwoInputs(), (torch.zeros(2, 8), torch.zeros(2, 6))),
    "denoiser": denoiser,
    "translator": lambda: (Translator(), (torch.zeros(2, 16, 32), torch.zeros(2, 8, 32))),
    "reader": lambda: (Reader(), (torch.zeros(2, 12, 8), torch.zeros(2, 12, 8))),
    "segmentation": segmentation,
    "video": lambda: (torchvision.models.video.mc3_18(num_classes=5), torch.zeros(2, 3, 4, 32, 32)),
    "swin": lambda: torchvision.models.swin_t(num_classes=5),
    "convnext": lambda: torchvision.models.convnext_tiny(num_classes=5),
    "clip": clip,
}
FUNCTIONS = {name: partial(listed, name) for name in LISTED} | ARCHITECTURES


class Made:
    """What a file of examples/ needs of an architecture. Its inputs have names, or their order."""

    def __init__(self, name):
        self.name = name
        made = FUNCTIONS[name]()
        _, batch, self.loss = (
            (*made, None, None)[:3] if isinstance(made, tuple) else (0, IMAGES, None)
        )
        batch = (batch,) if torch.is_tensor(batch) else batch
        self.in_order = isinstance(batch, tuple)
        batch = dict(enumerate(batch)) if self.in_order else batch
        self.samples = [{str(key): value[0] for key, value in batch.items()}] * 32

    def make_model(self):
        made = FUNCTIONS[self.name]()
        return made[0] if isinstance(made, tuple) else made

    def forward(self, model, batch):
        return model(*batch.values()) if self.in_order else model(**inputs_of(model, batch))

    def loss_of(self, output, batch):
        if self.loss:
            return self.loss(output, batch)
        tensors = [output.logits] if hasattr(output, "logits") else tree_leaves(output)
        return sum(tensor.float().square().sum() for tensor in tensors)


def inputs_of(model, batch):
    """Without what only the loss reads."""
    names = inspect.signature(type(getattr(model, "module", model)).forward).parameters
    return {name: tensor for name, tensor in batch.items() if name in names}
