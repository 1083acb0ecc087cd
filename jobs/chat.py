"""Chat: conversations from a .jsonl file, in the chat template of the folder ``--weights``. Labels
are the assistant's answers."""

import json
import zlib
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path

import jinja2
import numpy as np
import torch
from torch import Tensor

from harness.cli import fail, fetch_input
from harness.data import how_many
from harness.world import print0, this_script
from jobs import decoder, text, token_files
from libraries import hub

END = np.iinfo(np.int32).min  # follows each conversation in a token file
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}'
describe, has_pretrained = text.describe, text.has_pretrained  # as those of text


def resolve(args):
    """Fill in defaults as for text, and check that there is a tokenizer."""
    args = text.resolve(args)
    if args.tokenizer != "hub":
        why = "needs the tokenizer and the chat template of a model"
        fail(f"--dataset chat {why}; give their folder as --weights, without --tokenizer")
    return args


class Chat(text.Text):
    """Conversations, one per window of ``context`` tokens. A longer one is cut, a shorter one is
    padded at its end, which causal attention keeps from it. Labels are -100 except for answers.

    Args:
        tokens: int32, all conversations, each with :data:`END` after it. A token that is not part
            of an answer is stored as its bitwise complement, which is negative.
        vocabulary: the tokens' names.
        context: tokens per window.
        places: int64 ``[n, 3]``: where each conversation begins, and its numbers of tokens and of
            labels.
    """

    unit, units, name = "conv", "conversations", "chat"

    def __init__(self, tokens: Tensor, vocabulary: list[str], context: int, places: Tensor):
        super().__init__(tokens, vocabulary, context)
        self.starts, self.lengths, self.counts = places.T

    def __len__(self) -> int:
        return len(self.starts)

    def count_labels(self) -> int:
        return int(self.counts.sum())

    def prepare(self, batch, device, seed, epoch, step, dtype=None, share=(0, 1)):
        """Tokens and labels, int64 ``[n, context]``. Every rank also counts the labels of the
        global batch, for :meth:`weight`."""
        [index], (rank, of) = batch, share
        n = len(index) * of
        order = in_order(len(self), seed + epoch)[step * n : (step + 1) * n]
        if not torch.equal(order[rank::of], index):
            raise RuntimeError("the sampler has another order of conversations")
        self.density = self.counts[order].sum().item() / (n * self.context)
        return self.prepare_evaluation(batch, device)

    def weight(self, labels: Tensor) -> Tensor:
        """The share of positions with a label, relative to that of the global batch, a scalar: a
        mean over few labels counts less."""
        if labels.shape[1] != self.context:
            why = f"{this_script()}.py splits sequences, and some parts would have no answer"
            fail(f"--dataset chat: {why}; do not shard the context")
        return (labels >= 0).to(torch.get_default_dtype()).mean() / self.density

    def prepare_evaluation(self, batch, device, dtype=None) -> tuple[Tensor, Tensor]:
        """The same, without counting."""
        [index] = batch
        places = torch.arange(self.context + 1)
        inside = (places < self.lengths[index, None]).to(self.tokens.device)
        places = (self.starts[index, None] + places).clamp(max=len(self.tokens) - 1)
        found = self.tokens[places.to(self.tokens.device)].long()
        tokens = torch.where(found < 0, ~found, found).masked_fill(~inside, 0)
        labels = found.masked_fill(~inside | (found < 0), -100)[:, 1:]
        return tokens[:, :-1].contiguous().to(device), labels.contiguous().to(device)

    def rates(self, samples_per_second: float) -> dict[str, float]:
        tokens = samples_per_second * self.lengths.clamp(max=self.context).double().mean().item()
        return {"samples_per_second": samples_per_second, "tokens_per_second": tokens}

    def describe(self) -> dict:
        checksum = zlib.crc32(self.tokens.cpu().numpy())
        found = {"train_tokens": int(self.lengths.sum()), "train_labels": self.count_labels()}
        return super().describe() | found | {"context": self.context, "checksum": checksum}


