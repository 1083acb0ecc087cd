"""Predict the GPU memory and the communication of each technique without a GPU, by running its own
training step on fake tensors.

Command:    python estimate.py --model resnet152 --image-size 224 -b 256 --gpus 4 --memory 24
            python estimate.py --model gpt2 --context 1024 --gpus 8 --memory A100-40GB --fit
            python estimate.py --module my_model.py:make_model --gpus 2
            python estimate.py --model gpt2 -b 64 --gpus 8 --scale --link ib400 --step-ms 250
            python estimate.py --model llama3-8b -b 16 --gpus 8 --memory H100 --recommend
Prints      one row per technique: the peak of PyTorch's allocator on the GPU with the highest peak,
            what it consists of, the bytes that a GPU sends per step, and whether it fits.
Leaves out  memory outside PyTorch's tensors: the CUDA context (about 0.3 GiB), workspaces of cuDNN
            and cuBLAS, NCCL's buffers, fragmentation. --spare reserves memory for them.
Other flags are those of the training scripts: --optimizer adamw, --norm group, --clip-grad 1, ...
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from estimator import network
from estimator.network import LINKS, link_of
from estimator.tables import (
    GIB,
    describe,
    gpus_of,
    print_fit,
    print_json,
    print_table,
    print_ways,
    room_of,
    say_what_fits,
)
from harness.cli import check_writable, fail, make_parser, number
from harness.settings import fill
from report import draw
from techniques import TECHNIQUES

# GiB as CUDA reports them, less than nvidia-smi's: from error messages in GitHub issues,
# Zheng-Chong/CatVTON#133, zai-org/CogVLM#236 (A10; an L4's difference is assumed to be as large),
# stepfun-ai/Step-Video-T2V#8, GaoLii/DSP#10, TianheWu/CoSeR#10, HiDream-ai/VAREdit#6,
# vllm-project/vllm#27508, ali-vilab/VGen#104 (RTX 4090) and Wan-Video/Wan2.1#465 (RTX 5090); of
# A6000, H200, B200 and MI300X from messages in several logs, the smallest that they name. And dense
# TFLOP/s in half precision with accumulation in fp32, by the vendors' data sheets and white papers.
GPUS = {
    "T4": (14.56, 65), "L4": (21.99, 121), "A10": (21.99, 125), "L40S": (44.42, 362),
    "RTX3090": (23.70, 71), "RTX4090": (23.64, 165), "RTX5090": (31.37, 209), "A6000": (47.54, 155),
    "A100-40GB": (39.50, 312), "A100-80GB": (79.25, 312), "H100": (79.11, 989),
    "H200": (139.72, 989), "B200": (178.35, 2250), "MI300X": (191.69, 1307),
}  # fmt: skip
SPARE = 1.5, 0.07  # GiB, or this fraction of --memory if larger, as fragmentation grows


def gib_of(text: str) -> float:
    """``--memory``: a number, or the name of a GPU."""
    names = {name.lower(): size for name, (size, _) in GPUS.items()}
    if text.lower() in names:
        return names[text.lower()]
    try:
        return number(float, 0, above=0)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text} is neither a number of GiB nor one of {', '.join(GPUS)}"
        ) from None


def parse_args(words: list[str] | None = None) -> tuple[Any, list[str]]:
    """The flags of this script, frozen, and those that are passed to the training scripts."""
    parser = make_parser(__doc__)
    # fmt: off
    flag = parser.add_argument_group("task").add_argument
    flag("--model", default="resnet50", metavar="NAME",
         help="any torchvision classifier, a GPT or a Llama (default: resnet50)")
    flag("--module", metavar="FILE:FUNCTION",
         help="your own model instead. The function returns a module that takes images; or a "
         "module and a batch for it (a tensor, tuple or dict); or a module, a batch and a function "
         "that computes the loss from output and batch (default: cross_entropy of the logits); or "
         "what else the training scripts' --module takes. Trained with AdamW by default, as there")
    flag("-b", "--batch-size", type=number(int, 1), default=128, metavar="N",
         help="GLOBAL batch size, divided among the GPUs (default: 128)")
    flag("--gpus", type=number(int, 1), default=4, metavar="N", help="number of GPUs (default: 4)")
    flag("--classes", type=number(int, 1), metavar="N",
         help="number of classes, or of tokens in the vocabulary (default: 10; GPT 65)")
    flag("--memory", type=gib_of, metavar="GIB|NAME",
         help=f"memory of one GPU: a number, or one of {', '.join(GPUS)}. Says what fits")
    flag("--spare", type=number(float, 0), metavar="GIB",
         help="part of --memory to reserve for what is not predicted (default: 1.5, or 7%% of "
         "--memory if that is more)")
    flag("--fit", action="store_true", help="find the largest batch that fits --memory")
    flag("--only", metavar="NAME,...", help="only these techniques, for example FSDP,DDP_ZeRO")
    flag("--recommend", action="store_true",
         help="recommend combinations of techniques that fit --memory, each with the command for "
         "pytorch_ND_parallel.py; least recomputation, idle time and communication that does not "
         "overlap with compute first. In bfloat16, or with --dtype float32")
    flag("--scale", action="store_true",
         help="instead of memory, predict the share of a step that a GPU waits for communication, "
         "on up to 1,024 GPUs with as many samples each")
    flag("--link", type=link_of, default="nvlink4", metavar="NAME|US,GBPS|FILE",
         help=f"link between two GPUs: {', '.join(LINKS)}; or latency in microseconds and "
         "bandwidth in GB/s, such as 5,300; or the file that pytorch_collectives.py --sweep wrote "
         "(default: nvlink4)")
    flag("--step-ms", type=number(float, 0, above=0), metavar="MS",
         help="with --scale: compute time of a step, without communication")
    flag("--from", type=Path, dest="measured", metavar="FILE",
         help="with --scale: take the compute time from the result.json of a single-rank run")
    flag("--plot", type=Path, metavar="FILE.svg", help="with --scale: also draw a plot")
    flag("--json", action="store_true", help="print JSON, in bytes")
    flag("-h", "--help", action="help", help="print this help and exit")
    # fmt: on
    given, others = parser.parse_known_args(words)
    args = dataclasses.make_dataclass("Flags", vars(given), frozen=True)(**vars(given))
    if args.memory is not None:
        least, part = SPARE
        args = fill(args, spare=max(least, part * args.memory))
    check(args)
    if args.scale and not args.step_ms:
        args = fill(args, step_ms=step_of(args.measured))
    if args.module and "--optimizer" not in others:
        others += ["--optimizer", "adamw"]  # as the training scripts train it
    return args, ["--model", args.model, *others]


def check(args) -> None:
    if args.memory is not None and args.memory <= args.spare:
        fail(
            f"--memory {args.memory:g} is not more than --spare {args.spare:g}; use a lower --spare"
        )
    if args.scale and (args.fit or args.memory):
        fail("--scale predicts communication, --memory and --fit memory; use one of them")
    if args.plot and (args.json or not args.scale):
        fail(f"--plot {args.plot} needs --scale, and not --json")
    if args.plot:
        check_writable(args.plot.absolute().parent, f"--plot {args.plot}")
    if args.fit and args.memory is None:
        fail("--fit needs the --memory of a GPU, for example --memory 24")
    if args.recommend and (args.module or args.only or args.scale or args.fit):
        own = "; for activation checkpointing in the rows of --module, let the function call "
        own += "model.gradient_checkpointing_enable(), or what your model has for it"
        use = f"leave out --module, --only, --scale and --fit{own if args.module else ''}"
        fail(f"--recommend combines the techniques of a GPT or a Llama of ours; {use}")
    if args.recommend and args.memory is None:
        fail("--recommend needs the --memory of a GPU, for example --memory H100")


def step_of(path: Path | None) -> float:
    """Milliseconds of a step, from ``--from``."""
    if path is None:
        fail("--scale needs the compute time of a step: --step-ms MS, or --from result.json")
    try:
        found = json.loads(path.read_text())
        ranks, milliseconds = found["world_size"], found["step_ms"]["p50"]
        milliseconds, ranks = float(milliseconds), int(ranks)
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"--from {path} is not a result.json of these scripts ({error}); use --step-ms")
    if ranks > 1:
        fail(f"--from {path} is from {ranks} ranks; use the result.json of a single-rank run")
    return milliseconds


def check_batch(args, chosen: list) -> None:
    """Check that the batch can be divided, if one of the techniques divides it."""
    if args.batch_size % args.gpus and any(gpus_of(technique) > 1 for technique in chosen):
        near = max(args.batch_size // args.gpus, 1) * args.gpus
        fail(
            f"--batch-size {args.batch_size} is the global batch and is not divisible by "
            f"{args.gpus} GPUs; use --batch-size {near}"
        )


def choose(name: str, techniques: list):
    found = [technique for technique in techniques if technique.name.split()[0] == name.strip()]
    if not found:
        names = dict.fromkeys(technique.name.split()[0] for technique in techniques)
        why = next((row.unpredicted for row in TECHNIQUES if row.name == name.strip()), "")
        why = f"cannot be predicted ({why})" if why else "unknown"
        fail(f"--only {name}: {why}; use some of {', '.join(names)}")
    return found


# -------------------------------------------------------------------------------- what is printed


def checked(predictions):
    """Yield all predictions; exit if the first one reports a user error, or any a bug."""
    for index, prediction in enumerate(without_bugs(predictions)):
        if prediction.mistake and index == 0:
            fail(prediction.mistake)
        yield prediction


def without_bugs(predictions):
    for prediction in predictions:
        if prediction.error:
            print(prediction.error, end="", file=sys.stderr)
            raise SystemExit(1)
        yield prediction


# ------------------------------------------------------------------------------- communication

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SCALED = ("torchrun_DDP", "DDP_ZeRO --use_zero", "FSDP", "FSDP --dtype bfloat16")


def scale(args, flags: list[str], chosen: list, predict, at_once: int) -> None:
    """A row per technique, a column per number of ranks."""
    from estimator import techniques

    each, compute = args.batch_size // args.gpus, args.step_ms / 1e3
    names = [technique.name for technique in chosen]
    tasks = [
        partial(predict, techniques.make_technique(name, n), n * each)
        for name in names
        for n in RANKS
    ]
    shares = {name: {} for name in names}
    for found in checked(techniques.side_by_side(tasks, at_once)):
        if found.mistake:
            fail(f"{found.technique.name}: {found.mistake}")
        least, most = network.waiting(found.messages, compute, args.link)
        share = [least / (compute + least), most / (compute + most)]
        shares[found.technique.name][found.technique.ranks] = share
    if args.json:
        return print(json.dumps(shares, indent=2))
    print(
        f"{describe(args, flags)}, {found.inputs}, {each} samples per rank: % of a step that a "
        f"rank waits for\ncommunication, with the best overlap with {args.step_ms:g} ms of compute "
        "and with no overlap\n"
    )
    print(f"{'ranks':24}" + "".join(f"{n:>9,}" for n in RANKS))
    for name, row in shares.items():
        cells = [f"{100 * least:.0f}–{100 * most:.0f}" for least, most in row.values()]
        print(f"{name:24}" + "".join(f"{cell:>9}" for cell in cells))
    if args.plot:
        lines, unit = {}, f"% of a step that waits ({describe(args, flags)})"
        for name, row in shares.items():
            least, most = (
                [100 * share for share in each] for each in zip(*row.values(), strict=True)
            )
            lines[name] = {"-": (RANKS, most), "--": (RANKS, least)}
        key = {"--": "with the best overlap"}
        draw.draw(args.plot, draw.percent_by_ranks(unit, lines, RANKS, key))


# ------------------------------------------------------------------------------ the largest batch


def search(args, chosen: list, predict, at_once: int) -> list:
    """The prediction for each technique's largest batch that fits; of batch 0 if none does."""
    from estimator import fit, techniques

    found = [techniques.Prediction(technique, 0) for technique in chosen]
    searches = [fit.trials(room_of(args)) for _ in chosen]
    wanted = {i: next(search) for i, search in enumerate(searches)}
    while wanted:
        tasks = [partial(predict, chosen[i], chosen[i].unit * n) for i, n in wanted.items()]
        predictions = zip(wanted, techniques.side_by_side(tasks, at_once), strict=True)
        wanted = {}
        for i, prediction in predictions:
            failed = prediction.mistake or prediction.error
            if failed or prediction.peak <= room_of(args):
                found[i] = prediction
            if not failed:
                with contextlib.suppress(StopIteration):  # it is found
                    wanted[i] = searches[i].send(prediction.peak)
    return found


