"""Files elsewhere: what fsspec opens by a URL, listed, copied here and copied there."""

import argparse
import contextlib
import functools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from harness.command_line import fail, import_optional, trim_url
from harness.ranks import gather_objects, is_first_here, print0

ANSWER = 15  # seconds for the first answer of a server
SILENCE = 60  # seconds without a sign of life, later
# The libraries' own patience is minutes:
LIMITS = {"s3": {"config_kwargs": {"retries": {"max_attempts": 1, "mode": "standard"}}}}
LIMITS["sftp"] = LIMITS["ssh"] = {"timeout": 10, "banner_timeout": 10, "auth_timeout": 10}
AT_ONCE = 64  # files of a download; some libraries fetch them side by side

RUNS, DATA = Path("runs", "remote"), Path("data", "remote")  # what is uploaded, and downloaded


class RemoteError(Exception):
    """A server did not do what it was asked to: where and why, in words."""


def is_url(place: object) -> bool:
    return "://" in str(place)  # which a Path has not: it leaves out one of the slashes


def local_folder(place: Path | str, below: Path = RUNS) -> Path:
    """The local folder or file that stands for a place: itself, or for a URL one named after it."""
    if not is_url(place):
        return Path(place)
    protocol, _, rest = place.partition("://")
    return Path(below, protocol, *filter(None, rest.split("/")))


def check_urls(args: argparse.Namespace) -> None:
    """Check the URLs among the flags."""
    for name in ("output_dir", "resume", "data_dir", "weights"):
        if is_url(getattr(args, name)):
            check_url(getattr(args, name), f"--{name.replace('_', '-')}")


def check_writable(args: argparse.Namespace) -> None:
    """Check that ``--output-dir`` can be written, if it is a URL."""
    if is_url(args.output_dir):
        try:
            Remote(args.output_dir).check_writable()
        except RemoteError as error:
            fail(f"--output-dir {error}; give another")


def check_url(url: str, flag: str) -> None:
    """Whether fsspec can open such a URL, and we may write it down."""
    protocol, _, rest = url.partition("://")
    if set("*?[") & set(rest) or ".." in rest.split("/"):
        shown = f"{protocol}://{rest.rpartition('@')[2]}"  # without a password
        fail(f"{flag} {shown} has a *, ?, [ or .. in it; write the name of one place")
    if urlsplit(url).password:
        fail(
            f"{flag} {protocol}://...: a password would be written into result.json; leave it out, "
            f"and use a key, or export FSSPEC_{protocol.upper()}_PASSWORD"
        )
    try:
        import_optional("fsspec").get_filesystem_class(protocol)
    except ValueError:  # an unknown protocol
        fail(f"{flag} {url}: fsspec knows no {protocol}://; give a folder, or s3://, sftp://, ...")
    except ImportError as error:  # it names the package
        fail(f"{flag} {url}: {error}; pip install -r requirements-ecosystem.txt")


