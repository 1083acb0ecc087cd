"""A trained GPT: continue a prompt, evaluate the loss on a text, export to ONNX."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.cli import fail
from inference import export
from inference.runtimes import Runner, TorchRunner, progress
from inference.trained import Trained
from jobs.gpt import Decoder, attend
from jobs.language_models import make_model, size_of
from libraries import hub
from libraries.weights import is_snapshot, load
from parallel.attention_kernels import repeat

INPUT = "int64 [batch, time]: tokens, the numbers of the characters in classes"


def complete(args: Trained) -> Trained:
    """Fill in what only ``--weights`` says: the vocabulary, and a GPT's context."""
    if hub.is_folder(args.weights) and not is_snapshot(args.weights):
        size = size_of(args)
        classes = hub.token_names(args.weights, size)
        return replace(args, classes=classes, context=size.context, dropout=0.0)
    state = load(args.weights, mmap=True)
    if not {"vocabulary", "token.weight"} <= state.keys():
        fail(f"--weights {args.weights} is not a {args.model}; give the model.pt of a GPT")
    if any(".experts." in name for name in state) and not size_of(args).experts:
        why = "is a mixture of experts, and no result.json beside it says how many a token uses"
        fail(f"--weights {args.weights} {why}; give the folder of its run")
    if "position.weight" in state:
        args = replace(args, context=len(state["position.weight"]))
    if args.tokenizer != "hub":  # result.json has its tokens
        args = replace(args, classes=[chr(point) for point in state["vocabulary"].tolist()])
    return replace(args, context=args.context or size_of(args).context, dropout=0.0)


def load_model(args: Trained) -> Decoder:
    """``--weights``, in evaluation mode on the CPU."""
    return make_model(args, args.classes).eval()


def to_tokens(args: Trained, text: str) -> Tensor:
    """Encode a prompt as ``[1, time]``; fail if it has characters that the model does not know."""
    if args.tokenizer == "bytes":
        return torch.tensor([list(text.encode())])
    if args.tokenizer == "hub":
        tokenizer = hub.load_tokenizer(args.weights)
        return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    numbers = {character: number for number, character in enumerate(args.classes)}
    if unknown := " ".join(repr(c) for c in sorted(set(text) - numbers.keys())):
        known = "".join(filter(str.isprintable, args.classes)).strip()
        fail(f"--prompt: unknown characters {unknown}; the model knows {known}")
    return torch.tensor([[numbers[character] for character in text]])


def to_text(args: Trained, tokens: list[int]) -> str:
    if args.tokenizer == "hub":
        return hub.load_tokenizer(args.weights).decode(tokens)
    text = "".join(args.classes[token] for token in tokens)
    return text.encode("latin-1").decode(errors="replace") if args.tokenizer == "bytes" else text


class KeyValueCache:
    """Replaces :func:`jobs.gpt.attend`: caches keys and values of all positions, so that only those
    of new tokens are computed."""

    def __init__(self):
        self.kept = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kept is None:  # the prompt
            self.kept = k, v
            return attend(q, k, v)
        self.kept = [torch.cat(pair, 2) for pair in zip(self.kept, (k, v), strict=True)]
        return F.scaled_dot_product_attention(q, *repeat(q, *self.kept))  # all are in the past


class CachedRunner:
    """Returns logits of the last token, ``[1, vocabulary]``, as tokens are added one by one."""

    def __init__(self, runner: TorchRunner):
        self.runner = runner
        self.seen = 0  # number of tokens in the cache
        for block in runner.model.blocks:
            block.attention.attend = KeyValueCache()

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        new = tokens[:, self.seen :]
        positions = torch.arange(self.seen, tokens.shape[1], device=self.runner.device)
        self.seen = tokens.shape[1]
        return self.runner.model(new.to(self.runner.device), positions)[:, -1].cpu()

    def remove(self) -> None:
        for block in self.runner.model.blocks:
            block.attention.attend = attend


def continue_text(args, runner: Runner) -> str:
    """``--prompt`` and ``--tokens`` sampled tokens.

    Up to the context length keys and values are cached. Beyond it the window moves, which changes
    all positions in it, so they are recomputed.
    """
    generator = torch.Generator().manual_seed(args.sample_seed)
    tokens = to_tokens(args, args.prompt)
    cached = isinstance(runner, TorchRunner) and args.cache and tokens.shape[1] <= args.context
    cache = CachedRunner(runner) if cached else None
    for _ in progress(range(args.tokens), "tokens"):
        if cache and tokens.shape[1] > args.context:
            cache = cache.remove()
        whole = tokens[:, -args.context :].contiguous()
        logits = cache(tokens) if cache else runner(whole)[:, -1]
        tokens = torch.cat([tokens, draw(logits, args.temperature, args.most, generator)], 1)
    return to_text(args, tokens[0].tolist())


def draw(logits: Tensor, temperature: float, top_k: int | None, generator) -> Tensor:
    """Sample one token for each row of ``[batch, vocabulary]``: ``[batch, 1]``. At temperature 0,
    take the likeliest."""
    if temperature == 0:
        return logits.argmax(1, keepdim=True)
    if top_k:
        least = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)


def measure(args: Trained, runner: Runner) -> dict[str, float]:
    """Loss (mean cross-entropy), perplexity and accuracy over the test split, each position
    once."""
    if args.dataset == "auto":
        fail("--dataset is needed: the weights do not say which one they were trained on")
    _, text, _ = args.task.data.load(args)
    if text.classes != args.classes:
        fail(f"--dataset {args.dataset} and the weights have different characters; give their own")
    loss = correct = n = 0
    numbers = torch.arange(len(text)).split(args.batch_size)
    for batch in progress(numbers, "batches"):
        tokens, labels = text.prepare_evaluation((batch,), "cpu")
        logits = runner(tokens).double().flatten(0, 1)
        labels = labels.flatten()
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(1) == labels).sum().item()
        n += (labels >= 0).sum().item()
    loss /= n
    return {"loss": loss, "perplexity": math.exp(loss), "accuracy": correct / n, "tokens": n}


def write_onnx(args: Trained) -> None:
    """Export for any batch size and length up to the context, and compare on random tokens."""
    if size_of(args).experts:
        fail(f"--weights {args.weights}: ONNX has no mixture of experts; use them in PyTorch")
    shapes = [(3, args.context), (1, 1), (16, max(1, args.context // 2))]
    tokens = [torch.randint(len(args.classes), shape) for shape in shapes]
    time = torch.export.Dim("time", max=args.context)
    shape = {"tokens": {0: torch.export.Dim("batch"), 1: time}}
    one_document = replace(args, packed=None)  # it takes one document, or window, per row
    export.write(one_document, load_model(args), tokens, shape, INPUT)