# ------------------------------------------------------------------------ combined techniques


def size_of(flags: list[str]):
    """The size of a decoder, from the scripts' own flags; ``None`` for other models."""
    from jobs import choice, decoder

    parser = make_parser("")
    choice.add_all_flags(parser)
    args, _ = parser.parse_known_args(flags)
    return (decoder.size_of(args), args) if choice.is_decoder(args.model) else (None, args)


def layers_of(flags: list[str]) -> int:
    size, _ = size_of(flags)
    return size.layers if size else 0


def job_of(args, flags: list[str]):
    """The training task for ``--recommend``: the decoder, its batch and its precision."""
    from estimator.recommend import Job

    size, given = size_of(flags)
    if not size:
        fail(f"--recommend does not support --model {args.model}; use gpt-LxHxD or a Llama")
    if size.experts:
        fail(f"--recommend does not divide the {size.experts} experts; use --only EP instead")
    if "--dtype" not in flags:
        flags = [*flags, "--dtype", "bfloat16"]
    half = flags[flags.index("--dtype") + 1] == "bfloat16"
    optimizer = "sgd" if "sgd" in flags else "adamw"
    vocabulary = args.classes or size.vocabulary or 65
    context = given.context or size.context
    each = 2 if half else 4
    # --memory in GiB names no GPU: it is an H100 then
    tflops = next((flops for gib, flops in GPUS.values() if gib == args.memory), GPUS["H100"][1])
    rest = optimizer, each, 1e12 * tflops, tuple(flags)
    return Job(size, vocabulary, context, args.batch_size, *rest)


