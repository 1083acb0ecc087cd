"""A trained model with its normalization: uint8 images in, float32 logits out."""

import argparse

import torch
from torch import Tensor, nn

from harness.state import load_file
from jobs.choice import Settings
from jobs.classifiers import check_model_name, make_model
from jobs.images import MEAN, STD

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Classifier(nn.Module):
    """Normalizes uint8 images ``[n, 3, side, side]`` and returns float32 logits ``[n, classes]``.

    The normalization is part of the module, so it becomes part of the exported graph: users of the
    file need not know how the model was trained.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model, self.dtype = model.to(dtype), dtype
        for name, values in (("pixel_mean", MEAN), ("pixel_std", STD)):
            self.register_buffer(name, 255 * torch.tensor(values)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        images = (images.to(self.pixel_mean.dtype) - self.pixel_mean) / self.pixel_std
        return self.model(images.to(self.dtype)).float()


def load_classifier(args: argparse.Namespace, precision: str) -> Classifier:
    """``--weights``, loaded strictly, in evaluation mode on the CPU."""
    state = load_file(args.weights, "--weights")
    if args.classes is None:  # the last tensor of a classifier is the bias of its last layer
        args.classes = [f"class {i}" for i in range(len(list(state.values())[-1]))]
    check_model_name(args.model)
    job = Settings(
        model=args.model, norm=args.norm, weights=args.weights, batch_size=2,
        image_size=args.image_size,
    )  # fmt: skip
    return Classifier(make_model(job, args.classes), DTYPES[precision]).eval()
