"""docs/troubleshooting.md: its quotes are what PyTorch prints, and its remedies work."""

import inspect
import mmap
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, cases, launch
from torch.nn.parallel import DistributedDataParallel

ROWS = re.findall(
    r"^\| (.+) \| .+ \| (.+) \|$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE
)
PROVOKED = {where[1:-1]: seen for seen, where in ROWS if re.fullmatch(r"`\w+`", where)}
SOURCES = {seen: where[1:-1] for seen, where in ROWS if re.fullmatch(r"`(lib|dist).+`", where)}
SLOW = {"compiled_late"}  # waits for a compiler
# https://github.com/pytorch/pytorch/pull/175851
FIXED = "preserve_version" in inspect.getsource(DistributedDataParallel._sync_buffers)


def quoted(seen):
    return re.findall(r"`(.+?)`", seen)


@pytest.mark.parametrize("name", cases([(n,) for n in PROVOKED], lambda n: n not in SLOW))
def test_provoked_and_remedied(name):
    command = f"torchrun --standalone --nproc_per_node=2 tests/troubles.py {name}"
    finished = launch(command, forked=True, timeout=60)
    assert finished.stdout.count("remedied") == 2, str(finished)
    if name == "two_forwards" and FIXED:
        assert finished.code == 0, str(finished)
        return
    assert finished.code != 0, str(finished)
    silent = not quoted(PROVOKED[name])
    for words in ["AssertionError"] if silent else quoted(PROVOKED[name]):
        assert words in finished.stderr, f"{words}\n{finished}"


@pytest.mark.parametrize("seen", SOURCES)
def test_words_of_a_gpu(seen):
    """They are in the library that prints them."""
    packages, name = Path(torch.__file__).parents[1], SOURCES[seen]
    files = [*packages.glob(f"torch/*/{name}"), *packages.glob(f"nvidia/nccl/lib/{name}")]
    if not files:
        pytest.skip(f"this build of PyTorch has no {name}")
    with open(files[0], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        assert any(text.find(words.encode()) >= 0 for words in quoted(seen))


def test_what_the_page_names_exists():
    functions = set(
        re.findall(r"^def (\w+)\(remedy\)", (ROOT / "tests/troubles.py").read_text(), re.M)
    )
    assert functions == set(PROVOKED)
    for file, test in re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", str(ROWS)):
        assert f"def {test}" in (ROOT / "tests" / file).read_text()
