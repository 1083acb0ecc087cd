"""Predict the GPU memory and the communication of training without a GPU, by running the training
step on fake tensors: of your file that you copied from examples/, or of each technique.

Command:    python estimate.py my_fsdp.py --gpus 8 --memory H100
            python estimate.py init my_fsdp.py --from fsdp --own my_ddp.py
            python estimate.py --model resnet152 --image-size 224 -b 256 --gpus 4 --memory 24
            python estimate.py --model gpt2 --context 1024 --gpus 8 --memory A100-40GB --fit
            python estimate.py --model gpt2 -b 64 --gpus 8 --scale --link ib400 --step-ms 250
            python estimate.py --model llama3-8b -b 16 --gpus 8 --memory H100 --recommend
Prints      of a file: the peak of PyTorch's allocator on one GPU, what it consists of, the bytes
            that a GPU sends per step, and the lines of the file with the largest tensors. Takes
            --gpus, --memory, --spare, --host-memory, --fit, --recommend and --json.
            Of --model: one row per technique, on the GPU with the highest peak.
Leaves out  memory outside PyTorch's tensors: the CUDA context (about 0.3 GiB), workspaces of cuDNN
            and cuBLAS, NCCL's buffers, fragmentation. --spare reserves memory for them.
Other flags are those of the training scripts: --optimizer adamw, --norm group, --clip-grad 1, ...
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from estimator import network, tables
from estimator.network import LINKS, link_of
from harness import flops
from harness.cli import fail, make_parser, number
from harness.settings import fill, spelled
from harness.world import count_cores
from jobs.sizes import is_decoder
from libraries import hub
from techniques import TECHNIQUES

# GiB, and dense TFLOP/s in half precision
GPUS = {name: (gpu["gib"], gpu["half"]) for name, gpu in flops.GPUS.items() if "gib" in gpu}
MFU = json.loads(Path(__file__).with_name("estimator").joinpath("mfu.json").read_text())["rows"]
EXAMPLES = Path(__file__).parent / "examples"
SPARE = 1.5, 0.07  # GiB, or this fraction of --memory if larger, as fragmentation grows


class Memory(float):
    """GiB of a GPU, and its name if that was given."""

    gpu = ""


def memory_of(text: str) -> Memory:
    """``--memory``: a number, or the name of a GPU."""
    name = next((name for name in GPUS if name.lower() == text.lower()), "")
    try:
        found = Memory(GPUS[name][0] if name else number(float, 0, above=0)(text))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text} is neither a number of GiB nor one of {', '.join(GPUS)}"
        ) from None
    found.gpu = name
    return found


def gpu_of(args) -> tuple[str, str]:
    """The GPU whose speed is predicted, and how to say so."""
    name = getattr(args.memory, "gpu", "")
    return name or "H100", f"on {name}" if name else "on H100, as --memory names no GPU"


def mfu_of(text: str) -> tuple[float, float]:
    """``--mfu``: a share of the GPU's peak, or the lowest and the highest."""
    parts = text.split(",")
    try:
        low, high = map(float, parts * 2 if len(parts) == 1 else parts)
        if 0 < low <= high <= 1:
            return low, high
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"{text} is neither a share up to 1, such as 0.4, nor LOW,HIGH"
    )


def published_mfu(gpu: str, parameters: int) -> tuple[float, float]:
    """The range that was published for models of this size on this GPU; of all GPUs if there are no
    figures of this one."""
    rows = [row["mfu"] for row in MFU if gpu.startswith(row["gpu"]) and parameters < row["below"]]
    lows, highs = zip(*(rows[:1] or [row["mfu"] for row in MFU]), strict=True)
    return min(lows), max(highs)


