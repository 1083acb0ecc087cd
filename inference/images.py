"""Images for a trained model: files, or the test split of the dataset that it was trained on."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import jobs.images
from harness.cli import fail
from harness.data import Unreadable
from inference.runtimes import progress
from inference.trained import Trained
from jobs.images import Images, cifar10, folder, open_image, synthetic


def find_images(path: Path) -> list[Path]:
    """The file itself, or all images in and below a folder, sorted."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        fail(f"--input {path}: no such file or folder; give an image, a folder, or test")
    found = [Path(at, name) for at, names in jobs.images.find_images(path) for name in names]
    return found or fail(f"--input {path}: no image in it; give another")


def resize(images: Tensor, side: int) -> Tensor:
    """uint8 ``[n, 3, any, any]`` to uint8 ``[n, 3, side, side]``, as training does it."""
    if images.shape[-1] == side:
        return images
    shrinks = images.shape[-1] > side
    resized = F.interpolate(images.float(), size=side, mode="bilinear", antialias=shrinks)
    return resized.round().clamp(0, 255).to(torch.uint8)


def read_image(path: Path, side: int) -> Tensor:
    """Decode a file to uint8 ``[1, 3, side, side]``; raises :class:`Unreadable`."""
    with open_image(path) as image:
        short_side = min(image.size)
    return resize(jobs.images.read_image(path, min(side, short_side))[None], side)


def load_split(args: Trained) -> Images:
    """The test split, as training loaded it; its classes are matched by name with the model's."""
    make = {"cifar10": cifar10, "folder": folder, "synthetic": synthetic}
    if args.dataset not in make:
        fail("--dataset is needed: the weights do not say which one they were trained on")
    images = make[args.dataset](args, "eval")
    theirs = images.classes
    ours = args.classes
    if len(theirs) == len(ours) and ours[0].startswith("unnamed"):
        return images
    if unknown := sorted(set(theirs) - set(ours)):
        why = f"the weights know {', '.join(ours[:9])}, but not {', '.join(unknown[:9])}"
        fail(f"--dataset {args.dataset}: {why}; give the classes that they were trained on")
    images.labels = torch.tensor([ours.index(name) for name in theirs])[images.labels]
    return images


def batches(
    images: Images, batch_size: int, side: int, title: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """uint8 images ``[n, 3, side, side]`` and labels ``[n]``, with the progress."""
    numbers = torch.arange(len(images)).split(batch_size)
    for indices in progress(numbers, title):
        try:
            pixels, labels = images.__getitems__(indices.tolist())
        except Unreadable as error:
            fail(error)
        yield resize(pixels, side), labels
