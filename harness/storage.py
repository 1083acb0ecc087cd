"""Storage by URL: inputs that fsspec copies to this machine, and runs that are written there."""

import contextlib
import fcntl
import functools
import hashlib
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path

ANSWER = 15  # seconds for the first answer of a server; the libraries' own timeouts are minutes
SUMS = "SHA256SUMS"  # what `sha256sum --check SHA256SUMS` reads, in the folder of a snapshot
RUNS = Path("runs", "remote")  # what a run writes before it is copied to a URL
DATA = Path("data", "remote")  # copies of inputs
VERSIONS = "ETag", "etag", "mtime", "LastModified", "last_modified", "modify", "created"


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


def connect(url: str) -> tuple:
    """fsspec's file system for a URL, and the path in it. Its connection and its cache of listings
    are new: a connection may have died since, and other processes write there, too."""
    import fsspec  # only a run that has a URL needs it

    local = url.startswith(("file://", "local://"))  # where nothing else creates a folder
    options = {"auto_mkdir": True} if local else {}
    fs, path = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
    fs.exists(path)
    return fs, path


@contextlib.contextmanager
def opened(url: str, doing: str) -> Iterator[tuple]:
    """What :func:`connect` returns. Any error, a library's that is missing too, becomes a
    :class:`StorageError`, which says what the URL cannot be: ``doing``."""
    try:
        import fsspec

        # This imports a library, which may take longer than a server's answer.
        fsspec.get_filesystem_class(url.partition("://")[0].rpartition("::")[2])
        yield answer_within(ANSWER, functools.partial(connect, url))
    except Exception as error:  # fsspec, botocore, paramiko, sockets: no common class
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise StorageError(f"{url} cannot be {doing} ({why})") from error


def list_names(fs, folder: str) -> list[str]:
    """The names in a folder, without its path."""
    return [about["name"].rstrip("/").rpartition("/")[2] for about in fs.ls(folder, detail=True)]


def list_files(fs, folder: str) -> dict[str, dict]:
    """The files in a folder and in its folders, as fsspec describes them. Its own ``find()`` and
    ``get()`` take a folder that cannot be listed for an empty one."""
    found = {}
    for about in fs.ls(folder, detail=True):
        name = about["name"].rstrip("/")
        if about["type"] == "directory" and name != folder:
            found |= list_files(fs, name)
        elif name != folder:  # which an object store may list in itself
            found[name] = about
    return found


def describe(found: dict[str, dict]) -> str:
    """A checksum of names, sizes and versions, which changes when a file does: a server also tells
    what changes by reading, such as the time of the last access."""
    lines = []
    for name, about in sorted(found.items()):
        versions = [about[key] for key in VERSIONS if about.get(key)]
        lines.append(f"{name} {about.get('size')} {versions[:1]}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def remove_local(path: Path) -> None:
    """Remove a local file, or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def fetch(url: str, target: Path) -> None:
    """Copy a file, or a folder recursively, to a local path, unless it is there and the URL has not
    changed since. Of all processes of a machine the first one copies, and the others wait."""
    with opened(url, "read") as (fs, path):
        is_file = fs.isfile(path)
        found = {}
        with contextlib.suppress(FileNotFoundError):
            found = {path: fs.info(path)} if is_file else list_files(fs, path)
        if not found:
            raise FileNotFoundError("no such file or folder")
        inside = path if is_file else f"{path.rstrip('/')}/"
        for name in found:
            if ".." in name.split("/") or not name.startswith(inside):
                raise ValueError(f"it contains a file named {name}")
        version = describe(found)
        part = target.with_name(f".{target.name}.part")
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_name(f".{target.name}.copied"), "a+") as mark:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(mark, fcntl.LOCK_EX)
            mark.seek(0)
            if mark.read() == version and target.exists():
                return
            print(f"copying {url} to {target}: {len(found)} files", flush=True)
            remove_local(part)  # of a killed attempt
            fs.get([*found], [str(part / name.removeprefix(inside)) for name in found])
            mark.truncate(0)
            remove_local(target)
            os.replace(part, target)
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


def make_folders(url: str, names: set[str]) -> None:
    """Create folders below a URL. One rank does this for all, before they write: where sftp creates
    a folder, all but one of several ranks would fail."""
    with opened(url, "written") as (fs, path):
        for name in [] if fs.async_impl else sorted(names):  # object stores have no folders
            fs.makedirs(f"{path}/{name}".rstrip("/"), exist_ok=True)


def list_snapshots(url: str) -> dict[str, bool]:
    """The snapshots of a run, newest first, and whether each is complete: whether it has its list
    of checksums, which is copied last."""
    with opened(url, "read") as (fs, path):
        names = []
        with contextlib.suppress(FileNotFoundError):  # of a new run
            names = list_names(fs, f"{path}/snapshots")
        steps = sorted((name for name in names if name.startswith("step-")), reverse=True)
        return {step: SUMS in list_names(fs, f"{path}/snapshots/{step}") for step in steps}


def list_complete(url: str) -> list[str]:
    """Names of the complete snapshots of a run, newest first."""
    return [name for name, complete in list_snapshots(url).items() if complete]
