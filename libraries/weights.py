"""Read ``--weights``: any model.pt, the folder of a run, or a snapshot, without its ranks."""

import contextlib
import functools
import re
import sys
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from harness.cli import fail, fetch_input
from harness.snapshots import FORMAT, find_damage, list_snapshots
from harness.state import TENSORS, load_file
from harness.world import gather_objects, print0, world

NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # on the hub: OWNER/NAME
INSIDE = "state_dict", "model_state_dict", "model", "module"  # where a checkpoint has a state dict
ADAPTERS = "adapters: load them and their base with peft, or train with --merge"  # of LoRA
OF_TENSORS = ".safetensors", ".pt", ".bin", ".distcp"  # how names of files end
PIECE = 2**20  # bytes
WRAPPERS = r"(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."  # in names


@functools.cache
def say(line: str) -> None:
    """Print a line once, not for each model that a rank makes; beside the output of a command."""
    print0(line, file=sys.stderr)


def locate(place: Path | str) -> Path:
    """The local path of ``--weights``: for the folder of a run that has ended, its ``model.pt``."""
    path = fetch_input(place, "--weights")
    return path / "model.pt" if (path / "model.pt").is_file() else path


def is_snapshot(place: Path | str) -> bool:
    return any((locate(place) / name).is_file() for name in ("state.pt", ".metadata"))


def checksum(path: Path) -> int:
    """Of a file, or the files of tensors in a folder or a snapshot: of their sizes and of three
    pieces of each, as training changes all of a model."""
    found = 0
    inside = sorted([*path.glob("*"), *path.glob(f"{TENSORS}/*")])
    files = [file for file in inside if file.suffix in OF_TENSORS]
    for file in files if path.is_dir() else [path]:
        size = file.stat().st_size
        found = zlib.crc32(str(size).encode(), found)
        with open(file, "rb") as opened:
            for start in (0, size // 2, max(0, size - PIECE)):
                opened.seek(start)
                found = zlib.crc32(opened.read(PIECE), found)
    return found


def why_unusable(place: Path | str) -> str:
    """Why ``--weights`` is no file, snapshot or folder of a run; empty if it is one of them."""
    path = locate(place)
    if path.is_file() or is_snapshot(place):
        return ""
    if (path / "adapter").is_dir():
        return f"it has only {ADAPTERS}"
    if found := list_snapshots(path / "snapshots"):
        return f"its run has not ended; its newest snapshot is {found[0]}"
    return "it has no model.pt" if path.is_dir() else why_missing(str(place))


def why_missing(place: str) -> str:
    """Why a path that is not there is not looked for on the hub, if it has the form of a name."""
    owner = Path(place).parent
    if not (NAME.fullmatch(place) and owner.is_dir()):
        return "no such file or folder"
    use = f"for a model of the hub, give the folder that `hf download {place}` prints"
    return f"no such file or folder, and {owner} is a folder here ({use})"


def load(place: Path | str, mmap: bool = False) -> dict[str, Tensor]:
    """All weights of ``--weights`` on the CPU, by the names of the plain model."""
    path = locate(place)
    if not is_snapshot(place):
        return unwrap(load_file(path, "--weights", mmap), place)
    if shapes := shapes_of(place):
        weights = {name: torch.empty_like(t, device="cpu") for name, t in shapes.items()}
        read(place, weights)
        return weights
    with one_line_errors(place):
        if (path / "zero").is_dir():
            from libraries import deepspeed_engine  # which other files do not need

            return deepspeed_engine.read_weights(path)
        from parallel import local_sgd

        return local_sgd.read_weights(path)


def unwrap(state: dict, place: Path | str) -> dict[str, Tensor]:
    """The state dict in a checkpoint, without the prefixes of DDP, torch.compile and others."""
    done = []
    for name in INSIDE:
        if isinstance(state.get(name), dict):
            state = state[name]
            done.append(f"its entry {name}")
    if state and all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
        done.append("names without module.")
    if found := sorted({part for name in state for part in re.findall(WRAPPERS, name)}):
        state = {re.sub(WRAPPERS, "", name): tensor for name, tensor in state.items()}
        done.append(f"names without {', '.join(found)}")
    if done:
        say(f"--weights {place}: {', '.join(done)}")
    return state


# ------------------------------------------------------------------------------------- snapshots
@functools.cache
def read_state(place: Path | str) -> dict:
    """A snapshot's state, if it is intact. All ranks first call it together: each checks files."""
    path = locate(place)
    if (path / ".metadata").is_file():  # of pytorch_checkpoint.py, without checksums
        state = load_file(path / "run.pt", "--weights")
    else:
        found = gather_objects(find_damage(path, world().rank, world().size))
        if damage := next(filter(None, found), None):
            fail(f"--weights {place} is damaged: {damage}; give another snapshot")
        state = load_file(path / "state.pt", "--weights")
    if state.get("format") != FORMAT:
        fail(f"--weights {place} was written by an older version of the scripts; give a model.pt")
    say(f"--weights {place}: a snapshot of {state['technique']}.py at step {state['run']['step']}")
    return state


def reader_of(path: Path):
    if (path / ".metadata").is_file():
        return dcp.FileSystemReader(path)
    return dcp.HuggingFaceStorageReader(str(path / TENSORS))


def shapes_of(place: Path | str) -> dict[str, Tensor]:
    """Meta tensors of the weights in a snapshot of which :func:`read` reads shards. Empty for a
    file, and for a snapshot of DeepSpeed, or of Local SGD between two synchronizations."""
    path = locate(place)
    if not is_snapshot(place) or not any((path / n).exists() for n in (TENSORS, ".metadata")):
        return {}
    read_state(place)
    with one_line_errors(place):
        found = reader_of(path).read_metadata().state_dict_metadata
    found = {n.removeprefix("model."): t for n, t in found.items() if n.startswith("model.")}
    if found and all(".lora_" in name for name in found):
        fail(f"--weights {place}: a snapshot of {ADAPTERS}")
    with torch.device("meta"):
        return {n: torch.empty(t.size, dtype=t.properties.dtype) for n, t in found.items()}


def read(place: Path | str, tensors: dict[str, Tensor]) -> None:
    """Fill tensors by name from a snapshot: see :func:`read_shards`."""
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    read_shards(place, named, reader_of(locate(place)))


def read_shards(place: Path | str, tensors: dict[str, Tensor], reader, flag="--weights") -> None:
    """Fill tensors, or of DTensors this rank's shards, by a reader of DCP; the dtype may differ."""
    with warnings.catch_warnings(), one_line_errors(place, flag):
        warnings.simplefilter("ignore")  # DCP's: that each rank reads for itself
        dcp.load(tensors, storage_reader=reader, no_dist=True)


@contextlib.contextmanager
def one_line_errors(place: Path | str, flag="--weights", give="copy it again, or give another"):
    """Report an error of a library, for which damaged files have many types."""
    try:
        yield
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        fail(f"{flag} {place} cannot be read ({why}); {give}")
