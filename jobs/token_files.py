"""Token files: what a tokenizer of the hub makes of the data, encoded once by one rank per machine,
and memory-mapped by all ranks."""

import contextlib
import hashlib
import itertools
import json
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
from jobs.language_models import size_of
from jobs.text_files import find_files, read_parts
from libraries import hub

TOGETHER = 32  # parts that a tokenizer gets in one call, and encodes in parallel
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
    middle = total * 9 // 10
    found = []
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
    options = {"return_offsets_mapping": "offset_mapping" in also}
    pairs = iter(pairs)
    while some := list(itertools.islice(pairs, TOGETHER)):
        texts, others = zip(*some, strict=True)
        found = tokenizer(list(texts), add_special_tokens=False, verbose=False, **options)
        yield from zip(others, *(found[name] for name in ("input_ids", *also)), strict=True)


# ---------------------------------------------------------------------------------------- texts
def load_text(args) -> tuple[list[Tensor], list[str]]:
    """The tokens of the files ``--data-dir``, for training and for evaluation, and the vocabulary.
    Every file ends with the token for the end of a sequence."""
    paths = find_files(args)
    tokenizer = hub.load_tokenizer(args.weights)
    total = sum(path.stat().st_size for path in paths)
    tokens = load(args, paths, total, partial(encode_files, tokenizer, paths, args.context))
    return tokens, hub.token_names(args.weights, size_of(args))


def encode_files(
    tokenizer, paths: list[Path], context: int, begin: int, end: int, samples: int | None
) -> Iterator[list]:
    """Yield the tokens of bytes ``begin`` to ``end`` of all files, enough for the samples."""
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    last = newline if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts = read_parts(paths, begin, end)
    n = 0
    for ends, ids in tokenize(tokenizer, parts):
        if ends:
            ids = ids + last
        yield ids
        n += len(ids)
        if samples and n > samples * context:
            return
