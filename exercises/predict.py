"""Predict bytes before you measure them: three questions, of sizes drawn at random.

Command:    python exercises/predict.py             another three each time
            python exercises/predict.py --seed 7    these three again
            printf '72\\n9.3\\n1.5\\n' | python exercises/predict.py --seed 7
Answers     from techniques.py, and from estimate.py, which runs a step on fake tensors. Within 10%
            counts as right; otherwise it says whose number you gave.
"""

import random
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import estimate  # noqa: E402
from estimator import techniques as predicted  # noqa: E402
from harness.cli import fail, make_parser, not_negative  # noqa: E402
from harness.world import count_cores  # noqa: E402
from techniques import technique  # noqa: E402

GB = 1e9
CLOSE = 0.1  # relative
MODELS = "llama3-8b", "llama2-7b", "llama2-13b", "mistral-7b", "qwen3-8b", "llama3-70b"


class Question(NamedTuple):
    """What is asked. ``others``: what a number means that somebody gives instead."""

    text: str
    unit: str
    answer: float
    why: str
    others: dict[str, float]


def job_of(model: str, context: int, batch_size: int):
    words = ["--model", model, "--context", str(context), "-b", str(batch_size)]
    return estimate.job_of(*estimate.parse_args([*words, "--memory", "H100", "--recommend"]))


def listed(parts: dict[str, float], form: str) -> str:
    return ", ".join(f"{kind} {value:{form}}" for kind, value in parts.items())


def ask_state(draw: random.Random) -> Question:
    """Persistent memory of a rank."""
    stage = draw.choice((1, 2))
    ranks = draw.choice((4, 8, 16, 32))
    model = draw.choice(MODELS)
    parameters = job_of(model, 2048, 64).decoder.whole

    def kept(name: str, stage: int = stage) -> dict[str, float]:
        return technique(name).keeps(ranks, {"optimizer": "adamw", "stage": stage})

    others = {
        f"ZeRO-{3 - stage}": kept("ZeRO_by_hand", 3 - stage),
        "DDP, where no rank shards anything": kept("torchrun_DDP"),
        "FSDP, which shards the parameters, too": kept("FSDP"),
    }
    own = kept("ZeRO_by_hand")
    return Question(
        f"{model} has {parameters / 1e9:.2f} billion parameters. With AdamW, in float32, and "
        f"ZeRO-{stage} on {ranks} ranks: how many GB does a rank keep between two steps?",
        "GB",
        sum(own.values()) * parameters / GB,
        f"bytes per parameter: {listed(own, '.3g')}",
        {name: sum(row.values()) * parameters / GB for name, row in others.items()},
    )


def ask_traffic(draw: random.Random) -> Question:
    """Bytes that tensor parallelism sends."""
    ranks = draw.choice((2, 4, 8))
    model = draw.choice(MODELS)
    batch_size = draw.choice((1, 2, 4))
    job = job_of(model, 4096, batch_size)
    options = {"decoder": job.decoder, "optimizer": "adamw", "dtype": "float32"}

    def sent(name: str) -> float:
        return sum(technique(name).sends(ranks, options).values()) * job.decoder.whole / GB

    return Question(
        f"{model} has {job.size.layers} blocks of width {job.size.width}. With tensor parallelism "
        f"on {ranks} ranks, in float32, without sequence parallelism: how many GB does a rank send "
        f"in a step with {batch_size} x 4,096 tokens?",
        "GB",
        sent("TP"),
        "a block all-reduces its activations twice in forward and twice in backward, and an "
        "all-reduce sends 2 (N - 1) / N of its bytes",
        {
            "forward alone": sent("TP") / 2,
            "an all-reduce that sends its bytes once": sent("TP") / 2 / (ranks - 1) * ranks,
            "DDP, which sends gradients": sent("torchrun_DDP"),
        },
    )


def ask_peak(draw: random.Random) -> Question:
    """What a larger batch does to the peak."""
    model = draw.choice(("gpt-nano", "gpt-mini"))
    name = draw.choice(("torchrun_DDP", "FSDP", "activation_checkpointing", "DDP_ZeRO --use_zero"))
    batch_size = draw.choice((16, 32, 64))
    setup = predicted.make_technique(name, 4)
    flags = ["--model", model]
    predict = partial(predicted.predict, flags=flags, classes=None)
    tasks = [partial(predict, setup, size) for size in (batch_size, 2 * batch_size)]
    small, large = predicted.side_by_side(tasks, count_cores())
    grown = {}
    for kind, size in large.kinds.items():
        grown[f"{kind} {small.kinds[kind] / 2**20:.0f} to"] = size / 2**20
    return Question(
        f"{model} on 4 ranks with {name}: the global batch grows from {batch_size} to "
        f"{2 * batch_size} sequences. By which factor does the peak of a rank's memory grow?",
        "times",
        large.peak / small.peak,
        f"MiB at the peak: {listed(grown, '.0f')}",
        {
            "a peak of activations only: weights and their state do not grow": 2.0,
            "a peak that the batch does not change": 1.0,
        },
    )


def read_answer(unit: str) -> float | None:
    """The next line that is a number; None at the end of the input."""
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return None
        if not sys.stdin.isatty():
            print(text)  # which no terminal has shown
        try:
            return float(text.removesuffix(unit))
        except ValueError:
            print(f"{text!r} is not a number of {unit}; a point separates decimals, as in 12.5")


def reply(question: Question, given: float) -> tuple[bool, str]:
    """Whether the answer is right, and what to say."""
    is_right = abs(given - question.answer) <= CLOSE * abs(question.answer)
    it_is = f"it is {question.answer:.3g} {question.unit}; {question.why}"
    if is_right:
        return True, f"right: {it_is}"
    for name, value in question.others.items():
        if abs(given - value) <= CLOSE * abs(value):
            return False, f"this is {name}; {it_is}"
    if given > 0 and 500 < max(given / question.answer, question.answer / given) < 2000:
        return False, f"a factor of 1,000 is a matter of the unit; {it_is}"
    return False, f"no: {it_is}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--seed", type=not_negative, metavar="N", help="seed of the sizes that are drawn"
    )
    parser.add_argument("-h", "--help", action="help", help="print this help and exit")
    seed = parser.parse_args().seed
    if seed is None:
        seed = random.randrange(1000)
    draw = random.Random(seed)
    right = 0
    asked = 0
    for make in (ask_state, ask_traffic, ask_peak):
        question = make(draw)
        print(f"\n{question.text}")
        given = read_answer(question.unit)
        if given is None:
            break
        is_right, said = reply(question, given)
        asked += 1
        right += is_right
        print(said)
    if not asked:
        fail("no answer on the standard input; give one number a line")
    print(f"\n{right} of {asked} right. The same questions: --seed {seed}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
