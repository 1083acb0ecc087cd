"""Snapshots in remote storage: ``--output-dir`` as a URL.

Everything is written to a local folder first and uploaded from there: a snapshot once it is
complete and verified, with its list of checksums last. Without this list the upload is incomplete.
A URL holds one run. A file ``run_id`` tells whether the local files belong to it.
"""

import argparse
import os
import shutil
import uuid

from harness.cli import fail
from harness.snapshots import SUMS, SnapshotStore, find_damage, list_files, list_snapshots
from harness.world import Failed, is_first_here, print0, together, world
from remote.storage import Remote, RemoteError, is_url, or_fail

RUN_ID, RESULT = "run_id", "result.json"


def open_snapshots(args: argparse.Namespace, identity: dict) -> SnapshotStore:
    """The snapshots of a run, in a local folder or in remote storage."""
    return (RemoteStore if is_url(args.output_dir) else SnapshotStore)(args, identity)


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


class RemoteStore(SnapshotStore):
    """Snapshots that are also in remote storage."""

    def __init__(self, args: argparse.Namespace, identity: dict):
        super().__init__(args, identity)
        self.remote, self.id_file = Remote(args.output_dir), self.output_dir / RUN_ID
        self.behind = []  # names of local snapshots that are not uploaded yet

    def name_of(self, path) -> str:
        own = path.parent == self.folder
        return f"{self.remote.url}/snapshots/{path.name}" if own else super().name_of(path)

    # -------------------------------------------------------------------------- what is resumed

    def fetch(self) -> None:
        try:
            together(self.fetch_own, here=is_first_here())
        except Failed as error:
            fail(f"--output-dir {error}; try again, or give another URL")

    def fetch_own(self) -> None:
        """Download the newest valid snapshot of this run, and the file that tells whether the run
        had ended. Local files of another run are moved aside."""
        files, run_id = self.remote.list_files(), self.remote.read(RUN_ID)
        if run_id and not (self.id_file.exists() and self.id_file.read_bytes() == run_id):
            if list_snapshots(self.folder):
                print0(f"{self.output_dir} belongs to another run and moves to previous/")
            super().archive_previous_run()
            self.id_file.write_bytes(run_id)
        there, here = by_snapshot(files), [path.name for path in list_snapshots(self.folder)]
        newest = max(complete(there), default="")
        self.behind = [name for name in here if name > newest]
        for name, theirs in there.items():
            damage = self.fetch_snapshot(name, theirs)
            if not damage:
                break
            url = self.name_of(self.folder / name)
            print0(f"snapshot {url} is damaged and ignored: {damage}")
        if newest > max(here, default=""):  # resumed on another machine: the local result is old
            for name in ("model.pt", RESULT):
                (self.output_dir / name).unlink(missing_ok=True)
            if RESULT in files:
                self.remote.download({RESULT: files[RESULT]}, self.output_dir)

    def fetch_snapshot(self, name: str, files: dict[str, int]) -> str | None:
        """Download a snapshot unless it exists locally. Returns what is wrong with it."""
        here, sums = self.folder / name, f"snapshots/{name}/{SUMS}"
        if sums not in files:
            return f"{SUMS} is missing, so it was not copied to its end"
        if not find_damage(here) and (here / SUMS).read_bytes() == self.remote.read(sums):
            return None
        part = self.output_dir / ".part"
        shutil.rmtree(part, ignore_errors=True)
        self.remote.download(files, part)
        if not (damage := find_damage(part / "snapshots" / name)):
            shutil.rmtree(here, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)
            os.replace(part / "snapshots" / name, here)
        shutil.rmtree(part)
        return damage

    # -------------------------------------------------------------------------- what is copied

    def archive_previous_run(self) -> None:
        """Archive the local files. A remote run is never replaced by another one; if the run
        resumes, remote snapshots newer than the resumed one, and the result, are removed."""
        own = self.resumed and self.resumed.resolve().parent == self.folder.resolve()
        with or_fail("try again, or give another URL"):
            there = by_snapshot(files := self.remote.list_files())
            if not own and (there or RESULT in files):
                fail(
                    f"--output-dir {self.remote.url} contains a run; resume it with --resume auto, "
                    "or give another"
                )
            super().archive_previous_run()
            if own:
                for name in (name for name in there if name > self.resumed.name):
                    self.remote.remove(f"snapshots/{name}")
                self.remote.remove(RESULT)  # uploaded again when this run ends
            if not own or not self.id_file.exists():
                self.id_file.write_text(uuid.uuid4().hex)
            self.remote.upload(self.output_dir, [RUN_ID])

    def copy_snapshot(self, folder) -> str | None:
        self.behind.append(folder.name)
        try:
            together(self.upload_snapshots, here=world().rank == 0)
        except Failed as error:
            return f"{error}; the snapshot is kept in {folder}"
        return None

    def upload_snapshots(self) -> None:
        """Upload snapshots that are still missing and exist locally; keep the last two there."""
        for name in sorted(self.behind):
            if (self.folder / name).exists():
                place = f"snapshots/{name}"
                self.remote.remove(place)  # of a failed attempt
                names = [f"{place}/{file}" for file in list_files(self.folder / name)]
                self.remote.upload(self.output_dir, names)
                arrived = self.remote.list_files(place)
                for file in names:  # not every protocol reports a truncated copy
                    if arrived.get(file) != (self.output_dir / file).stat().st_size:
                        raise RemoteError(f"{self.remote.url}/{file} was uploaded incompletely")
                self.remote.upload(self.output_dir, [f"{place}/{SUMS}"])
            self.behind.remove(name)
        there = by_snapshot(self.remote.list_files())
        for name in there:
            if name < min(complete(there)[:2], default=""):
                self.remote.remove(f"snapshots/{name}")

    def copy_results(self) -> None:
        try:
            together(self.upload_results, here=world().rank == 0)
        except Failed as error:
            fail(
                f"{error}; all files are in {self.output_dir}; to upload them, run the same "
                "command again with --resume auto",
                code=3,
            )
        print0(f"files copied to {self.remote.url}")

    def upload_results(self) -> None:
        """Upload all other files of the run; the result last, as it marks the end of the run."""
        others = ("snapshots", "previous", RUN_ID, RESULT)
        names = [n for n in list_files(self.output_dir) if n.split("/")[0] not in others]
        missing = ", ".join([*self.behind, *names, RESULT])
        try:
            self.upload_snapshots()
            self.remote.upload(self.output_dir, names)
            self.remote.upload(self.output_dir, [RESULT])
        except RemoteError as error:
            raise RemoteError(f"{error}; not copied: {missing}") from error
