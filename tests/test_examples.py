"""The loops of examples/: each ends with the weights of the plain one, also when it is resumed, and
docs/your_own_loop.md shows their lines."""

import re

import pytest
import torch
from conftest import ROOT, succeed
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Rounding alone in float64. bfloat16 rounds to 8 bits; DeepSpeed's engine computes in fp32.
TOLERANCE = {"ddp": 1e-9, "zero": 1e-9, "fsdp": 1e-9}
TOLERANCE |= {"ddp_autocast": 0.05, "fsdp_bf16": 0.05, "deepspeed_zero2": 1e-4}
TYPED = ("ddp", "fsdp_bf16")  # by torchrun itself; the others are forked
PAGES = [ROOT / "docs" / f"your_own_loop{language}.md" for language in ("", ".zh-CN")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Weights of the plain loop after two epochs, in both dtypes."""
    folder, found = tmp_path_factory.mktemp("plain"), {}
    for dtype, runner in ((torch.float32, ""), (torch.float64, "tests/in_float64.py ")):
        path = folder / f"{dtype}.pt"
        succeed(f"python {runner}examples/plain.py --epochs 2 --checkpoint {path}", forked=True)
        found[dtype] = torch.load(path)["model"]
    assert found[torch.float64]["0.weight"].dtype == torch.float64
    return found


def weights_in(path, name):
    """The model's, by their names in the plain loop."""
    if name.startswith("fsdp"):
        dcp_to_torch_save(path / "2", path / "whole.pt")
        path = path / "whole.pt"
    if name.startswith("deepspeed"):
        step = (path / "latest").read_text()
        return torch.load(path / step / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    return torch.load(path)["model"]


@pytest.mark.parametrize("name", TOLERANCE)
def test_an_example_ends_with_the_plain_loops_weights(name, plain, tmp_path):
    """Stopped after the first of two epochs and resumed."""
    exact = TOLERANCE[name] < 1e-6
    script = f"{'tests/in_float64.py ' if exact else ''}examples/{name}.py"
    launch = f"torchrun --standalone --nproc_per_node=2 {script}"
    if name.startswith("deepspeed"):
        launch = f"deepspeed --num_gpus 2 {script}"
    path = tmp_path / "checkpoint"
    for epochs in (1, 2):
        command = f"{launch} --epochs {epochs} --checkpoint {path}"
        forked = name not in TYPED and launch.startswith("torchrun")
        finished = succeed(command, forked=forked, DS_ACCELERATOR="cpu")
        assert re.findall(r"^epoch (\d): loss", finished.stdout, re.M) == [str(epochs)]
    found = weights_in(path, name)
    expected = plain[torch.float64 if exact else torch.float32]
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        difference = (found[key].to(weight) - weight).norm() / weight.norm()
        assert difference < TOLERANCE[name], key


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_stands_alone(path):
    text = path.read_text()
    assert len(text.splitlines()) <= (45 if path.stem == "plain" else 70)
    assert not re.search(r"\b(common|harness|jobs)\b", text)


def test_all_examples_are_run():
    assert {path.stem for path in EXAMPLES} == {*TOLERANCE, "plain"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_shows_lines_of_the_files(page):
    """Each block of code is named by the example above it, and stands there in one piece; a line of
    a diff stands in one of both."""
    blocks = re.findall(r"\(\.\./examples/(\w+)\.py\).*?```(\w+)\n(.*?)```", page.read_text(), re.S)
    assert {name for name, _, _ in blocks} == {path.stem for path in EXAMPLES}
    plain = (ROOT / "examples/plain.py").read_text()
    for name, kind, block in blocks:
        source = (ROOT / f"examples/{name}.py").read_text()
        if kind == "python":
            assert block in source, name
            continue
        assert kind == "diff"
        for line in block.splitlines():
            where = plain if line.startswith("-") else source
            assert f"{line[1:]}\n" in where, f"{name}: {line}"
