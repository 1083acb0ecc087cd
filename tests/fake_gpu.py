"""Run a script on simulated GPUs.

Used in place of a script's name. The process is one of several ranks, as RANK, LOCAL_RANK and
WORLD_SIZE say; the process group is PyTorch's `fake` one, which never communicates:

    RANK=0 LOCAL_RANK=3 WORLD_SIZE=4 python tests/fake_gpu.py pytorch_FSDP.py --device cuda ...

Tensors on a GPU are PyTorch's fake tensors: they have a shape, a dtype and a device, which every
operation checks as on a GPU, but no data. Tensors on the CPU are real. A recorder replaces
torch.cuda, and writes the calls to ``log.json`` in --output-dir, in order.

Whatever needs a driver, data or other ranks is replaced in `stand_in_for_...`, as little as
possible. The largest replacement is that of backward(), which no fake GPU can compute: every
parameter gets a gradient of its own shape.
"""

import contextlib
import json
import os
import runpy
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import small_resnet  # noqa: F401  a model to choose
import torch
import torch.cuda.nccl
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import _sharding_prop
from torch.nn.parallel import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only

GIB = 2**30
aten = torch.ops.aten
# Operations that tell in which precision a model computes.
COMPUTES = {"convolution", "addmm", "_log_softmax", "_fused_sgd_", "_fused_adamw_"}
COMPUTES |= {"native_batch_norm", "cudnn_batch_norm", "_batch_norm_with_update"}


class FakeCuda:
    """Stands in for torch.cuda, with four GPUs: answers, and notes what was asked of it."""

    def __init__(self):
        self.log = []
        self.current = 0
        self.known = {  # questions that are not noted
            **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
            **{"device_count": 4, "get_device_name": "Fake GPU", "get_device_capability": (8, 0)},
            **{"is_current_stream_capturing": False, "manual_seed_all": None},
        }
        silent = ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_rng_state")
        self.noted = dict.fromkeys(silent) | {
            "max_memory_reserved": 4 * GIB,
            "memory_reserved": 5 * GIB,
            "mem_get_info": (60 * GIB, 80 * GIB),  # free, total
            "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        }

    def note(self, name, *arguments):
        self.log.append([name, *map(str, arguments)])

    def install(self, setattr=setattr):
        for name, answer in self.known.items():
            setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
        for name, answer in self.noted.items():
            setattr(torch.cuda, name, self.noting(name, answer))
        for name in ("set_device", "current_device", "get_device_properties", "current_stream"):
            setattr(torch.cuda, name, getattr(self, name))
        setattr(torch.cuda, "max_memory_allocated", self.max_memory_allocated)
        setattr(torch.version, "cuda", "13.0")
        setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
        setattr(torch.backends.cudnn, "version", lambda: 91000)
        setattr(torch.cuda, "Event", lambda *_, **__: Event(self))
        setattr(torch.cuda, "Stream", lambda device=None, **_: Stream(self, device, "a"))
        setattr(torch.cuda, "stream", contextlib.nullcontext)

    def noting(self, name, answer):
        def call(*args, **kwargs):
            self.note(name, *args, *kwargs.values())
            return answer

        return call

    def set_device(self, device):
        self.note("set_device", device)
        self.current = device if isinstance(device, int) else device.index

    def current_device(self):
        return self.current

    def max_memory_allocated(self, device):
        """It is read three times in the warm-up, which takes more."""
        self.note("max_memory_allocated", device)
        return (3 if self.log.count(["max_memory_allocated", str(device)]) > 3 else 9) * GIB

    def get_device_properties(self, device):
        return SimpleNamespace(uuid=f"of {device}", total_memory=80 * GIB, major=8, minor=0)

    def current_stream(self, device=None):
        return Stream(self, device, "current")


class Stream:
    # FSDP of PyTorch 2.15 hands these on
    stream_id = 0
    device_index = 0
    device_type = 1

    def __init__(self, cuda, device, kind):
        self.cuda = cuda
        self.name = f"{kind} stream of {device}"

    def record_event(self, event=None):
        return event or Event(self.cuda)

    def wait_event(self, event):
        pass

    wait_stream = wait_event

    def synchronize(self):
        self.cuda.note("Stream.synchronize")


class Event:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self, stream=None):
        self.cuda.note("Event.record", *([stream.name] if stream else []))

    def query(self):
        return False  # the GPU is not there yet

    def synchronize(self):
        self.cuda.note("Event.synchronize")

    def elapsed_time(self, later):
        self.cuda.note("Event.elapsed_time")
        return 100.0  # milliseconds


