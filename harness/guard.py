"""Checks for NaN and Inf, in the modes of ``--on-nan``: see its help. To watch adds no overhead,
and the last snapshot is valid; stop and skip check in a hook, before a weight has changed."""

import math
import shlex
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.cli import fail
from harness.measure import launch_command, local, optimizer_tensors
from harness.world import gather_objects, print0

MAX_SKIPPED = 25  # consecutive steps, in any mode; with float16, to skip a few is normal
WEIGHT = "the weight"
OUTPUT = "the model's output"
LOSS = "the gradient of the loss"
GRADIENT = "the gradient of"


def all_finite(tensors: list[Tensor]) -> Tensor:
    """Whether all values on this rank are finite: a bool tensor on the device."""
    tensors = [t for t in map(local, tensors) if t.is_floating_point() and t.numel()]
    tensors = [t for t in tensors if t.untyped_storage().nbytes()]  # may be freed by FSDP
    if not tensors:
        return torch.tensor(True)
    # Minimum and maximum: unlike a norm they do not overflow, one pass computes both, and unlike
    # GradScaler's check they do not write to the tensors.
    bounds = [bound for tensor in tensors for bound in tensor.aminmax()]
    device = tensors[0].device
    return torch.stack([b.to(device, torch.float64) for b in bounds]).isfinite().all()


