"""Images: CIFAR-10, folders of files, a synthetic set; crops, flips and normalization."""

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor
from tqdm import tqdm

from harness.cli import fail, fetch_input
from harness.data import TaskData, Unreadable, how_many
from harness.settings import fill
from harness.world import print0, this_script, world

# The reference task, and one that two CPU cores finish in about a minute.
DEFAULTS = {
    "cuda": {"model": "resnet50", "image_size": 224},
    "cpu": {"model": "resnet18", "image_size": 32, "train_samples": 2048, "eval_samples": 1000},
}


def resolve(args):
    """Fill in defaults that depend on device and model, and check what needs no data."""
    defaults = DEFAULTS[args.device] | {"norm": "batch", "optimizer": "sgd"}
    if args.dataset == "folder":
        defaults = {k: v for k, v in defaults.items() if not k.endswith("_samples")}
    args = fill(args, **defaults)
    if args.norm == "sync" and args.device == "cpu":
        fail("--norm sync: SyncBatchNorm runs on GPUs only; use --norm batch or --norm group")
    if args.optimizer == "adamw":
        return fill(args, lr=0.001, weight_decay=0.01)
    # With a larger rate, the weights of a short run change faster than the running statistics of
    # BatchNorm follow, and the first evaluations have a loss far above that of training.
    return fill(args, lr=0.01, weight_decay=0.0005)


def describe(args) -> str:
    return f"at {args.image_size}x{args.image_size}"


# ---------------------------------------------------------------------------------------- data
# ImageNet's, which torchvision's pretrained weights expect
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
IN_MEMORY_BYTES = 4 * 2**30  # per machine; larger data sets are decoded batch by batch


class Images(TaskData):
    """Images in memory, uint8 ``[n, 3, side, side]``, with labels ``[n]``: a batch is one index
    operation, and its device resizes it to the model's ``image_size`` (``flip``: mirrors half)."""

    unit = "img"
    units = "images"
    tensors = ("images", "labels")

    def __init__(self, images, labels: Tensor, classes: list[str], image_size: int, side=None):
        self.images = images
        self.labels = labels
        self.classes = classes
        self.image_size = image_size
        self.side = side
        self.flip = True

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """Images and labels for the loader; or, if they are on the GPU, only their indices."""
        [index] = super().__getitems__(indices)
        return (index,) if self.images.is_cuda else (self.images[index], self.labels[index])

    def to_device(self, batch: tuple[Tensor, ...], device) -> tuple[Tensor, Tensor]:
        """A batch of the loader as uint8 images and labels on the device."""
        first, *labels = (tensor.to(device, non_blocking=True) for tensor in batch)
        return (first, *labels) if labels else (self.images[first], self.labels[first])

    def prepare(self, batch, device, seed, epoch, step, dtype=None, share=(0, 1)):
        """Images, cropped, flipped and normalized on the device, and labels int64 ``[n]``."""
        images, labels = self.to_device(batch, device)
        rank, of = share
        crops = draw_crops(seed, epoch, step, len(labels) * of, images.shape[-1])
        crops[:, 2] *= self.flip
        crops = crops[rank::of].to(device, non_blocking=True)
        return to_input(crop_and_flip(images, crops), self.image_size, dtype), labels

    def prepare_evaluation(self, batch, device, dtype=None) -> tuple[Tensor, Tensor]:
        images, labels = self.to_device(batch, device)
        return to_input(images, self.image_size, dtype), labels

    def example(self, n: int) -> Tensor:
        images = torch.zeros(n, 3, self.image_size, self.image_size)
        return images.contiguous(memory_format=torch.channels_last)

    def describe(self) -> dict:
        return super().describe() | {"normalization": {"mean": MEAN, "std": STD}}


class ImagesOnDisk(Images):
    """Images in files that are decoded for each batch. ``images`` is an array of their paths as
    bytes, which loader processes share; of a list of strings, each would end up with a copy."""

    workers = 4
    tensors = ()

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images = [read_image(os.fsdecode(path), self.side) for path in self.images[indices]]
        return torch.stack(images), self.labels[torch.tensor(indices)]


