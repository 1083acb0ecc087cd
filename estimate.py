"""Predict how much GPU memory each technique needs, without a GPU, by running its own training step
on tensors that have a shape but no numbers.

Command:    python estimate.py --model resnet152 --image-size 224 -b 256 --gpus 4 --memory 24
            python estimate.py --model gpt2 --context 1024 --gpus 8 --memory A100-40GB --fit
            python estimate.py --module my_model.py:make_model --gpus 2
            python estimate.py --model gpt2 -b 64 --gpus 8 --scale --link ib400 --step-ms 250
            python estimate.py --model gpt-32x32x4096 -b 8 --gpus 8 --memory 80 --meshes --fit
Prints      a row per technique: the peak of PyTorch's allocator on the fullest GPU, what it
            consists of, the bytes that a GPU sends in a step, and whether that fits.
Not in it   what is no tensor: the CUDA context (about 0.3 GiB), workspaces of cuDNN and cuBLAS,
            NCCL's buffers, fragmentation. --spare leaves room for them.
Other flags are the training scripts' own: --optimizer adamw, --norm group, --clip-grad 1, ...
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from functools import partial
from pathlib import Path

from estimator import network
from estimator.network import LINKS, link_of
from harness.command_line import check_writable, fail, make_parser, number
from report import plots

GIB = 2**30
# MiB, as nvidia-smi shows them (github.com/modal-labs/modal-client/pull/2797; of the RTX 3090
# github.com/noonghunna/club-3090/issues/747).
GPUS = {
    "T4": 15360, "L4": 23034, "A10": 23028, "L40S": 46068, "RTX3090": 24576,
    "A100-40GB": 40960, "A100-80GB": 81920, "H100": 81559,
}  # fmt: skip
NAME = 37  # the width of a technique's
PHASES = {"forward": "activations", "backward": "temporary", "update": "update"}  # and what is made
COLUMNS = {  # of a table, and the kinds of memory in each
    "weights": ["parameters"],
    "gradients": ["gradients"],
    "optimizer": ["optimizer"],
    "activations": ["activations"],
    "input": ["input"],
    "temporary": ["temporary", "update"],
}


def gib_of(text: str) -> float:
    """``--memory``: a number, or the name of a GPU."""
    names = {name.lower(): mib / 1024 for name, mib in GPUS.items()}
    if text.lower() in names:
        return names[text.lower()]
    try:
        return number(float, 0, above=0)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text} is neither a number of GiB nor one of {', '.join(GPUS)}"
        ) from None


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Ours, and the flags that are handed on to the scripts."""
    parser = make_parser(__doc__)
    # fmt: off
    flag = parser.add_argument
    flag("--model", default="resnet50", metavar="NAME",
         help="any torchvision classifier, or a GPT, as the scripts have it (default: resnet50)")
    flag("--module", metavar="FILE:FUNCTION",
         help="your own model instead: the function returns a module that takes images, or a "
         "module and a batch for it; its output is what cross_entropy takes, classes second")
    flag("-b", "--batch-size", type=number(int, 1), default=128, metavar="N",
         help="GLOBAL batch, divided among the GPUs (default: 128)")
    flag("--gpus", type=number(int, 1), default=4, metavar="N", help="(default: 4)")
    flag("--classes", type=number(int, 1), metavar="N",
         help="of images, or tokens of a vocabulary (default: 10; of a GPT 65)")
    flag("--memory", type=gib_of, metavar="GIB|NAME",
         help=f"of one GPU: say what fits. A number, or one of {', '.join(GPUS)}")
    flag("--spare", type=number(float, 0), default=1.5, metavar="GIB",
         help="of --memory, for what is not in the figures (default: 1.5)")
    flag("--fit", action="store_true", help="find the largest batch that fits --memory")
    flag("--only", metavar="NAME,...", help="techniques, instead of all: FSDP,DDP_ZeRO")
    flag("--meshes", nargs="*", metavar="DP,TP,PP,CP",
         help="instead of techniques: meshes of the GPUs on which four of them train a GPT at "
         "once, these or all; --fit then lists those that fit, least sent first. FSDP over DP x CP,"
         " TP with or without --sequence-parallel, PP by 1F1B with --microbatches N, CP with "
         "--attention ring, allgather or ulysses")
    flag("--scale", action="store_true",
         help="instead of memory: the share of a step in which a GPU waits for messages, at up to "
         "1,024 of them, each with as many samples as here")
    flag("--link", type=link_of, default="nvlink4", metavar="NAME|US,GBPS|FILE",
         help=f"between any two: {', '.join(LINKS)}; or microseconds and GB/s, such as 5,300; or "
         "what pytorch_collectives.py --sweep wrote (default: nvlink4)")
    flag("--step-ms", type=number(float, 0, above=0), metavar="MS",
         help="of a step that waits for nobody")
    flag("--from", type=Path, dest="measured", metavar="FILE",
         help="the same, from the result.json of a run of one rank")
    flag("--plot", type=Path, metavar="FILE.svg", help="draw --scale, too")
    flag("--json", action="store_true", help="print JSON, in bytes")
    # fmt: on
    args, others = parser.parse_known_args()
    check(args)
    if args.scale:
        args.step_ms = args.step_ms or step_of(args.measured)
    return args, ["--model", args.model, *others]