class Guard:
    """Implements ``--on-nan`` for a :class:`Run`. All ranks call its methods. The ``scaler`` may
    skip steps; a library that skips steps by itself calls :meth:`library_stepped` instead."""

    def __init__(self, run, model: nn.Module, optimizer, scaler=None):
        self.mode = run.args.on_nan
        self.state = run.state
        self.model = model
        self.optimizer = optimizer
        self.newest_snapshot = run.store.newest
        self.exact = self.mode in ("stop", "skip")
        self.good_step = self.fetched = run.state.step  # with finite weights; of the last loss
        self.left_out = False  # the current step
        self.skipped = 0  # consecutive steps
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.scale = self.scaler and scaler.get_scale()
        self.overflow_is_normal = bool(self.scaler)
        self.outputs = []  # of the model in this step, and their gradients: name and tensor
        self.good_buffers = []  # before this step
        self.taken = []  # parameters and their gradients, in a skipped step
        if self.exact:
            self.keep_buffers()
            model.register_forward_hook(self.remember_output)
            optimizer.register_step_pre_hook(self.before_step)
            optimizer.register_step_post_hook(self.give_back)

    def check_loss(self, loss: float) -> None:
        """Check the printed loss: a mean over the last steps and all ranks."""
        if self.mode != "ignore":
            if not math.isfinite(loss):
                # A scaler keeps the weights finite, so they do not show when the loss became NaN.
                after = self.fetched if self.scaler else self.good_step
                self.stop_watching(f"the loss became {loss}", after)
            self.fetched = self.state.step
            self.good_step = max(self.good_step, self.state.step - 1)  # computed before this step
        if self.scaler:
            self.check_scale()

    def check_snapshot(self) -> None:
        """Check the state before it is written."""
        if self.mode == "ignore":
            return
        owner = getattr(self.optimizer, "optim", self.optimizer)  # of ZeroRedundancyOptimizer
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        finite = all_finite([*weights, *self.model.buffers(), *optimizer_tensors(owner)])
        if any(gather_objects(not finite.item())):
            self.stop_watching("weights or optimizer became NaN or infinite", self.good_step)
        self.good_step = self.state.step

    def stop_watching(self, what: str, after: int) -> NoReturn:
        command = launch_command()
        go_on = "no snapshot was written before"
        if snapshot := self.newest_snapshot():
            command += f" --resume {shlex.quote(str(snapshot))}"
            go_on = f"the last good snapshot is {snapshot}"
        first = after + 1
        last = self.state.step
        where = f"in step {last}" if first >= last else f"between steps {first} and {last}"
        find = f"To find the first step: {command} --on-nan stop"
        use = find if self.mode == "watch" else "Use a lower --lr"
        fail(f"{where} {what}; {go_on}. {use}", code=3)

    def remember_output(self, module: nn.Module, inputs, output: Tensor) -> None:
        """Keep this rank's model output and its gradient, which name the rank: gradients of
        parameters are identical on every rank once they are averaged."""
        if module.training and torch.is_tensor(output) and output.requires_grad:
            self.outputs.append((OUTPUT, output.detach()))
            output.register_hook(lambda gradient: self.outputs.append((LOSS, gradient)))

    def before_step(self, optimizer, *_) -> None:
        """The optimizer's hook: stop the run or skip the step if a gradient is NaN or Inf."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        seen = [p.grad for p in parameters if p.grad is not None]
        if self.overflow_is_normal:
            seen = [tensor for name, tensor in self.outputs if name == OUTPUT]
        bad = (~all_finite(seen)).to(self.state.loss_sum.device, torch.float32)
        if dist.is_initialized():
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        self.left_out = bool(bad.item())
        if self.left_out:
            self.react()
            self.taken = [(parameter, parameter.grad) for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None  # optimizers skip a parameter without gradient
        else:
            self.keep_buffers()
        if not self.scaler:  # its scale is checked instead
            self.count(self.left_out)
        self.outputs.clear()

    def give_back(self, *_) -> None:
        """After a skipped step, restore the gradients: they may be views of a library's buffers."""
        for parameter, gradient in self.taken:
            parameter.grad = gradient
        self.taken.clear()

    def library_stepped(self, skipped: bool) -> None:
        """A library has done a step, or skipped it before it called the optimizer's hook."""
        if skipped and self.exact and not self.overflow_is_normal:
            self.left_out = True
            self.react()
        self.outputs.clear()
        if skipped or not self.exact:  # otherwise the hook has counted
            self.count(skipped)

    def react(self) -> None:
        """Stop the run before this step, or skip the step."""
        why = f"step {self.state.step}: {self.first_not_finite()}"
        if self.mode == "stop":
            fail(f"{why}; no weight has changed. Use a lower --lr, or --on-nan skip", code=3)
        print0(f"{why}; the step is skipped")
        for buffer, good in zip(self.model.buffers(), self.good_buffers, strict=True):
            buffer.copy_(good)  # BatchNorm's statistics contain NaN or Inf

    def keep_buffers(self) -> None:
        """Save BatchNorm's statistics, in case the next step is skipped."""
        if self.mode == "skip":
            self.good_buffers = [buffer.clone() for buffer in self.model.buffers()]

    def first_not_finite(self) -> str:
        """Describe what became NaN or Inf first, and on which ranks. All ranks call it."""
        named = list(self.model.named_parameters())
        tensors = [(f"{WEIGHT} {name}", p) for name, p in named] + self.outputs
        tensors += [(f"{GRADIENT} {name}", p.grad) for name, p in named if p.grad is not None]
        own = next((name for name, tensor in tensors if not all_finite([tensor])), "")
        everyone = gather_objects(own)
        kinds = (WEIGHT, OUTPUT, LOSS, GRADIENT)
        found = [name for kind in kinds for name in everyone if name.startswith(kind)]
        if not found:  # shards of a library have no names
            return "a gradient is NaN or Inf"
        ranks = ", ".join(str(rank) for rank, name in enumerate(everyone) if name == found[0])
        return f"{found[0]} is NaN or Inf on rank {ranks}"

    def check_scale(self) -> None:
        """Count the steps that the GradScaler skipped since the last check: each has lowered its
        scale, which is copied from the device only now. A growth tracker > 0 means a good step."""
        before, self.scale = self.scale, self.scaler.get_scale()
        if self.scaler.state_dict()["_growth_tracker"]:
            return self.count(False)
        factor = self.scaler.get_backoff_factor()
        skips = math.log(before / self.scale, 1 / factor) if self.scale else MAX_SKIPPED
        self.count(True, max(0, round(skips)))  # negative if the scale has grown

    def count(self, skipped: bool, times: int = 1) -> None:
        self.skipped = self.skipped + times if skipped else 0
        if self.skipped >= MAX_SKIPPED:
            why = f"the last {self.skipped} steps were skipped, because gradients are not finite"
            use = "use a lower --lr, or bfloat16 instead of float16"
            fail(f"step {self.state.step}: {why}; {use}", code=3)
