"""--module: a model of one's own, under every technique that needs none of ours; that of
examples/own/module.py: a tied matrix, a buffer that no state dict holds, and labels to ignore."""

import re

import pytest
import torch
from conftest import ROOT, cases, distance, launcher, read_run, refused, same_bits, succeed
from torch import nn

from jobs import own
from jobs.choice import Settings, resolve

MODULE = (ROOT / "examples/own/module.py").read_text()
MORE = """
def own_loss():
    def score(out, batch):
        return nn.functional.cross_entropy(out, batch["labels"], reduction="none").sum(1)

    def count(batch):
        return (batch["labels"] != -100).sum()

    return {**make_model(), "loss": score, "count": count}

def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))
    named = [[dict(input_ids=s["ids"], labels=s["labels"]) for s in map(Answers(60).__getitem__, r)]
             for r in (range(60), range(15))]
    return {"module": model, "train": named[0], "eval": named[1]}
"""
JOB = "--double --batch-size 12 --epochs 2 --max-steps 8 --clip-grad 1 --lr 0.01 --weight-decay 0.1"


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(MODULE + MORE)
    return path


ACCUMULATE, USUAL = "pytorch_gradient_accumulation --accumulate 3", "make_model"
ADAPTERS = "pytorch_LoRA --merge --targets"  # against those of one rank
AGREE = """pytorch_torchrun_DDP, pytorch_DDP_ZeRO --use_zero, pytorch_FSDP_by_hand,
pytorch_ZeRO_by_hand --stage 2, pytorch_DDP_by_hand, pytorch_FSDP_offload, pytorch_HSDP --shard 2,
pytorch_checkpoint, pytorch_activation_checkpointing, lightning_Trainer --strategy fsdp"""
AGREE = [("pytorch_FSDP", USUAL), (ACCUMULATE, "own_loss"), ("pytorch_FSDP", "llama")] + [
    (script, USUAL) for script in re.split(r",\s", AGREE)
]
LORA = [(f"{ADAPTERS} q_proj,v_proj", "llama"), (f"{ADAPTERS} 0,1", USUAL)]


@cases("script, name", AGREE + LORA, lambda *row: row in AGREE[:2] + LORA[:1])
def test_techniques_agree(script, name, mine, train):
    """However the labels are distributed over ranks and micro-batches; evaluation, too, although
    two ranks do not divide 15 samples."""
    flags = f"--module {mine}:{name}"
    single = script if script.startswith(ADAPTERS) else "pytorch_SingleGPU"
    (expected, one), (weights, two) = train(single, 1, flags), train(script, 2, flags)
    # transformers computes norms and the loss in float32
    assert distance(weights, expected) < (1e-5 if name == "llama" else 1e-11)
    for figure in ("train_loss", "eval_loss", "eval_samples"):
        assert one[figure] == pytest.approx(two[figure], rel=1e-6), figure
    assert one["eval_accuracy"] == two["eval_accuracy"]
    assert (name == "own_loss") == (one["eval_accuracy"][0] is None)


def test_a_run_that_resumes_has_the_same_bits(mine, tmp_path):
    """With dropout, and samples that draw random numbers, in a process that is another one then."""
    noise = MODULE.replace("i % 6", "int(torch.randint(5, ()))")
    (tmp_path / "mine.py").write_text(noise.replace("dropout=0.0", "dropout=0.2"))
    job = f"{JOB} --module {tmp_path}/mine.py:make_model --snapshot-every 3 --workers 1"
    start = launcher("pytorch_torchrun_DDP", 2)
    succeed(f"{start} {job} --output-dir {tmp_path}/whole", forked=True)
    snapshot = tmp_path / "whole/snapshots/step-00000006"
    succeed(f"{start} {job} --output-dir {tmp_path}/again --resume {snapshot}", forked=True)
    assert same_bits(*(read_run(tmp_path / name)[0] for name in ("whole", "again")))


def linear(*others):
    return nn.Sequential(nn.Linear(3, 3), *others)


ROWS, IDS = torch.ones(2, 3), torch.zeros(2, 2, dtype=torch.int64)
WRONG = {  # what the function returns, or what is wrong with it
    "returned None": lambda: None,
    "returned dict {'modul': 3}": lambda: {"modul": 3},
    "returned ReLU, which has no parameters": nn.ReLU,
    "returned a batch without a tensor, str hi": lambda: (linear(), "hi"),
    "does not take (missing a required argument: 'input')": lambda: (linear(), {"x": ROWS[0]}),
    "as the loss": lambda: (linear(), ROWS, 5),
    "loss function that returns a tensor of [2, 3]": lambda: (linear(), ROWS, lambda out, _: out),
    "a module that returns a tensor of [6]": lambda: (linear(nn.Flatten(0)), (ROWS, IDS)),
    "make needs arguments (missing a required argument: 'size')": lambda size: linear(),
    "returned neither a batch nor a data set": linear,
    "returned int as train, no map-style data set": lambda: {"module": linear(), "train": 3},
    "blocks 'x', and its module has no nn.": lambda: (linear()[0], ROWS, *[None] * 5, "x"),
    "do not make a batch (": lambda: {"module": linear(), "train": [ROWS, ROWS[0]]},
    "float32, that do not fit a tensor of [2, 2]": lambda: (linear(), (ROWS, IDS)),
    "without labels or loss; return": lambda: (linear(), ROWS),
    "returned floating-point labels, a tensor of": lambda: (linear(), (ROWS, ROWS[:, :1])),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_a_function_returns_wrongly_is_one_line(words, tmp_path):
    given = f"{tmp_path}/mine.py:make"
    program = f"from test_own_model import WRONG\nmake = WRONG[{words!r}]\n"
    (tmp_path / "mine.py").write_text(program)
    with refused(f"error: --module {given}", words):
        args = resolve(Settings(module=given, device="cpu", output_dir=tmp_path))
        data, _ = own.make_datasets(args)
        own.make_model(args, [])(data.example(2))
