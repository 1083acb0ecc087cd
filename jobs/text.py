"""Text: tiny Shakespeare, your own files, synthetic text; tokens and sequences."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from harness.cli import fail, fetch_input, need_compiler
from harness.data import TaskData, how_many
from harness.settings import fill, replace
from harness.world import print0
from jobs.language_models import has_pretrained, resolve_experts, size_of
from jobs.sizes import GPTS
from jobs.text_files import SHAKESPEARE, character, fetch_shakespeare, read, read_shakespeare

MODELS = {"cuda": "gpt-mini", "cpu": "gpt-nano"}  # what --model gpt means
AT_MOST = {"train": 2048, "eval": 1000}  # default number of samples on a CPU


def resolve(args):
    """Fill in defaults that depend on device and model, and check what needs no data."""
    if args.model == "gpt":
        args = replace(args, model=MODELS[args.device])
    size = size_of(args)
    own = has_pretrained(args)
    has_tokenizer = False
    context = size.context
    if own:
        from libraries import hub  # which other runs do not need

        if not size.on_the_hub:
            use = "use --model llama, which takes its shape"
            fail(f"--weights {args.weights} contains a Llama; {use}")
        has_tokenizer = hub.has_tokenizer(hub.folder_of(args.weights))
        context = min(context, 2048)
    defaults = {"context": context, "dropout": size.dropout, "optimizer": "adamw"}
    defaults |= {"tokenizer": "hub" if has_tokenizer else "chars"}
    defaults |= {"tie": getattr(size, "tie", False) or None}
    if size.experts:
        defaults |= {"experts": size.experts, "top_k": size.top_k, "balance": 0.0 if own else None}
    args = resolve_experts(fill(args, **defaults))
    if own and args.experts and not size.experts:  # the default of pytorch_EP.py
        fail(f"--weights {args.weights}: the model has no experts; use pytorch_FSDP.py")
    if own and args.balance == "bias":
        fail(f"--balance bias: a {size.kind} has none in transformers; use a loss, or 0")
    if own and 0 < size.window < args.context:
        why = f"is beyond the sliding window of {args.weights}"
        fail(f"--context {args.context} {why}; use at most {size.window}")
    if args.context > size.context and args.model in GPTS:
        why = f"{args.model} has at most {size.context} positions"
        use = "use no more than that, or a model of the form gpt-LxHxD"
        fail(f"--context {args.context}: {why}; {use}")
    if args.dropout and size.on_the_hub:
        fail(f"--dropout {args.dropout:g}: a Llama has none; leave it out")
    attention = getattr(args, "attention", "allgather")
    if args.packed and attention != "allgather" and getattr(args, "cp", 2) > 1:
        fail(f"--packed: --attention {attention} would cross documents; use --attention allgather")
    if args.packed and args.device == "cuda" and not args.double:
        need_compiler("cuda")  # of FlexAttention
    if args.tokenizer == "hub" and not has_tokenizer:
        fail("--tokenizer hub reads the one in the folder --weights; use a folder that has one")
    if args.optimizer == "adamw":
        return fill(args, lr=2e-5 if own else 0.001, weight_decay=0.0 if own else 0.1)
    return fill(args, lr=0.1, weight_decay=0.0005)


def describe(args) -> str:
    unit = {"bytes": "bytes", "hub": "tokens"}.get(args.tokenizer, "characters")
    return f"of {args.context} {unit}"


class Text(TaskData):
    """Text as one tensor of tokens. Sample i is a window that begins near ``i * context``: its
    tokens, with the next token of each as label.

    Args:
        tokens: ``[n]``, of a small integer type.
        vocabulary: the character of each token; for bytes U+0000 to U+00FF.
    """

    unit = "win"
    units = "windows"
    tensors = ("tokens",)
    about = ""  # how documents were packed, to print

    def __init__(self, tokens: Tensor, vocabulary: list[str], context: int):
        self.tokens = tokens
        self.classes = vocabulary
        self.context = context
        self.length = context  # tokens of a sample, on average

    def __len__(self) -> int:
        return -(-self.count_labels() // self.context)

    def count_labels(self) -> int:
        """Number of labels: all tokens but the first."""
        return len(self.tokens) - 1

    def prepare(self, batch, device, seed, epoch, step, dtype=None, share=(0, 1)):
        """Tokens and labels, int64 ``[n, context]``, of windows that begin at ``i * context`` plus
        a random offset of up to ``context - 1`` tokens: a function of (seed, epoch, step),
        identical at every world size and after a resume, like the crops of images."""
        [index] = batch
        rank, of = share
        rng = np.random.default_rng((seed, epoch, step))
        later = torch.from_numpy(rng.integers(self.context, size=len(index) * of))
        starts = index * self.context + later[rank::of]
        return self.windows(starts.clamp(max=self.count_labels() - self.context), device)

    def prepare_evaluation(self, batch, device, dtype=None) -> tuple[Tensor, Tensor]:
        """Adjacent windows, so that each position counts once. Beyond the end of the text, the
        labels of the last window are -100, which ``F.cross_entropy`` ignores."""
        [index] = batch
        return self.windows(index * self.context, device)

    def windows(self, starts: Tensor, device) -> tuple[Tensor, Tensor]:
        """``context`` tokens from each start, and their labels, on the device of the text."""
        end = len(self.tokens)
        where = self.tokens.device
        places = send(starts, where)[:, None] + torch.arange(self.context + 1, device=where)
        tokens = self.tokens[places.clamp(max=end - 1)].long()
        labels = tokens[:, 1:].masked_fill(places[:, 1:] >= end, -100)
        return send(tokens[:, :-1].contiguous(), device), send(labels, device)

    def example(self, n: int) -> Tensor:
        return torch.zeros(n, self.context, dtype=torch.int64)

    def rates(self, samples_per_second: float) -> dict[str, float]:
        tokens = samples_per_second * self.length
        return {"samples_per_second": samples_per_second, "tokens_per_second": tokens}

    def describe(self) -> dict:
        return super().describe() | {"train_tokens": len(self.tokens), "context": self.context}


class Documents(Text):
    """Rows of ``context`` tokens, each with one document, or ``packed`` with as many as fit, one
    after the other; and with padding at its end.

    Args:
        tokens: one that is no label is stored as its bitwise complement, which is negative.
        places: ``[n, 3]``: where each document begins, its number of inputs, which is at most
            ``context``, and of labels.
    """

    unit = "row"
    units = "rows"

    def __init__(self, tokens: Tensor, vocabulary: list[str], context: int, places, packed: bool):
        super().__init__(tokens, vocabulary, context)
        self.packed = packed
        self.starts, self.lengths, counts = places.T
        self.rows = np.arange(len(places) + 1)  # the first document of each, and all documents
        if packed:
            self.rows = next_fit(self.lengths, context)
        self.counts = np.add.reduceat(counts, self.rows[:-1])  # labels of each row
        self.length = self.lengths.sum() / len(self)

    def __len__(self) -> int:
        return len(self.counts)

    def count_labels(self) -> int:
        return int(self.counts.sum())

    def prepare(self, batch, device, seed, epoch, step, dtype=None, share=(0, 1)):
        """See :meth:`prepare_evaluation`. Also counts the global batch's labels, for the loss."""
        [index] = batch
        rank, of = share
        n = len(index) * of
        order = in_order(len(self), seed + epoch)[step * n : (step + 1) * n]
        if not np.array_equal(order[rank::of], index):
            raise RuntimeError("the sampler has another order of rows")
        self.density = self.counts[order].mean() / self.context
        return self.prepare_evaluation(batch, device)

    def prepare_evaluation(self, batch, device, dtype=None) -> tuple[Tensor, Tensor]:
        """Labels int64 ``[n, context]``, -100 where there is none, and tokens of the same shape, -1
        at padding. If packed, these are ``[n, 2, context]``, with the position of each in its
        document."""
        rows = torch.from_numpy(np.stack([self.row(i) for i in batch[0].numpy()]))
        places, positions = send(rows, self.tokens.device).unbind(1)
        tokens = self.tokens[places].long()
        labels = self.tokens[places + 1].long()
        tokens = torch.where(tokens < 0, ~tokens, tokens).masked_fill(places < 0, -1)
        labels = labels.masked_fill((places < 0) | (labels < 0), -100)
        tokens = torch.stack([tokens, positions], 1) if self.packed else tokens
        return send(tokens, device), send(labels, device)

    def row(self, i: int) -> np.ndarray:
        """Where the tokens of a row are, and their positions in their documents. Padding is at -1,
        and a document of its own, which has no labels."""
        documents = slice(self.rows[i], self.rows[i + 1])
        lengths = self.lengths[documents]
        begins = np.repeat(lengths.cumsum() - lengths, lengths)
        positions = np.arange(len(begins)) - begins
        places = np.repeat(self.starts[documents], lengths) + positions
        padding = np.arange(self.context - len(begins))
        both = [places, np.full_like(padding, -1)], [positions, padding]
        return np.stack([np.concatenate(parts) for parts in both])

    def describe(self) -> dict:
        found = {"train_tokens": int(self.lengths.sum()), "train_labels": self.count_labels()}
        return super().describe() | found

    def describe_rows(self) -> str:
        padding = 1 - self.length / self.context
        return f" in {len(self):,} rows, {padding:.0%} padding" if self.packed else ""


