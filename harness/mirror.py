"""Snapshots elsewhere: ``--output-dir`` and ``--resume`` as URLs.

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
from harness.remote import DATA, Remote, RemoteError, is_url, local_folder
from harness.snapshots import SUMS, SnapshotStore, find_damage, list_files, list_snapshots

RUN_ID = "run_id"


def open_snapshots(args: argparse.Namespace, identity: dict) -> SnapshotStore:
    """The snapshots of a run, local or remote."""
    remote = is_url(args.resume) or is_url(args.output_dir)
    return (RemoteStore if remote else SnapshotStore)(args, identity)


def by_snapshot(sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    """Of the files in a folder, those of each snapshot; newest first."""
    found = {}
    for path, size in sizes.items():
        name, _, file = path.partition("/")
        if file and name.startswith("step-"):
            found.setdefault(name, {})[file] = size
    return dict(sorted(found.items(), reverse=True))


def fetch_snapshot(remote: Remote, name: str, sizes: dict[str, int], folder: Path) -> str | None:
    """Download a snapshot into a folder, unless the same is there already.

    Args:
        remote: the folder elsewhere that holds it.
        sizes: of its files.

    Returns:
        ``None``, or what is wrong with it.
    """
    if SUMS not in sizes:
        return f"{SUMS} is missing, so it was not copied to its end"
    here, part = folder / name, folder / f".{name}.part"
    sums = remote.read(f"{name}/{SUMS}")
    if here.exists() and not find_damage(here) and (here / SUMS).read_bytes() == sums:
        return None
    shutil.rmtree(part, ignore_errors=True)
    remote.download(sizes, part, name)
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
        damage = fetch_snapshot(remote, name, theirs, folder)
        if not damage:
            return folder / name
        print0(f"snapshot {remote.url}/{name} is damaged and left out: {damage}")


class Mirror:
    """The folder of ``--output-dir`` elsewhere, and ``folder``, which stands for it here. Rank 0
    alone calls all this."""

    def __init__(self, url: str, folder: Path):
        self.remote, self.folder = Remote(url), folder
        self.snapshots = Remote(f"{url}/snapshots")
        self.behind = []  # names of snapshots that are here and are not yet there
        self.left = []  # names of the other files for which that is so, at the end of the run

    def is_of_another_run(self) -> bool:
        """Whether what is here was left by another run than what is there."""
        there = self.remote.read(RUN_ID)
        return there != self.own_id() and bool(there or self.snapshots.list_files())

    def own_id(self) -> bytes | None:
        path = self.folder / RUN_ID
        return path.read_bytes() if path.exists() else None

    def fetch(self) -> None:
        """Bring here what a run needs to go on: the newest good snapshot, and what tells whether
        the run had ended."""
        sizes = self.snapshots.list_files()
        here = [path.name for path in list_snapshots(self.folder / "snapshots")]
        there = [name for name, files in by_snapshot(sizes).items() if SUMS in files]
        newest = max(there, default="")
        self.behind = [name for name in here if name > newest]
        if newest > max(here, default=""):  # it went on elsewhere, and what has ended here is old
            (self.folder / "result.json").unlink(missing_ok=True)
            (self.folder / "model.pt").unlink(missing_ok=True)
        fetch_newest(self.snapshots, sizes, self.folder / "snapshots")
        for name in (RUN_ID, "result.json"):
            content = self.remote.read(name)
            if content and not (self.folder / name).exists():
                (self.folder / name).write_bytes(content)

    def archive(self, resumed: str | None) -> None:
        """What :meth:`SnapshotStore.archive_previous_run` does here. A run that begins has a new
        ``run_id``.

        Args:
            resumed: the name of the snapshot that the run goes on from, if it is one of its own.
        """
        sizes = self.remote.list_files()
        aside = ["model.pt", "result.json", "snapshots"]
        if resumed:
            there = by_snapshot(self.snapshots.list_files())
            aside = [f"snapshots/{name}" for name in there if name > resumed]
        for what in aside:
            files = [name for name in sizes if name == what or name.startswith(f"{what}/")]
            if files:
                self.remote.remove(f"previous/{what}")
            for name in sorted(files):  # SHA256SUMS before state.pt: what is half moved has none
                self.remote.move(name, f"previous/{name}")
            if what not in files:
                self.remote.remove(what)  # the folder that is left
        if resumed:
            self.remote.remove("result.json")  # it comes back when this run ends
        else:
            for name in sizes:
                if name.startswith(("events.out.tfevents.", "trace/")):
                    self.remote.remove(name)
            (self.folder / RUN_ID).unlink(missing_ok=True)
        if self.own_id() is None:
            (self.folder / RUN_ID).write_text(uuid.uuid4().hex + "\n")
        self.remote.upload(self.folder, [RUN_ID])

    def copy_snapshots(self) -> None:
        """Copy those that are behind, as long as they are here, and keep the last two there."""
        there = by_snapshot(self.snapshots.list_files())
        for name in sorted(self.behind):
            here = self.folder / "snapshots" / name
            if here.exists():
                if name in there:  # of an attempt that came to nothing
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
        """Copy all other files of the run. Each has its name only when it is there as a whole."""
        others = ("snapshots", "previous", RUN_ID)
        self.left = [n for n in list_files(self.folder) if n.split("/")[0] not in others]
        if self.behind:
            self.copy_snapshots()
        for name in list(self.left):
            self.remote.upload(self.folder, [name], ".part")
            self.remote.move(f".part/{name}", name)
            self.left.remove(name)
        self.remote.remove(".part")


class RemoteStore(SnapshotStore):
    """Snapshots that are elsewhere as well, or are to be resumed from there."""

    def __init__(self, args: argparse.Namespace, identity: dict):
        super().__init__(args, identity)
        url = args.output_dir if is_url(args.output_dir) else None
        self.mirror = Mirror(url, self.output_dir) if url else None
        self.places = {url: self.output_dir} if url else {}  # what stands here for a URL
        if is_url(args.resume) and not (url and f"{args.resume}/".startswith(f"{url}/")):
            self.places[args.resume] = local_folder(args.resume, DATA)

    def url_of(self, path: Path) -> str | None:
        """Where that is elsewhere which a path here stands for."""
        for url, place in self.places.items():
            if place in (path, *path.parents):
                return "/".join([url, *path.relative_to(place).parts])

    def name_of(self, path: Path) -> str:
        return self.url_of(path) or super().name_of(path)

    # -------------------------------------------------------------------------- what is resumed

    def newest_of_this_launch(self) -> Path | None:
        self.fetch_own()
        return super().newest_of_this_launch()

    def asked_for(self) -> Path | None:
        if is_url(self.args.resume):
            return self.fetch_asked(self.args.resume)
        if self.args.resume == "auto":
            self.fetch_own()
        return super().asked_for()

    def fetch_own(self) -> None:
        """Bring the snapshots of this run up to date here. Those of another one are put aside."""
        if not self.mirror:
            return
        url = self.mirror.remote.url
        try:
            if self.mirror.is_of_another_run():
                if list_snapshots(self.folder):
                    print0(f"{self.folder} is of another run than {url}, and moves to previous/")
                super().archive_previous_run()
                (self.output_dir / RUN_ID).unlink(missing_ok=True)  # theirs comes instead
            self.mirror.fetch()
        except RemoteError as error:
            fail(f"--output-dir: {error}; try again, or give another")

    def fetch_asked(self, url: str) -> Path:
        """Download the snapshot that ``--resume`` names, or the newest good one in that folder."""
        try:
            place = next(
                path / url.removeprefix(theirs).strip("/")
                for theirs, path in self.places.items()
                if f"{url}/".startswith(f"{theirs}/")
            )
            sizes = Remote(url).list_files()
            if {SUMS, "state.pt"} & sizes.keys():
                parent, _, name = url.rpartition("/")
                damage = fetch_snapshot(Remote(parent), name, sizes, place.parent)
                if damage:
                    fail(f"--resume {url} is damaged: {damage}; give another, or auto")
                return place
            if any(name.startswith("snapshots/") for name in sizes):
                url, place = f"{url}/snapshots", place / "snapshots"
                sizes = Remote(url).list_files()
            found = fetch_newest(Remote(url), sizes, place)
        except RemoteError as error:
            fail(f"--resume: {error}; give another, or none")
        return found or fail(f"--resume {url} holds no good snapshot; give another, or none")

    def bring(self, path: Path) -> None:
        """To each further machine, the snapshot that rank 0 has chosen. All ranks call it."""
        url, failure = self.url_of(path), None
        if url is None:
            return
        own = (path / SUMS).read_bytes() if (path / SUMS).exists() else None
        chosen = gather_objects(own)[0]
        # One of that name may be of an earlier run.
        if is_first_here() and (own is None or own != chosen or find_damage(path)):
            parent, _, name = url.rpartition("/")
            try:
                remote = Remote(parent)
                failure = fetch_snapshot(remote, name, remote.list_files(name), path.parent)
            except RemoteError as error:
                failure = str(error)
        if failures := [why for why in gather_objects(failure) if why]:
            fail(f"--resume {self.name_of(path)}: {failures[0]}; give another, or none")

    # -------------------------------------------------------------------------- what is copied

    def archive_previous_run(self) -> None:
        super().archive_previous_run()
        own = self.resumed and self.resumed.resolve().parent == self.folder.resolve()
        if self.mirror:
            try:
                self.mirror.archive(self.resumed.name if own else None)
            except RemoteError as error:
                fail(f"--output-dir: {error}; try again, or give another")

    def copy_snapshot(self, folder: Path) -> str | None:
        failure = None
        if self.mirror and RANK == 0:
            self.mirror.behind.append(folder.name)
            try:
                self.mirror.copy_snapshots()
            except RemoteError as error:
                failure = f"{error}; the snapshot is kept in {folder}"
        return gather_objects(failure)[0]

    def copy_results(self) -> None:
        failure = None
        if self.mirror and RANK == 0:
            try:
                self.mirror.copy_results()
            except RemoteError as error:
                missing = ", ".join([*self.mirror.behind, *self.mirror.left])
                failure = f"{error}; not copied: {missing}"
        [failure, *_] = gather_objects(failure)
        if failure:
            fail(
                f"{failure}; all is in {self.output_dir}: run the same command again, with "
                "--resume auto, and it is copied",
                code=3,
            )
        if self.mirror:
            print0(f"files copied to {self.mirror.remote.url}")
