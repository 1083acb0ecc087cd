"""The tensors of a model and its optimizer in a snapshot: safetensors files, which every script
reads at any number of ranks; and files of plain state dicts."""

import contextlib
import os
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Shard, zeros
from torch.nn.parallel import DistributedDataParallel

from harness.cli import fail
from harness.measure import local
from harness.world import gather_objects, print0, this_script

TENSORS = "tensors"  # the folder in that of a snapshot
FILE_SIZE = 2**30  # bytes of a file, roughly: each is put together in memory before it is written


def sync(path: Path) -> None:
    """Flush a file, or the list of files of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_file(state: dict, path: Path) -> None:
    """Atomic ``torch.save``: leaves either the old file or the complete new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    torch.save(state, temporary)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def load_file(path: Path | str, flag: str, mmap: bool = False) -> dict:
    """``torch.load`` of a dict of tensors and plain types, onto the CPU, with ``mmap`` each tensor
    only when it is used. An error names the flag that gave the file."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # damaged files raise any of a dozen types
        why = f"({type(error).__name__}: it is damaged, or contains objects other than tensors)"
        fail(f"{flag} {path} cannot be loaded {why}; give another file")
    if not isinstance(state, dict):
        fail(f"{flag} {path} contains a {type(state).__name__}, not a dict; give another")
    return state


def check_weights(model: nn.Module, weights: dict, complaint: str) -> None:
    """Check that weights fit a model. The complaint begins the error, which names an entry."""
    shapes = {name: t.shape for name, t in model.state_dict().items()}
    theirs = {name: getattr(t, "shape", None) for name, t in weights.items()}
    wrong = sorted(name for name, _ in shapes.items() ^ theirs.items())
    if wrong:
        fail(f"{complaint}: {wrong[0]} differs, and maybe others; use that run's settings")


def plain(model: nn.Module) -> nn.Module:
    """The model without DDP's wrapper, whose entries have no ``module.`` prefix."""
    return model.module if isinstance(model, DistributedDataParallel) else model


# In a snapshot, "optimizer.fc.weight.exp_avg" belongs to the state of "model.fc.weight".
def named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[Tensor, str]]:
    """This rank's weights and buffers, or shards; and the (first) names of the parameters."""
    tensors = {}
    names = {}
    for name, tensor in plain(model).state_dict(keep_vars=True).items():
        tensors[f"model.{name}"] = tensor.detach()
        names.setdefault(tensor, name)
    return tensors, names


