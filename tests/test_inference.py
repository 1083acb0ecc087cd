"""From weights to predictions: predict, export, run in ONNX Runtime."""

import argparse
import io
import json
import shlex
import struct
import subprocess
import sys
import traceback
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import small_resnet  # noqa: F401  a model to choose
import torch
from conftest import ROOT, Finished, environment, hooked, refused, same_bits, snapshots, succeed
from PIL import Image
from test_mistakes import OF_IMAGES

import common
import jobs.images
import model_inference
from inference.classifier import load_model
from inference.images import find_images, load_split, read_image
from inference.runtimes import TorchRunner
from inference.trained import Trained

JOB = "--dataset synthetic --train-samples 768 --eval-samples 500 -b 32 --epochs 2 --lr 0.02"
JOB += " --model small_resnet"
PAGE = (ROOT / "docs/inference.md").read_text()
COMMANDS = PAGE.partition("```bash\n")[2].partition("```")[0].splitlines()
IN_STOCK_ORT = """
import json, sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
logits = session.run(None, {"images": numpy.load(sys.argv[2])})[0]
print(json.dumps([classes[i] for i in logits.argmax(1)]))
"""


def infer(flags):
    """Run model_inference.py here, where PyTorch and ONNX are imported already."""
    stdout = io.StringIO()
    stderr = io.StringIO()
    code = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["model_inference.py", *shlex.split(flags)])
        try:
            code = model_inference.main()
        except SystemExit as end:
            code = end.code or 0
        except Exception:
            traceback.print_exc()
            code = 1
    command = f"python model_inference.py {flags}"
    errors = stderr.getvalue().replace(f"{common.this_script()}: ", "model_inference: ")
    return Finished(command, command, code, stdout.getvalue(), errors, seconds=0)


@pytest.fixture(autouse=True, scope="module")
def as_launched():
    """No GPU, as the processes have it that tests launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the weights of a small model that has learned something: where the README's
    commands expect it."""
    weights = Path(shlex.split(COMMANDS[0])[3])
    folder = tmp_path_factory.mktemp("checkout") / weights.parent
    succeed(hooked("pytorch_SingleGPU", 1, f"{JOB} --output-dir {folder}"), forked=True)
    assert json.loads((folder / "result.json").read_text())["eval_accuracy"][-1] > 0.8
    return folder


@pytest.fixture(scope="module")
def typed(trained):
    """What the page's three commands print, from a model.pt to an ONNX file that runs."""
    with chdir(trained.parents[1]):
        return [infer(command.removeprefix("python model_inference.py ")) for command in COMMANDS]