class FakeGpus(FakeTensorMode):
    """Fake are the tensors of GPUs only, and they are kept on them."""

    avoid_device_init = True  # whatever torch.cuda says now

    def __init__(self, cuda):
        super().__init__(allow_non_fake_inputs=True)
        self.note = cuda.note
        self.cuda = cuda
        self.computed = set()  # which operation, where, on which dtypes: the first two
        self.model = torch.nn.Module()  # until it is there
        self.number = 1  # that any tensor holds when it is fetched

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):  # which only a driver can do
            kwargs["pin_memory"] = False
        name = func.__name__.split(".")[0]
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it comes again with what is in it
        if name in ("pin_memory", "_pin_memory"):
            return args[0]
        leaves = tree_leaves((args, kwargs))
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        gpus = [leaf for leaf in leaves if isinstance(leaf, torch.device) and leaf.type == "cuda"]
        if "c10d" in func.namespace and name != "wait_tensor":  # functional ones as well
            through_gloo = name == "barrier" or "gloo" in dist.get_backend()
            assert fakes or through_gloo, "nccl sends no tensors of the CPU"
            self.note(name)
        if not fakes and not gpus:
            return func(*args, **kwargs)  # on the CPU
        if name in COMPUTES:
            devices = sorted({str(tensor.device) for tensor in fakes})
            dtypes = [str(tensor.dtype)[6:] for tensor in (fakes * 2)[:2]]
            self.computed.add((name, ",".join(devices), *dtypes))
        if name == "_local_scalar_dense":
            self.note("to cpu", "item")
            return args[0].dtype == torch.bool or self.number
        if name == "_fused_sgd_":  # for which PyTorch has no rule; this one is that of its kernel
            for tensors in zip(*filter(None, args[:3]), strict=True):
                assert len({(t.device, t.dtype, t.shape, t.stride()) for t in tensors}) == 1
            return None
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            waits = len(args) < 3 or not args[2]  # non_blocking
            self.note("to cpu" if waits else "to cpu, later", args[0].dtype)
            return args[0].zero_()
        sent = name == "_to_copy" and not fakes
        if sent:
            if gpus[0].index == 0:  # "cuda" without a number: the guard in use knows no other
                kwargs["device"] = torch.device("cuda", self.cuda.current)
            self.note("to cuda", kwargs["device"], args[0].dtype, list(args[0].shape))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if sent and args[0].numel() < 10:
            out.known = args[0]  # as long as nothing is computed of it
        if name == "_to_copy" and out.device.type == "cpu":
            self.note("to cpu", out.dtype)
            return torch.full(out.shape, self.number, dtype=out.dtype)
        return out


