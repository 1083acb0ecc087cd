"""Datasets, order, augmentation. That ranks have the batches of one process: test_contract.py."""

import dataclasses
import hashlib
import pickle
import re
import shutil

import numpy as np
import pytest
import torch
import torchvision
from conftest import HOOKED, ROOT, launch, refused, succeed
from PIL import Image
from safetensors.torch import save_file
from torchvision.transforms.v2 import functional as reference

import common
from harness import data
from jobs import images as job
from jobs.choice import Settings
from libraries import weights

JOB = "--dataset synthetic --train-samples 100 --eval-samples 12 --batch-size 24 --epochs 2"
JOB += " --norm group --model small_resnet"


@pytest.fixture(autouse=True)
def no_loader_is_waited_for():
    """Its processes ignore signals, so a loader that Python frees later would wait for them."""
    yield
    data.kill_loaders()


def arguments(**changes):
    return Settings(**{"device": "cpu", "model": "resnet18", "image_size": 32} | changes)


def test_epochs_differ_in_order_and_repeat_nothing(tmp_path):
    """Found by their labels and, within an epoch, by their pixels."""
    command = f"python {HOOKED} pytorch_SingleGPU.py {JOB} --output-dir {tmp_path}/run"
    succeed(command, forked=True, HOOKS=f"batches:{tmp_path}")
    files = [tmp_path / f"step{step}-rank0.pt" for step in range(1, 9)]
    images, labels = zip(*(torch.load(file, weights_only=True) for file in files), strict=True)
    assert not all(map(torch.equal, labels[:4], labels[4:]))
    for epoch in (images[:4], images[4:]):
        pixels = torch.cat(epoch).flatten(1)
        assert len(pixels.unique(dim=0)) == len(pixels) == 96


def test_synthetic_images_do_not_depend_on_their_number():
    few = job.synthetic(arguments(train_samples=1500), "train")
    many = job.synthetic(arguments(train_samples=2300), "train")
    assert torch.equal(few.images, many.images[:1500])
    assert torch.equal(few.labels, many.labels[:1500])
    assert few.images.dtype == torch.uint8 and few.images.shape == (1500, 3, 32, 32)
    for split, seed in (("train", 1), ("eval", 0)):
        other = job.synthetic(arguments(train_samples=1500, eval_samples=1500, seed=seed), split)
        assert not torch.equal(few.images, other.images)
    assert few.labels.bincount().min() > 100


def test_crops_are_a_function_of_seed_epoch_and_step():
    crops = job.draw_crops(0, 3, 7, 512, 32)
    assert crops.shape == (512, 3) and torch.equal(crops, job.draw_crops(0, 3, 7, 512, 32))
    for seed, epoch, step in [(1, 3, 7), (0, 4, 7), (0, 3, 8), (0, 7, 3)]:
        assert not torch.equal(crops, job.draw_crops(seed, epoch, step, 512, 32))
    rows, columns, flips = crops.unbind(1)
    assert set(rows.tolist()) == set(columns.tolist()) == set(range(9))
    assert set(flips.tolist()) == {0, 1}


