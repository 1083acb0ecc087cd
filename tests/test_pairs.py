"""Every option of a decoder with every script that takes it, and with every other option: two steps
on fake GPUs for each pair, unless tests/refused_pairs.txt has it."""

import functools
import importlib
import itertools
import re

import pytest
from conftest import ROOT, cases, refused
from test_cuda import NOT_FAKED, pretend

import common
from jobs import text
from techniques import TECHNIQUES

OPTIONS = [  # at most one of a line
    ["--model gpt-2x4x32", "--model qwen3-2x4x32"],  # whose heads have norms
    ["--experts 4 --balance 0", "--experts 4 --balance 0.01", "--experts 4 --balance bias"],
    ["--packed"],
    ["--tie"],
    ["--dropout 0.1"],
]
OWN = [  # of scripts that have the flag
    ["--dtype bfloat16"],
    ["--sequence-parallel"],
    ["--offload"],
    ["--master-weights"],
    ["--attention ring", "--attention allgather", "--attention ulysses"],
    ["--accumulate 2"],
    ["--ac full", "--ac selective", "--ac full --offload-activations"],
    ["--selective"],
    ["--fused"],
]
MODES = {  # flags without which a script does less, and its ranks: 2, if it is not here
    **dict.fromkeys(("half_precision", "auto_mixed_precision"), ("--dtype bfloat16", 1)),
    "DDP_AMP": ("--dtype bfloat16", 2),  # in float16, the loss of balance is refused
    "HSDP": ("--shard 2", 4),
    "FSDP_TP": ("--tp 2", 4),
    "EP": ("--ep 2", 2),
    "DDP_ZeRO": ("--use_zero", 2),
    "ZeRO_by_hand": ("--stage 2", 2),
    "ND_parallel": ("--tp 2 --dp-shard 2", 4),
    "ND_parallel 2": ("--pp 2 --cp 2", 4),
    "ND_parallel 3": ("--ep 2 --dp-shard 2", 2),
}
JOB = "--context 16 --dataset synthetic --train-samples 16 --eval-samples 8 --batch-size 8 "
JOB += "--max-steps 2"
USUAL = {("ND_parallel", 1), ("TP", 1), ("half_precision", 2)}
ORDER = [option for line in OPTIONS + OWN for option in line]
LINES = (ROOT / "tests/refused_pairs.txt").read_text().splitlines()[1:]
REFUSED = [line.rsplit(" | ", 3) for line in LINES]


def scripts():
    """The names of what is run: scripts, and those of MODES. float8 needs torchao. Replicas refuse
    padding, which packed synthetic documents have."""
    left_out = (*NOT_FAKED, "float8", "fault_tolerance")
    found = [t.name for t in TECHNIQUES if t.name not in left_out]
    return sorted({*found, *MODES})


def takes(name, option):
    script = name.split()[0]
    source = (ROOT / f"pytorch_{script}.py").read_text()
    if script == "ND_parallel":
        source += (ROOT / "parallel/mesh.py").read_text()
    return f'"{option.split()[0]}"' in source


def is_refused(name, options):
    given = {*options, "-"}
    return any(re.fullmatch(who, name) and {a, b} <= given for who, a, b, _ in REFUSED)


def pairs_of(options):
    return set(itertools.combinations(sorted(options, key=ORDER.index), 2))


def rows_of(name):
    """The options of few runs, so that each pair that is not refused is in one of them."""
    own = [list(filter(functools.partial(takes, name), line)) for line in OWN]
    left = set()
    rows = []
    for ours, theirs in itertools.combinations(OPTIONS + own, 2):
        left |= {pair for pair in itertools.product(ours, theirs) if not is_refused(name, pair)}
    while left:
        row = list(min(left))
        for line in OPTIONS + own:
            if not set(line) & set(row):
                row += most_of(left, name, row, line)
        left -= pairs_of(row)
        rows.append(sorted({*row, *without_a_model(row)}, key=ORDER.index))
    return rows


def most_of(left, name, row, line):
    """The option of a line that adds most of the pairs that are left, if one adds any."""
    possible = [option for option in line if not is_refused(name, [*row, option])]
    added = {option: len(left & pairs_of([*row, option]) - pairs_of(row)) for option in possible}
    best = max(added, key=added.get, default=None)
    return [best] if best and added[best] else []


def without_a_model(row):
    return [] if set(OPTIONS[0]) & set(row) else OPTIONS[0][:1]


ROWS = []
for script in scripts():
    ROWS += [(script, " ".join(row), i) for i, row in enumerate(rows_of(script))]


@cases("name, options, i", ROWS, lambda name, options, i: (name, i) in USUAL)
def test_a_pair_of_options(name, options, i, tmp_path):
    flags, n = MODES.get(name, ("", 2))
    if name == "ND_parallel 3" and "--experts" not in options:
        flags += " --experts 4"  # which --ep needs
    script = f"pytorch_{name.split()[0]} {flags} {options}"
    one = {t.name for t in TECHNIQUES if "one_process" in t.traits}
    _, result = pretend(script, 1 if name in one else n, JOB, tmp_path)
    assert result["steps"] == 2


class Taken(Exception):
    """The flags are fine."""


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # pytest has the streams
@pytest.mark.parametrize("who, first, second, words", REFUSED)
def test_a_pair_that_is_refused(who, first, second, words, monkeypatch):
    """By the scripts that are said to, of all by some, in one line. A pair that no script refuses
    could be tested above."""

    def take(args):
        raise Taken

    monkeypatch.setattr(common, "prepare_process", take)
    monkeypatch.setattr(text, "need_compiler", lambda device: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    every = {*MODES, *(t.name for t in TECHNIQUES)}
    names = sorted(name for name in every if re.fullmatch(who, name))
    for name in names[:6]:
        script = f"pytorch_{name.split()[0]}"
        flags, _ = MODES.get(name, ("", 2))
        also = "" if second == "-" else second
        model = "" if "--model" in first else OPTIONS[0][0]
        command = f"{script}.py --device cuda {JOB} {flags} {model} {first} {also}"
        monkeypatch.setattr("sys.argv", command.split())
        with refused(words):
            importlib.import_module(script).main()
    assert names
