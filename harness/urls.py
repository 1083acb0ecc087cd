"""Flags that may be URLs: check them, and download inputs once per machine."""

import functools
import tempfile
from pathlib import Path

from harness.cli import fail
from harness.world import Failed, is_first_here, print0, together
from remote.storage import (
    DATA,
    Remote,
    RemoteError,
    fetch_files,
    find_mistake,
    is_url,
    local_folder,
)


def check_urls(args) -> None:
    """Check that fsspec can open the URLs among the flags, and that they contain no password."""
    for name in ("output_dir", "resume", "data_dir", "weights"):
        if mistake := find_mistake(str(getattr(args, name))):
            fail(f"--{name.replace('_', '-')} {mistake}")


def check_output_url(url: Path | str) -> None:
    """Check that files can be written to ``--output-dir``, if it is a URL."""
    if not is_url(url):
        return
    try:
        with tempfile.NamedTemporaryFile() as probe:
            remote, file = Remote(url), Path(probe.name)
            remote.upload(file.parent, [file.name])
            remote.remove(file.name)
    except RemoteError as error:
        fail(f"--output-dir {error}; give another")


@functools.cache
def fetch_input(place: Path | str, flag: str) -> Path:
    """The local path for ``--data-dir``, ``--weights`` or ``--resume``. The first rank of each
    machine downloads a URL, once per process. All ranks call it."""
    if not is_url(place):
        return Path(place)
    path, again = local_folder(place, DATA), flag != "--data-dir"
    try:
        together(fetch_files, Remote(place), path, again, print0, here=is_first_here())
    except Failed as error:
        fail(f"{flag} {error}; give another, or a local path")
    return path
