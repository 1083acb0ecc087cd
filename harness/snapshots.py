"""Snapshots on disk: write them atomically, verify them, choose the one to resume from."""

import argparse
import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from harness.cli import fail
from harness.files import load_file, sync
from harness.measure import count_bytes
from harness.world import (
    Failed,
    gather_objects,
    launch_id,
    max_over_ranks,
    print0,
    this_script,
    together,
    world,
)
from remote.storage import fetch_input, local_folder

SUMS = "SHA256SUMS"  # what `sha256sum --check SHA256SUMS` reads, in the folder of a snapshot


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def list_files(folder: Path) -> list[str]:
    """The files of a snapshot, from its list of checksums."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in paths if path.name != SUMS)


def find_damage(folder: Path) -> str | None:
    """What is wrong with a snapshot's files; ``None`` if they are intact."""
    try:
        *lines, end = (folder / SUMS).read_bytes().decode().split("\n")
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
        if end or not expected:
            raise ValueError("truncated")
        if differ := sorted(expected.keys() ^ set(list_files(folder))):
            return f"{differ[0]} is {'missing' if differ[0] in expected else 'not of it'}"
        for name, digest in expected.items():
            if sha256(folder / name) != digest:
                return f"{name} is not what was written"
    except (OSError, ValueError) as error:  # ValueError: no such line, or no text
        return f"{SUMS} cannot be read ({type(error).__name__})"
    return None


def list_snapshots(folder: Path) -> list[Path]:
    """The snapshots in a folder, newest first, valid or not."""
    return sorted(folder.glob("step-*"), reverse=True)


def write_snapshot(folder: Path, write: Callable[[Path], None], needed: int) -> str | None:
    """Write a snapshot atomically, and delete all but the last two.

    It is written under a name that begins with a dot, flushed to disk, and then renamed. All ranks
    call this.

    Args:
        folder: ``.../step-*``; the last two by name are kept.
        write: writes the files into the given folder; all ranks call it.
        needed: bytes that all ranks will write, to check the free space first.

    Returns:
        ``None``, or why it could not be written, on all ranks. Older snapshots still exist then.
    """
    part = folder.with_name(f".{folder.name}.part")
    try:
        together(make_room, part, needed, here=world().rank == 0)
        together(write, part)
        [names, *_] = together(list_files, part, here=world().rank == 0)
        sums = together(bring_to_disk, part, names[world().rank :: world().size])
        together(seal_and_rename, part, folder, sums, here=world().rank == 0)
    except Failed as error:
        free = "unknown"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(folder.parent).free:,}"
        if world().rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        return f"{folder} could not be written ({error}; {needed:,} bytes needed, {free} free)"
    return None


