"""What Accelerate, Lightning and transformers do by default, which docs/ecosystem.md lists and our
scripts undo. Only with -m '': these defaults are theirs, and change only with their versions."""

import json
import math
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import HOOKED, ROOT, launcher, succeed
from test_ecosystem import GPT
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from harness.data import Batches

accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.full


def test_what_accelerate_does_by_default():
    """The numbers are of two ranks, and batches of 4 or, of five samples, 2."""
    command = "torchrun --standalone --nproc_per_node=2 measure/accelerate_defaults.py"
    defaults = json.loads(succeed(command, forked=True).lines[-1])
    # a step takes two batches, where rank 0 has the first and not, as by DistributedSampler, every
    # other sample; and it is two steps of the schedule
    assert defaults["samples of a step"] == list(range(8))
    assert defaults["own samples of a step"] == list(range(4))
    assert defaults["scheduler is at step"] == 2
    # three of the five come again
    assert len(defaults["evaluated samples"]) == 8
    assert set(defaults["evaluated samples"]) == set(range(5))
    # the environment asks for FSDP, and nothing is sharded
    assert defaults["distributed_type"] == "MULTI_CPU"
    # the upper half of a matrix is of rank 0, the lower half of rank 1, whatever they hold
    assert defaults["weights of FSDP"] == [0.0, 0.0, 1.0, 1.0]


def test_bf16_of_fsdp_adds_gradients_in_bf16():
    """pytorch_FSDP.py --dtype bfloat16 adds them in fp32."""
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16


def test_one_process_gets_one_thread(tmp_path):
    """torchrun sets OMP_NUM_THREADS for several ranks alone."""
    show = "import os; print('threads', os.environ['OMP_NUM_THREADS'])"
    (tmp_path / "threads.py").write_text(show)
    file = ROOT / "config/accelerate_DDP.yml"
    command = f"accelerate launch --config_file {file} --num_processes 1 {tmp_path}/threads.py"
    assert "threads 1" in succeed(f"env -u OMP_NUM_THREADS {command}").lines


# -------------------------------------------------------------------------------------- Lightning


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
    sent, scripts = {}, ("pytorch_torchrun_DDP", "lightning_Fabric", "lightning_Trainer")
    for script in scripts:
        command = launcher(script, 2, HOOKED)
        command += f" {GPT} --max-steps 3 --output-dir {tmp_path}/{script}"
        succeed(command, forked=True, HOOKS="sent")
        sent[script] = json.loads((tmp_path / script / "result.json").read_text())
    raw, fabric, trainer = (sent[script]["calls"] for script in scripts)
    assert fabric == raw and trainer == raw | {"broadcast": 1}


# ----------------------------------------------------------------------------------- transformers


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
