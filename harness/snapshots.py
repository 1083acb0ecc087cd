"""Snapshots on disk: write them atomically, verify them, choose the one to resume from."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from harness import storage
from harness.cli import fail, fetch_input, fetch_together, reachable
from harness.settings import spelled
from harness.state import load_file, sync
from harness.storage import SUMS, StorageError, is_url, local_folder
from harness.world import Failed, gather_objects, launch_id, print0, together, world

FORMAT = 4  # of a snapshot: tensors as safetensors, and all else in state.pt
WEIGHTS = "model.pt", "model.safetensors", "config.json", "generation_config.json"
WEIGHTS += "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"  # of an earlier run
WEIGHTS += "adapter", "adapter_config.json", "adapter_model.safetensors"


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def list_files(folder: Path) -> list[str]:
    """The files in a folder, but for the list of checksums."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in paths if path.name != SUMS)


def find_damage(folder: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """What is wrong with this rank's share of a snapshot's files; ``None`` if they are intact."""
    try:
        *lines, end = (folder / SUMS).read_bytes().decode().split("\n")
        expected = {}
        for line in lines:
            digest, name = line.split("  ", 1)
            expected[name] = digest
        if end or not expected:
            raise ValueError("truncated")
        if differ := sorted(expected.keys() ^ set(list_files(folder))):
            return f"{differ[0]} is {'missing' if differ[0] in expected else 'not of it'}"
        for name in list(expected)[rank::ranks]:
            if sha256(folder / name) != expected[name]:
                return f"{name} is not what was written"
    except (OSError, ValueError) as error:  # ValueError: no such line, or no text
        return f"{SUMS} cannot be read ({type(error).__name__})"
    return None


def list_snapshots(folder: Path) -> list[Path]:
    """The snapshots in a folder, newest first, valid or not."""
    return sorted(folder.glob("step-*"), reverse=True)


def write_snapshot(folder: Path, write: Callable, kept: str = "") -> str | None:
    """Write a snapshot atomically, and delete all but the last two by name, and the one named
    ``kept``. All ranks call it, and write into a folder whose name begins with a dot, which is
    flushed to disk and then renamed. Returns why it could not be written, on all ranks; older
    snapshots still exist then."""
    part = folder.with_name(f".{folder.name}.part")
    rank = world().rank
    try:
        together(make_room, part, here=rank == 0)
        together(write, part)
        names, *others = together(list_files, part)
        if lost := {name for theirs in others for name in theirs} - set(names):
            raise Failed(f"{min(lost)} is on another machine; give an --output-dir that all share")
        # A rank on another machine does not see the files if only rank 0 has written any.
        readers = [0, *(r for r, theirs in enumerate(others, 1) if theirs == names)]
        share = names[readers.index(rank) :: len(readers)] if rank in readers else []
        sums = together(bring_to_disk, part, share)
        together(seal_and_rename, part, folder, sums, kept, here=rank == 0)
    except Failed as error:
        free = "unknown"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(folder.parent).free:,}"
        return f"{folder} could not be written ({error}; {free} bytes free); free some disk space"
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return None


def write_to_url(url: str, write: Callable, kept: str = "") -> str | None:
    """:func:`write_snapshot` to a URL, where nothing can be renamed. Each rank writes into a local
    folder of its own and copies its files. The list of checksums, copied last, makes a snapshot
    complete."""
    part = local_folder(url).parent / f".rank-{world().rank}" / ".new.part"
    try:
        together(make_room, part)
        together(write, part)
        everyone = together(list_files, part)
        folders = {name.rpartition("/")[0] for names in everyone for name in names}
        together(storage.remove, url, here=world().rank == 0)  # of an attempt that failed
        together(storage.make_folders, url, folders, here=world().rank == 0)
        sums = together(copy_files, part, url)
        together(seal_at_url, part, url, sums, kept, here=world().rank == 0)
    except Failed as error:
        use = "check the server" if url in str(error) else "free some disk space"
        return f"{url} could not be written ({error}); {use}"
    finally:
        shutil.rmtree(part.parent, ignore_errors=True)
    return None


