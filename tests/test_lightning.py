"""Lightning: its scripts against their raw counterparts, and what it does by default."""

import json
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import (
    HOOKED,
    ROOT,
    cases,
    distance,
    free_port,
    launch,
    launcher,
    read_run,
    relative_difference,
    snapshots,
    started,
    succeed,
    wait_for,
)
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from harness.data import Batches

lightning = pytest.importorskip("lightning")

JOB = (
    "--dataset synthetic --train-samples 150 --eval-samples 20 --batch-size 24 --print-freq 1 "
    "--max-steps 8"
)
IMAGES = "--model small_resnet_dropout --double --clip-grad 0.5"
GPT = "--model gpt-2x4x32 --context 16 --double --clip-grad 0.5"
JOBS = {"images": IMAGES, "gpt": GPT}
RAW, FABRIC, TRAINER = "pytorch_torchrun_DDP", "lightning_Fabric", "lightning_Trainer"
FSDP = f"{TRAINER} --strategy fsdp"
DEEPSPEED = f"{TRAINER} --strategy deepspeed_stage_2"
MEASURED = (
    "technique command settings seconds_total seconds_train trained_between images_per_second "
    "tokens_per_second samples_per_second first_step_seconds step_ms seconds peak_memory_gib "
    "breakdown"
)


def start(script, n=1, flags=""):
    return f"{launcher(script, n, HOOKED)} {JOB} {flags}"


# ------------------------------------------------------------------------------------------ parity


PARITY = [(FABRIC, RAW, 1), (FABRIC, RAW, 2), (TRAINER, RAW, 1), (TRAINER, RAW, 2)]
PARITY = [(*row, job) for row in [*PARITY, (FSDP, "pytorch_FSDP", 2)] for job in JOBS]


@pytest.mark.parametrize(
    "script, raw, n, job",
    cases(PARITY, lambda script, raw, n, job: raw == RAW and n == 2 and job == "images"),
)
def test_as_the_raw_script(script, raw, n, job, train):
    """Weights after eight steps in float64, and all of result.json that is not a time."""
    (ours, result), (theirs, expected) = (train(s, n, JOBS[job]) for s in (script, raw))
    assert relative_difference(ours, theirs) < 1e-12 and result["precision"] == "float64"
    assert result.keys() == expected.keys()
    for name in result.keys() - set(MEASURED.split()):
        close = name in ("train_loss", "eval_loss")
        wanted = pytest.approx(expected[name], rel=1e-12) if close else expected[name]
        assert result[name] == wanted, name
    ours, theirs = (each["breakdown"]["ranks"] for each in (result, expected))
    assert [rank.keys() for rank in ours] == [rank.keys() for rank in theirs]


# Within epochs and between them, and with dropout; but not for FSDP, whose is drawn from another
# state. In fp32 for DeepSpeed, which has nothing longer, and names of its own.
LONG = f"{IMAGES} --norm group --warmup-steps 20 --deterministic --epochs 2"
FIXED = LONG.replace("_dropout", "")
GOES_ON = [  # the script in one go, scripts in turn with the steps up to which they go
    (RAW, [(RAW, 2), (TRAINER, 4), (FABRIC, 7), (TRAINER, 9), (RAW, 10), (FABRIC, 12)], LONG),
    ("pytorch_FSDP", [("pytorch_FSDP", 3), (FSDP, 6), ("pytorch_FSDP", 12)], FIXED),
    ("pytorch_DeepSpeed", [(DEEPSPEED, 2), (DEEPSPEED, 4)], FIXED.replace("--double ", "")),
]


@pytest.mark.full
@pytest.mark.parametrize("raw, turns, flags", GOES_ON, ids=[row[0] for row in GOES_ON])
def test_one_goes_on_from_the_snapshots_of_another(raw, turns, flags, train, tmp_path):
    for script, steps in turns:
        job = f"{flags} --max-steps {steps} --output-dir {tmp_path} --resume auto"
        finished = succeed(start(script, 2, job), forked=True)
        assert ("resumed from" in finished.stdout) == (steps > turns[0][1]), str(finished)
    weights, result = read_run(tmp_path)
    expected, expected_result = train(raw, 2, f"{flags} --max-steps {turns[-1][1]}")
    assert distance(weights, expected) < (1e-12 if "--double" in flags else 1e-6)
    assert result["eval_loss"] == pytest.approx(expected_result["eval_loss"], rel=1e-4)
    assert result["state_bytes"] == expected_result["state_bytes"]


# ----------------------------------------------------------------------- launchers and signals


@pytest.mark.full
def test_fabrics_own_launcher(tmp_path, train):
    """Two ranks, which share the cores, and the command as it was typed."""
    command = f"fabric run --accelerator=cpu --devices=2 --strategy=ddp --main-port={free_port()} "
    command += f"{HOOKED} lightning_Fabric.py {JOB} {IMAGES} --output-dir {tmp_path}"
    finished = succeed(command)
    assert not finished.our_warnings and "warn" not in finished.stderr.lower(), str(finished)
    weights, result = read_run(tmp_path)
    assert relative_difference(weights, train(RAW, 2, IMAGES)[0]) < 1e-12
    assert result["command"] == command.replace(f" {ROOT}", " ") and result["world_size"] == 2