@pytest.fixture(scope="module")
def exported(typed, trained):
    return trained.parents[1] / "model.onnx"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Images of every kind, and the class that each is of."""
    folder = tmp_path_factory.mktemp("pictures")
    args = argparse.Namespace(seed=0, eval_samples=8, image_size=32)
    images = jobs.images.synthetic(args, "eval")
    for i, pixels in enumerate(images.images):
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        image.save(folder / f"{i}.png")
    for mode in ("RGBA", "L", "P"):
        image.convert(mode).save(folder / f"{mode}.png")
    Image.fromarray(np.full((40, 50), 40_000, np.uint16)).save(folder / "16bit.png")
    (folder / "notes.txt").write_text("not an image")
    Image.new("RGB", (1, 1), "red").save(folder / "1x1.jpg")
    Image.new("RGB", (5000, 4000), "blue").save(folder / "huge.jpg")
    (folder / "broken.png").write_bytes((folder / "0.png").read_bytes()[:200])
    (folder / "empty.jpg").touch()
    return folder


def test_readme_in_three_commands(typed, trained):
    assert [finished.code for finished in typed] == [0, 0, 0], str(typed)
    score, export, score_again = typed
    accuracy = json.loads((trained / "result.json").read_text())["eval_accuracy"][-1]
    assert score.stdout.startswith(f"accuracy {accuracy:.2%} of 500 ")
    assert "compared with PyTorch: logits within" in export.stdout
    again = float(score_again.stdout.split()[1].rstrip("%")) / 100
    assert again == pytest.approx(accuracy, abs=0.0021)


def test_the_folder_of_a_run_and_its_snapshot(typed, trained, tmp_path):
    """A run that was stopped has nothing else; its weights can be written to a model.pt."""
    for weights in (trained, snapshots(trained)[0]):
        assert infer(f"--weights {weights} --input test").stdout == typed[0].stdout
    finished = infer(f"--weights {snapshots(trained)[0]} --export {tmp_path}/model.pt")
    assert finished.stdout == f"{tmp_path}/model.pt: the weights of small_resnet\n"
    assert same_bits(*(torch.load(f / "model.pt", weights_only=True) for f in (tmp_path, trained)))


def test_predict_files(trained, exported, pictures):
    """PyTorch and ONNX Runtime agree on images of every kind, and on which are of which class."""
    answers = []
    for weights in (trained / "model.pt", exported):
        finished = infer(f"--weights {weights} --input {pictures} --json --top-k 2")
        assert finished.code == 1 and "2 of 16 images cannot be read" in finished.stderr
        found = json.loads(finished.stdout)
        assert found["unreadable"] == [f"{pictures}/broken.png", f"{pictures}/empty.jpg"]
        assert len(found["answers"]) == 14 and "not images: 1 .txt" in finished.stderr
        answers.append(found["answers"])
    for ours, theirs in zip(*answers, strict=True):
        assert ours["file"] == theirs["file"] and ours["classes"][0] == theirs["classes"][0]
        assert ours["probabilities"] == pytest.approx(theirs["probabilities"], abs=1e-4)
        assert 1 >= ours["probabilities"][0] >= ours["probabilities"][1] >= 0
    finished = infer(f"--weights {exported} --input {pictures}/0.png")
    [line] = finished.lines
    assert finished.code == 0 and line.startswith(f"{pictures}/0.png: class ")


def test_a_picture_is_seen_as_it_was_taken(pictures, tmp_path, monkeypatch):
    """Turned by what the camera wrote down; of a GIF the first; of 12 or 16 bits the upper ones;
    on white where it is transparent. What has no known range, or is too large, is named."""
    upright = np.zeros((8, 8, 3), np.uint8)
    upright[:4, :, 0] = 200  # red above
    turned = Image.fromarray(np.rot90(upright).copy())
    how = Image.Exif()
    how[0x0112] = 6  # to be turned by 90 degrees
    turned.save(tmp_path / "turned.png", exif=how)
    Image.fromarray(upright).save(tmp_path / "plain.png")
    later = [Image.fromarray(255 - upright)]
    Image.fromarray(upright).save(tmp_path / "moves.gif", save_all=True, append_images=later)
    shape = np.eye(8, dtype=np.uint8) * 255  # black, on nothing
    Image.fromarray(np.dstack([shape * 0, shape])).save(tmp_path / "LA.png")
    tags = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 110, 278: 1, 279: 3}  # two pixels
    tags = b"".join(struct.pack("<HHLL", tag, 3, 1, value) for tag, value in tags.items())
    tags = b"II*\0\x08\0\0\0\x08\0" + tags + bytes(4)
    (tmp_path / "12bit.tiff").write_bytes(tags + b"\x80\x08\x00")
    for kind in (np.float32, np.int32):
        Image.fromarray(np.ones((8, 8), kind)).save(tmp_path / f"{kind.__name__}.tiff")
    assert len(find_images(tmp_path)) == 7
    assert torch.equal(read_image(tmp_path / "LA.png", 8)[0, 2], torch.tensor(255 - shape))
    assert jobs.images.read_image(tmp_path / "12bit.tiff", 1).max() == 0x80
    plain = read_image(tmp_path / "plain.png", 8)
    for name in ("turned.png", "moves.gif"):
        assert torch.equal(read_image(tmp_path / name, 8), plain), name
    assert read_image(pictures / "16bit.png", 8).unique().tolist() == [40_000 // 256]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64)  # half of the limit
    Image.new("L", (129, 1)).save(tmp_path / "large.tiff")
    for name, why in {"float32": "32-bit", "int32": "32-bit", "large": "128 pixels"}.items():
        with pytest.raises(jobs.images.Unreadable, match=f"{name}.tiff .*{why}"):
            read_image(tmp_path / f"{name}.tiff", 8)


def test_classes_are_matched_by_name(image_folder):
    args = Trained(dataset="folder", data_dir=image_folder, image_size=32)
    known = replace(args, classes=["red", "other", "green", "blue"])
    images = load_split(known)
    strongest = images.__getitems__(range(len(images)))[0].float().mean((2, 3)).argmax(1)
    assert torch.equal(images.labels, torch.tensor([0, 2, 3])[strongest])  # red, green, blue
    unnamed = replace(args, classes=[f"unnamed class {i}" for i in range(3)])
    assert set(load_split(unnamed).labels.tolist()) == {0, 1, 2}
    with refused("the weights know red, dog, blue, but not green;"):
        load_split(replace(args, classes=["red", "dog", "blue"]))


def test_stock_onnxruntime_opens_the_file(trained, exported, tmp_path):
    """In a process without this repository, from a folder that holds the one file only; which is
    valid and says what it is given and answers."""
    args = argparse.Namespace(seed=0, eval_samples=7, image_size=32)
    images = jobs.images.synthetic(args, "eval").images
    (tmp_path / "only.onnx").write_bytes(exported.read_bytes())
    np.save(tmp_path / "images.npy", images.numpy())
    command = [sys.executable, "-c", IN_STOCK_ORT, "only.onnx", "images.npy"]
    printed = subprocess.check_output(command, text=True, cwd=tmp_path, env=environment())
    args = Trained(weights=trained / "model.pt", model="small_resnet", norm="batch", image_size=32)
    args = replace(args, classes=[f"class {i}" for i in range(10)])
    runner = TorchRunner(load_model(args), "cpu")
    assert json.loads(printed) == [args.classes[i] for i in runner(images).argmax(1)]
    model = onnx.load(exported)
    onnx.checker.check_model(model, full_check=True)
    [images] = model.graph.input
    [logits] = model.graph.output
    assert images.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    for value, sides in ((images, [3, 32, 32]), (logits, [10])):
        batch, *rest = value.type.tensor_type.shape.dim
        assert batch.dim_param and [d.dim_value for d in rest] == sides
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(about["classes"]) == args.classes and about["input"].startswith("uint8")


# ------------------------------------------------------------------------------------- mistakes
def test_mistakes(trained, exported, pictures, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.onnx").write_bytes(exported.read_bytes()[:9999])
    foreign = onnx.load(exported)
    del foreign.metadata_props[:]
    onnx.save(foreign, tmp_path / "foreign.onnx")
    outside = onnx.load(exported)
    path = tmp_path / "beside.onnx"
    onnx.save(outside, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").rename(tmp_path / "data.bin")
    (tmp_path / "inner").mkdir()
    moved = path.read_bytes().replace(b"weights.bin", b"../data.bin")
    (tmp_path / "inner/outside.onnx").write_bytes(moved)
    torch.save({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "other.pt")
    found = {"here": tmp_path, "trained": trained, "exported": exported, "pictures": pictures}
    for flags, named in OF_IMAGES:
        before = sorted(tmp_path.rglob("*"))
        named = named.format(**found)
        finished = infer(flags.format(**found))
        assert named in finished.refusal, str(finished)
        assert finished.stdout == "" and sorted(tmp_path.rglob("*")) == before
