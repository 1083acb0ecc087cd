"""The techniques that are compared, and their predictions, each in a process of its own."""

import contextlib
import dataclasses
import io
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import wait

import torch
import torchvision
from torch._subclasses.fake_tensor import FakeTensorMode

from estimator import trial
from estimator.live_bytes import highest
from estimator.own_model import own_traceback, place_of
from estimator.sent import Message

ON_HOST = ("parameters", "gradients", "optimizer", "update")  # of offload


@dataclasses.dataclass(frozen=True)
class Technique:
    """A row of the table.

    Args:
        name: in the tables.
        command: the script and its flags.
        ranks: 0 without a launcher.
        gpus: GPUs of a single process that divides the batch.
        unit: the batch is a multiple of this many samples.
        on_host: kinds of memory on the CPU.
        rank: the predicted rank.
        steps: number of steps.
    """

    name: str
    command: tuple[str, ...]
    ranks: int = 0
    gpus: int = 1
    unit: int = 1
    on_host: tuple[str, ...] = ()
    rank: int = 0
    steps: int = trial.STEPS


def techniques_for(gpus: int, is_gpt: bool = False) -> list[Technique]:
    """The techniques for a number of GPUs; some need a GPT."""
    rows = ["SingleGPU", "half_precision --dtype bfloat16", "auto_mixed_precision --dtype bfloat16"]
    if gpus > 1:
        rows += ["DP", "torchrun_DDP", "DDP_AMP --dtype bfloat16", "DDP_ZeRO --use_zero"]
        rows += ["FSDP", "FSDP --dtype bfloat16"]
    if gpus > 8 and gpus % 8 == 0:  # machines of eight
        rows += ["HSDP --shard 8"]
    if is_gpt and gpus > 1:
        rows += ["ND_parallel --dtype bfloat16 --ac full", "TP"] + (
            ["FSDP_TP --tp 2"] if gpus > 2 and gpus % 2 == 0 else []
        )
    rows += ["FSDP_offload", "gradient_accumulation --accumulate 4", "activation_checkpointing"]
    rows += ["DeepSpeed zero_stage2", "DeepSpeed zero_stage3"]
    return [make_technique(row, gpus) for row in rows]


def make_technique(name: str, gpus: int) -> Technique:
    """The technique with this name in the tables."""
    script, *flags = name.split()
    if script == "DeepSpeed":
        flags = ["--deepspeed_config", str(trial.ROOT / "config" / f"{flags[0]}_config.json")]
    launched = script not in ("SingleGPU", "half_precision", "auto_mixed_precision", "DP")
    parts = int(flags[1]) if script == "gradient_accumulation" else 1
    shares = gpus if launched or script == "DP" else 1
    if script in ("TP", "FSDP_TP"):  # tensor-parallel ranks read the same batch
        shares = gpus // int(flags[1]) if flags else 1
    return Technique(
        name,
        (f"pytorch_{script}.py", *flags),
        ranks=gpus if launched else 0,
        gpus=gpus if script == "DP" else 1,
        unit=parts * shares,
        on_host=ON_HOST if script == "FSDP_offload" else (),
    )


@dataclasses.dataclass
class Prediction:
    """The memory and communication of the GPU with the highest peak.

    Args:
        kinds: bytes at the peak, by kind.
        peaks: the same for each part of the step: see :meth:`LiveBytes.peaks`.
        messages: communication of a step.
        inputs: description of a sample.
        mistake: the script's error message, if it failed.
        error: a traceback, if there was a bug.
    """

    technique: Technique
    batch_size: int
    kinds: dict[str, int] = dataclasses.field(default_factory=dict)
    peaks: list[dict[str, int]] = dataclasses.field(default_factory=list)
    messages: list[Message] = dataclasses.field(default_factory=list)
    inputs: str = ""
    mistake: str = ""
    error: str = ""

    @property
    def peak(self) -> int:
        return sum(self.kinds.values())

    @property
    def sent(self) -> float:
        """Bytes that a rank sends per step."""
        return sum(message.sent for message in self.messages)