def send(tensor: Tensor, device) -> Tensor:
    """A tensor on a device. From pinned memory, a GPU copies it while the CPU goes on."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def next_fit(lengths: np.ndarray, context: int) -> np.ndarray:
    """The first document of each row, and at the end the number of documents. A row ends before
    the first document that does not fit, so documents keep their order."""
    ends = lengths.cumsum()
    rows = [0]
    used = 0
    while rows[-1] < len(ends):
        rows.append(int(np.searchsorted(ends, used + context, "right")))
        used = ends[rows[-1] - 1]
    return np.array(rows)


@lru_cache(maxsize=1)
def in_order(n: int, seed: int) -> np.ndarray:
    """The order of an epoch, as RandomSampler and DistributedSampler have it."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).numpy()


# ---------------------------------------------------------------------------------------- texts
def make_datasets(args) -> tuple[Text, Text]:
    """The training and the evaluation text, with a common vocabulary. Resolves ``auto``."""
    train_set, eval_set, why = load(args)
    because = f" ({SHAKESPEARE} is not in {args.data_dir} and could not be downloaded: {why})"
    print0(
        f"data: {train_set.name}{because if why else ''}, {len(train_set.tokens):,} training and "
        f"{len(eval_set.tokens):,} evaluation tokens in {train_set.units} of {args.context}, "
        f"{len(train_set.classes)} different ones{train_set.about}{eval_set.about}"
    )
    return train_set, eval_set


