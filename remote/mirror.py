"""The copy of a run in remote storage: ``--output-dir`` as a URL.

Everything is written to a local folder first and uploaded from there: a snapshot once it is
complete and verified, with its list of checksums last. Without this list the upload is incomplete.
A URL holds one run. A file ``run_id`` tells whether the local files belong to it.
"""

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from remote.storage import SUMS, Remote, RemoteError, list_files

RUN_ID, RESULT = "run_id", "result.json"


def by_snapshot(files: dict[str, int]) -> dict[str, dict[str, int]]:
    """Group the files of a run by snapshot, newest first."""
    found = {}
    for path, size in files.items():
        if path.startswith("snapshots/step-"):
            found.setdefault(path.split("/")[1], {})[path] = size
    return dict(sorted(found.items(), reverse=True))


def complete(files: dict[str, dict[str, int]]) -> list[str]:
    """Names of complete snapshots, newest first."""
    return [name for name in files if f"snapshots/{name}/{SUMS}" in files[name]]


class Mirror:
    """The copy of one run. One process per machine pulls, and one of the run pushes.

    Every method raises :class:`RemoteError` if the server cannot be used.

    Args:
        folder: the local files of the run.
        find_damage: what is wrong with a snapshot in a local folder; ``None`` if it is intact.
        say: prints a line.
    """

    def __init__(self, url: str, folder: Path, find_damage: Callable, say: Callable = print):
        self.remote, self.folder, self.find_damage, self.say = Remote(url), folder, find_damage, say
        self.snapshots, self.id_file = folder / "snapshots", folder / RUN_ID
        self.behind = []  # names of local snapshots that are not uploaded yet

    def url_of(self, name: str) -> str:
        return f"{self.remote.url}/snapshots/{name}"

    def pull(self, archive: Callable[[], None]) -> None:
        """Download the newest valid snapshot of this run, and the file that tells whether the run
        had ended. If the local files are of another run, ``archive`` moves them aside."""
        here = sorted(path.name for path in self.snapshots.glob("step-*"))
        files, run_id = self.remote.list_files(), self.remote.read(RUN_ID)
        if run_id and not (self.id_file.exists() and self.id_file.read_bytes() == run_id):
            if here:
                self.say(f"{self.folder} belongs to another run and moves to previous/")
            archive()
            self.id_file.write_bytes(run_id)
            here = []
        there = by_snapshot(files)
        newest = max(complete(there), default="")
        self.behind = [name for name in here if name > newest]
        for name in there:
            damage = self.pull_snapshot(name)
            if not damage:
                break
            self.say(f"snapshot {self.url_of(name)} is damaged and ignored: {damage}")
        if newest > max(here, default=""):  # resumed on another machine: the local result is old
            for name in ("model.pt", RESULT):
                (self.folder / name).unlink(missing_ok=True)
            if RESULT in files:
                self.remote.download({RESULT: files[RESULT]}, self.folder)

    def pull_snapshot(self, name: str) -> str | None:
        """Download a snapshot unless it exists locally. Returns what is wrong with it."""
        here, sums = self.snapshots / name, f"snapshots/{name}/{SUMS}"
        files = self.remote.list_files(f"snapshots/{name}")
        if sums not in files:
            return f"{SUMS} is missing, so it was not copied to its end"
        if not self.find_damage(here) and (here / SUMS).read_bytes() == self.remote.read(sums):
            return None
        part = self.folder / ".part"
        shutil.rmtree(part, ignore_errors=True)
        self.remote.download(files, part)
        if not (damage := self.find_damage(part / "snapshots" / name)):
            shutil.rmtree(here, ignore_errors=True)
            self.snapshots.mkdir(exist_ok=True)
            os.replace(part / "snapshots" / name, here)
        shutil.rmtree(part)
        return damage

    def is_used(self) -> bool:
        """Whether the URL contains a run."""
        files = self.remote.list_files()
        return bool(by_snapshot(files)) or RESULT in files

    def begin(self, resumed: str | None) -> None:
        """Give the run an identity, or remove what is newer than the snapshot from which it
        resumes (``None``: it starts from scratch), and its result. The local files of an earlier
        run must be archived by now."""
        if resumed:
            for name in by_snapshot(self.remote.list_files()):
                if name > resumed:
                    self.remote.remove(f"snapshots/{name}")
            self.remote.remove(RESULT)  # uploaded again when this run ends
        if not resumed or not self.id_file.exists():
            self.id_file.write_text(uuid.uuid4().hex)
        self.remote.upload(self.folder, [RUN_ID])

    def push(self, kept: str) -> None:
        """Upload snapshots that are still missing and exist locally; keep the last two there, and
        the one named ``kept``."""
        for name in sorted(self.behind):
            if (self.snapshots / name).exists():
                place = f"snapshots/{name}"
                self.remote.remove(place)  # of a failed attempt
                names = [f"{place}/{file}" for file in list_files(self.snapshots / name)]
                self.remote.upload(self.folder, names)
                arrived = self.remote.list_files(place)
                for file in names:  # not every protocol reports a truncated copy
                    if arrived.get(file) != (self.folder / file).stat().st_size:
                        raise RemoteError(f"{self.remote.url}/{file} was uploaded incompletely")
                self.remote.upload(self.folder, [f"{place}/{SUMS}"])
            self.behind.remove(name)
        there = by_snapshot(self.remote.list_files())
        for name in there:
            if name < min(complete(there)[:2], default="") and name != kept:
                self.remote.remove(f"snapshots/{name}")

    def push_results(self, kept: str) -> None:
        """Upload all other files of the run; the result last, as it marks the end of the run."""
        others = ("snapshots", "previous", RUN_ID, RESULT)
        names = [name for name in list_files(self.folder) if name.split("/")[0] not in others]
        names = [name for name in names if not name.startswith(".")]  # .lock, or unfinished
        missing = ", ".join([*self.behind, *names, RESULT])
        try:
            self.push(kept)
            self.remote.upload(self.folder, names)
            self.remote.upload(self.folder, [RESULT])
        except RemoteError as error:
            raise RemoteError(f"{error}; not copied: {missing}") from error
