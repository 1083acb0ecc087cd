"""The cases of test_contract.py: every technique with its flags, on each number of ranks, with each
optimizer and model that it has."""

import itertools
import re
import shutil
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch
from conftest import TABLES

from techniques import TECHNIQUES, Case, Technique, technique
from theory import decoder

# 119 texts, or 59 images: a sampler that repeats some, instead of dropping the last, would make
# five steps of an epoch on two, three and four ranks, instead of four.
# Twelve heads, and 24 positions in two chunks a rank: two, three and four ranks can divide them.
WIDTH = CONTEXT = BATCH = 24
STEPS = 8
SAVED = 6  # a snapshot within the second epoch
DATA = f"--dataset synthetic --train-samples 119 --eval-samples 20 --batch-size {BATCH} --epochs 9"
DATA += " --print-freq 3"
CLIP = "--clip-grad 0.5 "
GPT = f"--context {CONTEXT} {CLIP}--model gpt-{{}}x12x{{}}"
LLAMA = f"--context {CONTEXT} {CLIP}--model llama-{{}}x12x{{}} --kv-heads 6 --mlp-width 48"
IMAGES = "--model small_resnet --norm group --batch-size 12 --train-samples 59"
# Weights: rounding alone; AdamW divides by the root of a small number, which enlarges it.
TOLERANCE = {"sgd": 1e-12, "adamw": 1e-11}
# Flags of the single process, too:
OF_THE_MODEL = re.compile(r"--(?:experts|top-k|balance) \S+|--tie|--packed")
COMPILER = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
TORCHAO = pytest.mark.skipif(not find_spec("torchao"), reason="needs torchao")
BYTES = pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP gathers bytes as bfloat16")
FUSED = pytest.mark.skipif(torch.__version__ < "2.14", reason="needs PyTorch 2.14")
BLOCK = 8  # numbers of a row that share a scale
LOW = "low_bit_optimizer"
HOOKS = {"Muon": "muon", "LoRA": "lora", "QLoRA": f"qlora:{BLOCK}", LOW: f"low_bit:{BLOCK}"}
# With dropout: nothing is drawn in a first step that is not drawn in others.
SAME = f"{DATA} {GPT} --dropout 0.2 --schedule none --lr 0.001 --deterministic --optimizer adamw"
SAME += " --train-samples 167 --snapshot-every 4 --eval-every 3 --max-steps 5"
FLOAT16 = [  # with a scaled loss
    (row, Case(case.flags.replace("bfloat16", "float16"), case.ranks, case.traits - {"branch"}))
    for row in TECHNIQUES
    for case in row.cases
    if "scaled" in case.traits
]


def packed(name, flags, n, *usual):
    """Several documents in a sequence, tried with a Llama."""
    traits = {"llama", "needs_gpt", *usual}
    return technique(name), Case(f"{flags} --packed".strip(), (n,), frozenset(traits))


PACKED = [packed(*row) for row in TABLES["packed"]]