@pytest.mark.parametrize("side", [7, 32])
def test_crop_and_flip_is_what_torchvision_does_one_by_one(side):
    images = torch.randint(256, (50, 3, side, side), dtype=torch.uint8)
    crops = job.draw_crops(0, 0, 0, 50, side)
    expected = []
    for image, (row, column, flip) in zip(images, crops.tolist(), strict=True):
        image = reference.pad(image, [side // 8] * 4)
        image = reference.crop(image, row, column, side, side)
        expected.append(reference.horizontal_flip(image) if flip else image)
    assert torch.equal(job.crop_and_flip(images, crops), torch.stack(expected))


@pytest.mark.parametrize("image_size", [16, 32, 80])
def test_to_input_is_what_torchvision_does(image_size):
    images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    expected = reference.to_dtype(images, torch.float32, scale=True)
    expected = reference.normalize(expected, job.MEAN, job.STD)
    expected = reference.resize(expected, [image_size, image_size], antialias=image_size < 32)
    torch.testing.assert_close(job.to_input(images, image_size), expected, rtol=1e-5, atol=1e-5)


def test_folder(image_folder, tmp_path, capsys):
    args = arguments(dataset="folder", data_dir=image_folder)
    train_set, eval_set = common.make_datasets(args)
    assert (len(train_set), len(eval_set)) == (60, 21)
    assert train_set.classes == ["blue", "green", "red"]
    assert train_set.images.shape == (60, 3, 32, 32) and train_set.images.dtype == torch.uint8
    strongest = train_set.images.float().mean((2, 3)).argmax(1)  # 0 red, 1 green, 2 blue
    assert torch.equal(strongest, 2 - train_set.labels)
    first = job.folder(dataclasses.replace(args, train_samples=12), "train")
    assert set(first.labels.tolist()) == {0, 1, 2}, "the first n must not be of one class"
    assert torch.equal(first.images, train_set.images[:12])
    (tmp_path / "val").symlink_to(image_folder / "test")  # as many call it
    assert len(job.folder(arguments(data_dir=tmp_path), "eval")) == 21
    assert train_set.flip and "is mirrored" in capsys.readouterr().out
    train_set, _ = common.make_datasets(dataclasses.replace(args, no_flip=True))
    assert not train_set.flip and "mirrored" not in capsys.readouterr().out


UNLIKE = {"samples of the training set": "59", "checksum of --weights": "7", "--lr": "0.2"}
UNLIKE |= {"--data-dir is a URL": "true"}


@pytest.mark.parametrize("name, other", UNLIKE.items())
def test_ranks_with_other_data_or_flags_are_refused(name, other, monkeypatch):
    """As on machines with disks of their own, which would otherwise wait for each other."""
    monkeypatch.setattr(
        "harness.data.gather_objects",
        lambda own: [own, own, own | {name: other} if name in own else own],
    )
    args = arguments(dataset="synthetic", train_samples=60, eval_samples=9)
    with refused(f"{name}: ", f" on rank 0 and {other} on rank 2; start all ranks with the same"):
        common.announce(args, torch.device("cpu"))
        common.make_datasets(args)


def test_a_machine_may_have_places_of_its_own(monkeypatch, tmp_path):
    """With other weights there, each rank would read its shards from another model."""
    found = {}
    for place, value in {"a": 1.0, "b": 1.0, "c": 2.0}.items():
        (tmp_path / place).mkdir()
        save_file({"weight": torch.full((9,), value)}, tmp_path / place / "model.safetensors")
        found[place] = weights.checksum(tmp_path / place)
    assert found["a"] == found["b"] != found["c"]
    args = arguments(dataset="synthetic", train_samples=60, eval_samples=9, data_dir="/other")
    compared = {}

    def gather(own):
        compared.update(own)
        return [own]

    monkeypatch.setattr("harness.data.gather_objects", gather)
    common.announce(args, torch.device("cpu"))
    assert "/other" not in str(compared) and compared["--train-samples"] == "60"
    assert weights.checksum(tmp_path / "a" / "model.safetensors") == found["a"]


BY_RANK = [
    ("pytorch_ND_parallel", "--tp 1", "--tp 2"),  # its groups would wait for each other
    ("pytorch_GRPO", "--lr 0.1", "--lr 0.2"),  # trains on no data set
    ("pytorch_torchrun_DDP --model gpt-nano", "--dataset synthetic", "--dataset text"),
]


@pytest.mark.parametrize("script, first, second", BY_RANK)
def test_real_ranks_with_other_flags_end(script, first, second, tmp_path):
    """Before they make groups or read data."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, runpy, sys\n"
        f"sys.argv[:1] = ['{script.split()[0]}.py']\n"
        f"sys.argv += {[first, second]}[int(os.environ['RANK'])].split()\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    flags = " ".join(script.split()[1:])
    command = f"torchrun --standalone --nproc_per_node=2 {program} {flags} --output-dir {tmp_path}"
    finished = launch(command, forked=True, PYTHONPATH=str(ROOT))
    assert re.search(rf"(: |; ){first.split()[0]}: ", finished.refusal)


def test_what_else_is_in_a_folder(image_folder, tmp_path, capsys):
    """Nothing hidden is a class or an image, no link leads in a circle; the rest is named."""
    train = shutil.copytree(image_folder, tmp_path, dirs_exist_ok=True) / "train"
    for name in ("red/a.GIF", "red/._000.jpg", "red/notes.txt", "red/000.eps", "of_no_class.png"):
        shutil.copy(train / "red" / "000.jpg", train / name)
    shutil.copytree(train / "red", train / ".ipynb_checkpoints")
    for link, to in {"red/up": "..", "red/circle": "../blue", "blue/circle": "../red"}.items():
        (train / link).symlink_to(to)
    train_set = job.folder(arguments(data_dir=tmp_path), "train")
    assert train_set.classes == ["blue", "green", "red"]
    assert train_set.labels.bincount().tolist() == [20 + 21, 20, 21 + 20]
    out, err = capsys.readouterr()
    assert "ignored 1 images" in out and "not images: 2 .eps, 2 .txt" in err


@pytest.mark.parametrize("workers", [0, 2])
def test_folder_too_large_for_memory(workers, image_folder, monkeypatch):
    """Decoded by the batch, it holds the same images in the same order, or one that is broken."""
    args = arguments(data_dir=image_folder, workers=workers, batch_size=8)
    in_memory = job.folder(args, "train")
    monkeypatch.setattr(job, "IN_MEMORY_BYTES", 0)
    on_disk = job.folder(args, "train")
    assert on_disk.images.dtype.kind == "S", "loaders would copy a list of strings"
    batches = [list(common.make_loader(args, data, 8)) for data in (in_memory, on_disk)]
    for (images, labels), (their_images, their_labels) in zip(*batches, strict=True):
        assert torch.equal(images, their_images) and torch.equal(labels, their_labels)
    on_disk.images[20] = b"/dev/null"
    with refused("error: cannot read the image /dev/null (UnidentifiedImageError)"):
        list(data.batches_of(common.make_loader(args, on_disk, 8)))


def test_what_a_gpu_holds_is_asked_for_by_number():
    """The same bits, whether the images are sent or only their numbers."""
    train_set = job.synthetic(arguments(train_samples=64), "train")
    numbers = [5, 0, 63, 7]
    cpu = torch.device("cpu")
    sent = train_set.prepare(train_set.__getitems__(numbers), cpu, seed=1, epoch=2, step=3)
    held = train_set.prepare((torch.tensor(numbers),), cpu, seed=1, epoch=2, step=3)
    for ours, theirs in zip(held, sent, strict=True):
        assert torch.equal(ours, theirs)
    assert sent[0].is_contiguous(memory_format=torch.channels_last)
    train_set.flip = False  # the same windows
    flips = job.draw_crops(1, 2, 3, 4, 32)[:, 2, None, None, None].bool()
    plain, _ = train_set.prepare((torch.tensor(numbers),), cpu, seed=1, epoch=2, step=3)
    assert flips.any() and torch.equal(plain, torch.where(flips, sent[0].flip(3), sent[0]))


def test_a_large_image_is_reduced_to_the_input(tmp_path):
    """Short side resized, middle cut out: what torchvision does to a PIL image."""
    x, y = np.meshgrid(np.linspace(0, 255, 200), np.linspace(0, 255, 300))
    image = Image.fromarray(np.stack([x, y, (x + y) / 2], axis=-1).astype(np.uint8))
    image.save(tmp_path / "large.png")
    expected = reference.center_crop(reference.resize(image, [64]), [64, 64])
    ours = job.read_image(tmp_path / "large.png", 64).int()
    assert (ours - reference.pil_to_tensor(expected)).abs().max() <= 2


def test_cifar10_is_read_from_its_own_files(tmp_path, monkeypatch):
    """The files' real format, with other pixels, and hence other checksums."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (110, 3, 32, 32), dtype=np.uint8)
    files = {name: {"data": part.reshape(-1, 3072), "labels": [3] * len(part)}
             for name, part in zip("abc", np.split(pixels, [50, 100]), strict=True)}  # fmt: skip
    files["names"] = {"label_names": [f"name {i}" for i in range(10)]}
    sums = {name: hashlib.md5(pickle.dumps(content)).hexdigest() for name, content in files.items()}
    for name, content in files.items():
        (folder / name).write_bytes(pickle.dumps(content))
    cifar10 = torchvision.datasets.CIFAR10
    monkeypatch.setattr(cifar10, "train_list", [(name, sums[name]) for name in "ab"])
    monkeypatch.setattr(cifar10, "test_list", [("c", sums["c"])])
    meta = {"filename": "names", "key": "label_names", "md5": sums["names"]}
    monkeypatch.setattr(cifar10, "meta", meta)
    args = arguments(dataset="auto", data_dir=tmp_path, train_samples=70)
    train_set, eval_set = common.make_datasets(args)
    assert (train_set.name, len(eval_set)) == ("cifar10", 10)
    assert np.array_equal(train_set.images.numpy(), pixels[:70])
    assert train_set.classes[3] == "name 3" and set(train_set.labels.tolist()) == {3}
    (folder / "b").write_bytes(b"cut off")
    with refused(f"{tmp_path} is damaged"):
        common.make_datasets(arguments(dataset="cifar10", data_dir=tmp_path))


def test_one_rank_downloads_and_the_others_wait(tmp_path):
    """Even though the folder is there before the download is complete."""
    script = tmp_path / "download.py"
    script.write_text(
        """
import sys, time
from pathlib import Path
import torch.distributed as dist
import common
from libraries import download
def slowly():
    folder.mkdir()
    time.sleep(2)
    (folder / "complete").touch()
dist.init_process_group("gloo")
folder, download.why_unreachable = Path(sys.argv[1]), lambda url: ""
found = [download.fetch("", folder.is_dir, slowly), (folder / "complete").exists()]
sys.stdout.write(f"rank {common.world().rank}: {found}\\n")  # at once, as both ranks are here
dist.destroy_process_group()
"""
    )
    command = f"torchrun --standalone --nproc_per_node=2 {script} {tmp_path}/data"
    finished = succeed(command, forked=True, PYTHONPATH=str(ROOT))
    assert sorted(finished.lines) == ["rank 0: [None, True]", "rank 1: [None, True]"]
