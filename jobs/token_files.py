"""Token files: what a tokenizer of the hub makes of the data, encoded once by one rank per machine,
and memory-mapped by all ranks."""

import contextlib
import hashlib
import itertools
import json
import mmap
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.cli import fail
from harness.world import Failed, gather_objects, is_first_here, print0, together
from libraries import hub

TOGETHER = 32  # parts that a tokenizer gets in one call, and encodes in parallel
PART = 2**14  # bytes of text in a part
MEET = 10  # seconds of encoding, after which a rank takes part in a collective
VERSION = 2  # of what is encoded: another one does not read the files of earlier ones


def load(args, paths: list[Path], total: int, encode: Callable) -> list[Tensor]:
    """The tokens for training and for evaluation, int32 ``[n]``. All ranks call it.

    Args:
        paths: the files that are encoded. With size and time of change they identify the tokens.
        total: number of bytes or lines. The last tenth is for evaluation.
        encode: yields the tokens of the first ``samples``, or of all, between ``begin`` and
            ``end``, which are its arguments. It runs on one rank.
    """
    middle, found = total * 9 // 10, []
    for split, begin, end in (("train", 0, middle), ("eval", middle, total)):
        samples = getattr(args, f"{split}_samples")
        about = args.dataset, begin, end, samples, samples and args.context
        found.append(load_split(args, paths, about, partial(encode, begin, end, samples)))
    return found


def load_split(args, paths: list[Path], about: tuple, encode: Callable[[], Iterator]) -> Tensor:
    """The tokens that ``encode`` yields, from the file of an earlier run or of this one: next to
    the data, or else in a cache folder. ``about``: what tokens also depend on."""
    name = f".tokens-{identify(hub.folder_of(args.weights), paths, about)}.int32"
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "distributed-tokens"
    places = [folder / name for folder in (paths[0].parent, cache, Path(tempfile.gettempdir()))]

    def find() -> Path | None:
        return next((path for path in places if os.access(path, os.R_OK)), None)

    try:
        together(write, places, partial(meet, encode), here=is_first_here() and not find())
    except Failed as error:
        fail(f"--data-dir {args.data_dir}: its tokens cannot be written ({error}); free some space")
    path = find()
    if not path.stat().st_size:
        return torch.empty(0, dtype=torch.int32)
    return torch.from_numpy(np.memmap(path, np.int32, "c"))


def identify(tokenizer: Path, paths: list[Path], about: tuple) -> str:
    """A short hash of everything that the tokens depend on."""
    found = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    files = sorted(file for kind in hub.BESIDE for file in tokenizer.glob(kind))
    hashes = [hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()]
    return hashlib.sha256(json.dumps([VERSION, found, hashes, about]).encode()).hexdigest()[:16]


def meet(encode: Callable[[], Iterator]) -> Iterator:
    """What a rank encodes. All others wait for it in :func:`together`, in a collective that ends
    the run after ``--timeout``; so every few seconds this rank takes part in one."""
    met = time.monotonic()
    for tokens in encode():
        yield tokens
        if time.monotonic() > met + MEET:
            gather_objects(None)
            met = time.monotonic()


def write(places: list[Path], encode: Callable[[], Iterator[Iterable[int]]]) -> None:
    """Write the tokens to the first place that can be written."""
    for place in places:
        part = place.with_name(f"{place.name}.{uuid.uuid4().hex}.part")  # machines may share a disk
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                print0(f"tokenizing into {place}, which later runs read", sys.stderr)
                for tokens in encode():
                    file.write(np.asarray(tokens, np.int32).tobytes())
            return part.replace(place)
        except OSError:
            if place == places[-1]:
                raise
        finally:
            with contextlib.suppress(OSError):
                part.unlink()


def tokenize(tokenizer, pairs: Iterable[tuple[str, Any]], *also: str) -> Iterator[tuple]:
    """Encode texts, several at a time. Each has a companion, which is yielded with its
    ``input_ids`` and what ``also`` names, such as ``offset_mapping``."""
    options, pairs = {"return_offsets_mapping": "offset_mapping" in also}, iter(pairs)
    while some := list(itertools.islice(pairs, TOGETHER)):
        texts, others = zip(*some, strict=True)
        found = tokenizer(list(texts), add_special_tokens=False, verbose=False, **options)
        yield from zip(others, *(found[name] for name in ("input_ids", *also)), strict=True)


def read_parts(paths: list[Path], begin: int, end: int) -> Iterator[tuple[str, bool]]:
    """Decode the bytes from ``begin`` to ``end`` of all files as one, in parts of whole lines
    or words where possible: the text of each part, and whether its file ends with it."""
    for path in paths:
        size = path.stat().st_size
        first, last = (min(max(place, 0), size) for place in (begin, end))
        begin, end = begin - size, end - size
        if first == last:
            continue
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        first, last = character(data, first), character(data, last)
        while first < last:
            stop = character(data, min(first + PART, last))
            if stop < last:  # after a line, or before a space, as a token may begin with it
                space = data.rfind(b" ", first + 1, stop)
                stop = data.rfind(b"\n", first, stop) + 1 or (space if space > 0 else stop)
            try:
                text = data[first:stop].decode()
            except UnicodeDecodeError as error:
                why = f"is not UTF-8 ({error.reason} at byte {first + error.start})"
                fail(f"--data-dir: {path} {why}; convert or remove it")
            yield text.removeprefix("\ufeff"), stop == size  # a byte-order mark of Windows
            first = stop


def character(data: bytes | mmap.mmap, place: int) -> int:
    """Where the next character begins, at or after a byte."""
    while place < len(data) and 0x80 <= data[place] < 0xC0:  # UTF-8's continuation bytes
        place += 1
    return place