def find_images(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Every folder in and below ``root`` that is not hidden, with its images: the files whose
    extension is that of an image that Pillow opens. Prints what it ignores."""
    kinds = Image.registered_extensions()
    ignored = Counter()
    known = {s for s, k in kinds.items() if k in Image.OPEN and "image/" in Image.MIME.get(k, "")}
    for at, folders, files in os.walk(root, onerror=fail, followlinks=True):
        folders[:] = sorted(name for name in folders if not is_skipped(Path(at, name)))
        suffixes = {name: Path(name).suffix.lower() for name in sorted(files) if name[0] != "."}
        ignored.update(s or "without extension" for s in suffixes.values() if s not in known)
        yield at, [name for name, suffix in suffixes.items() if suffix in known]
    if ignored:
        counts = ", ".join(f"{n:,} {suffix}" for suffix, n in ignored.most_common(9))
        print0(f"{this_script()}: ignored in {root}, not images: {counts}", sys.stderr)


def is_skipped(folder: Path) -> bool:
    """Whether a folder is hidden, or a link to one that contains the link."""
    target = folder.resolve()
    loop = folder.is_symlink() and any(p.resolve().is_relative_to(target) for p in folder.parents)
    return loop or folder.name.startswith(".")


@contextlib.contextmanager
def open_image(path: str) -> Iterator[Image.Image]:
    """Open an image, with its orientation from EXIF applied."""
    try:
        with Image.open(path) as image:
            ImageOps.exif_transpose(image, in_place=True)
            yield image
    except Image.DecompressionBombError:
        why = f"(more than {2 * Image.MAX_IMAGE_PIXELS:,} pixels); make it smaller"
    except Exception as error:  # damaged files raise any of a dozen types
        why = f"({type(error).__name__}); repair or remove it"
    else:
        if image.mode != "F" and (image.mode != "I" or image.format in ("PNG", "PPM")):
            return  # 8 bits, or 16
        why = "(32-bit pixels of unknown range); save it as an 8-bit or 16-bit image"
    raise Unreadable(f"cannot read the image {path} {why}")


def read_image(path: str, side: int) -> Tensor:
    """Decode a file to uint8 ``[3, side, side]``: on white, resized, then cropped at the center."""
    with open_image(path) as file:
        if file.mode.startswith("I"):  # 16 bits, or 12 in a TIFF, which convert() would clip
            bits = getattr(file, "tag_v2", {}).get(258, [16])[0]
            file = Image.fromarray((np.asarray(file) >> bits - 8).astype(np.uint8))
        if file.has_transparency_data:
            file = file.convert("RGBA")
            file = Image.alpha_composite(Image.new("RGBA", file.size, "white"), file)
        image = ImageOps.fit(file.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def make_datasets(args) -> tuple[Images, Images]:
    """The training and the evaluation set, of the same classes. Resolves ``auto``."""
    name = args.dataset
    why = None
    if name in ("auto", "cifar10"):
        from torchvision.datasets import CIFAR10  # takes seconds: the run has printed a line

        from libraries.download import fetch

        data_dir = fetch_input(args.data_dir, "--data-dir")
        download = functools.partial(CIFAR10, data_dir, download=True)
        why = fetch(CIFAR10.url, (data_dir / CIFAR10.base_folder).is_dir, download)
        if why and name == "cifar10":
            use = "put cifar-10-batches-py there, or use --dataset synthetic"
            fail(f"--dataset cifar10: not in {args.data_dir} or online ({why}); {use}")
        name = "synthetic" if why else "cifar10"
    make = {"cifar10": cifar10, "folder": folder, "synthetic": synthetic}[name]
    train_set = make(args, "train")
    eval_set = make(args, "eval")
    train_set.name = eval_set.name = name
    if odd := set(train_set.classes) ^ set(eval_set.classes):
        need = "both splits need the same class folders; only one of them has"
        fail(f"--data-dir {args.data_dir}: {need} {', '.join(sorted(odd))}")
    train_set.flip = not args.no_flip
    if why:
        why = f" (CIFAR-10 is not in {args.data_dir} and could not be downloaded: {why})"
    elif name == "folder" and train_set.flip:
        why = " (half of each training batch is mirrored; --no-flip: none)"
    sizes = f"{len(train_set):,} training and {len(eval_set):,} evaluation images"
    print0(f"data: {name}{why or ''}, {sizes}, {len(train_set.classes)} classes")
    return train_set, eval_set


def cifar10(args, split: str) -> Images:
    """CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 images of 32x32, checksums verified."""
    from torchvision.datasets import CIFAR10

    try:
        source = CIFAR10(fetch_input(args.data_dir, "--data-dir"), train=split == "train")
    except (OSError, RuntimeError, EOFError) as error:
        fail(f"CIFAR-10 in {args.data_dir} is damaged ({error}); remove it and start again")
    n = how_many(args, split, len(source))
    images = torch.from_numpy(source.data[:n]).permute(0, 3, 1, 2).contiguous()
    return Images(images, torch.tensor(source.targets[:n]), source.classes, args.image_size)


def folder(args, split: str) -> Images:
    """A folder per class, below ``train/`` and below ``test/`` or ``val/`` of ``--data-dir``.

    The files are shuffled in a fixed order: otherwise the first n would be of one class."""
    names = ["train"] if split == "train" else ["test", "val"]
    data_dir = fetch_input(args.data_dir, "--data-dir")
    roots = [data_dir / name for name in names if (data_dir / name).is_dir()]
    if not roots:
        fail(f"--data-dir {args.data_dir}: no folder {' or '.join(names)} in it; give its parent")
    root = roots[0]
    paths = []
    counts = Counter()
    for at, names in find_images(root):
        paths += [os.fsencode(os.path.join(at, name)) for name in names]
        folders = Path(at).relative_to(root).parts
        kind = folders[0] if folders else ""
        counts[kind] += len(names)
    if beside := counts.pop(""):  # they come first
        print0(f"data: ignored {beside:,} images that are in no folder of {root}")
    empty = [name for name, n in counts.items() if not n]
    if empty or len(counts) < 2:
        has = f"there is none in {', '.join(empty)}" if empty else f"it has {len(counts)}"
        fail(f"--data-dir {args.data_dir}: {root} needs a folder of images per class, and {has}")
    classes = list(counts)
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor(list(counts.values())))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    order = order[: how_many(args, split, len(labels))]
    paths = np.array(paths[beside:])[order]
    labels = labels[order]
    try:
        short_sides = []
        for path in paths[:100]:
            with open_image(os.fsdecode(path)) as image:
                short_sides.append(min(image.size))
        # Large images are stored at the size of the model's input, small ones unchanged.
        side = min(args.image_size, max(short_sides))
        if len(paths) * 3 * side**2 * world().local_size > IN_MEMORY_BYTES:
            return ImagesOnDisk(paths, labels, classes, args.image_size, side)
        images = torch.empty(len(paths), 3, side, side, dtype=torch.uint8)
        hidden = world().rank > 0 or None  # None: shown if there is a terminal
        for i, path in enumerate(tqdm(paths, f"reading {root}", leave=False, disable=hidden)):
            images[i] = read_image(os.fsdecode(path), side)
    except Unreadable as error:
        fail(error)
    return Images(images, labels, classes, args.image_size)


def synthetic(args, split: str) -> Images:
    """Ten random classes from the seed, in CIFAR-10's shape, without files or network.

    A class is a smooth random pattern; an image is the sum of this pattern, another one and noise.
    Image i does not depend on the number of images."""
    n = getattr(args, f"{split}_samples") or {"train": 50_000, "eval": 10_000}[split]
    images = torch.empty(n, 3, 32, 32, dtype=torch.uint8)
    labels = torch.empty(n, dtype=torch.int64)
    of_class = smooth_patterns(np.random.default_rng((args.seed, 0)), 10)
    for start in range(0, n, 1000):
        rng = np.random.default_rng((args.seed, {"train": 1, "eval": 2}[split], start))
        chunk = slice(start, min(start + 1000, n))
        labels[chunk] = torch.from_numpy(rng.integers(10, size=1000))[: n - start]
        drawn = smooth_patterns(rng, 1000)[: n - start]
        drawn += torch.from_numpy(rng.standard_normal(drawn.shape, dtype=np.float32))
        drawn += of_class[labels[chunk]]
        images[chunk] = (128 + 32 * drawn).clamp(0, 255).to(torch.uint8)
    return Images(images, labels, [f"class {i}" for i in range(10)], args.image_size)


def smooth_patterns(rng: np.random.Generator, n: int) -> Tensor:
    """float32 ``[n, 3, 32, 32]``: 4x4 normal values, upsampled."""
    coarse = torch.from_numpy(rng.standard_normal((n, 3, 4, 4), dtype=np.float32))
    return F.interpolate(coarse, size=32, mode="bicubic")


# --------------------------------------------------------------------------- a batch on its device
def draw_crops(seed: int, epoch: int, step: int, batch_size: int, side: int) -> Tensor:
    """Random crops and flips of a GLOBAL batch: a function of (seed, epoch, step) only, so that
    they are identical at every world size and after a resume. int64 ``[batch_size, 3]``: row and
    column in the padded image, and whether to flip."""
    places = 2 * (side // 8) + 1
    rng = np.random.default_rng((seed, epoch, step))
    return torch.from_numpy(rng.integers([places, places, 2], size=(batch_size, 3)))


def crop_and_flip(images: Tensor, crops: Tensor) -> Tensor:
    """Pad images ``[n, 3, side, side]`` by an eighth of the side, cut a window out of each, mirror
    half of them: for 32x32 the augmentation of He et al. 2016 (arXiv:1512.03385, section 4.2).
    ``crops``: of :func:`draw_crops`, on the same device."""
    side = images.shape[-1]
    padded = F.pad(images, [side // 8] * 4)
    windows = padded.unfold(2, side, 1).unfold(3, side, 1)  # a view: all windows of all images
    rows, columns, flips = crops.unbind(1)
    images = windows[torch.arange(len(images), device=images.device), :, rows, columns]
    return torch.where(flips.bool()[:, None, None, None], images.flip(3), images)


def to_input(images: Tensor, image_size: int, dtype: torch.dtype | None = None) -> Tensor:
    """From uint8 ``[n, 3, side, side]`` to the input of the model: normalized in the default dtype,
    cast to ``dtype`` if given, and resized to ``[n, 3, image_size, image_size]``. Channels last is
    the fastest memory format for convolutions; all activations of the network inherit it."""
    mean, std = normalization(images.device, torch.get_default_dtype())
    images = images.to(mean.dtype, memory_format=torch.channels_last).sub_(mean).div_(std)
    if images.shape[-1] != image_size:
        shrinks = images.shape[-1] > image_size
        images = F.interpolate(images, size=image_size, mode="bilinear", antialias=shrinks)
    return images.to(dtype or mean.dtype).contiguous(memory_format=torch.channels_last)


@functools.cache  # a copy to the GPU at every step would make the CPU wait for it
def normalization(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor([MEAN, STD], dtype=dtype, device=device).mul(255)[..., None, None]
