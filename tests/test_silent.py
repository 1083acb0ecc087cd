"""Silent mistakes in the scripts that split a model, listed in docs/silent_mistakes.md: the run
finishes without an error, but its weights are wrong."""

import re

import pytest
from conftest import HOOKED, cases, launcher, read_run, relative_difference, succeed
from test_contract import JOB

EXPERTS = "--experts 4 --balance 1 --optimizer sgd"  # AdamW hides a factor
SILENT = [  # the mistake of tests/mistakes.py, script, ranks, flags; how far off it is at least
    ("batch divided by rank instead of row", "pytorch_FSDP_TP --tp 2", 4, "", 0.5),
    ("fused QKV split by columns", "pytorch_TP", 2, "", 0.5),
    ("clipped by the norm of each stage", "pytorch_PP", 2, "--optimizer sgd", 0.05),
    (
        "micro-batch losses summed instead of averaged",
        "pytorch_PP",
        2,
        "--optimizer sgd --clip-grad 1000000",
        0.05,
    ),
    ("tied gradients not summed", "pytorch_PP", 2, "--tie", 0.05),
    ("every shard starts at position 0", "pytorch_CP", 2, "", 0.1),
    ("attention sees local keys only", "pytorch_CP", 2, "", 0.1),
    ("expert gradients summed instead of averaged", "pytorch_EP", 2, EXPERTS, 0.01),
    ("load balanced on each rank alone", "pytorch_EP", 2, EXPERTS, 0.01),
]
USUAL = (
    "clipped by the norm of each stage",
    "every shard starts at position 0",
    "load balanced on each rank alone",
)


def run_with(mistake, script, n, flags, folder):
    folder = folder / mistake.replace(" ", "-")
    command = f"{launcher(script, n, through='tests/mistakes.py')} {JOB} {flags}"
    succeed(f"{command} --output-dir {folder}", forked=True, MISTAKE=mistake)
    return read_run(folder)[0]


@pytest.mark.parametrize(
    "mistake, script, n, flags, at_least", cases(SILENT, lambda m, *_: m in USUAL)
)
def test_silent_mistakes(mistake, script, n, flags, at_least, train, tmp_path, measured):
    flags += " --max-steps 12"
    if mistake.startswith("fused"):  # whose single process has one matrix, too
        expected = run_with("none: fused", "pytorch_SingleGPU", 1, flags, tmp_path)
    else:
        expected = train("pytorch_SingleGPU", 1, flags)[0]
    difference = relative_difference(run_with(mistake, script, n, flags, tmp_path), expected)
    measured("silent", mistake=mistake, script=script, ranks=n, value=difference)
    assert difference > at_least


MASKS = [  # script, and the ranks that draw alike
    ("pytorch_SingleGPU", [{0}]),
    ("pytorch_TP", [{0, 1}]),
    ("pytorch_TP --sequence-parallel", [{0}, {1}]),
    ("pytorch_FSDP_TP --tp 2", [{0, 1}, {2, 3}]),
    ("pytorch_FSDP_TP --tp 2 --sequence-parallel", [{0}, {1}, {2}, {3}]),
    ("pytorch_PP", [{0}, {1}]),
    ("pytorch_CP", [{0}, {1}]),
    ("pytorch_EP --experts 4", [{0}, {1}]),
    ("pytorch_torchrun_DDP", [{0}, {1}]),
]


@pytest.mark.parametrize("script, alike", MASKS, ids=[script for script, _ in MASKS])
def test_which_ranks_drop_the_same(script, alike, tmp_path):
    """Those that compute the same numbers have to; of all others no two masks are equal."""
    command = launcher(script, len(set().union(*alike)), through=HOOKED)
    flags = "--dropout 0.2 --max-steps 1"
    command += f" {JOB} {flags} --output-dir {tmp_path}"
    finished = succeed(command, forked=True, HOOKS="dropout")
    masks = {}
    for rank, mask in re.findall(r"^mask (\d) (\w+)$", finished.stdout, re.MULTILINE):
        masks.setdefault(int(rank), []).append(mask)
    drawn = []
    for ranks in alike:
        first, *others = (masks[rank] for rank in sorted(ranks))
        assert len(first) > 2 and all(other == first for other in others)
        drawn += first
    assert len(set(drawn)) == len(drawn)


def test_dropout_of_tensor_parallel_ranks_is_that_of_the_single_process(train):
    """They draw it alike, for what they have whole."""
    flags = "--max-steps 4 --dropout 0.3"
    expected, _ = train("pytorch_SingleGPU", 1, flags)
    weights, _ = train("pytorch_TP", 2, flags)
    assert relative_difference(weights, expected) < 1e-11


def test_gradients_are_clipped_here(train):
    """Or the contract would say nothing of their norm."""
    flags = "--max-steps 12 --optimizer sgd"
    clipped, _ = train("pytorch_SingleGPU", 1, flags)
    free, _ = train("pytorch_SingleGPU", 1, f"{flags} --clip-grad 50")
    assert relative_difference(free, clipped) > 1e-3