@contextlib.contextmanager
def delivery(path: Path) -> Iterator[None]:
    """End the run if a result cannot be written; one that resumes at the end writes it again."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        newest = next(iter(list_snapshots(path.parent / "snapshots")), "see --output-dir")
        again = f"free some disk space, then give --resume auto (snapshot: {newest})"
        fail(f"{path} could not be written ({error}); {again}", code=3)


def make_room(part: Path) -> None:
    """Create the temporary folder of a new snapshot."""
    part.parent.mkdir(parents=True, exist_ok=True)
    for old in part.parent.glob(".*.part"):  # of a killed attempt
        shutil.rmtree(old)
    part.mkdir()


def bring_to_disk(part: Path, names: list[str]) -> dict[str, str]:
    """Flush this rank's files to disk, and return their checksums."""
    for name in names:
        sync(part / name)
    return {name: sha256(part / name) for name in names}


def write_sums(part: Path, sums: list[dict[str, str]]) -> None:
    """Write the list of the checksums of all ranks' files."""
    lines = sorted(f"{theirs[name]}  {name}\n" for theirs in sums for name in theirs)
    (part / SUMS).write_text("".join(lines))


def copy_files(part: Path, url: str) -> dict[str, str]:
    """Copy this rank's files to a URL, and return their checksums."""
    names = list_files(part)
    storage.upload(part, names, url)
    return {name: sha256(part / name) for name in names}


def seal_at_url(part: Path, url: str, sums: list[dict[str, str]], kept: str) -> None:
    """Copy the checksums, and delete all snapshots that are older than the last two complete ones,
    but this one and ``kept``."""
    write_sums(part, sums)
    storage.upload(part, [SUMS], url)
    folder, _, name = url.rpartition("/")
    with contextlib.suppress(StorageError):  # the new one exists in any case
        found = storage.list_snapshots(folder.removesuffix("/snapshots"))
        complete = [step for step, is_complete in found.items() if is_complete]
        for old in found:
            if sum(step > old for step in complete) >= 2 and old not in (name, kept):
                storage.remove(f"{folder}/{old}")


def seal_and_rename(part: Path, folder: Path, sums: list[dict[str, str]], kept: str) -> None:
    """Write the checksums, rename the snapshot, and delete all but the last two and ``kept``."""
    write_sums(part, sums)
    sync(part / SUMS)
    for place in {part, *((part / name).parent for theirs in sums for name in theirs)}:
        sync(place)
    if folder.exists():  # a damaged one, from which no run can resume
        shutil.rmtree(folder)
    os.replace(part, folder)
    sync(folder.parent)
    for old in list_snapshots(folder.parent)[2:]:
        if old.name != kept:
            shutil.rmtree(old, ignore_errors=True)  # the new one exists in any case


def read_snapshot(path: Path, launch: str | None, named: bool) -> dict | None:
    """The content of ``state.pt``, if the snapshot is valid, and of this launch, if one is given. A
    damaged one is reported; if ``--resume`` named it, there is no other and the run ends."""
    if not all(gather_objects(path.exists())):
        fail(f"{path} is not on every machine; give an --output-dir that all machines share")
    if (path / ".metadata").exists():
        fail(f"--resume {path} is DCP's own; use the script that wrote it, or --weights {path}")
    copied = {storage.RUNS, storage.DATA} & {*path.parents}  # each machine verifies its own copy
    ranks = world().local_size if copied else world().size
    found = gather_objects(find_damage(path, world().rank % ranks, ranks))
    damage = next(filter(None, found), None)
    if damage and named:
        fail(f"--resume {path} is damaged: {damage}; give another, or auto")
    state = {} if damage else load_file(path / "state.pt", "--resume")
    step = state.get("run", {}).get("step", 0)
    if not (damage or named) and path.name.split("-")[1] != f"{step:08}":
        damage = f"its content is from step {step}"  # all files of an older snapshot
    if damage:
        print0(f"snapshot {path} is damaged and ignored: {damage}")
    return None if damage or launch not in (None, state.get("launch")) else state