def predict(
    technique: Technique, batch_size: int, flags: Iterable[str], classes, own, layers=None
) -> Prediction:
    """Predict in this process, which cannot be used for anything else afterwards.

    Args:
        layers: see :func:`trial.run_script`.
    """
    found, complaint = Prediction(technique, batch_size), io.StringIO()
    share = batch_size // technique.gpus
    words = [*technique.command, *flags, "--batch-size", str(share)]
    try:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(complaint):
            with contextlib.redirect_stdout(nothing):
                live, found.inputs = trial.run_script(
                    words,
                    technique.ranks,
                    classes,
                    own,
                    steps=technique.steps,
                    rank=technique.rank,
                    layers=layers,
                )
    except trial.NEEDS_NUMBERS as error:
        found.mistake = f"{place_of(error)}{error.func}: its result depends on numbers, which are "
        found.mistake += "not there"
    except NotImplementedError as error:
        found.mistake = str(error)
    except SystemExit:
        _, _, said = complaint.getvalue().strip().rpartition(": error: ")
        found.mistake = said.splitlines()[0] if said else "it ended before its first step"
    except Exception as error:
        found.error = own_traceback(error)
    else:
        found.peaks, found.messages = live.peaks(technique.on_host), live.messages
        found.kinds = dict(highest(found.peaks))
        # nn.DataParallel's first GPU holds the whole batch and scatters it.
        found.kinds["input"] *= technique.gpus
    return found


def few_blocks(blocks: int) -> tuple[list[int], int]:
    """The numbers of blocks of two smaller models, from which a larger one is extrapolated, and how
    often to add their difference. FSDP holds up to three blocks at once, and the middle of a step
    falls between two blocks if their number is even: hence four and six, or five and seven. No
    numbers if there are few blocks anyway."""
    few = 4 + blocks % 2
    return ([few, few + 2], (blocks - few) // 2) if blocks > few + 4 else ([], 0)


def extrapolate(small: Prediction, large: Prediction, times: int) -> Prediction:
    """Add the difference of two models to the smaller one, ``times`` times."""
    if small.error or small.mistake or large.error or large.mistake:
        return large if large.error or large.mistake else small
    peaks = [
        {kind: few[kind] + times * (more[kind] - few[kind]) for kind in few}
        for few, more in zip(small.peaks, large.peaks, strict=True)
    ]
    few, many = Counter(small.messages), Counter(large.messages)
    if few - many:  # DDP's buckets have other sizes now: as many bytes, in one message
        few, many = (
            Counter({m: sum(n.size for n in of if kind_of(n) == m) for m in {*map(kind_of, of)}})
            for of in (small.messages, large.messages)
        )
        messages = [dataclasses.replace(m, size=few[m] + times * (many[m] - few[m])) for m in many]
    else:
        messages = [
            *small.messages,
            *(m for m, n in (many - few).items() for _ in range(n * times)),
        ]
    return dataclasses.replace(small, kinds=highest(peaks), peaks=peaks, messages=messages)


def kind_of(message: Message) -> Message:
    """A message without its size."""
    return dataclasses.replace(message, size=0)


def predict_all(
    chosen: list[Technique], predict: Callable, batch_size: int, layers: int, at_once: int
) -> Iterator[Prediction]:
    """Predict each technique; a decoder with many ``layers`` from two smaller ones."""
    tasks, kinds = [], []
    for technique in chosen:
        # DeepSpeed prefetches blocks up to a fixed number of parameters.
        by_two = "DeepSpeed" not in technique.name
        counts, times = few_blocks(layers) if by_two else ([], 0)
        tasks += [partial(predict, technique, batch_size, layers=n) for n in counts or [None]]
        kinds.append((bool(counts), times))
    found = side_by_side(tasks, at_once)
    for by_two, times in kinds:
        yield extrapolate(next(found), next(found), times) if by_two else next(found)


class Killed(Exception):
    """A process was killed; the argument is its exit code."""


def warm_up() -> None:
    """Do once what each process would do first, as fake tensors import many modules."""
    with FakeTensorMode(), torch.no_grad():
        torchvision.models.resnet18()(torch.zeros(2, 3, 64, 64))


def side_by_side(tasks: list[Callable], at_once: int) -> Iterator:
    """Run each task in its own process; yield the results in order."""
    warm_up()
    context = multiprocessing.get_context("fork")  # so the child has already imported PyTorch
    waiting, running, done = list(enumerate(tasks)), {}, {}

    def work(task, pipe):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
        pipe.send(task())
        os._exit(0)  # skips freeing what it imported

    for number in range(len(tasks)):
        while number not in done:
            while waiting and len(running) < at_once:
                index, task = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=work, args=(task, theirs), daemon=True)
                process.start()
                theirs.close()
                running[ours] = index, process
            for pipe in wait(list(running)):
                index, process = running.pop(pipe)
                try:
                    done[index] = pipe.recv()
                except EOFError:
                    process.join()
                    raise Killed(process.exitcode) from None
        yield done[number]
