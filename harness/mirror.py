"""Snapshots in remote storage: ``--output-dir`` as a URL.

All is written to a folder here first, and copied from there: a snapshot when it is whole and
verified, with its list of checksums last. What has no such list was not copied to its end.
A file ``run_id`` on both sides tells whether both are of the same run.
"""

import argparse
import os
import shutil
import uuid
from pathlib import Path

from harness.command_line import fail
from harness.ranks import RANK, gather_objects, is_first_here, print0
from harness.remote import Remote, RemoteError, failure_of, is_url, or_fail
from harness.snapshots import SUMS, SnapshotStore, find_damage, list_files, list_snapshots

RUN_ID = "run_id"


def open_snapshots(args: argparse.Namespace, identity: dict) -> SnapshotStore:
    """The snapshots of a run, local or remote."""
    return (RemoteStore if is_url(args.output_dir) else SnapshotStore)(args, identity)


def by_snapshot(sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    """Of the files in a folder, those of each snapshot; newest first."""
    found = {}
    for path, size in sizes.items():
        name, _, file = path.partition("/")
        if file and name.startswith("step-"):
            found.setdefault(name, {})[file] = size
    return dict(sorted(found.items(), reverse=True))


def fetch_snapshot(url: str, sizes: dict[str, int], here: Path) -> str | None:
    """Download a snapshot, unless the same is here already.

    Args:
        sizes: of its files.

    Returns:
        ``None``, or what is wrong with it.
    """
    if SUMS not in sizes:
        return f"{SUMS} is missing, so it was not copied to its end"
    remote, part = Remote(url), here.with_name(f".{here.name}.part")
    if not find_damage(here) and (here / SUMS).read_bytes() == remote.read(SUMS):
        return None
    shutil.rmtree(part, ignore_errors=True)
    remote.download(sizes, part)
    damage = find_damage(part)
    if damage:
        shutil.rmtree(part)
    else:
        shutil.rmtree(here, ignore_errors=True)
        os.replace(part, here)
    return damage


def fetch_newest(remote: Remote, sizes: dict[str, int], folder: Path) -> Path | None:
    """Download the newest good one; others are named and left out."""
    for name, theirs in by_snapshot(sizes).items():
        damage = fetch_snapshot(f"{remote.url}/{name}", theirs, folder / name)
        if not damage:
            return folder / name
        print0(f"snapshot {remote.url}/{name} is damaged and left out: {damage}")


class RemoteStore(SnapshotStore):
    """Snapshots that are in remote storage as well."""

    def __init__(self, args: argparse.Namespace, identity: dict):
        super().__init__(args, identity)
        self.remote, self.snapshots = (
            Remote(args.output_dir),
            Remote(f"{args.output_dir}/snapshots"),
        )
        self.behind = []  # names of snapshots that are here and are not yet there

    def name_of(self, path: Path) -> str:
        own = path.parent == self.folder
        return f"{self.snapshots.url}/{path.name}" if own else super().name_of(path)

    # -------------------------------------------------------------------------- what is resumed

    def choose(self, restarted: bool) -> Path | None:
        if restarted or self.args.resume == "auto":
            self.fetch_own()
        return super().choose(restarted)

    def own_id(self) -> bytes | None:
        path = self.output_dir / RUN_ID
        return path.read_bytes() if path.exists() else None

    def fetch_own(self) -> None:
        """Bring the newest good snapshot of this run here, and what tells whether the run had
        ended. What another run has left here is put aside."""
        with or_fail("--output-dir", "try again, or give another"):
            sizes, run_id = self.snapshots.list_files(), self.remote.read(RUN_ID)
            if run_id != self.own_id() and (run_id or sizes):
                if list_snapshots(self.folder):
                    print0(f"{self.output_dir} is of another run and moves to previous/")
                super().archive_previous_run()
                (self.output_dir / RUN_ID).unlink(missing_ok=True)  # theirs comes instead
            here = [path.name for path in list_snapshots(self.folder)]
            newest = next((n for n, files in by_snapshot(sizes).items() if SUMS in files), "")
            self.behind = [name for name in here if name > newest]
            if newest > max(here, default=""):  # it went on elsewhere: what has ended here is old
                (self.output_dir / "result.json").unlink(missing_ok=True)
                (self.output_dir / "model.pt").unlink(missing_ok=True)
            fetch_newest(self.snapshots, sizes, self.folder)
            for name in (RUN_ID, "result.json"):
                content = self.remote.read(name)
                if content and not (self.output_dir / name).exists():
                    (self.output_dir / name).write_bytes(content)

    def bring(self, path: Path) -> None:
        """To each further machine, the snapshot that rank 0 has chosen. All ranks call it."""
        if path.parent != self.folder:
            return
        url = self.name_of(path)
        own = (path / SUMS).read_bytes() if (path / SUMS).exists() else None
        chosen = gather_objects(own)[0]

        def download():
            if damage := fetch_snapshot(url, Remote(url).list_files(), path):
                raise RemoteError(f"{url} is damaged: {damage}")

        # One of that name may be of an earlier run.
        missing = is_first_here() and (own is None or own != chosen or find_damage(path))
        if failure := failure_of(download if missing else None):
            fail(f"--resume {failure}; give another, or none")

    # -------------------------------------------------------------------------- what is copied

    def archive_previous_run(self) -> None:
        """The same there as here. A run that begins has a new ``run_id``."""
        super().archive_previous_run()
        own = self.resumed and self.resumed.resolve().parent == self.folder.resolve()
        with or_fail("--output-dir", "try again, or give another"):
            files = [n for n in self.remote.list_files() if not n.startswith("previous/")]
            if own:
                files = [n for n in files if n.startswith("snapshots/")]
                files = [n for n in files if n.split("/")[1] > self.resumed.name]
            for what in {"/".join(name.split("/")[: 2 if own else 1]) for name in files}:
                self.remote.remove(f"previous/{what}")
            for name in sorted(files):  # SHA256SUMS before state.pt: what is half moved has none
                self.remote.move(name, f"previous/{name}")
            if own:
                self.remote.remove("result.json")  # it comes back when this run ends
            else:
                (self.output_dir / RUN_ID).unlink(missing_ok=True)
            if self.own_id() is None:
                (self.output_dir / RUN_ID).write_text(uuid.uuid4().hex + "\n")
            self.remote.upload(self.output_dir, [RUN_ID])

    def copy_snapshot(self, folder: Path) -> str | None:
        self.behind.append(folder.name)
        failure = failure_of(self.upload_snapshots if RANK == 0 else None)
        return f"{failure}; the snapshot is kept in {folder}" if failure else None

    def upload_snapshots(self) -> None:
        """Copy those that are behind, as long as they are here, and keep the last two there."""
        for name in sorted(self.behind):
            here = self.folder / name
            if here.exists():
                if self.snapshots.list_files(name):  # of an attempt that came to nothing
                    self.snapshots.remove(f"{name}/{SUMS}")
                    self.snapshots.remove(name)
                files = list_files(here)
                self.snapshots.upload(here, files, name)
                arrived = self.snapshots.list_files(name)
                for file in files:
                    if arrived.get(file) != (here / file).stat().st_size:
                        raise RemoteError(f"{self.snapshots.url}/{name} lacks some of {file}")
                self.snapshots.upload(here, [SUMS], name)
            self.behind.remove(name)
        there = by_snapshot(self.snapshots.list_files())
        last = [name for name, files in there.items() if SUMS in files][:2]
        for name in there:
            if last and name < last[-1]:
                self.snapshots.remove(name)

    def copy_results(self) -> None:
        if failure := failure_of(self.upload_results if RANK == 0 else None):
            fail(
                f"{failure}; all is in {self.output_dir}: run the same command again, with "
                "--resume auto, and it is copied",
                code=3,
            )
        print0(f"files copied to {self.remote.url}")

    def upload_results(self) -> None:
        """Copy all other files of the run. Each has its name only when it is there as a whole."""
        others = ("snapshots", "previous", RUN_ID)
        names = [n for n in list_files(self.output_dir) if n.split("/")[0] not in others]
        names.sort(key=lambda name: name == "result.json")  # last: with it the run has ended there
        missing = [*self.behind, *names]
        try:
            self.upload_snapshots()
            self.remote.upload(self.output_dir, names, ".part")
            for name in names:
                self.remote.move(f".part/{name}", name)
        except RemoteError as error:
            raise RemoteError(f"{error}; not copied: {', '.join(missing)}") from error
        self.remote.remove(".part")
