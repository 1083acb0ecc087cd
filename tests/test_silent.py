"""Silent mistakes of docs/silent_mistakes.md: a run finishes without an error, and its weights are
wrong. In the scripts that split a model, and in examples/silent/, which show right and wrong."""

import re

import pytest
from conftest import HOOKED, ROOT, TABLES, cases, launcher, read_run, relative_difference, succeed

from report import recorded
from report.results import read_result
from techniques import LESSONS

# Of mistakes.py: script, ranks, flags; how far off it is at least
SILENT = [(name, *row["run"]) for name, row in TABLES["silent_mistakes"].items()]

USUAL = "clipped"  # the others are marked full
JOB = "--model gpt-4x12x24 --context 24 --dataset synthetic --train-samples 150 --eval-samples 20"
JOB += " --batch-size 24 --epochs 9 --print-freq 1 --clip-grad 0.5 --double"


def run_with(mistake, script, n, flags, folder):
    folder = folder / mistake.replace(" ", "-")
    command = f"{launcher(script, n, through='tests/mistakes.py')} {JOB} {flags}"
    succeed(f"{command} --output-dir {folder}", forked=True, MISTAKE=mistake)
    return read_run(folder)[0]


@pytest.mark.parametrize("row", TABLES["silent_mistakes"].values(), ids=TABLES["silent_mistakes"])
def test_the_right_lines_are_in_the_script(row):
    text = (ROOT / f"{row['run'][0].split()[0]}.py").read_text()
    assert all(line in text for line in row["lines"])


@cases("mistake, script, n, flags, at_least", SILENT, lambda m, *_: m.startswith(USUAL))
def test_silent_mistakes(mistake, script, n, flags, at_least, train, tmp_path):
    flags += " --max-steps 12"
    if mistake.startswith("fused"):  # whose single process has one matrix, too
        expected = run_with("none: fused", "pytorch_SingleGPU", 1, flags, tmp_path)
    else:
        expected = train("pytorch_SingleGPU", 1, flags)[0]
    difference = relative_difference(run_with(mistake, script, n, flags, tmp_path), expected)
    assert difference > at_least


MASKS = [tuple(row) for row in TABLES["dropout_masks"]]  # which ranks draw alike


@cases("script, alike, other", MASKS, lambda *row: row == MASKS[1])
def test_which_ranks_drop_the_same(script, alike, other, tmp_path):
    """Those that compute the same numbers have to; of all others no two masks are equal."""
    n = len(set().union(*alike))
    job = f"{JOB} --dropout 0.2 --output-dir {tmp_path} --resume auto"
    if other:
        succeed(f"{launcher(other, n)} {job} --max-steps 1", forked=True)
    command = f"{launcher(script, n, HOOKED)} {job} --max-steps 2"
    finished = succeed(command, forked=True, HOOKS="dropout")
    assert ("dropout starts from --seed" in finished.stdout) == bool(other)
    masks = {}
    for rank, mask in re.findall(r"^mask (\d) (\w+)$", finished.stdout, re.MULTILINE):
        masks.setdefault(int(rank), []).append(mask)
    drawn = []
    for ranks in alike:
        first, *others = (masks[rank] for rank in sorted(ranks))
        assert len(first) > 2 and all(other == first for other in others)
        drawn += first
    assert len(set(drawn)) == len(drawn)


TRAINING = [row for row in LESSONS if "no_training" not in row.traits]


@pytest.mark.parametrize("row", TRAINING, ids=lambda row: row.name)
def test_dropout_has_a_seed_of_each_rank(row):
    """What comes of it: test_which_ranks_drop_the_same, and check_ranks() of the contract."""
    text = (ROOT / f"{row.script}.py").read_text()
    alike = row.traits & {"one_process", "whole"}
    own = {"ND_parallel": "own", "fault_tolerance": "rank + world_size * replicas.me"}
    own = own.get(row.name, "rank")  # of several meshes, or replicas
    seeds = re.findall(r"common\.seed_everything\((.*), args\.deterministic\)", text)
    assert seeds == ["args.seed" if alike else f"args.seed + {own}"]


SUMS = {"", "torch.bfloat16, torch.float32", "dtype, torch.float32 if dtype else None"}


@pytest.mark.parametrize("row", TRAINING, ids=lambda row: row.name)
def test_gradients_are_summed_in_fp32(row):
    """Where parameters are bfloat16. What comes of it: the contract of FSDP in bfloat16."""
    text = (ROOT / f"{row.script}.py").read_text()
    assert {*re.findall(r"MixedPrecisionPolicy\((.*?)\)", text)} <= SUMS


def test_dropout_of_tensor_parallel_ranks_is_that_of_the_single_process(train):
    """They draw it alike, for what they have whole."""
    flags = "--max-steps 4 --dropout 0.3"
    expected, _ = train("pytorch_SingleGPU", 1, flags)
    weights, _ = train("pytorch_TP", 2, flags)
    assert relative_difference(weights, expected) < 1e-11


EXAMPLES = sorted(recorded.WORDS)
SEEN = "clip_shards", "expert_gradients"  # usually: an edit of one breaks no other
LINE = re.compile(r"^(right|wrong) ?(.*): (.+) off by (\S+)$", re.MULTILINE)
# Drawn noise, and a mean of variances, which lacks that of the means. Others: rounding.
INEXACT = {"same_dropout": 0.05, "batchnorm_statistics": 1e-3}


@cases("name", EXAMPLES, SEEN.__contains__)
def test_right_and_wrong(name):
    """As results/outputs.json has it, but for figures."""
    printed = succeed(f"python examples/silent/{name}.py", forked=True).stdout
    (kind, _, _, right), *wrongs = LINE.findall(printed)
    assert kind == "right" and float(right) < INEXACT.get(name, 1e-11)
    assert wrongs and all(float(value) > 0.01 for *_, value in wrongs)
    stored = read_result(ROOT, "outputs")["outputs"][f"silent-{name}"]["output"]
    told = [match[:3] for match in LINE.findall("\n".join(stored))]
    assert told == [match[:3] for match in LINE.findall(printed)]


def test_no_program_is_forgotten():
    assert {p.stem for p in (ROOT / "examples/silent").glob("*.py")} == {*EXAMPLES, "two_ranks"}
