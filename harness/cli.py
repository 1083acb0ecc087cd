"""The command line: parser, types of flags, files that flags name, and how to end with an error."""

import argparse
import contextlib
import fcntl
import functools
import importlib
import json
import math
import os
import shlex
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from harness import storage
from harness.storage import is_url
from harness.world import Failed, is_first_here, print0, this_script, together, world


def fail(message: object, code: int = 2) -> NoReturn:
    """Report a user error in one line and exit with code 2, or 3 if training had started. A bug
    keeps its traceback. Usually all ranks of a machine find the same error: rank 0 prints it, and
    the launcher stops the others while they wait; a rank that is still alive prints its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the signal by which the launcher stops ranks
    if world().local_rank:
        time.sleep(2 + world().local_rank)
    line = f"{this_script()}: error: {' '.join(str(message).split())}"
    print(line, file=sys.stderr, flush=True)
    found = {"py_callstack": line, "timestamp": str(int(time.time()))}
    report = json.dumps({"message": {"message": line, "extraInfo": found}})
    with contextlib.suppress(OSError):  # torchrun's own report ends with what this file contains
        Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)).write_text(report)
    raise SystemExit(code)


def need_compiler(device: str) -> None:
    """Check that torch.compile finds a compiler: C++ on a CPU, and C on a GPU, for Triton."""
    of_device = {"cuda": ("C", "CC", "cc gcc clang"), "cpu": ("C++", "CXX", "c++")}
    language, variable, names = of_device[device]
    if not any(map(shutil.which, os.environ.get(variable, names).split())):
        use = f"install gcc, g++ or clang, or set {variable}"
        fail(f"no {language} compiler ({os.environ.get(variable, names)}) is installed; {use}")


def import_optional(library: str):
    """Import a library that few scripts need, or fail with the command that installs it."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        fail(f"{library} cannot be imported ({error}); pip install -r requirements-ecosystem.txt")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the docstring, and does not break words of help texts."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


class ArgumentParser(argparse.ArgumentParser):
    """argparse with one-line errors, help from rank 0 only, and comments in ``@FILE``."""

    def add_argument(self, *names: str, **options):
        if "--local-rank" in names:  # the launcher sets it
            options.setdefault("help", argparse.SUPPRESS)
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (--help lists the flags)")

    def print_help(self, file=None) -> None:
        if world().rank == 0:
            super().print_help(file)

    def convert_arg_line_to_args(self, line: str) -> list[str]:
        return shlex.split(line, comments=True)


def number(kind: type, low: float, below: float = math.inf, above: float = -1):
    """An argparse ``type``: an int or float with ``low <= value < below`` and ``value > above``."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is not a valid {kind.__name__}") from None
        if not (low <= value < below and value > above):
            limits = f"more than {above}" if above >= low else f"{low} or more"
            limits += f" and less than {below}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text} is out of range, it must be {limits}")
        return value

    return parse


def place(text: str) -> Path | str:
    """An argparse ``type``: a local path, or a URL."""
    return storage.trim_url(text) if is_url(text) else Path(text)


positive = number(int, 1)
not_negative = number(int, 0)


def make_parser(doc: str) -> ArgumentParser:
    """A parser without flags; its help begins with the script's docstring and own flags."""
    parser = ArgumentParser(
        description=doc,
        usage="%(prog)s [flags]",
        add_help=False,  # --help is in the last group
        formatter_class=HelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
        epilog="@FILE reads flags from a file, for example @config/reference.args",
    )
    parser._optionals.title = "this technique"
    return parser


def given_flags() -> str:
    """The flags on the command line and in ``@FILE``, without those that the launcher added."""
    words = make_parser("")._read_args_from_files(sys.argv[1:])
    return shlex.join(w for w in words if not w.startswith(("--local-rank", "--local_rank")))


def check_writable(folder: Path, flag: str) -> None:
    """Create the folder, and check that files can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        fail(f"{flag} cannot be written ({error.strerror}); give another path")


def lock(folder: Path, flag: str) -> None:
    """Fail if another run has locked the folder, else lock it as long as this process exists."""
    try:  # a lock of this process, not of its workers; the file stays open
        file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        if not world().restarts:  # otherwise a dead machine of this launch may still have it
            fail(f"{flag}: another run is writing to it; give each run a folder of its own")
    except OSError:
        print0(f"{flag} is on a file system without locks: do not start another run in it")


@contextlib.contextmanager
def reachable(flag: str) -> Iterator[None]:
    """End the run if a URL that the flag gave cannot be used, on this rank or on any together."""
    try:
        yield
    except (storage.StorageError, Failed) as error:
        fail(f"{flag} {error}; give another, or a local path")


def check_output_url(url: Path | str) -> None:
    """Check that files can be written to ``--output-dir``, if it is a URL."""
    if is_url(url):
        with reachable("--output-dir"), tempfile.NamedTemporaryFile() as probe:
            file = Path(probe.name)
            storage.upload(file.parent, [file.name], url)
            storage.remove(f"{url}/{file.name}")


@functools.cache
def fetch_input(place: Path | str, flag: str) -> Path:
    """The local path; a URL is copied to each machine, once. All ranks call it."""
    if not is_url(place):
        return Path(place)
    path = storage.local_folder(place, storage.DATA)
    with reachable(flag):
        fetch_together(place, path)
    return path


def fetch_together(url: str, path: Path) -> None:
    """Copy a URL to a local path of each machine. All ranks call it, and raise :class:`Failed` if
    it fails on any. Without a process group each tries, and the lock of the copy makes them wait.
    """
    together(storage.fetch, url, path, here=is_first_here() or not dist.is_initialized())
