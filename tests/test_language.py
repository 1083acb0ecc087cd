"""From a GPT's weights to text: sample, test, export, sample again from the ONNX file."""

import json
import math
from types import SimpleNamespace

import onnx
import pytest
import torch
from conftest import launcher, succeed
from test_inference import infer
from test_mistakes import OF_A_GPT

from inference import language

JOB = "--model gpt-2x2x32 --context 16 --dataset synthetic --train-samples 480 --eval-samples 100"
JOB += " -b 32 --epochs 1 --lr 0.01"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt")
    succeed(f"{launcher('pytorch_FSDP', 2)} {JOB} --output-dir {folder}", forked=True)
    return folder / "model.pt"


@pytest.fixture(scope="module")
def exported(trained):
    path = trained.with_name("model.onnx")
    finished = infer(f"--weights {trained} --export {path}")
    assert finished.code == 0 and "compared with PyTorch: logits within" in finished.stdout
    return path


def read_json(flags):
    finished = infer(f"{flags} --json")
    assert finished.code == 0, str(finished)
    return json.loads(finished.stdout)


def test_the_test_split_is_what_training_evaluated(trained, exported):
    result = json.loads(trained.with_name("result.json").read_text())
    for path in (trained, exported):
        found = read_json(f"--weights {path} --input test")
        assert found["loss"] == pytest.approx(result["eval_loss"][-1], rel=1e-5)
        assert found["accuracy"] == pytest.approx(result["eval_accuracy"][-1], abs=2e-3)
        assert found["tokens"] == result["eval_samples"] == 1600


def test_sampling(trained, exported):
    """A seed's text is the same every time, and in ONNX Runtime; it goes on from the prompt, also
    from one that is longer than the context."""
    prompt = "a long prompt with more characters than the context has"
    prompt = "".join(c for c in prompt if c in vocabulary(trained))
    flags = f"--prompt '{prompt}' --tokens 30"
    first = read_json(f"--weights {trained} {flags}")["text"]
    assert first.startswith(prompt) and len(first) == len(prompt) + 30
    assert first == read_json(f"--weights {trained} {flags}")["text"]
    assert first == read_json(f"--weights {exported} {flags}")["text"]
    assert first != read_json(f"--weights {trained} {flags} --sample-seed 1")["text"]
    likeliest = read_json(f"--weights {trained} {flags} --temperature 0")["text"]
    assert likeliest == read_json(f"--weights {trained} {flags} --top-k 1")["text"] != first


def vocabulary(path):
    return json.loads(path.with_name("result.json").read_text())["classes"]


def test_weights_without_their_result(trained, tmp_path):
    """Context and vocabulary are in the file. Nor does the cache change a text."""
    (tmp_path / "model.pt").write_bytes(trained.read_bytes())
    prompt = f"--prompt {vocabulary(trained)[1]} --tokens 30"
    flags = f"--weights {tmp_path}/model.pt --model gpt-2x2x32", f"--weights {trained}"
    texts = {read_json(f"{words} {prompt}")["text"] for words in (*flags, f"{flags[1]} --no-cache")}
    assert len(texts) == 1 and len(*texts) == 31


def test_drawing():
    """As often as the model says, and none that --top-k leaves out."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(20_000, 1)
    generator = torch.Generator().manual_seed(0)
    for temperature, top_k in ((0.5, None), (1.0, 3)):
        drawn = language.draw(logits, temperature, top_k, generator).flatten().bincount(minlength=4)
        kept = logits[0].clone()
        kept[top_k or 4 :] = -torch.inf
        assert drawn / 20_000 == pytest.approx((kept / temperature).softmax(0), abs=0.015)


def test_a_file_that_cannot_be_right_is_not_written(trained, exported, tmp_path, monkeypatch):
    """Of more weights than an ONNX file can hold, or of another model."""
    export = f"--weights {trained} --export {tmp_path}/gpt.onnx"
    monkeypatch.setattr("inference.export.MOST", 100_000)
    assert "the weights take 0.0 GB, and an ONNX file has at most" in infer(export).refusal
    monkeypatch.setattr("inference.export.MOST", 2e9)
    once_more = SimpleNamespace(model_proto=onnx.load(exported))
    monkeypatch.setattr("torch.onnx.export", lambda *_, **__: once_more)  # which takes seconds
    monkeypatch.setattr("inference.export.largest_difference", lambda *_: math.nan)
    assert "the exported model does not compute the same" in infer(export).stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags, words", OF_A_GPT)
def test_mistakes(flags, words, trained):
    assert words in infer(f"--weights {trained} {flags}").refusal