def answer_within(seconds: float, question: Callable):
    """What a server answers. A thread asks, because not every library has a timeout, and looking up
    a host obeys none; it may be left behind."""
    answers = []

    def ask():
        try:
            answers.append((question(), None))
        except Exception as error:  # of any library
            answers.append((None, error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise TimeoutError(f"no answer within {seconds} s")
    [(answer, error)] = answers
    if error:
        raise error
    return answer


class Remote:
    """A folder or a file elsewhere. Names are relative to it; ``""`` is the place itself."""

    def __init__(self, url: str):
        self.url, self.fs, self.root = trim_url(url), None, ""

    @contextlib.contextmanager
    def connection(self, doing: str) -> Iterator:
        """A file system of fsspec's, opened when it is first needed.

        Args:
            doing: what could not be done, if that raises.
        """
        try:
            if self.fs is None:
                self.fs, self.root = answer_within(ANSWER, self.connect)
            yield self.fs
        except RemoteError:
            raise
        except Exception as error:  # of fsspec, botocore, paramiko, sockets: they share no class
            self.fs = None  # the next attempt begins with a new connection
            why = f"{type(error).__name__}: {error}"[:200]
            raise RemoteError(f"{self.url} cannot be {doing} ({why})") from error

    def connect(self):
        import fsspec

        protocol = self.url.partition("://")[0]
        theirs = fsspec.config.conf.get(protocol, {})  # the user's own settings come first
        limits = {k: v for k, v in LIMITS.get(protocol, {}).items() if k not in theirs}
        fs, root = fsspec.url_to_fs(self.url, skip_instance_cache=True, **limits)
        if hasattr(fs, "ftp"):  # of paramiko, which would wait for ever
            fs.ftp.get_channel().settimeout(SILENCE)
        return fs, root

    def path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def list_files(self, below: str = "") -> dict[str, int]:
        """The size of each file, by name; of none, if there is no such place."""
        with self.connection("read") as fs:
            place = self.path(below)
            fs.invalidate_cache()
            if answer_within(ANSWER, lambda: fs.isfile(place)):
                return {"": fs.size(place)}
            # Not fs.find(), which in some file systems leaves out a folder that cannot be read.
            found, folders = {}, [place]
            while folders:
                folder = folders.pop()
                with contextlib.suppress(FileNotFoundError):
                    for entry in fs.ls(folder, detail=True):
                        path = entry["name"].rstrip("/")
                        if entry["type"] == "directory" and path != folder.rstrip("/"):
                            folders.append(path)
                        elif entry["type"] == "file" and not entry["name"].endswith("/"):
                            found[path.removeprefix(place.rstrip("/")).strip("/")] = entry["size"]
            return found

    def read(self, name: str) -> bytes | None:
        """The content of a small file; ``None`` if there is none."""
        with self.connection("read") as fs:
            try:
                return fs.cat_file(self.path(name))
            except FileNotFoundError:
                return None

    def download(self, sizes: dict[str, int], target: Path, below: str = "") -> None:
        """Fetch files into a folder (``""``: into the file ``target``), each whole or not at all.

        Args:
            sizes: as :meth:`list_files` has them.
        """
        names = list(sizes)
        with self.connection("read") as fs:
            for i in range(0, len(names), AT_ONCE):
                some = names[i : i + AT_ONCE]
                targets = [target / name if name else target for name in some]
                parts = [path.with_name(f".{path.name}.part") for path in targets]
                for path in targets:
                    if ".." in path.parts:
                        raise ValueError(f"it holds a file named {path}")
                    path.parent.mkdir(parents=True, exist_ok=True)
                sources = [self.path("/".join(filter(None, (below, name)))) for name in some]
                fs.get(sources, [str(part) for part in parts])
                for name, part, path in zip(some, parts, targets, strict=True):
                    if part.stat().st_size != (sizes[name] or part.stat().st_size):
                        raise EOFError(f"{name} is cut off")
                    os.replace(part, path)

    def upload(self, folder: Path, names: list[str], below: str = "") -> None:
        """Copy files of a folder here, one after the other, in this order."""
        with self.connection("written") as fs:
            for name in names:
                path = self.path("/".join(filter(None, (below, name))))
                fs.put_file(str(folder / name), path)

    def move(self, name: str, other: str) -> None:
        """Give a file another name, and take the place of one that has it."""
        with self.connection("written") as fs:
            fs.makedirs(self.path(other).rpartition("/")[0], exist_ok=True)
            fs.mv(self.path(name), self.path(other))

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it is there."""
        with self.connection("written") as fs, contextlib.suppress(FileNotFoundError):
            fs.invalidate_cache()
            fs.rm(self.path(name), recursive=True)

    def check_writable(self) -> None:
        """Write an empty file, and remove it."""

        def write():
            self.upload(Path(file.name).parent, [Path(file.name).name])
            self.remove(Path(file.name).name)

        with tempfile.NamedTemporaryFile() as file, self.connection("written"):
            answer_within(ANSWER, write)


# ------------------------------------------------------------------------------ what a run reads


@functools.cache
def fetch_input(place: Path | str, flag: str) -> Path:
    """The local path of what ``--data-dir`` or ``--weights`` names. A URL is downloaded, once in a
    process, by the first rank of each machine. All ranks call it."""
    if not is_url(place):
        return Path(place)
    path, failure = local_folder(place, DATA), None
    if is_first_here():
        try:
            fetch(Remote(place), path, again=flag == "--weights")
        except RemoteError as error:
            failure = str(error)
    if failures := [why for why in gather_objects(failure) if why]:
        fail(f"{flag} {failures[0]}; give another, or a local path")
    return path


def fetch(remote: Remote, place: Path, again: bool) -> None:
    """Download a file, or a folder with all that is below it.

    Args:
        again: also what is here already, with the same size.
    """
    sizes = remote.list_files()
    if not sizes:
        raise RemoteError(f"{remote.url} cannot be read (there is nothing)")

    def is_here(name: str) -> bool:
        path = place / name if name else place
        return path.is_file() and path.stat().st_size == sizes[name]

    here = [path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()]
    for name in here:  # what is read must be what is there
        if name not in sizes and not Path(name).name.startswith("."):
            fail(f"{place / name} is not in {remote.url}; remove it, or put it there, too")
    missing = {name: size for name, size in sizes.items() if again or not is_here(name)}
    if missing:
        total = sum(size or 0 for size in missing.values())
        files = f"{len(missing)} of {len(sizes)} files"
        print0(f"downloading {remote.url} to {place}: {files}, {total:,} bytes")
        remote.download(missing, place)