@lru_cache(maxsize=1)
def in_order(n: int, seed: int) -> Tensor:
    """The order of an epoch, as RandomSampler and DistributedSampler have it."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------- files
def make_datasets(args) -> tuple[Chat, Chat]:
    """The training set, and the last tenth of the conversations for evaluation."""
    train_set, eval_set, words = load(args)
    print0(f"data: chat, {words}; windows of {args.context} tokens")
    return train_set, eval_set


def load(args) -> tuple[Chat, Chat, str]:
    """The same without printing, and a description of both."""
    path, folder = fetch_input(args.data_dir, "--data-dir"), hub.folder_of(args.weights)
    if not path.is_file():
        fail(f"--data-dir {path}: --dataset chat reads a file; give a .jsonl, each line {EXAMPLE}")
    tokenizer = hub.load_tokenizer(folder)
    if not (tokenizer.chat_template and tokenizer.is_fast):
        lacks = "tokenizer.json" if tokenizer.chat_template else "chat template"
        fail(f"--dataset chat: {folder} has no {lacks}; use a model for chat, or add that file")
    with path.open("rb") as file:
        total = sum(1 for _ in file)
    vocabulary = hub.token_names(folder, decoder.size_of(args))
    found = token_files.load(args, [path], total, partial(encode, tokenizer, path, args.context))
    train_set, trained = choose(args, "train", found[0], vocabulary)
    eval_set, evaluated = choose(args, "eval", found[1], vocabulary)
    return train_set, eval_set, f"{trained}; {evaluated}"


def choose(args, split: str, tokens: Tensor, vocabulary: list[str]) -> tuple[Chat, str]:
    """The conversations that have an answer within the context, and a description of them all."""
    ends = np.flatnonzero(tokens.numpy() == END)
    starts = np.concatenate([[0], ends + 1])[: len(ends)]
    places = np.stack([starts + 1, np.minimum(ends, starts + args.context + 1)], 1)
    counts = np.add.reduceat(tokens.numpy() >= 0, places.flatten(), dtype=np.int64)[::2]
    kept = np.flatnonzero(counts)
    if not len(kept):
        of = {"train": "first nine tenths", "eval": "last tenth"}[split]
        why = f"no conversation of the {of} has an answer within --context {args.context}"
        fail(f"--data-dir {args.data_dir}: {why}; use more of them, or a larger --context")
    skipped, kept = len(ends) - len(kept), kept[: how_many(args, split, len(kept))]
    places = torch.from_numpy(np.stack([starts, ends - starts, counts], 1)[kept])
    chosen = Chat(tokens, vocabulary, args.context, places)
    long = (chosen.lengths > args.context + 1).sum()
    kind = "training" if split == "train" else "evaluation"
    words = f"{len(kept):,} {kind} conversations with {chosen.count_labels():,} labels "
    return chosen, f"{words}({long:,} cut, {skipped:,} others without an answer skipped)"


def encode(
    tokenizer, path: Path, context: int, begin: int, end: int, samples: int | None
) -> Iterator[np.ndarray]:
    """Yield the tokens of each conversation from line ``begin`` to ``end``, as :class:`Chat` takes
    them; stop after so many samples that have an answer within the context."""
    n, pairs = 0, read(tokenizer, path, begin, end)
    for answers, ids, offsets in token_files.tokenize(tokenizer, pairs, "offset_mapping"):
        first, last = np.array(offsets).reshape(-1, 2).T
        counted = np.zeros(len(ids), bool)
        for start, stop in answers:  # the offsets of a token need not include its spaces
            counted |= (first >= start) & (last > start) & (last <= stop)
        yield np.append(np.where(counted, ids, np.invert(ids)), END)
        n += counted[1 : context + 1].any()
        if n == samples:
            return


def read(tokenizer, path: Path, begin: int, end: int) -> Iterator[tuple[str, list]]:
    """What :func:`render` makes of the lines from ``begin`` to ``end``."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if begin < number <= end and line.strip():
                try:
                    yield render(tokenizer, parse(line))
                except (ValueError, TypeError, jinja2.TemplateError) as error:
                    why = f"line {number} cannot be used ({error}); correct or remove it"
                    fail(f"--data-dir {path}: {why}; a line is {EXAMPLE}")


def parse(line: bytes) -> list[dict]:
    """The messages of a line; a ``ValueError`` says what is wrong with it."""
    found = json.loads(line)
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("it has no list of messages")
    for number, message in enumerate(messages, 1):
        for name in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(name), str):
                raise ValueError(f"the {name} of message {number} is not text")
    return messages


def render(tokenizer, messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and where its answers begin, after the prompt for one, and end,
    with what ends a turn. A ``ValueError`` says that the template does not tell."""
    fill = partial(tokenizer.apply_chat_template, tokenize=False)
    whole, answers = fill(messages), []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = fill(messages[:number], add_generation_prompt=True)
            turn, said = fill(messages[: number + 1]), message["content"].strip()
            stop = len(turn)
            if not whole.startswith(turn):  # later messages have changed what is before the answer
                said = turn[turn.rfind(said) :]
                stop = whole.find(said, len(prompt)) + len(said)
            if not whole.startswith(prompt) or stop < len(prompt) + len(said):
                raise ValueError(f"its template renders message {number + 1} in two ways")
            answers.append((len(prompt), stop))
    return whole, answers
