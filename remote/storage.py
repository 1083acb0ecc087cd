"""Remote storage: list, download and upload what fsspec opens by a URL."""

import contextlib
import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from urllib.parse import urlsplit

ANSWER = 15  # seconds for the first answer of a server
SILENCE = 60  # seconds without any data, later
# The libraries' own timeouts are minutes:
LIMITS = {"s3": {"config_kwargs": {"retries": {"max_attempts": 1, "mode": "standard"}}}}
LIMITS["sftp"] = LIMITS["ssh"] = {"timeout": 10, "banner_timeout": 10, "auth_timeout": 10}

SUMS = "SHA256SUMS"  # what `sha256sum --check SHA256SUMS` reads, in the folder of a snapshot
RUNS, DATA = Path("runs", "remote"), Path("data", "remote")  # what is uploaded, and downloaded


class RemoteError(OSError):
    """An operation on remote storage failed; the message says where and why."""

    strerror = property(str)  # which an error without a number does not have


def is_url(place: object) -> bool:
    return "://" in str(place)  # a Path drops one of the slashes


def local_folder(place: Path | str, below: Path = RUNS) -> Path:
    """The local path of a flag's value: the path itself, or for a URL one named after it."""
    if not is_url(place):
        return Path(place)
    protocol, _, rest = place.partition("://")
    return Path(below, protocol, *filter(None, rest.split("/")))


def list_files(folder: Path) -> list[str]:
    """The files in a folder, but for the list of checksums."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in paths if path.name != SUMS)


def trim_url(text: str) -> str:
    """Strip the trailing slashes of a URL; leave other text as it is."""
    protocol, url, rest = text.partition("://")
    return f"{protocol}://{rest.rstrip('/')}" if url else text


def find_mistake(url: str) -> str | None:
    """Why fsspec cannot open this URL, or should not; it begins with the URL, without a password.
    ``None`` if all is well, and for a local path."""
    protocol, _, rest = url.partition("://")
    if not is_url(url):
        return None
    if set("*?[") & set(rest) or ".." in rest.split("/"):
        shown = f"{protocol}://{rest.rpartition('@')[2]}"
        return f"{shown} contains *, ?, [ or ..; give the name of one file or folder"
    if urlsplit(url).password:
        instead = f"use a key, or export FSSPEC_{protocol.upper()}_PASSWORD"
        return f"{protocol}://...: a password would be written into result.json; {instead}"
    try:
        import fsspec

        fsspec.get_filesystem_class(protocol)
    except ValueError:  # an unknown protocol
        return f"{url}: fsspec has no {protocol}://; use a path, s3://, sftp://, ..."
    except ImportError as error:  # which names the package
        return f"{url}: {error}; pip install -r requirements-ecosystem.txt"
    return None


def answer_within(seconds: float, question: Callable):
    """Call a server with a timeout, in a thread that may be left running, because not every library
    has a timeout, and a host lookup has none."""
    try:
        with ThreadPool(1) as pool:
            return pool.apply_async(question).get(seconds)
    except multiprocessing.TimeoutError as error:
        raise TimeoutError(f"no answer within {seconds} s") from error


class Remote:
    """A remote folder or file. Names are relative to it; ``""`` is the URL itself."""

    def __init__(self, url: str):
        self.url, self.fs = trim_url(url), None

    @contextlib.contextmanager
    def connection(self, doing: str) -> Iterator:
        """A file system of fsspec with this URL as its root, opened on first use. An error message
        says what the URL cannot be: ``doing``."""
        try:
            self.fs = self.fs or answer_within(ANSWER, self.connect)
            self.fs.invalidate_cache()
            yield self.fs
        except Exception as error:  # fsspec, botocore, paramiko, sockets: no common class
            self.fs = None  # the next attempt opens a new connection
            why = f"{type(error).__name__}: {error}"[:200]
            raise RemoteError(f"{self.url} cannot be {doing} ({why})") from error

    def connect(self):
        import fsspec
        from fsspec.implementations.dirfs import DirFileSystem

        protocol = self.url.partition("://")[0]
        theirs = fsspec.config.conf.get(protocol, {})  # the user's own settings come first
        limits = {k: v for k, v in LIMITS.get(protocol, {}).items() if k not in theirs}
        fs, root = fsspec.url_to_fs(self.url, skip_instance_cache=True, **limits)
        if hasattr(fs, "ftp"):  # paramiko, which would wait forever
            fs.ftp.get_channel().settimeout(SILENCE)
        fs.exists(root)  # the first request to an object store
        return DirFileSystem(root, fs, skip_instance_cache=True)

    def list_files(self, below: str = "") -> dict[str, int]:
        """The size of each file, by name; empty if nothing is there."""
        with self.connection("read") as there, contextlib.suppress(FileNotFoundError):
            if there.isfile(below):
                return {below: there.size(below)}
            # Otherwise it would omit unreadable folders. Object stores list all in one request.
            strict = {} if there.fs.async_impl else {"on_error": "raise"}
            found = there.find(below, detail=True, **strict).items()
            return {name: info["size"] for name, info in found if info["type"] == "file"}
        return {}

    def read(self, name: str) -> bytes | None:
        """The content of a small file; ``None`` if there is none."""
        with self.connection("read") as there, contextlib.suppress(FileNotFoundError):
            return there.cat_file(name)

    def download(self, sizes: dict[str, int], target: Path) -> None:
        """Fetch files, of the sizes that :meth:`list_files` returns, into a folder (``""``: into
        the file ``target``)."""
        with self.connection("read") as there:
            for name in sizes:
                if ".." in name.split("/"):
                    raise ValueError(f"it contains a file named {name}")
                (target / name).parent.mkdir(parents=True, exist_ok=True)
            there.get(list(sizes), [str(target / name) for name in sizes])
            for name, size in sizes.items():
                if size and (target / name).stat().st_size != size:
                    raise EOFError(f"{name} is truncated")

    def upload(self, folder: Path, names: list[str]) -> None:
        """Copy files of a local folder."""
        with self.connection("written") as there:
            there.put([str(folder / name) for name in names], names)

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it is there."""
        with self.connection("written") as there, contextlib.suppress(FileNotFoundError):
            there.rm(name, recursive=True)


def fetch_files(remote: Remote, place: Path, again: bool, say: Callable = print) -> None:
    """Download a file, or a folder recursively. Local files of the same size are kept, unless they
    are to be downloaded ``again``. ``say`` prints what is downloaded."""
    sizes = remote.list_files()
    if not sizes:
        raise RemoteError(f"{remote.url} cannot be read (no such file or folder)")
    if again:
        shutil.rmtree(place, ignore_errors=True)
        place.unlink(missing_ok=True)
    here = {p.relative_to(place).as_posix(): p for p in place.rglob("*") if p.is_file()}
    here = {"": place} if place.is_file() else here
    for name in here.keys() - sizes.keys():  # local and remote files must be the same
        if not Path(name).name.startswith("."):
            raise RemoteError(f"{here[name]} is not in {remote.url}; remove it, or upload it")
    missing = {n: s for n, s in sizes.items() if n not in here or here[n].stat().st_size != s}
    if missing:
        total = sum(size or 0 for size in missing.values())
        files = f"{len(missing)} of {len(sizes)} files, {total:,} bytes"
        say(f"downloading {remote.url} to {place}: {files}")
        remote.download(missing, place)
