"""Chat: conversations of a .jsonl file in a model's chat template; labels are the answers."""

import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from jinja2 import TemplateError
from torch import Tensor

from harness.cli import fail, fetch_input
from harness.data import how_many
from harness.world import print0
from jobs import language_models, text, token_files
from jobs.conversations import documents_of
from jobs.language_models import has_pretrained as has_pretrained
from libraries import hub

END = np.iinfo(np.int32).min  # follows each conversation in a token file
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}'
describe = text.describe


def resolve(args):
    """Fill in defaults as for text, and check that there is a tokenizer."""
    args = text.resolve(args)
    if args.tokenizer != "hub":
        why = "needs the tokenizer and the chat template of a model"
        fail(f"--dataset chat {why}; give their folder as --weights, without --tokenizer")
    return args


class Chat(text.Documents):
    """Documents of conversations, mostly one of each. Labels are the answers."""

    unit = "doc"
    units = "documents"
    name = "chat"

    def describe(self) -> dict:
        return super().describe() | {"checksum": zlib.crc32(self.tokens.cpu().numpy())}


# ---------------------------------------------------------------------------------------- files
def make_datasets(args) -> tuple[Chat, Chat]:
    """The training set, and the last tenth of the conversations for evaluation."""
    train_set, eval_set, words = load(args)
    print0(f"data: chat, {words}; rows of {args.context} tokens")
    return train_set, eval_set


def load(args) -> tuple[Chat, Chat, str]:
    """The same without printing, and a description of both."""
    path = fetch_input(args.data_dir, "--data-dir")
    folder = hub.folder_of(args.weights)
    if not path.is_file():
        fail(f"--data-dir {path}: --dataset chat reads a file; give a .jsonl, each line {EXAMPLE}")
    tokenizer = hub.load_tokenizer(folder)
    if not (tokenizer.chat_template and tokenizer.is_fast):
        lacks = "tokenizer.json" if tokenizer.chat_template else "chat template"
        fail(f"--dataset chat: {folder} has no {lacks}; use a model for chat, or add that file")
    with path.open("rb") as file:
        total = sum(1 for _ in file)
    vocabulary = hub.token_names(folder, language_models.size_of(args))
    found = token_files.load(args, [path], total, partial(encode, tokenizer, path, args.context))
    train_set, trained = choose(args, "train", found[0], vocabulary)
    eval_set, evaluated = choose(args, "eval", found[1], vocabulary)
    return train_set, eval_set, f"{trained}; {evaluated}"


def choose(args, split: str, tokens: Tensor, vocabulary: list[str]) -> tuple[Chat, str]:
    """The documents that have an answer within the context, and a description of them all."""
    ends = np.flatnonzero(tokens.numpy() == END)
    starts = np.concatenate([[0], ends + 1])[: len(ends)]
    begins = np.minimum(ends, starts + 1)  # a template may make nothing of a line
    places = np.stack([begins, np.minimum(ends, starts + args.context + 1)], 1)
    counts = np.add.reduceat(tokens.numpy() >= 0, places.flatten(), dtype=np.int64)[::2]
    kept = np.flatnonzero(counts)
    if not len(kept):
        of = {"train": "first nine tenths", "eval": "last tenth"}[split]
        why = f"no conversation of the {of} has an answer within --context {args.context}"
        fail(f"--data-dir {args.data_dir}: {why}; use more of them, or a larger --context")
    skipped = len(ends) - len(kept)
    kept = kept[: how_many(args, split, len(kept))]
    inputs = ends - starts - 1
    long = (inputs[kept] > args.context).sum()
    places = np.stack([starts, np.minimum(inputs, args.context), counts], 1)
    chosen = Chat(tokens, vocabulary, args.context, places[kept], args.packed)
    kind = "training" if split == "train" else "evaluation"
    words = f"{len(kept):,} {kind} documents with {chosen.count_labels():,} labels "
    words += f"({long:,} cut, {skipped:,} others without an answer skipped)"
    return chosen, words + chosen.describe_rows()


def encode(
    tokenizer, path: Path, context: int, begin: int, end: int, samples: int | None
) -> Iterator[np.ndarray]:
    """Yield the tokens of each document from line ``begin`` to ``end``, as :class:`Chat` takes
    them; stop after so many samples that have an answer within the context."""
    n = 0
    pairs = read(tokenizer, path, begin, end)
    for answers, ids, offsets in token_files.tokenize(tokenizer, pairs, "offset_mapping"):
        first, last = np.array(offsets).reshape(-1, 2).T
        counted = np.zeros(len(ids), bool)
        for start, stop in answers:  # as transformers and TRL: a token counts if any of it does
            counted |= (first < stop) & (last > start)
        yield np.append(np.where(counted, ids, np.invert(ids)), END)
        n += counted[1 : context + 1].any()
        if n == samples:
            return


def read(tokenizer, path: Path, begin: int, end: int) -> Iterator[tuple[str, list]]:
    """The documents of the lines from ``begin`` to ``end``, and where their answers are."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if begin < number <= end and line.strip():
                try:
                    yield from documents_of(line, tokenizer)
                except (ValueError, TypeError, TemplateError) as error:
                    why = f"line {number} cannot be used ({error}); correct or remove it"
                    fail(f"--data-dir {path}: {why}; a line is {EXAMPLE}")
