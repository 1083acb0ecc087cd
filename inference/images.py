"""Images for a trained model: files, or a split of the dataset that it was trained on."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import jobs.images
from harness.cli import fail
from harness.data import Unreadable
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


def load_split(args: Trained, split: str) -> Images:
    """The ``eval`` or ``train`` split, as training loaded it."""
    make = {"cifar10": cifar10, "folder": folder, "synthetic": synthetic}
    if args.dataset not in make:
        fail("--dataset is needed: the weights do not say which one they were trained on")
    images = make[args.dataset](args, split)
    if len(images.classes) != len(args.classes):
        fail(
            f"--dataset {args.dataset} has {len(images.classes)} classes and the weights have "
            f"{len(args.classes)}; give the dataset they were trained on"
        )
    return images


def batches(
    images: Images, batch_size: int, side: int, title: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """uint8 images ``[n, 3, side, side]`` and labels ``[n]``, with a progress bar on a terminal."""
    numbers = torch.arange(len(images)).split(batch_size)
    for indices in tqdm(numbers, title, leave=False, disable=None):
        try:
            pixels, labels = images.__getitems__(indices.tolist())
        except Unreadable as error:
            fail(error)
        yield resize(pixels, side), labels
