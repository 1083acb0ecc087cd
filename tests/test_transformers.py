"""transformers_Trainer.py ends with the weights of its raw counterpart, bit for bit; and what
Trainer does by default, which docs/ecosystem.md lists and the script undoes."""

import json
import math
import signal

import pytest
import torch
from conftest import HOOKED, cases, launcher, snapshots, started, succeed, wait_for
from torch import nn

transformers = pytest.importorskip("transformers")

GPT = (
    "--model gpt-2x2x32 --context 16 --dataset synthetic --train-samples 64 --eval-samples 8 "
    "--batch-size 8 --epochs 2 --dropout 0.1 --clip-grad 0.5"
)
IMAGES = (
    "--model small_resnet --dataset synthetic --train-samples 64 --eval-samples 20 --batch-size 16 "
    "--double --epochs 2"
)
REVIEWS = (
    "--dataset reviews --data-dir {folder} --model encoder-1x2x16 --context 12 --batch-size 16 "
    "--epochs 2"
)


def run(script, ranks, job, output):
    through = HOOKED if "small_resnet" in job else ""
    finished = succeed(
        f"{launcher(script, ranks, through)} {job} --output-dir {output}", forked=True
    )
    assert not finished.our_warnings and "Warning" not in finished.stderr
    state = torch.load(output / "model.pt", weights_only=True)
    return state, json.loads((output / "result.json").read_text())


def same_bits(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)


JOBS = {"gpt": GPT, "images": IMAGES, "reviews": REVIEWS}


@pytest.mark.parametrize(
    "job, ranks",
    cases(
        [("gpt", 1), *((job, 2) for job in JOBS)], lambda job, ranks: (job, ranks) == ("images", 2)
    ),
)
def test_as_the_raw_script(job, ranks, review_folder, tmp_path):
    """BatchNorm and dropout included."""
    job = JOBS[job].format(folder=review_folder)
    expected, theirs = run("pytorch_torchrun_DDP", ranks, job, tmp_path / "raw")
    weights, result = run("transformers_Trainer", ranks, job, tmp_path / "trainer")
    assert same_bits(weights, expected)
    for name in ("train_loss", "eval_loss", "eval_accuracy", "state_bytes", "world_size", "steps"):
        assert result[name] == theirs[name]


@pytest.mark.full
def test_snapshots_are_those_of_the_raw_script(tmp_path):
    """Trainer, then raw, then Trainer, within epochs. On three ranks the order of a sum shows,
    which DDP settles in its first step."""
    job = f"{GPT} --schedule none --deterministic --batch-size 12"
    expected, _ = run("pytorch_torchrun_DDP", 3, job, tmp_path / "whole")
    turns = [
        ("transformers_Trainer", 3),
        ("pytorch_torchrun_DDP", 6),
        ("transformers_Trainer", 10),
    ]
    for script, steps in turns:
        flags = f"--max-steps {steps} --resume auto --output-dir {tmp_path}/parts"
        finished = succeed(f"{launcher(script, 3)} {job} {flags}", forked=True)
        assert ("resumed from" in finished.stdout) == (steps > 3)
    assert same_bits(torch.load(tmp_path / "parts/model.pt", weights_only=True), expected)


def test_asked_to_stop(tmp_path):
    command = f"{launcher('transformers_Trainer', 2)} {GPT} --epochs 1000 --output-dir {tmp_path}"
    with started(command, forked=True) as process:
        wait_for(lambda: "epoch 3/" in process.output[0])
        process.send(signal.SIGTERM)
        finished = process.end()
    assert finished.code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in finished.stdout and snapshots(tmp_path)


# ------------------------------------------------------ what it changes without telling you


class Line(nn.Module):
    """Returns a loss whose gradient is large, or NaN in one step."""

    def __init__(self, nan_in=None):
        super().__init__()
        self.weight, self.calls, self.nan_in = nn.Parameter(torch.zeros(1)), 0, nan_in

    def forward(self, x):
        self.calls += 1
        return {"loss": (math.nan if self.calls == self.nan_in else 100.0) * self.weight.sum()}


def trainer(tmp_path, model, steps=4, **options):
    data = [{"x": torch.zeros(1)}] * 4
    options = {"report_to": "none", "disable_tqdm": True, "use_cpu": True} | options
    options |= {"output_dir": tmp_path, "max_steps": steps, "per_device_train_batch_size": 1}
    args = transformers.TrainingArguments(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return transformers.Trainer(model=model, args=args, train_dataset=data,
                                optimizers=(optimizer, None))  # fmt: skip


def test_gradients_are_clipped(tmp_path):
    """To a norm of 1: the step of a gradient of 100 at a rate of 1 is 1."""
    model = Line()
    trainer(tmp_path, model, steps=1).train()
    assert model.weight.item() == pytest.approx(-1.0, rel=1e-4)


def test_the_rate_goes_down_to_nothing(tmp_path):
    """Linearly, without a warm-up, where nothing else is asked for."""
    seen, model = [], Line()
    run = trainer(tmp_path, model)
    step = run.optimizer.step

    def look(*args, **kwargs):
        seen.append(run.optimizer.param_groups[0]["lr"])
        return step(*args, **kwargs)

    run.optimizer.step = look
    run.train()
    assert seen == [1.0, 0.75, 0.5, 0.25]


def test_a_loss_that_is_nan_is_hidden(tmp_path):
    """What is logged is a number, though the weight is NaN from the second step on."""
    model = Line(nan_in=2)
    run = trainer(tmp_path, model, logging_steps=1)
    run.train()
    assert model.weight.isnan().all()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert len(losses) == 4 and all(math.isfinite(loss) for loss in losses)


def test_random_numbers_begin_anew(tmp_path):
    """With 42, whatever seed was set before; and equally on all ranks."""
    torch.manual_seed(7)
    trainer(tmp_path, Line())
    drawn = torch.rand(1)
    torch.manual_seed(42)
    assert torch.equal(drawn, torch.rand(1))


def test_ddp_looks_for_unused_parameters(tmp_path):
    """At every step; PyTorch's own default is not to."""
    assert trainer(tmp_path, Line()).accelerator.ddp_handler.find_unused_parameters is True


def test_several_gpus_without_a_launcher_are_data_parallel(tmp_path):
    """A script started by plain python on two GPUs."""
    run = trainer(tmp_path, Line())
    run.args._n_gpu = 2
    assert isinstance(run._wrap_model(run.model), nn.DataParallel)


def test_checkpoints_every_500_steps_in_files_of_its_own(tmp_path):
    args = transformers.TrainingArguments(output_dir=tmp_path, use_cpu=True)
    assert (args.save_strategy, args.save_steps, args.save_total_limit) == ("steps", 500, None)