def stand_in_for_ranks(note):
    """All others are like this one."""
    init = dist.init_process_group
    all_reduce = dist.all_reduce
    new_group = dist.new_group
    receive_fake = dist.recv

    def init_process_group(backend, device_id=None, **_):
        note("init_process_group", backend, device_id)
        rank = int(os.environ["RANK"])
        size = int(os.environ["WORLD_SIZE"])
        init("fake", store=FakeStore(), rank=rank, world_size=size)
        dist.get_backend = lambda group=None: backend

    def all_reduce_alike(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        note("all_reduce", tensor.device, tensor.dtype)
        all_reduce(tensor, op, group, async_op)
        if op == dist.ReduceOp.SUM:
            tensor.mul_(dist.get_world_size())
        return SimpleNamespace(wait=lambda: None)

    def all_gather_object(values, value, group=None):
        values[:] = [value] * len(values)

    def new_group_of(ranks=None, backend=None, **options):
        assert not (ranks and backend), "with a bound GPU, the others wait for ever for this group"
        return backend or new_group(ranks, **options)

    def receive(tensor, src=None, group=None, **options):
        if group != "gloo":  # otherwise a weight of another stage
            receive_fake(tensor, src, group, **options)

    dist.new_group = new_group_of
    dist.split_group = lambda parent_pg, *_, **__: parent_pg or dist.group.WORLD
    # PyTorch 2.15 splits the group of a pipeline, for each pair of its ranks.
    schedules._build_p2p_edge_groups = lambda *_: (defaultdict(lambda: dist.group.WORLD), ())
    dist.rendezvous = lambda *_, **__: iter([(dist.HashStore(), 0, 1)])
    dist.init_process_group = init_process_group
    dist.all_reduce = all_reduce_alike
    dist.all_gather_object = all_gather_object
    dist.recv = receive
    dist.broadcast_object_list = dist.monitored_barrier = lambda *_, **__: None
    # DDP reads what the others say of their parameters, and so does its new order of buckets.
    distributed._verify_param_shape_across_processes = lambda *_: None
    dist.Reducer._rebuild_buckets = lambda reducer: False
    # DTensor asks for shapes on fake tensors: of a mode of its own, as ours leaves the CPU's real.
    _sharding_prop.detect_fake_mode = lambda *_: None


def stand_in_for_numbers(fake, common, harness):
    """What reads the numbers of a tensor, or where they are."""
    from jobs.experts import MixtureOfExperts
    from parallel import attention_kernels, pipelining

    evaluate = common.evaluate
    tolist = FakeTensor.tolist
    make_model = common.make_model
    save = torch.save
    load = torch.load
    swap = torch.utils.swap_tensors

    def evaluate_all(model, loader, device, *cut, **head):
        fake.number = loader.dataset.count_labels()  # so many, all of them right
        metrics = evaluate(model, loader, device, *cut, **head)
        fake.number = 1
        return metrics

    def save_fakes(state, path, **options):
        save(tree_map_only(FakeTensor, of_the_cpu, state), path, **options)

    def of_the_cpu(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def load_real(*args, **options):
        with unset_fake_temporarily():  # which would read no numbers, not even those of the CPU
            return load(*args, **options)

    def save_shapes(tensors, folder):  # what the others keep is not known
        shapes = {name: (t.shape, t.dtype) for name, t in tensors.items()}
        save(shapes, folder / "shapes.pt")

    def read_shapes(path):  # as a reader of DCP
        found = {}
        for name, (size, dtype) in load_real(Path(path).parent / "shapes.pt").items():
            about = {"size": size, "properties": SimpleNamespace(dtype=dtype)}
            found[name] = SimpleNamespace(**about, chunks=[SimpleNamespace(sizes=size)])
        metadata = SimpleNamespace(state_dict_metadata=found)
        return SimpleNamespace(read_metadata=lambda: metadata)

    def swap_fakes(ours, theirs):  # Module.to() of half precision: there are references to ours
        if not isinstance(ours, FakeTensor):
            return swap(ours, theirs)
        ours.data = theirs.detach()
        ours.fake_device = theirs.fake_device

    def balanced(mixture, x, **padding):
        """As many tokens for each expert: what a count says that is fetched."""
        before = fake.number
        tokens = x.shape[0] * x.shape[1]
        fake.number = tokens * mixture.top_k // mixture.count
        out = forward(mixture, x, **padding)
        fake.number = before
        return out

    def make_and_remember(*args, **options):
        model = make_model(*args, **options)
        fake.whole = {
            name: torch.zeros(t.shape, dtype=t.dtype, device="cpu" if t.is_meta else t.device)
            for name, t in model.state_dict().items()
        }
        return model

    def flex(function):  # FlexAttention is compiled, which needs data
        if function == "create_block_mask":
            return lambda *_, **__: SimpleNamespace()
        return lambda q, k, v, block_mask, scale: F.scaled_dot_product_attention(q, k, v)

    def gather_weights(own, parts, group=None):  # those of the others, too
        assert group == "gloo", "nccl gathers on the GPU of rank 0, beside all else there"
        parts[:] = [fake.whole] * len(parts)

    def gather_stages(model, group):
        assert group == "gloo", "nccl gathers on the GPU of rank 0, beside all else there"
        return fake.whole

    pipelining.gather_weights = gather_stages
    common.make_model = make_and_remember
    dist.gather_object = gather_weights
    forward, MixtureOfExperts.forward = MixtureOfExperts.forward, balanced
    common.evaluate = evaluate_all
    torch.save = save_fakes
    torch.utils.swap_tensors = swap_fakes
    attention_kernels.flex = flex
    torch.load = load_real
    dcp.load = lambda *_, **__: None
    harness.state.save = save_shapes
    harness.state.HuggingFaceStorageReader = read_shapes
    harness.snapshots.find_damage = lambda *_, **__: None  # the others have no checksums
    FakeTensor.tolist = lambda t: t.known.tolist() if hasattr(t, "known") else tolist(t)
    torch.UntypedStorage.data_ptr = lambda storage: storage._cdata
    harness.stop.StopRequest.vote = lambda request, step: None  # nobody wants to


def stand_in_for_drivers(fake, harness):
    """What is computed by C++ that asks CUDA itself."""

    def backward(loss, *_, **__):
        seen = set()
        nodes = [loss.grad_fn]
        while nodes:
            node = nodes.pop()
            if node and node not in seen:
                seen.add(node)
                nodes += [following for following, _ in node.next_functions]
                weight = getattr(node, "variable", None)
                if weight is not None and weight.grad is None:
                    weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
                    for hook in (weight._post_accumulate_grad_hooks or {}).values():
                        hook(weight)
        # FSDP reduce-scatters them, where hooks have not, or leaves them to its pipeline
        for unit in [m for m in fake.model.modules() if hasattr(m, "_get_fsdp_state")][:1]:
            unit._get_fsdp_state()._register_root_post_backward_final_callback()

    fake_tensor.init_gpu_context = lambda device: None  # PyTorch 2.11 makes it a real tensor
    tensor = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **options: tensor(*args, **options)
    engine = SimpleNamespace(queue_callback=lambda callback: callback())
    torch.autograd.Variable._execution_engine = engine  # whose backward has ended
    torch.Tensor.backward = backward
    torch.autograd.backward = lambda tensors, *_, **__: [backward(tensor) for tensor in tensors]
    dist.Reducer.prepare_for_forward = dist.Reducer.prepare_for_backward = lambda *_: None


def main():
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    script = next(word for word in sys.argv if word.startswith("pytorch_"))
    sys.argv = [script, *(word for word in sys.argv[1:] if word != script)]
    cuda = FakeCuda()
    stand_in_for_ranks(cuda.note)
    # PyTorch 2.11, of this backend:
    warnings.filterwarnings("ignore", "Set timeout is now only supported for either nccl or gloo")
    import common
    import harness.snapshots
    import harness.state
    import harness.stop
    from harness.clock import StepClock
    from harness.run import Run

    fake = FakeGpus(cuda)
    start = Run.start
    batches = Run.batches
    mark = StepClock.mark
    finish = Run.finish

    def watched_start(run, model, *args, **kwargs):
        fake.model = model
        tensors = [*model.parameters(), *model.buffers()]
        kinds = {f"{str(t.dtype)[6:]} on {t.device}" for t in tensors if t.is_floating_point()}
        cuda.note("model", *sorted(kinds))
        start(run, model, *args, **kwargs)

    def watched_batches(run, loader, epoch, *dtype):
        cuda.note("epoch")
        for images, labels in batches(run, loader, epoch, *dtype):
            last = images.is_contiguous(memory_format=torch.channels_last)
            cuda.note("step", images.device, images.dtype, f"channels last: {last}", labels.device)
            yield images, labels
        cuda.note("end of epoch")

    def watched_finish(run, model, optimizer, **held):
        own = getattr(optimizer, "optim", optimizer)  # of ZeRO, the local one
        entries = [entry for state in own.state.values() for entry in state.items()]
        cuda.note("optimizer", *sorted({f"{key} {t.dtype} on {t.device}" for key, t in entries}))
        finish(run, model, optimizer, **held)

    def watched_mark(clock, phase):
        if clock.marks is not None:
            cuda.note("phase", phase)
        mark(clock, phase)

    Run.start = watched_start
    Run.batches = watched_batches
    StepClock.mark = watched_mark
    Run.finish = watched_finish
    cuda.install()
    stand_in_for_numbers(fake, common, harness)
    stand_in_for_drivers(fake, harness)
    with fake:
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            folder = Path(sys.argv[sys.argv.index("--output-dir") + 1])
            folder.mkdir(parents=True, exist_ok=True)  # not yet there, if a flag was refused
            precision = torch.get_float32_matmul_precision()
            seen = {"log": cuda.log, "computed": sorted(fake.computed), "precision": precision}
            (folder / "log.json").write_text(json.dumps(seen, indent=1) + "\n")


if __name__ == "__main__":
    main()