def make_room(part: Path, needed: int) -> None:
    """Create the temporary folder of a new snapshot, if there is enough space."""
    part.parent.mkdir(parents=True, exist_ok=True)
    for old in part.parent.glob(".*.part"):  # of a killed attempt
        shutil.rmtree(old)
    if shutil.disk_usage(part.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    part.mkdir()


def bring_to_disk(part: Path, names: list[str]) -> dict[str, str]:
    """Flush this rank's files to disk, and return their checksums."""
    for name in names:
        sync(part / name)
    return {name: sha256(part / name) for name in names}


def seal_and_rename(part: Path, folder: Path, sums: list[dict[str, str]]) -> None:
    """Write the checksums, rename the snapshot, and delete all but the last two."""
    lines = sorted(f"{theirs[name]}  {name}\n" for theirs in sums for name in theirs)
    (part / SUMS).write_text("".join(lines))
    sync(part / SUMS)
    sync(part)
    if folder.exists():  # a damaged one, from which no run can resume
        shutil.rmtree(folder)
    os.replace(part, folder)
    sync(folder.parent)
    for old in list_snapshots(folder.parent)[2:]:
        shutil.rmtree(old, ignore_errors=True)  # the new one exists in any case


# --------------------------------------------------------------------------- snapshots of one run


class SnapshotStore:
    """The snapshots of one run: where they are, and which one to resume from. All ranks call its
    methods.

    Args:
        identity: flags and values that must be the same in a snapshot and in this run.
    """

    def __init__(self, args: argparse.Namespace, identity: dict):
        self.args, self.output_dir = args, local_folder(args.output_dir)
        self.folder = self.output_dir / "snapshots"
        self.about = {"technique": this_script(), "launch": launch_id(), "job": identity}
        self.resumed = None  # the path of the one that this run resumes from

    def save(
        self, name: str, parts: dict, write_files: Callable | None = None, size: int = 0
    ) -> tuple[str | None, str | None]:
        """Write the snapshot of a step.

        Args:
            parts: entries of ``state.pt``, by name: plain data, or objects with a
                ``state_dict()``.
            write_files: see :meth:`Run.write_snapshot`.
            size: bytes of these files, over all ranks.

        Returns:
            the snapshot's path for ``--resume``, if it was written; and the error with its fix, if
            there was one.
        """
        folder, state = self.folder / name, dict(self.about)
        if world().rank == 0:
            for part, value in parts.items():
                state[part] = value.state_dict() if hasattr(value, "state_dict") else value
            size += count_bytes(t for t in tree_leaves(state) if torch.is_tensor(t))

        def write_all(part: Path) -> None:
            if write_files:  # first: if it communicates, all ranks must call it
                write_files(part)
            if world().rank == 0:
                torch.save(state, part / "state.pt")

        if failure := write_snapshot(folder, write_all, size):
            return None, f"{failure}; free some disk space"
        if failure := self.copy_snapshot(folder):
            return str(folder), f"{failure}; check the server"
        return self.name_of(folder), None

    # What these four do for remote storage is in mirror.py:

    def fetch(self) -> None:
        """Download a remote snapshot to every machine. All ranks call it."""

    def copy_snapshot(self, folder: Path) -> str | None:
        """Upload the last snapshot. Returns an error, on all ranks; all ranks call it."""

    def copy_results(self) -> None:
        """Upload all results of a run. All ranks call it."""

    def name_of(self, path: Path) -> str:
        """The path or URL by which a later run finds a snapshot."""
        return str(path)

    def newest(self) -> Path | None:
        """The snapshot that this run wrote last, or else resumes from."""
        return next(iter(list_snapshots(self.folder)), self.resumed)

    def has_result(self) -> bool:
        """Whether a run has finished in this folder. All ranks call it."""
        found = world().rank == 0 and (self.output_dir / "result.json").exists()
        return max_over_ranks([found])[0] > 0

    def find(self, needed: str) -> dict | None:
        """The content of ``state.pt`` of the snapshot to resume from, identical on every rank; its
        path is :attr:`resumed`. ``None`` if the run starts from scratch.

        Args:
            needed: an entry that the snapshots of this script contain.
        """
        fetch_input(self.args.resume, "--resume")  # by all ranks; below it is already local
        restarted = max_over_ranks([world().restarts])[0] > 0  # each machine counts its own
        if restarted or self.args.resume == "auto":
            self.fetch()
        [self.resumed, *_] = gather_objects(self.choose(restarted) if world().rank == 0 else None)
        if self.resumed is None:
            return None
        if not self.resumed.exists():
            fail(
                f"{self.resumed} is not on this machine; give an --output-dir that all machines "
                "share"
            )
        snapshot = load_file(self.resumed / "state.pt", "--resume")
        self.check(snapshot, needed)
        return snapshot

    def check(self, snapshot: dict, needed: str) -> None:
        """End the run if it cannot resume from a snapshot."""
        if "job" not in snapshot:
            fail(
                f"--resume {self.resumed} has no snapshot of this version of the scripts; give "
                "another"
            )
        for name, ours in self.about["job"].items():
            theirs = snapshot["job"].get(name)
            if theirs != ours:
                flag = f"--{name.replace('_', '-')}"
                fail(
                    f"--resume {self.resumed} is from a run with {flag} {theirs}, and this run has "
                    f"{ours}; use the same value, or --resume none"
                )
        if needed not in snapshot:
            fail(
                f"--resume {self.resumed} was written by {snapshot['technique']}.py in a format "
                f"that {this_script()}.py cannot read; use one of its own, or --weights with a "
                "model.pt"
            )

    def choose(self, restarted: bool) -> Path | None:
        """The snapshot to resume from. A run that its launcher has restarted uses its own snapshot,
        if it has written one; any other run uses ``--resume``."""
        own = self.good_ones(self.folder, launch_id()) if restarted else iter(())
        return next(own, None) or self.asked_for()

    def asked_for(self) -> Path | None:
        """The snapshot that ``--resume`` selects. It may name one, or a folder with several."""
        asked, folder = self.args.resume, self.folder
        if asked == "none":
            return None
        if asked != "auto":
            folder = fetch_input(asked, "--resume")
            if not folder.exists():
                fail(f"--resume {folder}: no such folder; give auto, none or a snapshot's folder")
            if (self.output_dir / "previous").resolve() in folder.resolve().parents:
                fail(f"--resume {folder}: a new run replaces previous/; move it away first")
            if (folder / "state.pt").exists() or (folder / SUMS).exists():
                if damage := find_damage(folder):
                    fail(f"--resume {folder} is damaged: {damage}; give another, or auto")
                return folder
            if (folder / "snapshots").is_dir():
                folder = folder / "snapshots"
        found = next(self.good_ones(folder), None)
        if found is None and asked != "auto":
            fail(
                f"--resume {asked} has no valid snapshot; give a folder such as "
                "snapshots/step-00001000 (a model.pt goes to --weights)"
            )
        return found

    def good_ones(self, folder: Path, launch: str | None = None) -> Iterator[Path]:
        """The valid snapshots, newest first; damaged ones are reported.

        Args:
            launch: only those that this launch wrote.
        """
        for path in list_snapshots(folder):
            if damage := find_damage(path):
                print0(f"snapshot {path} is damaged and ignored: {damage}")
                continue
            state = load_file(path / "state.pt", "--resume")
            step = state.get("run", {}).get("step", 0)
            if path.name.split("-")[1] != f"{step:08}":  # all files of an older snapshot
                print0(f"snapshot {path} is damaged and ignored: its content is from step {step}")
            elif launch in (None, state.get("launch")):
                yield path

    def archive_previous_run(self) -> None:
        """Move the files of an earlier run in this folder to ``previous/``, and delete its curves
        and traces. If the run resumes, move only snapshots that are damaged or newer than the
        resumed one. Rank 0 does this."""
        output_dir, resumed = self.output_dir, self.resumed
        aside = [output_dir / "model.pt", output_dir / "result.json", self.folder]
        if resumed and resumed.resolve().parent == self.folder.resolve():
            aside = [path for path in list_snapshots(self.folder) if path.name > resumed.name]
            (output_dir / "result.json").unlink(missing_ok=True)  # it comes back when this run ends
        else:
            for events in output_dir.glob("events.out.tfevents.*"):
                events.unlink()
            for trace in output_dir.glob("trace/rank*.json.gz"):
                trace.unlink()
            if not list_snapshots(self.folder):  # an attempt that wrote none
                shutil.rmtree(self.folder, ignore_errors=True)
        for path in aside:
            if path.exists():
                place = output_dir / "previous" / path.relative_to(output_dir)
                place.parent.mkdir(parents=True, exist_ok=True)
                if place.is_dir():
                    shutil.rmtree(place)
                os.replace(path, place)