class SnapshotStore:
    """The snapshots of one run. All ranks call its methods. A snapshot and this run must have the
    same ``identity``: flags and data. The one named ``kept()``, if any, is not deleted."""

    def __init__(self, args, identity: dict, kept: Callable[[], str] = str):
        self.args = args
        self.output_dir = local_folder(args.output_dir)
        self.kept = kept
        self.folder = self.output_dir / "snapshots"
        self.about = {"format": FORMAT, "launch": launch_id(), "identity": identity}  # in state.pt
        self.resumed = None  # the path of the one that this run resumes from
        self.url = args.output_dir if is_url(args.output_dir) else None
        self.saved = None  # the path or URL of the one that this run wrote last

    def save(self, name: str, state: dict, writers: list[Callable]) -> tuple[str | None, ...]:
        """Write the snapshot of a step: ``state.pt``, and what the writers write into its folder.
        Returns its path or URL, if it was written, or the error with its fix."""

        def write_all(part: Path) -> None:
            for write in writers:  # they communicate: none begins if the one before has failed
                together(write, part)
            if world().rank == 0:
                torch.save(state, part / "state.pt")

        if self.url:
            place = f"{self.url}/snapshots/{name}"
            failure = write_to_url(place, write_all, self.kept())
        else:
            place = str(self.folder / name)
            failure = write_snapshot(self.folder / name, write_all, self.kept())
        self.saved = self.saved if failure else place
        return None if failure else place, failure

    def list_own(self) -> list[Path]:
        """Where the snapshots of this run are, newest first, or where :meth:`fetch` brings them.
        All ranks call it."""
        if not self.url:
            return list_snapshots(self.folder)
        names = together(storage.list_complete, self.url, here=world().rank == 0)
        return [self.folder / name for name in names[0]]

    def fetch(self, path: Path) -> None:
        """Copy a snapshot of this run from its URL to every machine, and delete the copies of
        other ones. All ranks call it, when none reads these."""
        if self.url and path.parent == self.folder:
            fetch_together(f"{self.url}/snapshots/{path.name}", path)
            for old in list_snapshots(self.folder):
                if old != path:
                    shutil.rmtree(old, ignore_errors=True)  # another rank also does this

    def has_ended(self) -> bool:
        """Whether this run had written its result."""
        if not self.url:
            return (self.output_dir / "result.json").exists()
        with storage.opened(f"{self.url}/result.json", "read") as (fs, path):
            return fs.exists(path)

    def copy_results(self) -> None:
        """Copy what rank 0's machine has written to the URL of a run."""
        if self.url:
            try:
                together(self.upload_results, here=world().rank == 0)
            except Failed as error:
                again = "give --resume auto to copy them"
                fail(f"{error}; all files are in {self.output_dir}; {again}", code=3)
            print0(f"files copied to {self.url}")

    def upload_results(self) -> None:
        """Copy all files but snapshots, ``result.json`` last: it says that the run has ended."""
        others = ("snapshots", "previous", "result.json")
        names = [name for name in list_files(self.output_dir) if name.split("/")[0] not in others]
        names = [name for name in names if not name.startswith(".")]  # .lock, or unfinished
        storage.upload(self.output_dir, names, self.url)
        storage.upload(self.output_dir, ["result.json"], self.url)

    def find_kept(self) -> Path | None:
        """The path of the snapshot ``kept()``, if all machines have it: own, or of the run that
        this one resumes. All ranks call it."""
        with contextlib.suppress(Failed):
            self.fetch(self.folder / self.kept())
        for folder in (self.folder, self.resumed and self.resumed.parent):
            if folder and all(gather_objects((folder / self.kept()).exists())):
                return folder / self.kept()
        return None

    def newest(self) -> Path | str | None:
        """The snapshot that this run wrote last, or else resumes from."""
        return self.saved or next(iter(list_snapshots(self.folder)), self.resumed)

    def asked_for(self) -> list[tuple[Path, None, bool]]:
        """What ``--resume`` selects, best first, as arguments of :func:`read_snapshot`. All ranks
        call it."""
        asked = self.args.resume
        if asked == "none":
            return []
        if asked in ("auto", self.url):
            return [(path, None, False) for path in self.list_own()]
        folder, _, name = asked.rpartition("/")
        if self.url and folder == f"{self.url}/snapshots":  # as :meth:`newest` names it
            return [(self.folder / name, None, True)]
        folder = fetch_input(asked, "--resume")
        if (self.output_dir / "previous").resolve() in folder.resolve().parents:
            fail(f"--resume {folder}: a new run replaces previous/; move it away first")
        if any((folder / name).exists() for name in ("state.pt", SUMS, ".metadata")):
            return [(folder, None, True)]
        if (folder / "snapshots").is_dir():
            folder = folder / "snapshots"
        return [(path, None, False) for path in list_snapshots(folder)]

    @reachable("--output-dir")
    def find(self) -> dict | None:
        """The content of ``state.pt`` of the snapshot to resume from, identical on every rank, or
        ``None``; its path is :attr:`resumed`. A run that its launcher has restarted uses its own
        snapshot, if it has written one; any other uses ``--resume``."""
        asked = self.args.resume
        restarted = any(gather_objects(world().restarts))  # each machine counts its own
        own = self.list_own() if restarted else []
        candidates = [(path, launch_id(), False) for path in own]
        candidates += self.asked_for()  # may be deleted by the time of a restart
        for candidate in gather_objects(candidates)[0]:  # as rank 0 sees them, best first
            self.fetch(candidate[0])
            if snapshot := read_snapshot(*candidate):
                return self.check(candidate[0], snapshot)
        if asked not in ("auto", "none"):
            fail(f"--resume {asked} has no valid snapshot; give a step-N (--weights for model.pt)")
        return None

    def check(self, path: Path, snapshot: dict) -> dict:
        """End the run if it cannot resume from the snapshot at ``path``; return it otherwise."""
        self.resumed = path
        if snapshot.get("format") != FORMAT:
            fail(f"--resume {path} was written by an older version; resume with that, or give none")
        for name, ours in self.about["identity"].items():
            theirs = snapshot["identity"].get(name)
            is_flag = hasattr(self.args, name)
            if theirs != ours:
                what = spelled(name) if is_flag else f"data with {name.replace('_', ' ')}"
                if isinstance(ours, list):  # only what differs of classes or a vocabulary
                    only_theirs = sorted({*theirs} - {*ours})
                    only_ours = sorted({*ours} - {*theirs})
                    theirs = only_theirs[:5]
                    ours = only_ours[:5]
                both = f"{what} {theirs}, and this run has {ours}"
                fail(f"--resume {path} is from a run with {both}; use the same, or --resume none")
        return snapshot

    @reachable("--output-dir")
    def archive_previous_run(self) -> None:
        """Move the files of an earlier run in this folder to ``previous/``. A run at a URL is never
        replaced by another one; if it resumes, snapshots that are newer than the resumed one are
        deleted, because they are damaged. Rank 0 does this."""
        own = self.resumes_itself()
        if self.url and not own and (storage.list_complete(self.url) or self.has_ended()):
            fail(f"--output-dir {self.url} has a run; use --resume auto or another URL")
        self.archive_local_files()
        if self.url:
            found = storage.list_snapshots(self.url)  # if not own, none is complete
            newer = [name for name in found if not own or name > self.resumed.name]
            is_named = own and str(self.args.resume).endswith(f"/{self.resumed.name}")
            if is_named and any(found[name] for name in newer):
                why = f"{self.url} also has the newer snapshot {newer[0]}"
                fail(f"--resume {self.args.resume}: {why}; give another --output-dir, or auto")
            for name in newer:
                print0(f"deleting {self.url}/snapshots/{name}: it is incomplete or damaged")
                storage.remove(f"{self.url}/snapshots/{name}")
            storage.remove(f"{self.url}/result.json")  # it comes back when this run ends

    def resumes_itself(self) -> bool:
        """Whether the run resumes from a snapshot in its own folder."""
        return bool(self.resumed) and self.resumed.resolve().parent == self.folder.resolve()

    def archive_local_files(self) -> None:
        """Move the files of an earlier run to ``previous/``, and delete its curves and traces. If
        the run resumes, move only snapshots that are damaged or newer than the resumed one."""
        result = self.output_dir / "result.json"
        if self.resumes_itself():
            aside = [path for path in list_snapshots(self.folder) if path.name > self.resumed.name]
            result.unlink(missing_ok=True)  # it comes back when this run ends
        else:
            aside = [result, *(self.output_dir / name for name in WEIGHTS)]
            aside += [self.folder] if list_snapshots(self.folder) else []
            for old in ("events.out.tfevents.*", "trace/rank*.json.gz"):
                for path in self.output_dir.glob(old):
                    path.unlink()
        for path in filter(Path.exists, aside):
            place = self.output_dir / "previous" / path.relative_to(self.output_dir)
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.is_dir():
                shutil.rmtree(place)
            os.replace(path, place)
