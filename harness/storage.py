"""Storage by URL: inputs that fsspec copies to this machine, and runs that are written there."""

import contextlib
import fcntl
import functools
import hashlib
import multiprocessing
import re
import shutil
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path

ANSWER = 15  # seconds for the first answer of a server; the libraries' own timeouts are minutes
SUMS = "SHA256SUMS"  # what `sha256sum --check SHA256SUMS` reads, in the folder of a snapshot
RUNS = Path("runs", "remote")  # what a run writes before it is copied to a URL
DATA = Path("data", "remote")  # copies of inputs


class StorageError(OSError):
    """An operation on a URL failed; the message says where and why."""

    strerror = property(str)  # which an error without a number does not have


def is_url(place: object) -> bool:
    return "://" in str(place)  # a Path drops one of the slashes


def trim_url(text: str) -> str:
    """Strip the trailing slashes of a URL; leave other text as it is."""
    protocol, url, rest = text.partition("://")
    return f"{protocol}://{rest.rstrip('/')}" if url else text


def local_folder(place: Path | str, below: Path = RUNS) -> Path:
    """The local path of a flag's value: the path itself, or for a URL one named after it."""
    if not is_url(place):
        return Path(place)
    protocol, _, rest = place.partition("://")
    return Path(below, protocol, *filter(None, rest.split("/")))


def find_mistake(url: str) -> str | None:
    """Why a URL must not be used, without its password; ``None`` if it may, and for a path.
    fsspec would expand wildcards, and ``result.json`` contains all flags."""
    protocol, _, rest = url.partition("://")
    if is_url(url) and re.search(r"[*?[]|(^|/)\.\.(/|$)|^[^/@]*:[^/]*@", rest):
        shown = f"{protocol}://{rest.rpartition('@')[2]}"
        return f"{shown}: leave out *, ?, [, .. and passwords; name one file or folder"
    return None


def answer_within(seconds: float, question: Callable):
    """Call a server with a timeout, in a thread that may be left running, because not every library
    has a timeout, and a host lookup has none."""
    try:
        with ThreadPool(1) as pool:
            return pool.apply_async(question).get(seconds)
    except multiprocessing.TimeoutError as error:
        raise TimeoutError(f"no answer within {seconds} s") from error


@contextlib.contextmanager
def opened(url: str, doing: str) -> Iterator[tuple]:
    """fsspec's file system for a URL, and the path in it. Any error, a library's that is missing
    too, becomes a :class:`StorageError`, which says what the URL cannot be: ``doing``."""
    try:
        import fsspec  # only a run that has a URL needs it

        local = url.startswith(("file://", "local://"))  # where nothing else creates a folder
        fs, path = fsspec.url_to_fs(url, **({"auto_mkdir": True} if local else {}))
        fs.invalidate_cache()  # other processes write there, too
        answer_within(ANSWER, functools.partial(fs.exists, path))
        yield fs, path
    except Exception as error:  # fsspec, botocore, paramiko, sockets: no common class
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise StorageError(f"{url} cannot be {doing} ({why})") from error


def fetch(url: str, target: Path) -> None:
    """Copy a file, or a folder recursively, to a local path, unless it is there and the URL has not
    changed since. Of all processes of a machine the first one copies, and the others wait."""
    with opened(url, "read") as (fs, path):
        is_file = fs.isfile(path)
        found = {path: fs.info(path)} if is_file else fs.find(path, detail=True)
        if not found:
            raise FileNotFoundError("no such file or folder")
        if outside := [name for name in found if ".." in name.split("/")]:
            raise ValueError(f"it contains a file named {outside[0]}")
        version = hashlib.sha256(str(found).encode()).hexdigest()  # sizes, times, ETags
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_name(f".{target.name}.copied"), "a+") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX)
            mark.seek(0)
            if mark.read() == version and target.exists():
                return
            mark.truncate(0)  # until the copy is complete
            if target.is_dir():
                shutil.rmtree(target)
            print(f"copying {url} to {target}: {len(found)} files", flush=True)
            fs.get(path, str(target), recursive=not is_file)
            mark.write(version)


def upload(folder: Path, names: list[str], url: str) -> None:
    """Copy files of a local folder."""
    with opened(url, "written") as (fs, path):
        fs.put([str(folder / name) for name in names], [f"{path}/{name}" for name in names])


def remove(url: str) -> None:
    """Remove a file, or a folder, if it is there: that of a snapshot is incomplete at once."""
    with opened(url, "written") as (fs, path):
        for place in (f"{path}/{SUMS}", path):
            if fs.exists(place):
                fs.rm(place, recursive=True)


def list_complete(url: str) -> list[str]:
    """Names of the complete snapshots of a run, newest first: those with their list of checksums,
    which is copied last."""
    with opened(url, "read") as (fs, path):
        found = fs.glob(f"{path}/snapshots/step-*/{SUMS}")
    return sorted((name.split("/")[-2] for name in found), reverse=True)