def make_flags() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    # fmt: off
    flag = parser.add_argument_group("task").add_argument
    flag("--model", metavar="NAME",
         help="any torchvision classifier, a GPT or a Llama (default: resnet50; or llama, if "
         "--weights is a folder with a config.json, of which nothing else is read)")
    flag("-b", "--batch-size", type=number(int, 1), default=128, metavar="N",
         help="GLOBAL batch size, divided among the GPUs (default: 128)")
    flag("--gpus", type=number(int, 1), default=4, metavar="N", help="number of GPUs (default: 4)")
    flag("--classes", type=number(int, 1), metavar="N",
         help="number of classes, or of tokens in the vocabulary (default: 10; GPT 65)")
    flag("--memory", type=memory_of, metavar="GIB|NAME",
         help=f"memory of one GPU: a number, or one of {', '.join(GPUS)}. Says what fits")
    flag("--spare", type=number(float, 0), metavar="GIB",
         help="part of --memory to reserve for what is not predicted (default: 1.5, or 7%% of "
         "--memory if that is more)")
    flag("--host-memory", type=number(float, 0, above=0), metavar="GIB",
         help="CPU memory for each GPU, for what is offloaded; counts for what fits --memory")
    flag("--fit", action="store_true", help="find the largest batch that fits --memory")
    flag("--only", metavar="NAME,...", help="only these techniques, for example FSDP,DDP_ZeRO")
    flag("--recommend", action="store_true",
         help="recommend combinations of techniques that fit --memory, each with the command for "
         "pytorch_ND_parallel.py; least recomputation, idle time and communication that does not "
         "overlap with compute first, and the simplest of equal ones. In bfloat16, or with --dtype "
         "float32")
    flag("--scale", action="store_true",
         help="instead of memory, predict the share of a step that a GPU waits for communication, "
         "on up to 1,024 GPUs with as many samples each")
    flag("--link", type=link_of, default="nvlink4", metavar="NAME|US,GBPS|FILE",
         help=f"link between two GPUs: {', '.join(LINKS)}; or latency in microseconds and "
         "bandwidth in GB/s, such as 5,300; or the file that pytorch_collectives.py --sweep wrote "
         "(default: nvlink4)")
    flag("--mfu", type=mfu_of, metavar="LOW,HIGH",
         help="share of the GPU's peak FLOP/s that training of a decoder reaches, for tokens/s in "
         "--recommend and --scale (default: what is published for the GPU of --memory, an H100 if "
         "that is a number, and a model of this size: estimator/mfu.json)")
    flag("--step-ms", type=number(float, 0, above=0), metavar="MS",
         help="with --scale: compute time of a step, without communication (default for a decoder: "
         "by --mfu)")
    flag("--from", type=Path, dest="measured", metavar="FILE",
         help="with --scale: take the compute time from the result.json of a single-rank run")
    flag("--json", action="store_true", help="print JSON, in bytes")
    flag("-h", "--help", action="help", help="print this help and exit")
    # fmt: on
    return parser


def parse_args(words: list[str] | None = None) -> tuple[Any, list[str]]:
    """The flags of this script, frozen, and those that are passed to the training scripts."""
    given, others = make_flags().parse_known_args(words)
    others = in_two_words(others)
    folder = next((new for old, new in itertools.pairwise(others) if old == "--weights"), "none")
    args = dataclasses.make_dataclass("Flags", vars(given), frozen=True)(**vars(given))
    args = with_spare(args)
    args = fill(args, model="llama" if hub.is_folder(folder) else "resnet50")
    check(args)
    if args.scale:
        check_scale(args, others)
    if args.scale and not args.step_ms and (args.measured or not is_decoder(args.model)):
        args = fill(args, step_ms=step_of(args.measured))
    return args, ["--model", args.model, *others]


def in_two_words(words: list[str]) -> list[str]:
    """The same flags, with ``--name value`` for ``--name=value``: values are looked up so."""
    pairs = [word.split("=", 1) if word.startswith("--") else [word] for word in words]
    return [*itertools.chain(*pairs)]


OF_A_FILE = ("gpus", "memory", "spare", "host_memory", "fit", "recommend", "json", "help")


