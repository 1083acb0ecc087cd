"""Stand-ins for what an estimate lacks: other ranks, and the data of tensors."""

import contextlib
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed import device_mesh
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from estimator.sent import size_of
from jobs.experts import MixtureOfExperts

aten = torch.ops.aten
SHAPES = torch.library.Library("aten", "IMPL", "Meta")
with_numbers = _disable_current_modes  # as a context, or called as a decorator: tensors have data


def stand_in_for_ranks() -> None:
    """Use PyTorch's fake process group, which never communicates."""
    init = dist.init_process_group
    all_reduce = dist.all_reduce
    begin = DistributedDataParallel._lazy_init

    def init_process_group(*_, **__):
        ranks = {name: int(os.environ[name.upper()]) for name in ("rank", "world_size")}
        init("fake", store=FakeStore(), **ranks)

    def answered_all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        all_reduce(tensor, op, group)
        if not async_op:
            return None
        future = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
        future.set_result([tensor])
        return SimpleNamespace(wait=lambda: None, get_future=lambda: future)

    def answered(_, bucket):  # the fake group returns no result, but DDP reads it
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    def begin_with_hook(ddp):
        if not ddp._comm_hooks:
            ddp.register_comm_hook(None, answered)
        begin(ddp)

    dist.init_process_group = init_process_group
    dist.all_reduce = answered_all_reduce
    stand_in_for_meshes()
    keep_the_largest_share()
    # The real function returns its argument, but a copy for fake tensors.
    functional.wait_tensor = lambda tensor: tensor
    DistributedDataParallel._lazy_init = begin_with_hook
    # Rank 0's weights are broadcast before training; messages between ranks have no data.
    sd.set_model_state_dict = lambda *_, **__: None
    distributed._verify_param_shape_across_processes = lambda *_: None
    distributed._sync_module_states = lambda *_, **__: None
    # In its second step DDP makes buckets of 1 and then 25 MiB, in an order read from a tensor.
    assign = dist._compute_bucket_assignment_by_size
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20]
    dist._compute_bucket_assignment_by_size = lambda tensors, _, *rest: assign(
        tensors, limits, *rest
    )
    dist.Reducer._rebuild_buckets = lambda reducer: False
    # PyTorch 2.12 reads what the ranks of a pipeline have voted: that all shapes are known.
    voted = SimpleNamespace(item=lambda: 1)
    PipelineStage._warmup_backward_result = lambda *_, **__: voted


def keep_the_largest_share() -> None:
    """ZeroRedundancyOptimizer assigns whole tensors, so the ranks' shares differ: let this rank
    have the largest one, as the rank that runs out of memory first."""
    make = ZeroRedundancyOptimizer._init_local_optimizer

    def make_of_largest(optimizer):
        sizes = [size_of(groups) for groups in optimizer._partition_parameters()]
        optimizer.rank = sizes.index(max(sizes))
        make(optimizer)

    ZeroRedundancyOptimizer._init_local_optimizer = make_of_largest


def stand_in_for_meshes() -> None:
    """Device meshes read their ranks from tensors, which must not be fake."""
    device_mesh.init_device_mesh = with_numbers()(device_mesh.init_device_mesh)
    mesh = device_mesh.DeviceMesh
    mesh.__init__ = with_numbers()(mesh.__init__)  # FSDP combines two meshes for DTensors
    if isinstance(mesh.mesh, property):
        mesh.mesh = property(with_numbers()(mesh.mesh.fget))


def stand_in_for_numbers() -> None:
    """Replace functions that do not support fake tensors."""

    def swap(ours, theirs):  # for Module.to(), which fails if there are references to ours
        ours.data = theirs.detach()

    rand = torch.rand
    # LayerDrop compares one number: the largest, so that no layer is skipped
    torch.rand = lambda *a, **b: torch.tensor(1.0) if a == ([],) and not b else rand(*a, **b)
    torch.utils.swap_tensors = swap
    torch.nn.init._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor  # it reads drawn values
    FakeTensorMode.__deepcopy__ = lambda mode, memo: mode  # a copied model shares it
    with contextlib.suppress(RuntimeError):  # it is registered already
        SHAPES.impl("_fused_sgd_", lambda *_, **__: None)
    SHAPES.impl("_grouped_mm", grouped_product, allow_override=True)