def gather(model: nn.Module, optimizer) -> tuple[dict[str, Tensor], list[dict]]:
    """What :func:`save` writes: this rank's tensors, or its shards of them; and the optimizer's
    parameter groups of all ranks, which differ by pipeline stage. All ranks call it. An optimizer
    of shards that are no parameters of the model has an attribute ``whole`` with ``state``,
    ``param_groups`` and ``load_state_dict()`` of the model's parameters."""
    tensors, names = named_tensors(model)
    optimizer = getattr(optimizer, "whole", optimizer)
    own = getattr(optimizer, "optim", optimizer)  # the local one of ZeroRedundancyOptimizer
    for parameter, state in own.state.items():
        tensors |= {f"optimizer.{names[parameter]}.{key}": value for key, value in state.items()}
    for name, tensor in tensors.items():
        if not torch.is_tensor(tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; snapshots contain only tensors")
    groups = []
    for group in optimizer.param_groups:
        named = [names[p] for p in group["params"]]
        groups.append(group | {"params": named})
    everyone = [group for rank in gather_objects(groups) for group in rank]
    return tensors, list({tuple(group["params"]): group for group in everyone}.values())


class PlainTensors(dcp.DefaultSavePlanner):
    """Hands over each tensor as safetensors needs it: on the CPU, contiguous, and in memory of its
    own. Of a tensor that several ranks have, the lowest rank writes its copy."""

    def __init__(self):
        super().__init__(dedup_save_to_lowest_rank=True)

    def transform_object(self, write_item, object: Tensor) -> Tensor:
        return torch.empty(object.shape, dtype=object.dtype).copy_(object)


@contextlib.contextmanager
def original_error():
    """Raise the first error of any rank, which DCP wraps in one of its own."""
    try:
        with warnings.catch_warnings():  # about a single process without a group
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except dcp.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write tensors to the folder of a snapshot: each rank what no lower rank writes."""
    sizes = {}
    files = {}
    total = 0
    for theirs in gather_objects({name: local(t).nbytes for name, t in tensors.items()}):
        sizes |= {name: max(size, sizes.get(name, 0)) for name, size in theirs.items()}
    for name, size in sizes.items():
        files[name] = 1 + total // FILE_SIZE
        total = total + size
    writer = HuggingFaceStorageWriter(str(folder / TENSORS), files, save_distributed=True)
    with original_error():
        dcp.save(tensors, storage_writer=writer, planner=PlainTensors())


def load(folder: Path, snapshot: dict, model: nn.Module, optimizer) -> None:
    """Load what this rank needs from a snapshot, whose ``state.pt`` is read. All ranks call it."""
    if "param_groups" not in snapshot:
        why = f"was written by {snapshot['technique']}.py in a format that {this_script()}.py "
        why = snapshot.get("only", f"{why}cannot read; use one of its own")
        fail(f"--resume {folder} {why}, or take its weights alone: --weights {folder}")
    weights, names = named_tensors(model)
    optimizer = getattr(optimizer, "whole", optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    updating = getattr(optimizer, "optim", optimizer)  # ZeRO: of this rank; others' would be whole
    updated = {p for group in updating.param_groups for p in group["params"]}
    tensors = dict(weights)
    state = {}
    entries = {}
    try:
        reader = HuggingFaceStorageReader(str(folder / TENSORS))
        saved = reader.read_metadata().state_dict_metadata
        for name, found in saved.items():
            if sum(chunk.sizes.numel() for chunk in found.chunks) != found.size.numel():
                raise ValueError(f"a part of {name} is missing")
            entries.setdefault(name.rpartition(".")[0], []).append(name)
        for index, parameter in enumerate(parameters):
            own = entries.get(f"optimizer.{names[parameter]}", ())  # none, if it had no gradient
            room = {n: make_room(saved[n], parameter) for n in own if parameter in updated}
            state[index] = {name.rpartition(".")[2]: tensor for name, tensor in room.items()}
            tensors |= room
        if unknown := set(saved).difference(*gather_objects(set(tensors))):
            raise ValueError(f"this run has no {min(unknown)}")
        with original_error():
            dcp.load(tensors, storage_reader=reader)
    except Exception as error:  # damaged files raise any of a dozen types
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        fail(f"--resume {folder} cannot be loaded ({why}); give another, or none")
    plain(model).load_state_dict({n.removeprefix("model."): t for n, t in weights.items()})
    own_groups = []
    index = 0
    for group in optimizer.param_groups:
        first = names[group["params"][0]] if group["params"] else None
        theirs = next((saved for saved in snapshot["param_groups"] if first in saved["params"]), {})
        end = index + len(group["params"])
        places = list(range(index, end))
        index = end
        # The script decides how a step is computed.
        own_groups.append(group | theirs | {"params": places, "fused": group.get("fused")})
    optimizer.load_state_dict({"state": state, "param_groups": own_groups})
    if updating is not optimizer and updating.defaults["fused"]:
        for parameter, own in updating.state.items():
            if "step" in own:  # ZeRO leaves it on the CPU (pytorch/pytorch#124133)
                own["step"] = own["step"].to(parameter.device)


def load_others(folder: Path, snapshot: dict, others: dict) -> None:
    """Load the state of further objects, by name."""
    for name, other in others.items():
        if snapshot.get(name) or not other.state_dict():  # a disabled GradScaler has no state
            other.load_state_dict(snapshot.get(name, {}))
        else:
            print0(f"{folder} contains no {name} state; {name} is reset")


def make_room(saved: TensorStorageMetadata, parameter: Tensor) -> Tensor:
    """A tensor for an entry of the optimizer's state: sharded as its parameter, if it has as many
    rows, or whole."""
    if saved.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=saved.properties.dtype, requires_grad=False)
    by_rows = isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)
    if by_rows and saved.size[:1] == parameter.shape[:1]:
        layout = {"device_mesh": parameter.device_mesh, "placements": parameter.placements}
        return zeros(saved.size, dtype=saved.properties.dtype, **layout)
    return torch.zeros(saved.size, dtype=saved.properties.dtype)


def rebuild_buckets(model: DistributedDataParallel, inputs: Tensor) -> None:
    """Let DDP sort its gradients into the buckets of its second step, by a step that changes
    nothing: they affect the rounding of a sum over more than two ranks, and so a run's bits."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    gpus = [inputs.device] if inputs.device.type == "cuda" else []
    with torch.random.fork_rng(gpus):  # dropout draws from it
        model.train()
        model(inputs).sum().backward()
    model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