def check(args: argparse.Namespace) -> None:
    if args.memory is not None and args.memory <= args.spare:
        fail(
            f"--memory {args.memory:g} is no more than --spare {args.spare:g}; use a lower --spare"
        )
    if args.scale and (args.fit or args.memory):
        fail("--scale is about messages, --memory and --fit are about memory; give one of the two")
    if args.plot and (args.json or not args.scale):
        fail(f"--plot {args.plot} draws --scale, and not as --json")
    if args.plot:
        check_writable(args.plot.absolute().parent, f"--plot {args.plot}")
    if args.fit and args.memory is None:
        fail("--fit needs to know the --memory of a GPU; for example --memory 24")
    if args.meshes is not None:
        if args.module or args.only or args.scale:
            fail("--meshes takes a GPT apart; leave out --module, --only and --scale")
        check_meshes(args)
    elif args.batch_size % args.gpus:
        near = max(args.batch_size // args.gpus, 1) * args.gpus
        fail(
            f"--batch-size {args.batch_size} is the global batch and is not divisible by "
            f"{args.gpus} GPUs; use --batch-size {near}"
        )


def check_meshes(args: argparse.Namespace) -> None:
    """And settle which, and of how many layers."""
    from estimator.meshes import mesh_of, meshes_of
    from jobs.gpt import size_of

    args.layers, args.named = size_of(args.model)[0], args.meshes
    try:
        args.meshes = [mesh_of(text) for text in args.named] or meshes_of(args.gpus)
    except ValueError as error:
        fail(error)
    for mesh in args.meshes:
        if mesh.gpus != args.gpus:
            fail(f"--meshes {mesh} is of {mesh.gpus} GPUs, and --gpus is {args.gpus}")


def step_of(path: Path | None) -> float:
    """Milliseconds, from ``--from``."""
    if path is None:
        fail("--scale needs to know how long a step computes: --step-ms MS, or --from result.json")
    try:
        found = json.loads(path.read_text())
        ranks, milliseconds = found["world_size"], found["step_ms"]["p50"]
        milliseconds, ranks = float(milliseconds), int(ranks)
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"--from {path} is no result.json of ours ({error}); or give --step-ms")
    if ranks > 1:
        fail(f"--from {path} is of {ranks} ranks, which wait for each other; give a run of one")
    return milliseconds


