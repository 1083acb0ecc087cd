"""Downloading a dataset: one attempt, by one rank of each machine, and no hang if offline."""

import functools
import threading
import urllib.request
from collections.abc import Callable

from harness.ranks import is_first_here, max_over_ranks


def fetch(url: str, is_there: Callable[[], bool], download: Callable[[], object]) -> str | None:
    """Download what is missing. All ranks call it, and the others of a machine wait.

    Args:
        url: asked for its headers first, for at most 5 s.
        is_there: whether nothing is missing.

    Returns:
        ``None`` where every rank finds it, else the reason, on every rank.
    """
    why, first = "", is_first_here()
    if first and not is_there():
        why = why_unreachable(url)
        if not why:
            try:
                download()
            except Exception as error:  # the same, or of a damaged file
                why = str(error)
    # Only those who downloaded vote: the others may be looking at what is half there.
    failed = max_over_ranks([first and not is_there()])[0]
    return (why or "it failed on another machine") if failed else None


@functools.cache
def why_unreachable(url: str) -> str:
    """Why an address does not answer within 5 s; empty if it does."""
    answers = ["no answer within 5 s"]

    def ask_for_headers():
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10).close()
            answers.append("")
        except Exception as error:  # of urllib, http.client, ssl or socket
            answers.append(str(error))

    # A thread, because looking up a host obeys no timeout; it may be left behind.
    thread = threading.Thread(target=ask_for_headers, daemon=True)
    thread.start()
    thread.join(timeout=5)
    return answers[-1]