@pytest.mark.parametrize(
    "script", cases([(TRAINER,), (FSDP,), (FABRIC,)], lambda script: script == TRAINER)
)
def test_a_signal_ends_in_a_snapshot(script, tmp_path):
    """Lightning's own handler would send a broadcast from within the signal's handler."""
    command = start(script, 2, f"{IMAGES} --epochs 1000 --output-dir {tmp_path}")
    with started(command.replace("--max-steps 8", ""), forked=True) as process:
        wait_for(lambda: snapshots(tmp_path) or not process.running)
        process.send(signal.SIGTERM)
        finished = process.end()
    assert finished.code == 128 + signal.SIGTERM, str(finished)
    [said] = [line for line in finished.lines if line.startswith("stopped by SIGTERM after step")]
    assert str(snapshots(tmp_path)[0]) in said and "Traceback" not in finished.stderr


@pytest.mark.parametrize("script, on_nan, code", [(TRAINER, "stop", 3), (FABRIC, "skip", 0)])
def test_a_bad_gradient_is_seen_before_the_step(script, on_nan, code, tmp_path):
    command = launcher(script, 2, HOOKED)
    command += f" {JOB} {IMAGES} --on-nan {on_nan} --output-dir {tmp_path}"
    finished = launch(command, forked=True, HOOKS="poison:gradient,5,5,0")
    said = finished.stdout + finished.stderr
    assert finished.code == code, said
    assert "step 5: the gradient of conv1.weight is NaN or Inf" in said
    if code:
        assert "no weight has changed" in finished.errors[0]
    else:
        assert all(t.isfinite().all() for t in read_run(tmp_path)[0].values())


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"LT_STRATEGY": "fsdp"}, "--strategy=fsdp: this script supports only DDP"),
        ({"LT_STRATEGY": "ddp", "LT_PRECISION": "bf16-mixed"}, "`--precision=bf16-mixed`"),
    ],
)
def test_what_fabric_run_is_asked_for_and_the_script_is_not(asked, said, tmp_path):
    env = {"LT_CLI_USED": "1", "LT_DEVICES": "1"} | asked
    finished = launch(f"{start(FABRIC)} --output-dir {tmp_path}", forked=True, **env)
    assert finished.code == 2
    [line] = finished.errors
    assert said in line


# -------------------------------------------------------- what Lightning does when it is not told


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A process group of this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {"rank": 0, "world_size": 1, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", store=dist.HashStore(), **options)
    yield
    dist.destroy_process_group()


TEN = TensorDataset(torch.arange(10))
FIRST_OF_FOUR = {"num_replicas": 4, "rank": 0}


def numbers(loader):
    return [batch[0].tolist() for batch in loader]


@pytest.fixture
def fabric(alone):
    class OneOfFour(lightning.fabric.strategies.DDPStrategy):
        distributed_sampler_kwargs = FIRST_OF_FOUR

    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=OneOfFour())
    fabric.launch()
    return fabric


def test_fabric_shards_what_is_sharded_already(fabric):
    """A sampler within a batch sampler is not seen: its order and its seed are lost, samples are
    repeated; and of PyTorch's own batch sampler, also the batches."""
    sampler = DistributedSampler(TEN, **FIRST_OF_FOUR, seed=7, drop_last=True)
    ours = DataLoader(TEN, batch_sampler=Batches(sampler, 2, False))
    theirs = fabric.setup_dataloaders(ours).batch_sampler.sampler
    assert theirs is not sampler and (theirs.seed, theirs.shuffle) == (0, False)
    assert (sampler.total_size, theirs.total_size) == (8, 12)  # of 10: 2 left out, 2 repeated
    plain = DataLoader(TEN, batch_sampler=BatchSampler(sampler, 2, False))
    assert numbers(fabric.setup_dataloaders(plain)) == [0, 4, 8]  # one by one, and not shuffled
    kept = fabric.setup_dataloaders(plain, use_distributed_sampler=False)
    assert numbers(kept) == numbers(plain)


def test_fabric_shuffles_by_a_seed_of_its_own(fabric):
    """Neither torch.manual_seed() nor the loader's generator decides: 0 does, or its own
    seed_everything(), by way of the environment."""
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(TEN, batch_size=2, shuffle=True, drop_last=True, generator=generator)
        loader = fabric.setup_dataloaders(loader)
        assert loader.drop_last and not loader.sampler.drop_last
        orders.append(numbers(loader))
    assert orders[0] == orders[1]