def parse_file_args(words: list[str]) -> tuple[Any, bool]:
    """The flags for a user's file, and whether --gpus is one of them."""
    parser = make_flags()
    given, others = parser.parse_known_args(words)
    # argparse sets no defaults of what a namespace has
    named, _ = parser.parse_known_args(words, argparse.Namespace(**dict.fromkeys(vars(given))))
    for name, value in vars(named).items():
        if name not in OF_A_FILE and value is not None:
            others.append("--from" if name == "measured" else spelled(name))
    if others:
        known = ", ".join(map(spelled, OF_A_FILE))
        fail(f"{others[0]}: a file takes only {known}; the rest, such as BATCH, is in it")
    args = dataclasses.make_dataclass("Flags", vars(given), frozen=True)(**vars(given))
    return with_spare(args), named.gpus is not None


def with_spare(args):
    if args.memory is None:
        return args
    least, part = SPARE
    return fill(args, spare=max(least, part * args.memory))


def check(args) -> None:
    if args.memory is not None and args.memory <= args.spare:
        fail(
            f"--memory {args.memory:g} is not more than --spare {args.spare:g}; use a lower --spare"
        )
    if args.host_memory and args.memory is None:
        fail(f"--host-memory {args.host_memory:g} needs the --memory of a GPU, too")
    if args.scale and args.fit:
        fail("--scale predicts communication, --fit memory; use one of them")
    if args.mfu and not (args.recommend or args.scale):
        fail("--mfu is for tokens/s, which --recommend and --scale predict; use one of them")
    if args.mfu and args.scale and (args.step_ms or args.measured or not is_decoder(args.model)):
        fail("--mfu gives the compute time of a decoder's step; leave out --step-ms and --from")
    if args.fit and args.memory is None:
        fail("--fit needs the --memory of a GPU, for example --memory 24")
    if args.recommend and (args.only or args.scale or args.fit or args.host_memory):
        fail("--recommend does not take --only, --scale, --fit or --host-memory; leave them out")
    if args.recommend and args.memory is None:
        fail("--recommend needs the --memory of a GPU, for example --memory H100")


def check_scale(args, others: list[str]) -> None:
    """Refuse what :data:`SCALED` does not have."""
    names = dict.fromkeys(name.split()[0] for name in SCALED)
    given = [f"--only {name}" for name in args.only.split(",")] if args.only else []
    wrong = [only for only in given if names.keys().isdisjoint(only.split())]
    wrong += [f"{a} {b}" for a, b in itertools.pairwise(others) if a in ("--tp", "--cp", "--pp")]
    if wrong:
        fail(
            f"--scale {wrong[0]}: predicted speeds were near published ones only for data "
            f"parallelism; use some of {', '.join(names)}"
        )