def recommend(args, flags: list[str], at_once: int) -> None:
    from estimator.recommend import recommend, would_fit

    job, room = job_of(args, flags), room_of(args)
    found = recommend(job, args.gpus, room, args.link, at_once)
    if not found:
        fail(f"--memory {args.memory:g}: nothing comes close to fitting; give more memory")
    print_ways(args, job, found)
    sys.stdout.flush()
    if not any(one.peak <= room for one in found):
        closest = min(found, key=lambda one: one.peak)
        short = (closest.peak - room) / GIB
        ideas = would_fit(job, args.gpus, room) + ["a smaller --batch-size"]
        fail(
            f"nothing fits {args.memory:g} GiB with {args.spare:g} GiB reserved; the closest, "
            f"above, needs {short:.2f} GiB more: try {' or '.join(ideas)}"
        )


def main() -> None:
    args, flags = parse_args()
    try:
        predict_all(args, flags)
        sys.stdout.flush()
    except ChildProcessError as error:
        fail(f"a process was killed (exit code {error}), maybe for lack of memory", code=3)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # of `| head`. Python flushes stdout again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def predict_all(args, flags: list[str]) -> None:
    from estimator import techniques
    from estimator.own_model import OwnModel, load_function

    at_once = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if args.recommend:
        return recommend(args, flags, at_once)
    own = OwnModel(load_function(args.module), args.module) if args.module else None
    size, _ = size_of(flags)
    chosen = techniques.techniques_for(args.gpus, bool(size), bool(size and size.experts))
    if args.scale:
        chosen = [techniques.make_technique(name, 2) for name in SCALED]
    if args.only:
        chosen = [technique for name in args.only.split(",") for technique in choose(name, chosen)]
    check_batch(args, chosen)
    predict = partial(techniques.predict, flags=flags, classes=args.classes, own=own)
    if args.scale:
        return scale(args, flags, chosen, predict, at_once)
    if args.fit:
        found = search(args, chosen, predict, at_once)
    else:
        found = techniques.predict_all(chosen, predict, args.batch_size, layers_of(flags), at_once)
    show = print_json if args.json else print_fit if args.fit else print_table
    predictions = show(args, flags, checked(found))
    if args.memory:
        say_what_fits(args, predictions)


if __name__ == "__main__":
    main()