def test_fabric_clips_with_an_exception(fabric):
    model = nn.Linear(1, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    fabric.backward(model(torch.full((1, 1), torch.inf)).sum())
    with pytest.raises(RuntimeError, match="non-finite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


def test_fabric_passes_attributes_past_ddp(fabric):
    model = fabric.setup_module(nn.Linear(1, 1))
    model.broadcast_buffers = False  # of the plain model, which has no use for it
    [ddp] = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
    assert ddp.broadcast_buffers and not model.module.broadcast_buffers


def test_fabric_run_gives_every_rank_all_cores(monkeypatch):
    """torchrun gives it one thread."""
    from lightning.fabric import cli

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torch.distributed.run.main", lambda words: None)
    flags = {"accelerator": "cpu", "devices": "4", "strategy": "ddp", "script": "a.py"}
    flags |= {"num_nodes": 1, "node_rank": 0, "main_address": "127.0.0.1", "main_port": 1}
    cli._torchrun_launch(type("Flags", (), flags), [])
    assert os.environ.pop("OMP_NUM_THREADS") == str(len(os.sched_getaffinity(0)))


def test_the_import_replaces_torch_compile():
    assert torch.compile.__module__ == "torch" and hasattr(torch.compile, "__wrapped__")


class Noted(lightning.LightningModule):
    """Notes what is called, in its order, and what it finds then."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.kept = nn.Linear(1, 1), [], []

    def on_train_start(self):
        self.handler = signal.getsignal(signal.SIGTERM)

    def training_step(self, batch, index):
        self.calls.append("forward")
        self.kept.append(self.layer.weight.grad is not None)
        return self.layer(batch[0].float()[:, None]).sum()

    def validation_step(self, batch, index):
        self.calls.append("validation")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        optimizer.register_step_pre_hook(lambda *_: self.calls.append("step"))
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)]


def make_trainer(**options):
    class OneOfFour(lightning.pytorch.strategies.DDPStrategy):
        distributed_sampler_kwargs = FIRST_OF_FOUR

    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", devices=1, strategy=OneOfFour(), **quiet | options)


def test_what_the_trainer_does_by_default(alone, tmp_path):
    """Two epochs of three steps on the first of four ranks, whose loaders are in order."""
    model, loader = Noted().eval(), DataLoader(TEN, batch_size=1)
    before, trainer = signal.signal(signal.SIGTERM, lambda *_: None), make_trainer(max_epochs=2)
    try:
        with pytest.warns(match="in eval mode at the start of training"):
            trainer.fit(model, loader, loader)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert model.calls[:3] == ["validation", "validation", "step"]  # num_sanity_val_steps=2
    training, validation = trainer.train_dataloader.sampler, trainer.val_dataloaders.sampler
    assert (training.shuffle, training.seed, validation.shuffle) == (True, 0, False)
    assert training.total_size == validation.total_size == 12  # of 10, in the metrics, too
    assert trainer.global_step == 2 * 3
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1.0 * 0.1**2)
    # PyTorch's hooks before a step see the gradients of the step before, and gradients are kept
    # while the next forward makes its activations
    assert [call for call in model.calls if call != "validation"] == ["step", "forward"] * 6
    assert model.kept == [False, True, True] * 2
    assert not model.layer.training
    # also one that is handled already; and at several ranks its handler calls a collective
    assert type(model.handler).__module__.startswith("lightning.")
    files = {path.name for path in tmp_path.glob("lightning_logs/version_0/**/*")}
    assert "hparams.yaml" in files and any(name.endswith(".ckpt") for name in files)


def test_the_trainer_takes_a_batch_ahead_and_trains_for_a_thousand_epochs(alone):
    """Of a loader that has no length; where it is not told how many."""
    taken, at_steps = [], []

    class Endless:
        def __iter__(self):
            for number in range(3):
                taken.append(number)
                yield [torch.tensor([number])]

    class Counting(Noted):
        def training_step(self, batch, index):
            at_steps.append(len(taken))
            self.trainer.should_stop = index == 2
            return super().training_step(batch, index)

    trainer = make_trainer(logger=False, enable_checkpointing=False)
    with pytest.warns(match="`max_epochs` was not set. Setting it to 1000 epochs"):
        trainer.fit(Counting(), Endless())
    assert at_steps == [2, 3, 3] and trainer.fit_loop.max_epochs == 1000


def test_sharding_by_its_name_is_for_gpus(alone):
    """Though FSDP2 and DeepSpeed run on CPUs."""
    deepspeed = object.__new__(lightning.pytorch.strategies.DeepSpeedStrategy)  # imports nothing
    deepspeed._accelerator = lightning.pytorch.accelerators.CPUAccelerator()
    with pytest.raises(RuntimeError, match="DeepSpeed strategy is only supported on CUDA GPUs"):
        deepspeed.setup_environment()
    for make in (lightning.Fabric, lightning.Trainer):
        with pytest.raises(Exception, match="only available on GPU|requires a GPU accelerator"):
            make(accelerator="cpu", devices=1, strategy="fsdp")


def test_the_trainer_sends_a_flag_before_every_step(tmp_path):
    """And waits for it, on a GPU with all that is queued."""
    sent = {}
    for script in (RAW, FABRIC, TRAINER):
        command = launcher(script, 2, HOOKED) + f" {JOB} {GPT} --max-steps 3"
        succeed(f"{command} --output-dir {tmp_path}/{script}", forked=True, HOOKS="sent")
        sent[script] = json.loads((tmp_path / script / "result.json").read_text())
    assert sent[FABRIC]["calls"] == sent[RAW]["calls"]
    assert sent[TRAINER]["calls"] == sent[RAW]["calls"] | {"broadcast": 1}
