"""Movie reviews with binary labels, to classify; their tokenizer."""

import functools
import zlib
from pathlib import Path

import torch
from torch import Tensor

from harness.cli import fail, fetch_input
from harness.data import TaskData, how_many
from harness.settings import fill, replace
from harness.world import print0
from libraries import hub, weights

CLASSES = ["negative", "positive"]
COLUMNS = ["label", "rating", "text"]
VOCABULARY = 8000  # number of tokens of a trained tokenizer


def resolve(args):
    """Fill in defaults of the task, and check what needs no data."""
    pretrained = has_pretrained(args)
    model, dropout = ("encoder", 0.1) if pretrained else ("encoder-1x4x128", 0.5)
    args = replace(args, dataset="reviews")
    args = fill(args, model=model, context=64, dropout=dropout, optimizer="adamw")
    if (args.model == "encoder") != pretrained:
        why = "only --model encoder takes its shape from pretrained weights"
        use = "--weights FOLDER alone, or encoder-1x4x128 or distilbert without pretrained weights"
        fail(f"--model {args.model} with --weights {args.weights}: {why}; use {use}")
    if args.optimizer != "adamw":
        return fill(args, lr=0.1, weight_decay=0.0005)
    return fill(args, lr=5e-5 if pretrained else 0.001, weight_decay=0.01 if pretrained else 0.5)


def has_pretrained(args) -> bool:
    """Whether ``--weights`` is for ``from_pretrained``: a folder, or a name on the hub."""
    if args.weights == "none" or args.weights.endswith(".pt"):
        return False
    return "://" in args.weights or bool(weights.why_unusable(args.weights))


def describe(args) -> str:
    return f"of {args.context} tokens"


class Reviews(TaskData):
    """Reviews, truncated or padded to the same length: tokens ``[n, context]``, labels ``[n]``."""

    unit = "rev"
    units = "reviews"
    tensors = ("tokens", "labels")
    name = "reviews"
    classes = CLASSES

    def __init__(self, tokens: Tensor, labels: Tensor):
        self.tokens = tokens
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def prepare_evaluation(self, batch, device, dtype=None) -> tuple[Tensor, Tensor]:
        """Tokens int64 ``[n, context]`` and labels int64 ``[n]``, in training, too."""
        [index] = batch
        index = index.to(self.tokens.device, non_blocking=True)
        tokens = self.tokens[index].to(device, non_blocking=True)
        return tokens, self.labels[index].to(device, non_blocking=True)

    def example(self, n: int) -> Tensor:
        return self.tokens[:1].expand(n, -1)

    def describe(self) -> dict:
        checksum = zlib.crc32(self.tokens.cpu().numpy())  # the tokenizer may be trained on them
        return super().describe() | {"context": self.tokens.shape[1], "checksum": checksum}


def make_datasets(args) -> tuple[Reviews, Reviews]:
    """The training and the evaluation set."""
    tokenizer = make_tokenizer(args)
    splits = []
    for split, file in {"train": "train.tsv", "eval": "test.tsv"}.items():
        texts, labels = read(fetch_input(args.data_dir, "--data-dir") / file)
        wanted = how_many(args, split, len(texts))
        padded = {"padding": "max_length", "truncation": True, "max_length": args.context}
        tokens = tokenizer(texts[:wanted], **padded)["input_ids"]
        splits.append(Reviews(torch.tensor(tokens), torch.tensor(labels[:wanted])))
    train_set, eval_set = splits
    sizes = f"{len(train_set):,} training and {len(eval_set):,} evaluation reviews"
    print0(f"data: reviews, {sizes}, {len(tokenizer):,} different tokens")
    return train_set, eval_set


@functools.cache
def read(path: Path) -> tuple[list[str], list[int]]:
    """Read texts and labels from a file of tab-separated columns: label (0 or 1), rating (not
    used), text. The first line is a header."""
    example = "a line is label, rating and text with a tab between them, such as 1 2.4 'A delight.'"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        why = f"{path.name} cannot be read ({error.strerror})"
        fail(f"--data-dir {path.parent}: {why}; give the folder that holds train.tsv and test.tsv")
    texts = []
    labels = []
    for number, line in enumerate(lines, 1):
        try:
            label, rating, text = line.decode("utf-8-sig").split("\t")
            if number == 1 and [label, rating, text] == COLUMNS:
                continue
            float(rating)
            labels.append(["0", "1"].index(label))
            texts.append(text)
            if not text.strip():
                raise ValueError("no text")
        except ValueError as error:  # includes UnicodeDecodeError
            fail(f"{path}, line {number} is broken ({error}); {example}; correct or remove it")
    if not texts:
        fail(f"{path} contains no reviews; {example}")
    return texts, labels


def make_tokenizer(args):
    """The tokenizer of pretrained weights; or byte-pair encoding trained on the training split,
    identical on every rank. (A ``PreTrainedTokenizerFast``.)"""
    if has_pretrained(args):
        tokenizer = hub.from_pretrained(args.weights, "AutoTokenizer")
        if tokenizer.pad_token_id is None or not tokenizer.is_fast:
            fail(f"--weights {args.weights}: its tokenizer cannot pad a batch; give an encoder's")
        return tokenizer
    return train_tokenizer(fetch_input(args.data_dir, "--data-dir"))


@functools.cache
def train_tokenizer(data_dir: Path):
    """See :func:`libraries.hub.train_tokenizer`; once per process."""
    return hub.train_tokenizer(read(data_dir / "train.tsv")[0], VOCABULARY)
