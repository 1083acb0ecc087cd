"""A trained model with its normalization: uint8 images in, float32 logits out."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from inference.trained import Trained
from jobs.classifiers import check_model_name, load_weights, make_model
from jobs.images import MEAN, STD
from libraries.weights import load

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


def complete(args: Trained) -> Trained:
    """Fill in what only ``--weights`` says: the number of classes."""
    if args.classes is not None:
        return args
    *_, bias = load(args.weights).values()  # of the last layer
    return replace(args, classes=[f"unnamed class {i}" for i in range(len(bias))])


def load_classifier(args: Trained, precision: str) -> Classifier:
    """``--weights``, loaded strictly, in evaluation mode on the CPU."""
    check_model_name(args.model)
    new = replace(args, batch_size=2, weights="none")  # of the forward that checks it
    load_weights(args, model := make_model(new, args.classes), new_head=False)
    return Classifier(model, DTYPES[precision]).eval()
