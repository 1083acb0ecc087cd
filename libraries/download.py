"""Download a data set: one attempt, by one rank per machine, and no hang if offline."""

import functools
import urllib.request
from collections.abc import Callable

from harness.storage import answer_within
from harness.world import gather_objects, is_first_here


def fetch(url: str, is_there: Callable[[], bool], download: Callable[[], object]) -> str | None:
    """Download files, unless ``is_there()``, if ``url`` answers within 5 s. All ranks call it; one
    per machine downloads. Returns on every rank why it failed, ``None`` if all find the files."""
    why = ""
    first = is_first_here()
    if first and not is_there():
        why = why_unreachable(url)
        try:
            if not why:
                download()
        except Exception as error:  # network errors, or a damaged file
            why = str(error)
    # Only downloading ranks report: others may see incomplete files.
    failed = any(gather_objects(first and not is_there()))
    return (why or "it failed on another machine") if failed else None


@functools.cache
def why_unreachable(url: str) -> str:
    """Why an address does not answer within 5 s; empty if it does."""
    headers = urllib.request.Request(url, method="HEAD")
    try:
        answer_within(5, lambda: urllib.request.urlopen(headers, timeout=10).close())
    except Exception as error:  # urllib's, http.client's, ssl's or socket's
        return str(error)
    return ""
