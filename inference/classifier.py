"""A trained classifier of images: uint8 images in, float32 logits out; export to ONNX."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from inference import export
from inference.images import batches, load_split
from inference.runtimes import Runner
from inference.trained import Trained
from jobs.classifiers import check_model_name, load_weights, make_model
from jobs.images import MEAN, STD
from libraries.weights import load

INPUT = "uint8 [batch, 3, side, side]: RGB, 0 to 255. Normalization is part of the graph."


class Classifier(nn.Module):
    """Normalizes uint8 images ``[n, 3, side, side]`` and returns float32 logits ``[n, classes]``.

    The normalization is part of the module, so it becomes part of the exported graph: users of the
    file need not know how the model was trained.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.register_buffer("pixel_mean", 255 * torch.tensor(MEAN)[:, None, None])
        self.register_buffer("pixel_std", 255 * torch.tensor(STD)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        return self.model((images.float() - self.pixel_mean) / self.pixel_std)


def complete(args: Trained) -> Trained:
    """Fill in what only ``--weights`` says: the number of classes."""
    if args.classes is not None:
        return args
    *_, bias = load(args.weights).values()  # of the last layer
    return replace(args, classes=[f"unnamed class {i}" for i in range(len(bias))])


def load_model(args: Trained) -> Classifier:
    """``--weights``, loaded strictly, in evaluation mode on the CPU."""
    check_model_name(args.model)
    new = replace(args, batch_size=2, weights="none")  # of the forward that checks it
    model = make_model(new, args.classes)
    load_weights(args, model, new_head=False)
    return Classifier(model).eval()


def measure(args: Trained, runner: Runner) -> dict[str, float]:
    """Accuracy on the test split that training used, and its number of images."""
    images = load_split(args)
    correct = 0
    for pixels, labels in batches(images, args.batch_size, args.image_size, "batches"):
        correct += (runner(pixels).argmax(1) == labels).sum().item()
    return {"accuracy": correct / len(images), "samples": len(images)}


def write_onnx(args: Trained) -> None:
    """Export for any batch size, and compare on noise."""
    shapes = [(n, 3, args.image_size, args.image_size) for n in (3, 1, 16)]
    noise = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in shapes]
    shape = {"images": {0: torch.export.Dim("batch")}}
    export.write(args, load_model(args), noise, shape, INPUT)