class Try(NamedTuple):
    """A case of a technique as it is run."""

    technique: Technique
    case: Case
    n: int
    optimizer: str = "adamw"
    model: str = "gpt"  # or tied, llama, images

    def __str__(self):
        name = f"{self.technique.name} {self.case.flags}".rstrip()
        return f"{name} x{self.n} {self.optimizer} {self.model}"

    @property
    def traits(self):
        """Of the row, and of the case."""
        return self.technique.traits | self.case.traits

    @property
    def script(self):
        return f"{self.technique.script} {self.case.flags}".rstrip()

    @property
    def is_first(self):
        return self.case == self.technique.cases[0] and self.n == self.case.ranks[0]

    @property
    def rounds(self):
        return "rounds" in self.traits

    @property
    def width(self):
        return 2 * WIDTH if self.technique.name == "float8" else WIDTH  # multiples of 16

    @property
    def dropping(self):
        """A job with dropout, and the same bits in each run."""
        return self.allowed(SAME.format(self.layers, self.width))

    def allowed(self, flags):
        return flags.replace(CLIP, "") if "unclipped" in self.technique.traits else flags

    @property
    def adapts(self):
        """Whether it trains adapters."""
        return self.technique.name in ("LoRA", "QLoRA")

    @property
    def hooks(self):
        """Of the single process, so that it does the same."""
        return HOOKS.get(self.technique.name, "")

    @property
    def slack(self):
        """AdamW enlarges the rounding of convolutions."""
        return 100 if self.model == "images" and self.optimizer == "adamw" else 1

    @property
    def batch(self):
        return 12 if self.model == "images" else BATCH

    @property
    def layers(self):
        """A first, a last and one between; of a pipeline two stages a rank."""
        if "--pipeline-schedule" in self.case.flags or self.technique.name == "PP_by_hand":
            return 2 * max(2, self.n)
        return 4 if self.technique.name == "ND_parallel" else 3

    @property
    def job(self):
        """All flags that the single process has, too."""
        own = {"gpt": GPT, "tied": f"{GPT} --tie", "llama": LLAMA, "images": IMAGES}[self.model]
        own = [own.format(self.layers, self.width), *OF_THE_MODEL.findall(self.case.flags)]
        if self.adapts:  # its matrices are drawn by the seed, too
            own += ["--seed 1"] if self.rounds else ["--seed 1 --lr 0.02"]
        return self.allowed(" ".join([DATA, self.steps, "--optimizer", self.optimizer, *own]))

    @property
    def steps(self):
        """Those that round train for longer, to be told apart by their loss."""
        if self.rounds:
            return "--max-steps 12 --lr 0.003"
        return f"--max-steps {STEPS} --double"

    def short(self, steps):
        """The job, for as many steps."""
        double = "" if self.rounds else " --double"
        return self.job.replace(self.steps, f"--max-steps {steps}{double}")

    def decoder(self, vocabulary):
        """Its sizes, as techniques.py wants to have them."""
        more = {"experts": self.number("experts"), "top_k": self.number("top-k") or 1}
        more["tied"] = self.model == "tied"
        if self.model == "llama":
            more |= {"kv": 0.5, "mlp": 3 * WIDTH * 48, "llama": True}
        return decoder(self.layers, self.width, vocabulary, CONTEXT, BATCH, **more)

    def number(self, flag):
        found = re.search(rf"--{flag} (\d+)", self.job)
        return int(found[1]) if found else 0


def merged(row):
    """LoRA writes a whole model only if it is asked to. Theory has to know the size of blocks."""
    blocks = f" --block {BLOCK}"
    more = {"LoRA": " --merge", "QLoRA": f" --merge{blocks}", LOW: blocks}.get(row.name, "")
    return row._replace(cases=tuple(c._replace(flags=(c.flags + more).strip()) for c in row.cases))


def tries(usual, optimizers=("adamw",), models=("gpt",), but=(), more=()):
    """Parameters of a test: every case, on every number of ranks that it is proven on.

    Args:
        usual: whether the usual run has it; all others are marked ``full``.
        but: traits or names of techniques that are left out.
        more: further rows and cases.
    """
    rows = [(t, c) for t in map(merged, TECHNIQUES) for c in t.cases if t.name != "DeepSpeed"]
    rows += [*FLOAT16, *more]
    found = []
    for row, case in rows:
        for n, optimizer, model in itertools.product(case.ranks, optimizers, models):
            one = Try(row, case, n, optimizer, model)
            if not is_possible(one) or {row.name, *one.traits} & set(but):
                continue
            marks = [] if usual(one) else [pytest.mark.full]
            marks += [COMPILER, pytest.mark.full] if row.name == "compile" else []
            marks += [TORCHAO] if row.name == "float8" else []
            marks += [FUSED] if "--fused" in case.flags else []
            marks += [BYTES] if row.name == "QLoRA" and "--dtype" in case.flags else []
            found.append(pytest.param(one, id=str(one), marks=marks))
    return found


def is_possible(one):
    """Whether the technique has such a model, and can divide it."""
    if one.n > 4:
        return False
    if one.model == "images":
        return "needs_gpt" not in one.traits
    if one.model in ("tied", "llama") and one.model not in one.traits:
        return False
    by_heads = "ulysses" in one.script or one.technique.name in ("TP", "TP_by_hand")
    if by_heads and one.model == "llama" and one.n == 4:  # six heads
        return False
    # With this momentum, SGD would be ten times as fast.
    has_no_sgd = one.technique.name in ("Muon", LOW) or "--outer-momentum" in one.script
    return one.optimizer != "sgd" or not has_no_sgd
