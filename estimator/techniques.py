"""The techniques that are compared, and their predictions, each in a process of its own."""

import dataclasses
import gc
import itertools
import multiprocessing
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait

import torch
import torchvision
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from estimator import trial
from estimator.live_bytes import highest
from estimator.sent import Message
from techniques import TECHNIQUES, Case, Technique, technique

ON_HOST = ("offloaded",)  # kinds of memory on the CPU; with offload of FSDP:
ALL_ON_HOST = ("parameters", "gradients", "optimizer", "update", *ON_HOST)
ADVICE = {  # by a part of an error's message
    "doesn't require gradient": "this script cannot train a model with frozen parameters",
    "no attribute 'requires_grad'": "this script needs blocks that return one tensor, not a tuple",
    "tensors was saved during": "a block saves less when recomputed; a cache needs use_cache=False",
    "to view Float as Byte": "DeepSpeed doesn't support scalar parameters; use a tensor of size 1",
    "arguments: --accumulate": "--only ND_parallel --ac none is FSDP that accumulates",
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """A technique on so many GPUs, as a row of the table predicts it."""

    name: str  # in the tables
    command: tuple[str, ...]  # the script and its flags
    ranks: int = 0  # 0 without a launcher
    gpus: int = 1  # of a single process that divides the batch
    shares: int = 1  # among which the batch is divided: the GPUs without those of TP and CP
    unit: int = 1  # and is a multiple of this many samples, with gradient accumulation
    on_host: tuple[str, ...] = ON_HOST
    rank: int = 0  # the predicted one
    steps: int = trial.STEPS
    tp: int = 1  # numbers of ranks of tensor, pipeline, context and expert parallelism
    pp: int = 1
    cp: int = 1
    ep: int = 1
    to_one: bool = False  # all tokens are routed to the experts of one rank


def techniques_for(
    gpus: int, is_gpt: bool = False, has_experts=False, flags: Sequence[str] = ()
) -> list[Setup]:
    """The techniques for a number of GPUs, of those that the root's list has estimated; some need
    a GPT, and bring experts if it has none. ``flags`` of the user replace theirs, also in the name
    of a row."""
    rows = [row for row in TECHNIQUES if is_gpt or "needs_gpt" not in row.traits]
    cases = [(row, case) for row in rows for case in row.cases if "estimated" in case.traits]
    names = [name_of(*one, flags) for one in cases if is_for(one[1], gpus)]
    own = re.compile(r" --(experts|top-k) \d+" if has_experts else "$^")
    names = dict.fromkeys(own.sub("", name) for name in names)
    return [make_technique(name, gpus, flags) for name in names]


def is_for(case: Case, gpus: int) -> bool:
    """Whether a case is of use on so many GPUs: a mesh has at least two of its rows."""
    row = re.search(r"--(?:shard|tp|ep) (\d+)", case.flags)
    row = int(row[1]) if row else 1
    return "alone" in case.traits if gpus == 1 else gpus > row and gpus % row == 0


def name_of(row: Technique, case: Case, own: Sequence[str] = ()) -> str:
    """The name in the tables, with the values of the user's flags, which are the last ones: of a
    configuration of DeepSpeed, only the name of the file."""
    flags = case.flags
    for flag, value in values_of(own).items():
        flags = re.sub(rf"(?<!\S){flag} \S+", f"{flag} {value}", flags)
    flags = re.sub(r"--deepspeed_config (?:\S+/)?(\w+?)(?:_config)?\.json", r"\1", flags)
    return f"{row.name} {flags}".strip()


def values_of(flags: Sequence[str]) -> dict[str, str]:
    words = " ".join(flags).replace("=", " ").split()
    pairs = itertools.pairwise(words)
    return {flag: value for flag, value in pairs if flag[:2] == "--" != value[:2]}


def make_technique(name: str, gpus: int, own: Sequence[str] = ()) -> Setup:
    """The technique with this name in the tables; ``own``: the user's flags."""
    script, *flags = name.split()
    if script == "DeepSpeed":
        flags = ["--deepspeed_config", str(trial.ROOT / "config" / f"{flags[0]}_config.json")]
    given = values_of([*flags, *own])
    launched = "one_process" not in technique(script).traits
    kind = script.removesuffix("_by_hand").lower()
    split = {}  # numbers of ranks of tensor, pipeline, context and expert parallelism
    for dimension in ("tp", "pp", "cp", "ep"):
        usual = gpus if kind == dimension else 1
        split[dimension] = int(given.get(f"--{dimension}", usual))
    shares = gpus // split["tp"] // split["cp"] if launched or script == "DP" else 1
    shares //= split["pp"] if script == "ND_parallel" else 1
    # --offload of other scripts moves activations
    on_cpu = script == "FSDP_offload" or (script == "ND_parallel" and "--offload" in [*flags, *own])
    return Setup(
        name,
        (f"pytorch_{script}.py", *flags),
        ranks=gpus if launched else 0,
        gpus=gpus if script == "DP" else 1,
        shares=shares,
        unit=shares * int(given.get("--accumulate", 1)),
        on_host=ALL_ON_HOST if on_cpu else ON_HOST,
        **split,
    )


@dataclasses.dataclass
class Prediction(trial.Outcome):
    """The memory and communication of the GPU with the highest peak; ``inputs`` describes a
    sample."""

    technique: Setup
    batch_size: int
    peaks: Sequence[dict[str, int]] = ()  # of each part of the step: see :meth:`LiveBytes.peaks`
    most: int = 0  # the peak if all tokens are routed to the experts of one rank; 0: no matter


def predict(
    setup: Setup, batch_size: int, flags: Iterable[str], classes, layers=None
) -> Prediction:
    """Predict in this process, which cannot be used for anything else afterwards. For
    ``classes`` and ``layers`` see :func:`trial.run_script`."""
    found = Prediction(setup, batch_size)
    words = [*setup.command, *flags, "--batch-size", str(batch_size // setup.gpus)]
    options = {"rank": setup.rank, "steps": setup.steps, "to_one": setup.to_one, "layers": layers}
    with trial.explaining(found, last_error):
        live, found.inputs = trial.run_script(words, setup.ranks, classes, **options)
    if found.mistake:
        found.mistake += advice_on(found.mistake)
        return found
    found.messages = live.messages
    found.peaks = live.peaks(setup.on_host)
    found.kinds = dict(highest(found.peaks))
    # nn.DataParallel's first GPU holds the whole batch and scatters it.
    found.kinds["input"] *= setup.gpus
    on_gpu = set(live.KINDS) - set(setup.on_host)
    host = live.peak((*on_gpu, "update"))  # the CPU's optimizer is fused
    found.host = sum(host.values())
    return found


def last_error(_: SystemExit, complaint: str) -> str:
    """The line of a script that refuses its flags, without its usage."""
    _, _, said = complaint.strip().rpartition(": error: ")
    return said.splitlines()[0] if said else "it ended before its first step"


def advice_on(message: str) -> str:
    return next((f" ({ADVICE[part]})" for part in ADVICE if part in message), "")


def few_blocks(blocks: int) -> tuple[list[int], int]:
    """The numbers of blocks of two smaller models, from which a larger one is extrapolated, and how
    often to add their difference. FSDP holds up to three blocks at once, and the middle of a step
    falls between two blocks if their number is even: hence four and six, or five and seven. No
    numbers if there are few blocks anyway."""
    few = 4 + blocks % 2
    return ([few, few + 2], (blocks - few) // 2) if blocks > few + 4 else ([], 0)


def extrapolate(small: Prediction, large: Prediction, times: int) -> Prediction:
    """Add the difference of two models to the smaller one, ``times`` times."""
    if small.mistake or large.mistake:
        return large if large.mistake else small
    peaks = []
    for few, many in zip(small.peaks, large.peaks, strict=True):
        peaks.append({kind: few[kind] + times * (many[kind] - few[kind]) for kind in few})
    messages = with_more(small.messages, large.messages, times)
    host = small.host + times * (large.host - small.host)
    found = {"kinds": highest(peaks), "peaks": peaks, "messages": messages, "host": host}
    return dataclasses.replace(small, **found)


def with_more(small: Iterable[Message], large: Iterable[Message], times: int) -> list[Message]:
    """Add the difference to the smaller ones, ``times`` times."""
    few = sum_messages(small)
    many = sum_messages(large)
    return [dataclasses.replace(m, size=few[m] + times * (many[m] - few[m])) for m in many]


def sum_messages(messages: Iterable[Message]) -> Counter:
    """Bytes by kind of message: a message without its size. Their number need not grow with the
    blocks, as DDP has buckets of a fixed size."""
    found = Counter()
    for message in messages:
        found[dataclasses.replace(message, size=0)] += message.size
    return found


def stages_of(layers: int, stages: int) -> dict[int, int]:
    """Candidates for the stage with the highest peak and for the one that sends most, with their
    numbers of blocks: the first stage, with the most micro-batches in flight; the last one, with
    the logits; the second one, which sends both ways; and the first one with the most blocks."""
    blocks = [layers * (n + 1) // stages - layers * n // stages for n in range(stages)]
    chosen = sorted({0, min(1, stages - 1), blocks.index(max(blocks)), stages - 1})
    return {n: blocks[n] for n in chosen}


def predict_all(
    chosen: Iterable[Setup], predict: Callable, batch_size: int, layers: int, at_once: int
) -> Iterator[Prediction]:
    """Predict each setup; a decoder with many ``layers`` from two smaller ones, a pipeline from
    some of its stages."""
    tasks = [tasks_of(setup, predict, batch_size, layers) for setup in chosen]
    found = side_by_side([task for some in tasks for task, _ in some], at_once)
    for some in tasks:
        yield combine([(next(found), times) for _, times in some])


def tasks_of(
    setup: Setup, predict: Callable, batch_size: int, layers: int
) -> list[tuple[Callable, int]]:
    """The predictions for :func:`combine`: of each stage one, or two with some of its blocks."""
    found = []
    stages = stages_of(layers, setup.pp)
    routes = [False, True] if setup.ep > 1 else [False]  # tokens to all experts, or to one rank's
    for (stage, blocks), to_one in itertools.product(stages.items(), routes):
        rank = stage * setup.ranks // setup.pp + (setup.cp - 1) * setup.tp
        one = dataclasses.replace(setup, rank=rank, to_one=to_one)
        task = partial(predict, one, batch_size)
        # DeepSpeed prefetches blocks up to a fixed number of parameters. ZeroRedundancyOptimizer
        # assigns whole tensors: of a small model, a rank may have the largest one alone.
        whole = setup.name.startswith(("DeepSpeed", "DDP_ZeRO"))
        counts, times = ([], 0) if whole else few_blocks(blocks)
        if not counts:
            found.append((task, times))
        for n in counts:
            found.append((partial(task, layers=n * setup.pp), times))
    return found


def combine(found: list[tuple[Prediction, int]]) -> Prediction:
    """The memory of the stage with the highest peak, the messages of the one that sends most."""
    balanced = []  # each stage, if all experts get equally many tokens
    to_one = []  # if all tokens are routed to the experts of one rank
    for setup, some in itertools.groupby(found, lambda one: one[0].technique):
        (small, times), *larger = some
        stage = extrapolate(small, larger[0][0], times) if larger else small
        (to_one if setup.to_one else balanced).append(stage)
    fullest = max(balanced, key=lambda one: (bool(one.mistake), one.peak))
    busiest = max(balanced, key=lambda one: one.sent)
    most = max((one.peak for one in to_one), default=0)
    return dataclasses.replace(fullest, messages=busiest.messages, most=most)


def side_by_side(tasks: list[Callable], at_once: int) -> Iterator:
    """Run each task in its own process, with a progress bar on a terminal, elsewhere a line on
    stderr; yield the results in order. ``ChildProcessError``, with the exit code: a process was
    killed."""
    bar = tqdm(total=len(tasks), desc="predicted", unit="", leave=False, disable=None)
    if bar.disable:
        print(f"training steps to predict: {len(tasks)}, {at_once} at once", file=sys.stderr)
    with FakeTensorMode(), torch.no_grad():  # imports many modules, here instead of in each process
        torchvision.models.resnet18()(torch.zeros(2, 3, 64, 64))
    context = multiprocessing.get_context("fork")  # so the child has already imported PyTorch
    waiting = enumerate(tasks)
    running = {}  # by the end of its pipe: the number of a task, and its process
    done = {}  # results, by the number of the task

    def work(task, pipe):
        gc.freeze()  # a collection would copy the memory of the parent
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
        pipe.send(task())
        os._exit(0)  # skips freeing what it imported

    for number in range(len(tasks)):
        while number not in done:
            for index, task in itertools.islice(waiting, at_once - len(running)):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=work, args=(task, theirs), daemon=True)
                process.start()
                theirs.close()
                running[ours] = index, process
            for pipe in wait(list(running)):
                index, process = running.pop(pipe)
                bar.update()
                try:
                    done[index] = pipe.recv()
                except EOFError:
                    process.join()
                    raise ChildProcessError(process.exitcode) from None
        yield done[number]