def load_function(given: str):
    """``--module``. A mistake of its own keeps its traceback."""
    path, _, name = given.rpartition(":")
    if not Path(path).is_file() or not name:
        fail(f"--module {given}: no such file; give FILE:FUNCTION, such as my_model.py:make_model")
    spec = importlib.util.spec_from_file_location("module_to_estimate", path)
    if spec is None:
        fail(f"--module {given}: {path} is no Python file; give one that ends in .py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(Path(path).parent.absolute()))
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        fail(f"--module {given}: {path} has no function {name}; give the one that makes the model")
    return getattr(module, name)


def choose(name: str, techniques: list):
    found = [technique for technique in techniques if technique.name.split()[0] == name.strip()]
    if not found:
        names = dict.fromkeys(technique.name.split()[0] for technique in techniques)
        fail(f"--only {name}: here there are {', '.join(names)}")
    return found


# -------------------------------------------------------------------------------- what is printed


def checked(predictions):
    """Pass on all, unless the first is a mistake of the user's, or one is a bug."""
    for index, prediction in enumerate(without_bugs(predictions)):
        if prediction.mistake and index == 0:
            fail(prediction.mistake)
        yield prediction


def without_bugs(predictions):
    for prediction in predictions:
        if prediction.error:
            print(prediction.error, file=sys.stderr)
            raise SystemExit(1)
        yield prediction


def describe(args: argparse.Namespace, flags: list[str]) -> str:
    return args.module or " ".join(flags).removeprefix("--model ")


def fits(args: argparse.Namespace, prediction) -> bool:
    return bool(prediction.kinds) and prediction.peak <= (args.memory - args.spare) * GIB


def gpus_of(technique) -> int:
    return max(technique.ranks, technique.gpus, 1)


def print_table(args: argparse.Namespace, flags: list[str], predictions) -> list:
    """A row as soon as it is known."""
    each = f" = {args.gpus} x {args.batch_size // args.gpus}" if args.gpus > 1 else ""
    batch = f"global batch {args.batch_size}{each}"
    print(f"{describe(args, flags)}, {batch}: predicted peak of one GPU, GiB\n")
    heads = ["GPUs", "peak", *COLUMNS, "sent MB"] + (["fits"] if args.memory else [])
    print(f"{'':{NAME}}" + "".join(f"  {head:>6}" for head in heads))
    shown = []
    for found in predictions:
        shown.append(found)
        cells = [gpus_of(found.technique)] + ([] if found.mistake else figures_of(args, found))
        line = f"{found.technique.name:{NAME}}{row_of(cells, heads)}  {found.mistake}"
        print(line.rstrip(), flush=True)
    return shown


def figures_of(args: argparse.Namespace, found) -> list[str]:
    """The cells from the peak on."""
    parts = [sum(found.kinds[kind] for kind in kinds) for kinds in COLUMNS.values()]
    cells = [f"{size / GIB:.2f}" for size in (found.peak, *parts)] + [f"{found.sent / 1e6:,.0f}"]
    return cells + (["yes" if fits(args, found) else "no"] if args.memory else [])


def row_of(cells: list, heads: list[str]) -> str:
    widths = [max(6, len(head)) for head in heads]
    return "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=False))


def print_meshes(args: argparse.Namespace, flags: list[str], predictions) -> list:
    """A row for each; with ``--fit`` they are in order."""
    batch = f"global batch {args.batch_size} on {args.gpus} GPUs"
    order = "; least sent first" if args.fit else ""
    print(f"{describe(args, flags)}, {batch}: predicted peak of the fullest GPU, GiB{order}\n")
    heads = ["peak", *COLUMNS, "sent MB"] + (["fits"] if args.memory else [])
    print("  dp  tp  pp  cp" + row_of(heads, heads))
    shown = []
    for found in predictions:
        shown.append(found)
        sizes = "".join(f"{size:>4}" for size in dataclasses.astuple(found.technique.mesh))
        print(sizes + row_of(figures_of(args, found), heads), flush=True)
    if args.impossible:
        print(f"\n{args.impossible} of {len(args.meshes)} meshes cannot divide this model or batch")
    return shown


def possible(args: argparse.Namespace, predictions):
    """Leave out meshes that there cannot be; it is a mistake if one was named, or all are such."""
    args.impossible = 0
    for found in without_bugs(predictions):
        args.impossible += bool(found.mistake)
        if found.mistake and (args.named or args.impossible == len(args.meshes)):
            fail(found.mistake)
        if not found.mistake:
            yield found


def print_fit(args: argparse.Namespace, flags: list[str], predictions) -> list:
    where = f"{args.gpus} GPUs of {args.memory:.1f} GiB"
    print(f"{describe(args, flags)}, {where}: the largest global batch\n")
    print(f"{'':{NAME}}{'GPUs':>6}{'batch':>12}{'peak GiB':>12}")
    shown = list(predictions)
    for found in shown:
        name, gpus = found.technique.name, gpus_of(found.technique)
        batch, peak = found.batch_size or "none", f"{found.peak / GIB:.2f}"
        figures = f"  {found.mistake}" if found.mistake else f"{batch:>12}{peak:>12}"
        print(f"{name:{NAME}}{gpus:>6}{figures}")
    return shown


def print_json(args: argparse.Namespace, flags: list[str], predictions) -> list:
    """All in bytes."""
    shown = list(predictions)
    rows = []
    for found in shown:
        row = dataclasses.asdict(found) | {"peak": found.peak, "sent": found.sent}
        row["technique"] = found.technique.name
        row["sent_in"] = {
            name: sum(message.sent for message in found.messages if message.phase == kind)
            for name, kind in PHASES.items()
        }
        row["command"] = [*found.technique.command, *flags]
        row["gpus"] = gpus_of(found.technique)
        if args.meshes:
            row |= dataclasses.asdict(found.technique.mesh)
        if args.memory:
            row["fits"] = fits(args, found)
        rows.append({k: v for k, v in row.items() if k not in ("error", "messages")})
    print(json.dumps(rows, indent=2))
    return shown


def say_what_fits(args: argparse.Namespace, predictions: list) -> None:
    """The answer in a line; exit code 2 if it is that nothing fits."""
    good = [found.technique.name for found in predictions if fits(args, found)]
    if good:
        if not args.json and not args.fit and not args.meshes:
            print(f"\nfits {args.memory:.1f} GiB, {args.spare} GiB to spare: {', '.join(good)}")
        return
    if args.fit and not args.meshes:
        fail(
            f"no batch of two or more fits {args.memory:g} GiB with {args.spare:g} GiB to spare; "
            "use more --gpus, or a smaller model"
        )
    closest = min((f for f in predictions if not f.mistake), key=lambda found: found.peak)
    short = closest.peak / GIB + args.spare - args.memory
    fail(
        f"nothing fits {args.memory:g} GiB with {args.spare} GiB to spare; "
        f"{closest.technique.name} comes closest, and is {short:.2f} GiB too large: use more "
        f"--gpus or a smaller --batch-size{'' if args.meshes else ' (--fit finds the largest)'}"
    )


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
        f"{describe(args, flags)}, {each} samples each: % of a step in which a rank waits for "
        f"messages,\nif they overlap with {args.step_ms:g} ms of computing as much as they can, "
        "and if not at all\n"
    )
    print(f"{'ranks':24}" + "".join(f"{n:>9,}" for n in RANKS))
    for name, row in shares.items():
        cells = [f"{100 * least:.0f}–{100 * most:.0f}" for least, most in row.values()]
        print(f"{name:24}" + "".join(f"{cell:>9}" for cell in cells))
    if args.plot:
        unit = f"% of a step that waits ({describe(args, flags)})"
        plots.draw(args.plot, {"unit": unit, "values": shares}, "shares")