def load(args) -> tuple[Text, Text, str | None]:
    """The same without printing, and the reason if the data could not be downloaded."""
    name = args.dataset
    why = None
    if name in ("auto", "shakespeare"):
        why = fetch_shakespeare(fetch_input(args.data_dir, "--data-dir"))
        if why and name == "shakespeare":
            why = f"is not in {args.data_dir}, and could not be downloaded ({why})"
            use = "put it there, or use --dataset synthetic"
            fail(f"--dataset shakespeare: {SHAKESPEARE} {why}; {use}")
        name = "synthetic" if why else "shakespeare"
    if name == "text" and args.tokenizer == "hub":
        from jobs import token_files  # which other tokenizers do not need

        (first, last), vocabulary = token_files.load_text(args)
    elif name == "synthetic":
        texts = (made_up(args.seed, split, args.packed).encode() for split in ("train", "eval"))
        (first, last), vocabulary = encode(args, *texts)
    else:
        text = read_shakespeare(args) if name == "shakespeare" else read(args)
        middle = character(text, len(text) * 9 // 10)  # the last tenth: evaluation
        (first, last), vocabulary = encode(args, text[:middle], text[middle:])
    train_set = cut(args, name, first, vocabulary, "train")
    return train_set, cut(args, name, last, vocabulary, "eval"), why


def encode(args, *texts: bytes) -> tuple[list[Tensor], list[str]]:
    """Encode texts as tokens; also return the character of each token."""
    if args.tokenizer == "bytes":
        found = [torch.from_numpy(np.frombuffer(text, np.uint8).copy()) for text in texts]
        return found, [chr(byte) for byte in range(256)]
    if args.tokenizer == "hub":
        from jobs import token_files
        from libraries import hub

        tokenizer = hub.load_tokenizer(args.weights)
        found = token_files.tokenize(tokenizer, ((text.decode(), None) for text in texts))
        tokens = [torch.tensor(ids, dtype=torch.int32) for _, ids in found]
        return tokens, hub.token_names(args.weights, size_of(args))
    strings = [text.decode() for text in texts]
    vocabulary = sorted(set().union(*strings))
    kind, encoding = (np.uint8, "latin-1") if len(vocabulary) <= 256 else (np.int32, "utf-32-le")
    codes = {ord(character): code for code, character in enumerate(vocabulary)}
    coded = (string.translate(codes).encode(encoding, "surrogatepass") for string in strings)
    return [torch.from_numpy(np.frombuffer(text, kind).copy()) for text in coded], vocabulary


def cut(args, name: str, tokens: Tensor, vocabulary: list[str], split: str) -> Text:
    """Shorten a text to ``--train-samples`` or ``--eval-samples`` windows, if given."""
    whole = Text(tokens, vocabulary, args.context)
    least = args.context if split == "train" else 1
    if whole.count_labels() < least:
        which = {"train": "first nine tenths", "eval": "last tenth"}[split]
        why = f"have {len(tokens)} tokens, and --context {args.context} needs {least + 1}"
        fail(f"--dataset {name}: the {which} {why}; give a longer text, or a smaller --context")
    wanted = how_many(args, split, len(whole))
    if args.device == "cpu" and name != "text" and getattr(args, f"{split}_samples") is None:
        wanted = min(wanted, AT_MOST[split])
    first = tokens[: wanted * args.context + 1]
    mapped = args.tokenizer == "hub"  # a copy would be in memory
    chosen = Text(first if mapped else first.clone(), vocabulary, args.context)
    chosen = pack(args, chosen, split) if args.packed else chosen
    chosen.name = name
    return chosen


def pack(args, text: Text, split: str) -> Documents:
    """The documents of a text, which end with the tokenizer's token for the end of a sequence; of
    characters or bytes, with an empty line. Those that are too long are split into several."""
    tokens = text.tokens.numpy()
    context = args.context
    if args.tokenizer == "hub":
        from libraries import hub

        ends = np.flatnonzero(tokens == hub.load_tokenizer(args.weights).eos_token_id) + 1
    else:
        line = tokens == (text.classes.index("\n") if "\n" in text.classes else -1)
        ends = np.flatnonzero(line[1:] & line[:-1]) + 2
    if split == "train" and not len(ends):
        end = "token for the end of a sequence" if args.tokenizer == "hub" else "empty line"
        fail(f"--packed: the text has no {end}, which separates documents; add it after each")
    starts = np.concatenate([[0], ends])
    inputs = np.maximum(np.diff(starts, append=len(tokens)) - 1, 0)
    parts = -(-inputs // context)
    number = np.arange(parts.sum()) - np.repeat(parts.cumsum() - parts, parts)
    lengths = np.minimum(np.repeat(inputs, parts) - number * context, context)
    places = np.stack([np.repeat(starts, parts) + number * context, lengths, lengths], 1)
    packed = Documents(text.tokens, text.classes, context, places, True)
    kind = {"train": "training", "eval": "evaluation"}[split]
    long = (parts > 1).sum()
    split_up = f"{(parts > 0).sum():,} {kind} documents ({long:,} longer than --context, split)"
    packed.about = f"\npacked: {split_up}{packed.describe_rows()}"
    return packed


def made_up(seed: int, split: str, documents: bool | None = False) -> str:
    """Synthetic text from the seed: a hundred words, each with eight possible successors. It needs
    no files and no network, and a small model learns it. ``documents``: with empty lines."""
    rng = np.random.default_rng((seed, 0))
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, size=rng.integers(2, 8))) for _ in range(100)]
    follow = rng.integers(100, size=(100, 8)).tolist()
    rng = np.random.default_rng((seed, {"train": 1, "eval": 2}[split]))
    word = 0
    said = []
    choices = rng.integers(8, size={"train": 200_000, "eval": 20_000}[split]).tolist()
    ends = (rng.random(len(choices)) < (0.5 if documents else 0)).tolist()
    for choice, end in zip(choices, ends, strict=True):
        word = follow[word][choice]
        said.append(words[word] + "\n\n" * end)
    return " ".join(said)