def step_of(path: Path | None) -> float:
    """Milliseconds of a step, from ``--from``."""
    if path is None:
        fail(
            "--scale needs the compute time of a step: --step-ms MS, or --from result.json; or a "
            "GPT or a Llama as --model, whose FLOPs are known"
        )
    try:
        found = json.loads(path.read_text())
        ranks = int(found["world_size"])
        milliseconds = float(found["step_ms"]["p50"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"--from {path} is not a result.json of these scripts ({error}); use --step-ms")
    if ranks > 1:
        fail(f"--from {path} is from {ranks} ranks; use the result.json of a single-rank run")
    return milliseconds


def check_batch(args, chosen: list) -> None:
    """Check that a technique with several GPUs can divide the batch."""
    shares = [technique.shares for technique in chosen if tables.gpus_of(technique) > 1]
    if shares and all(args.batch_size % share for share in shares):
        least = min(shares)
        near = max(args.batch_size // least, 1) * least
        fail(
            f"--batch-size {args.batch_size} is the global batch and is not divisible by "
            f"{least} GPUs; use --batch-size {near}"
        )


def choose(name: str, techniques: list):
    """The techniques with this name in the table, and all of this script."""
    name = " ".join(name.split())
    found = [one for one in techniques if name in (one.name, one.name.split()[0])]
    if not found:
        names = dict.fromkeys(technique.name.split()[0] for technique in techniques)
        why = next((row.unpredicted for row in TECHNIQUES if row.name == name), "")
        why = f"cannot be predicted ({why})" if why else "unknown"
        fail(f"--only {name}: {why}; use some of {', '.join(names)}")
    return found


# -------------------------------------------------------------------------------- what is printed


def checked(predictions):
    """Yield all predictions. A technique without one is a row with the reason; exit if that is the
    same for the first two scripts, or if no technique has one."""
    seen = []
    for prediction in predictions:
        seen.append(prediction)
        scripts = {one.technique.name.split()[0] for one in seen}
        if len(scripts) == 2 and {one.mistake for one in seen} == {prediction.mistake} != {""}:
            stop(prediction)
        yield prediction
    if all(prediction.mistake for prediction in seen):
        stop(seen[0])


def stop(prediction) -> None:
    if prediction.error:
        print(prediction.error, end="", file=sys.stderr)
        raise SystemExit(1)
    fail(prediction.mistake)


# ------------------------------------------------------------------------------- communication

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SCALED = ("torchrun_DDP", "DDP_ZeRO --use_zero", "FSDP", "FSDP --dtype bfloat16")


def scale(args, flags: list[str], chosen: list, predict, at_once: int) -> None:
    """A row per technique, a column per number of ranks."""
    from estimator import techniques

    each = args.batch_size // args.gpus
    slow, fast, tokens = compute_of(args, flags, each)
    tasks = []
    rows = []
    for technique in chosen:
        # FSDP makes a view for each rank: with 1,024, a small model is predicted sooner
        layers = layers_of(flags) if "FSDP" in technique.name else 0
        blocks, times = techniques.few_blocks(layers)
        for layers, n in itertools.product(blocks or [None], (RANKS[0], RANKS[-1])):
            one = techniques.make_technique(technique.name, n)
            tasks.append(partial(predict, one, n * each, layers=layers))
        rows.append((technique.name, len(blocks or [None]), times))
    found = techniques.side_by_side(tasks, at_once)
    shares = {}
    speeds = {}
    for name, models, times in rows:
        pairs = [(next(found), next(found)) for _ in range(models)]
        for prediction in itertools.chain(*pairs):
            if prediction.mistake:
                stop(prediction)
        inputs = pairs[0][0].inputs
        shares[name] = {}
        speeds[name] = {}
        for n in RANKS:
            some = [network.between(few.messages, many.messages, n) for few, many in pairs]
            messages = network.extrapolate(*some, times=times)
            least, _ = network.waiting(messages, slow, args.link)
            hidden, most = network.waiting(messages, fast, args.link)
            shares[name][n] = [least / (slow + least), most / (fast + most)]
            speeds[name][n] = [tokens / (slow + most), tokens / (fast + hidden)]
    if args.json:
        return print(json.dumps(shares | {"tokens/s": speeds} if tokens else shares, indent=2))
    about = f"{inputs}, {each} samples per rank" + (f" {gpu_of(args)[1]}" if tokens else "")
    tables.print_scale(args, flags, about, (fast, slow), shares)
    tables.print_speeds(speeds if tokens else {})


def compute_of(args, flags: list[str], each: int) -> tuple[float, float, int]:
    """The longest and the shortest time in seconds that a rank computes in a step; and its tokens,
    if the times follow from them."""
    if args.step_ms:
        return args.step_ms / 1e3, args.step_ms / 1e3, 0
    job = job_of(args, flags)
    tokens = each * job.context
    slow, fast = (job.seconds(tokens, mfu) for mfu in job.mfu)
    return slow, fast, tokens


# ------------------------------------------------------------------------ combined techniques


def size_of(flags: list[str]):
    """The size of a decoder, from the scripts' own flags, ``None`` for other models; and their
    settings."""
    from jobs import choice, language_models

    parser = make_parser("")
    choice.add_all_flags(parser)
    args, _ = parser.parse_known_args(flags)
    return (language_models.size_of(args) if is_decoder(args.model) else None), args


def layers_of(flags: list[str]) -> int:
    size, _ = size_of(flags)
    return size.layers if size else 0


def job_of(args, flags: list[str]):
    """The task for ``--recommend`` and ``--scale``: the decoder, its batch, its precision and the
    speed of the GPU."""
    from estimator.recommend import Job

    size, given = size_of(flags)
    if not size:
        fail(f"--recommend does not support --model {args.model}; use gpt-LxHxD or a Llama")
    if size.experts and args.scale:
        fail(f"--scale does not know the FLOPs of {size.experts} experts; use --step-ms")
    if size.experts:
        fail(f"--recommend does not divide the {size.experts} experts; use --only EP instead")
    if "--dtype" not in flags:
        flags = [*flags, "--dtype", "bfloat16"]
    half = flags[flags.index("--dtype") + 1] == "bfloat16"
    vocabulary = args.classes or size.vocabulary or 65
    context = given.context or size.context
    gpu, _ = gpu_of(args)
    _, tflops = GPUS[gpu]
    mfu = args.mfu or published_mfu(gpu, size.count_parameters(vocabulary))
    return Job(
        size=size,
        vocabulary=vocabulary,
        context=context,
        batch_size=args.batch_size,
        optimizer=given.optimizer or "adamw",
        bytes=2 if half else 4,
        flops=1e12 * tflops,
        mfu=mfu,
        flags=tuple(flags),
    )


def recommend(args, flags: list[str], at_once: int) -> None:
    from estimator.recommend import recommend, speed_of, would_fit

    room = tables.room_of(args)
    job = job_of(args, flags)
    found = recommend(job, args.gpus, room, args.link, at_once)
    ideas = [*would_fit(job, args.gpus, room), "a smaller --batch-size"]
    at = "of nearly equal ones the simplest; data parallelism before all others;\n"
    at += "speeds at an MFU of {:g} to {:g} {};\n".format(*job.mfu, gpu_of(args)[1])
    speeds = [speed_of(job, one.technique, args.link) for one in found]
    if found[0].mistake:
        stop(found[0])
    tables.print_ways(args, list(job.flags), found, at, speeds)
    sys.stdout.flush()
    closest = min(found, key=lambda one: one.peak)
    if closest.peak > room:
        fail(
            f"nothing fits {args.memory:g} GiB with {args.spare:g} GiB reserved; the closest, "
            f"above, needs {tables.more(closest.peak - room)} more: try {' or '.join(ideas)}"
        )


# -------------------------------------------------------------------------------- a user's file


def run_own(words: list[str]) -> None:
    """What is asked of a user's file: its prediction, or with ``init`` to write one."""
    from estimator import own_commands

    if words[0] == "init":
        return own_commands.init(words[1:], EXAMPLES)
    path = next(word for word in words if word.endswith(".py"))
    words.remove(path)
    args, gpus_are_given = parse_file_args(words)
    check(args)
    if args.recommend:
        return own_commands.recommend(args, Path(path), EXAMPLES)
    own_commands.predict(args, Path(path), gpus_are_given)


def main() -> None:
    words = sys.argv[1:]
    try:
        if words[:1] == ["init"] or any(word.endswith(".py") for word in words):
            run_own(words)
        else:
            predict_all(*parse_args())
        sys.stdout.flush()
    except ChildProcessError as error:
        fail(f"a process was killed (exit code {error}), maybe for lack of memory", code=3)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # of `| head`. Python flushes stdout again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def predict_all(args, flags: list[str]) -> None:
    from estimator import fit, techniques

    at_once = count_cores()
    if args.recommend:
        return recommend(args, flags, at_once)
    size, _ = size_of(flags)
    chosen = techniques.techniques_for(args.gpus, bool(size), bool(size and size.experts), flags)
    if args.scale:
        chosen = [techniques.make_technique(name, args.gpus) for name in SCALED]
    if args.only:
        chosen = [technique for name in args.only.split(",") for technique in choose(name, chosen)]
    check_batch(args, chosen)
    predict = partial(techniques.predict, flags=flags, classes=args.classes)
    if args.scale:
        return scale(args, flags, chosen, predict, at_once)
    if args.fit:
        found = fit.search(args, chosen, predict, at_once)
    else:
        found = techniques.predict_all(chosen, predict, args.batch_size, layers_of(flags), at_once)
    show = tables.print_fit if args.fit else tables.print_table
    show = tables.print_json if args.json else show
    predictions = show(args, flags, checked(found))
    if args.memory:
        tables.say_what_fits(args, predictions)


if __name__ == "__main__":
    main()