# ------------------------------------------------------------------------------ the largest batch


def search(args: argparse.Namespace, chosen: list, predict, at_once: int) -> list:
    """For each technique the prediction for its largest batch that fits; of 0 if none does."""
    from estimator import techniques
    from estimator.fit import LargestBatch

    memory = (args.memory - args.spare) * GIB
    searches = [LargestBatch(memory, technique.unit) for technique in chosen]
    found = [techniques.Prediction(technique, 0) for technique in chosen]
    while wanted := {i: b for i, search in enumerate(searches) if (b := search.next())}:
        tasks = [partial(predict, chosen[i], batch) for i, batch in wanted.items()]
        for i, prediction in zip(wanted, techniques.side_by_side(tasks, at_once), strict=True):
            if prediction.mistake or prediction.error:
                found[i] = prediction
                searches[i].give_up()
                continue
            searches[i].tell(wanted[i], prediction.peak)
            if wanted[i] == searches[i].best:
                found[i] = prediction
    return found


def main() -> None:
    args, flags = parse_args()
    from estimator import techniques

    try:
        predict_all(args, flags)
    except techniques.Killed as error:
        fail(f"a process was killed (exit code {error}); is there enough memory?", code=3)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def predict_all(args: argparse.Namespace, flags: list[str]) -> None:
    from estimator import meshes, techniques

    at_once = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if args.meshes:
        size = args.layers, args.batch_size
        found = meshes.predict_all(args.meshes, *size, flags, args.classes, at_once)
        found = possible(args, found)
        if args.fit:
            found = sorted(found, key=lambda one: (one.sent, one.peak))
            found = [one for one in found if fits(args, one)] or found
        show = print_json if args.json else print_meshes
        predictions = show(args, flags, found)
        return say_what_fits(args, predictions) if args.memory else None
    make_module = load_function(args.module) if args.module else None
    chosen = techniques.techniques_for(args.gpus, not args.module and args.model.startswith("gpt"))
    if args.scale:
        chosen = [techniques.make_technique(name, 2) for name in SCALED]
    if args.only:
        chosen = [technique for name in args.only.split(",") for technique in choose(name, chosen)]
    predict = partial(
        techniques.predict, flags=flags, classes=args.classes, make_module=make_module
    )
    if args.scale:
        return scale(args, flags, chosen, predict, at_once)
    if args.fit:
        found = search(args, chosen, predict, at_once)
    else:
        tasks = [partial(predict, technique, args.batch_size) for technique in chosen]
        found = techniques.side_by_side(tasks, at_once)
    show = print_json if args.json else print_fit if args.fit else print_table
    predictions = show(args, flags, checked(found))
    if args.memory:
        say_what_fits(args, predictions)


if __name__ == "__main__":
    main()
