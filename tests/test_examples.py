"""The loops of examples/: each ends with the weights of the plain loop, also after a resume, and
docs/your_own_loop.md shows their lines."""

import difflib
import re

import pytest
import torch
from conftest import HOOKED, ROOT, cases, succeed
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Rounding alone in float64. bfloat16 rounds to 8 bits; DeepSpeed's engine computes in fp32.
TOLERANCE = {"ddp": 1e-9, "zero": 1e-9, "fsdp": 1e-9}
TOLERANCE |= {"ddp_autocast": 0.05, "fsdp_bf16": 0.05, "deepspeed_zero2": 1e-4}
PARENTS = dict.fromkeys(TOLERANCE, "ddp") | {"ddp": "plain", "fsdp_bf16": "fsdp"}
PAGES = [ROOT / "docs" / f"your_own_loop{language}.md" for language in ("", ".zh-CN")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Weights of the plain loop after two epochs, in both dtypes."""
    folder, found = tmp_path_factory.mktemp("plain"), {}
    for dtype, hooks in ((torch.float32, ""), (torch.float64, "float64")):
        path = folder / f"{dtype}.pt"
        command = f"python {HOOKED} examples/plain.py --epochs 2 --checkpoint {path}"
        succeed(command, forked=True, HOOKS=hooks)
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


@pytest.mark.parametrize("name", cases([(n,) for n in TOLERANCE], lambda n: TOLERANCE[n] < 0.01))
def test_an_example_ends_with_the_plain_loops_weights(name, plain, tmp_path):
    """Stopped after the first of two epochs and resumed."""
    exact = TOLERANCE[name] < 1e-6
    script = f"{HOOKED} examples/{name}.py" if exact else f"examples/{name}.py"
    launch = f"torchrun --standalone --nproc_per_node=2 {script}"
    if name.startswith("deepspeed"):
        launch = f"deepspeed --num_gpus 2 {script}"
    path = tmp_path / "checkpoint"
    for epochs in (1, 2):
        command = f"{launch} --epochs {epochs} --checkpoint {path}"
        finished = succeed(command, forked=True, DS_ACCELERATOR="cpu", HOOKS="float64")
        assert re.findall(r"^epoch (\d): loss", finished.stdout, re.M) == [str(epochs)]
    found = weights_in(path, name)
    expected = plain[torch.float64 if exact else torch.float32]
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        difference = (found[key].to(weight) - weight).norm() / weight.norm()
        assert difference < TOLERANCE[name], key


def test_examples_stand_alone():
    assert {path.stem for path in EXAMPLES} == {*TOLERANCE, "plain"}
    for path in EXAMPLES:
        assert not re.search(r"\b(common|harness|jobs)\b", path.read_text()), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_shows_the_files(page):
    """The plain loop, and of the others the lines that differ from their parents."""
    text = page.read_text()
    assert f"```python\n{read('plain').partition('parse_args()')[2].strip(chr(10))}\n```" in text
    shown = re.findall(r"\(\.\./examples/(\w+)\.py\)[:：]\n\n```diff\n(.*?)```", text, re.S)
    assert dict(shown) == {name: changes(PARENTS[name], name) for name in TOLERANCE}


def read(name):
    return (ROOT / f"examples/{name}.py").read_text()


def changes(old, new):
    """Without docstrings and imports."""
    olds, news = (read(name).split('"""', 2)[2].splitlines() for name in (old, new))
    lines = difflib.unified_diff(olds, news, n=0, lineterm="")
    lines = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    return "".join(f"{line}\n" for line in lines if not re.match(r"[+-](import|from) ", line))