class KnownNumbers(TorchDispatchMode):
    """Below :class:`LiveBytes`: small tensors that depend on no data keep their values, such as a
    range and what is computed from it. A question about the value of any other tensor gets an
    answer, unless ``refuses``: in the user's main(), which prints a loss, but not in a model, whose
    memory may depend on the answer."""

    MOST = 2**14  # elements
    FIRST = (aten.arange, aten.linspace, aten.randperm, aten.lift_fresh)
    TRUE = ("isfinite", "isclose", "eq", "equal", "all", "logical_and")  # of what holds usually

    def __init__(self):
        super().__init__()
        self.refuses = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        known = not any(isinstance(tensor, FakeTensor) for tensor in given)
        is_first = func.overloadpacket in self.FIRST or (func is aten.full.default and not args[0])
        if known and (given or is_first):
            with with_numbers():
                out = func(*args, **kwargs)
            sizes = [leaf.numel() for leaf in tree_leaves(out) if torch.is_tensor(leaf)]
            if max(sizes, default=0) <= self.MOST:
                return out
        if not known and not self.refuses:
            if func is aten.equal.default:
                return True
            if func is aten._local_scalar_dense.default:
                return self.answer(*given)
        out = func(*args, **kwargs)
        if isinstance(out, FakeTensor) and out.dtype == torch.bool:
            out.made_by = func.overloadpacket.__name__
        return out

    def answer(self, tensor: torch.Tensor) -> bool | int | float:
        if tensor.dtype == torch.bool:
            return getattr(tensor, "made_by", "") in self.TRUE
        return 1.0 if tensor.is_floating_point() else 1


def grouped_product(a, b, offs=None, bias=None, out_dtype=None):
    """The result of ``F.grouped_mm``. Its own rule for fake tensors refuses float32, which GPUs and
    CPUs multiply by one expert after the other."""
    if a.ndim == b.ndim == 2:
        groups = [len(offs)]
    elif a.ndim == b.ndim == 3:
        groups = [len(a)]
    else:
        groups = []
    dtype = out_dtype or a.dtype
    width = b.shape[-1]
    step = max(1, 16 // dtype.itemsize)  # rows are aligned to 16 bytes
    return a.new_empty(*groups, a.shape[-2], -(-width // step) * step, dtype=dtype)[..., :width]


def stand_in_for_router(to_one: bool) -> None:
    """Choose how many tokens each expert gets: as many as every other, or the first one all.
    These are the numbers that :class:`MixtureOfExperts` and pytorch_EP.py read."""
    forward = MixtureOfExperts.forward
    rows = 0

    def begin(mixture, x, **padding):
        nonlocal rows
        rows = x.shape[0] * x.shape[1] * mixture.top_k
        with mock.patch.object(FakeTensor, "tolist", counts):
            return forward(mixture, x, **padding)

    def counts(tensor):  # [experts], or rows that are sent to each rank and received from it
        nonlocal rows
        n = tensor.shape[-1]
        if to_one:
            each = [rows, *[0] * (n - 1)]
            received = [rows] * n
        else:
            each = [(rows + i) // n for i in range(n)]
            received = each
        rows = sum(received) if tensor.ndim == 2 else rows  # for the experts of this rank
        return [each, received] if tensor.ndim == 2 else each

    MixtureOfExperts.forward = begin


def stand_in_for_deepspeed(deepspeed_engine) -> None:
    """DeepSpeed compares values between ranks and reads some; none of them affects memory. Its own
    data-dependent checks get False; a model's still fail."""
    import_deepspeed = deepspeed_engine.import_deepspeed

    def false_for_deepspeed(function):
        def answer(tensor):
            asking = Path(sys._getframe(1).f_code.co_filename)
            return False if "deepspeed" in asking.parts else function(tensor)

        return answer

    def import_and_adapt(*args):
        deepspeed = import_deepspeed(*args)
        for name in ("item", "__bool__"):
            setattr(FakeTensor, name, false_for_deepspeed(getattr(FakeTensor, name)))
        for name in ("partition_parameters", "partitioned_param_coordinator", "stage3"):
            module = importlib.import_module(f"deepspeed.runtime.zero.{name}")
            module.assert_ints_same_as_other_ranks = lambda numbers: None
        return deepspeed

    deepspeed_engine.import_deepspeed = import_and_adapt
