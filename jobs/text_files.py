"""Text files: tiny Shakespeare, and your own, whole or in parts."""

import codecs
import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from harness.cli import fail, fetch_input

SHAKESPEARE = "tinyshakespeare.txt"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PART = 2**14  # bytes of text in a part


def fetch_shakespeare(data_dir: Path) -> str | None:
    """Download tiny Shakespeare (Karpathy 2015) if it is missing; see :func:`fetch`."""
    path = data_dir / SHAKESPEARE

    def download():
        data_dir.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(URL, path, SHA256, progress=False)

    from libraries.download import fetch  # which other data do not need

    return fetch(URL, path.is_file, download)


def read_shakespeare(args) -> bytes:
    path = fetch_input(args.data_dir, "--data-dir") / SHAKESPEARE
    text = path.read_bytes()
    if hashlib.sha256(text).hexdigest() != SHA256:
        fail(f"{path} is damaged; remove it and start again")
    return text


def find_files(args) -> list[Path]:
    """The file ``--data-dir``, or all files below that folder, sorted, without hidden ones."""
    folder = fetch_input(args.data_dir, "--data-dir")
    paths = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
    paths = [path for path in paths if not path.name.startswith(".")]
    if not paths:
        fail(f"--data-dir {folder}: it contains no file; give a text file, or a folder of them")
    if json := [path for path in paths if path.suffix in (".json", ".jsonl")]:
        why = f"{json[0].name} is JSON, of which the model would also learn the syntax"
        use = "use --dataset chat for conversations, or convert it to plain text"
        fail(f"--data-dir {folder}: {why}; {use}")
    for path in (path for path in paths if not os.access(path, os.R_OK)):
        fail(f"--data-dir: {path} cannot be read; remove it")
    return paths


def read(args) -> bytes:
    """All files, concatenated."""
    texts = []
    for path in find_files(args):
        try:
            texts.append(path.read_bytes().removeprefix(codecs.BOM_UTF8))  # of Windows
            if args.tokenizer != "bytes":
                texts[-1].decode()
        except UnicodeDecodeError as error:
            why = f"{path} is not UTF-8 ({error.reason} at byte {error.start})"
            fail(f"--data-dir: {why}; convert or remove it, or use --tokenizer bytes")
    if args.packed:  # on Windows, a line ends with \r\n: an empty one would not be found
        return b"\n\n".join(texts).replace(b"\r\n", b"\n")
    return b"\n".join(texts)


def read_parts(paths: list[Path], begin: int, end: int) -> Iterator[tuple[str, bool]]:
    """Decode the bytes from ``begin`` to ``end`` of all files as one, in parts of whole lines
    or words where possible: the text of each part, and whether its file ends with it."""
    for path in paths:
        size = path.stat().st_size
        first, last = (min(max(place, 0), size) for place in (begin, end))
        begin -= size
        end -= size
        if first == last:
            continue
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        first = character(data, first)
        last = character(data, last)
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
