"""What estimate.py prints: tables, JSON, and the line that says what fits."""

import json
import textwrap

from tqdm import tqdm

from harness.cli import fail
from jobs.choice import FAMILIES

GIB = 2**30
WIDTH = 100  # of the output
NAME = 37  # width of the technique column
PHASES = {"forward": "activations", "backward": "temporary", "update": "update"}  # by kind
COLUMNS = {  # of a table: the kinds of memory in each
    "weights": ["parameters"],
    "grads": ["gradients"],
    "optim": ["optimizer"],
    "activ": ["activations"],
    "input": ["input"],
    "temp": ["temporary", "update"],
}


def describe(args, flags: list[str]) -> str:
    return args.module or " ".join(flags).removeprefix("--model ")


def fits(args, prediction) -> bool:
    return bool(prediction.kinds) and prediction.peak <= room_of(args)


def room_of(args) -> int:
    """Bytes that tensors may take on one GPU."""
    return int((args.memory - args.spare) * GIB)


def gpus_of(technique) -> int:
    return max(technique.ranks, technique.gpus, 1)


def print_table(args, flags: list[str], predictions) -> list:
    """Print a row for each technique, without columns that contain only 0."""
    shown = collect(predictions)
    several = any(gpus_of(found.technique) > 1 for found in shown)
    each = f" = {args.gpus} x {args.batch_size // args.gpus}" if several else ""
    print(f"{describe(args, flags)}, {inputs_of(shown)}global batch {args.batch_size}{each}:")
    print("predicted peak per GPU in GiB (M: MiB), and MB that it sends per step;")
    print(f"{optimizer_of(flags)}, in float32 where neither the row nor a flag has a --dtype\n")
    rows = [cells_of(args, found) for found in shown]
    titles = [
        title
        for title in ("peak", *COLUMNS, "sent", "fits")
        if title == "peak" or {row.get(title, "") for row in rows} - {"", "0"}
    ]
    widths = {title: max(5 + (title == "sent"), len(title)) for title in titles}
    widths["peak"] = max(5, *(len(row.get("peak", "")) for row in rows))
    print("".ljust(NAME), "GPUs", *(title.rjust(width) for title, width in widths.items()))
    for found, row in zip(shown, rows, strict=True):
        cells = [row[title].rjust(width) for title, width in widths.items()] if row else []
        name = f"{found.technique.name:{NAME}} {gpus_of(found.technique):4}"
        print(name, *(cells or [found.mistake]))
    print_notes(shown)
    return shown


def optimizer_of(flags: list[str]) -> str:
    """The optimizer that the flags select, or that is the default of their model."""
    words = " ".join(flags).replace("=", " ").split()
    if "--optimizer" in words:
        return words[words.index("--optimizer") + 1]
    texts = any(word in " ".join(words) for word in (*FAMILIES, "encoder", "bert", "reviews"))
    return "adamw" if texts else "sgd"


def print_notes(shown: list) -> None:
    if any("LocalSGD" in found.technique.name for found in shown):
        print("\nLocalSGD sends in one of several steps; the predicted step is another one.")
    if any(found.most for found in shown):
        print("\nEP: if all experts get equally many tokens, and if one rank's get all of them.")
    ddp = next((found for found in shown if found.kinds and "DDP" in found.technique.name), None)
    if ddp and (size := size_of(ddp.kinds["gradients"] or ddp.kinds["parameters"])) != "0":
        size = f"{size[:-1]} MiB" if size.endswith("M") else f"{size} GiB"
        print("\nDDP's rows have gradient_as_bucket_view=True: a plain DDP(model) holds its "
              f"gradients\ntwice, which is {size} more.")  # fmt: skip


def collect(predictions) -> list:
    """A list of all predictions, with a progress bar in a terminal."""
    return list(tqdm(predictions, desc="predicted", unit="", leave=False, disable=None))


def inputs_of(shown: list) -> str:
    return next((f"{found.inputs}, " for found in shown if found.inputs), "")


def cells_of(args, found) -> dict[str, str]:
    """The cells of a row, by title; none if the technique reported an error."""
    if found.mistake:
        return {}
    sizes = {"peak": found.peak}
    sizes |= {title: sum(found.kinds[k] for k in kinds) for title, kinds in COLUMNS.items()}
    cells = {title: size_of(size) for title, size in sizes.items()}
    cells |= {"sent": f"{found.sent / 1e6:,.0f}"}
    cells |= {"peak": "<1M"} if cells["peak"] == "0" else {}
    cells |= {"peak": f"{cells['peak']}-{size_of(found.most)}"} if found.most else {}
    if args.memory:
        surely = "yes" if found.most <= room_of(args) else "maybe"
        cells["fits"] = surely if fits(args, found) else "no"
    return cells


def size_of(size: int) -> str:
    """A size in bytes as a short string."""
    if size < 0.1 * GIB:
        return f"{size / 2**20:.0f}M" if size > 2**19 else "0"
    return f"{size / GIB:.2f}"[:5].rstrip(".")


def print_ways(args, job, found: list) -> None:
    """Print each combination in a few lines, with its command."""
    print(
        f"{describe(args, list(job.flags))}, global batch {job.batch_size}, GPUs: {args.gpus} of "
        f"{args.memory:g} GiB, {args.spare:.2g} reserved:"
    )
    print("least recomputation, idle time and communication that compute does not hide first;")
    print("peaks are predictions per GPU")
    for number, one in enumerate(found, 1):
        way = one.technique
        parts = {name: sum(one.kinds[kind] for kind in kinds) for name, kinds in COLUMNS.items()}
        consists = ", ".join(f"{name} {in_words(n)}" for name, n in parts.items() if n > 2**16)
        again = {"full": "all of", "selective": "all but matmuls and attention of"}.get(way.ac)
        idle = (way.pp - 1) / way.microbatches
        costs = [f"sends {one.sent / 1e9:,.{0 if one.sent > 1e11 else 1}f} GB per step"]
        costs += [f"recomputes {again} forward"] if again else []
        host = way.bytes_on_host(job)
        costs += [f"keeps {in_words(host)} per GPU in CPU memory"] if host else []
        costs += [f"idle for {idle:.0%} of its compute time"] if idle else []
        print(f"\n{number}. {way.describe()}: peak {in_words(one.peak)} ({consists})")
        print(f"   {', '.join(costs)}")
        print(f"   {way.launch(job)}")


def in_words(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"


def print_fit(args, flags: list[str], predictions) -> list:
    shown = collect(predictions)
    where = f"{inputs_of(shown)}{args.gpus} GPUs of {args.memory:.1f} GiB"
    print(f"{describe(args, flags)}, {where}: the largest global batch\n")
    print(f"{'':{NAME}}{'GPUs':>6}{'batch':>12}{'peak GiB':>12}")
    for found in shown:
        name, gpus = found.technique.name, gpus_of(found.technique)
        batch, peak = found.batch_size or "none", f"{found.peak / GIB:.2f}"
        figures = f"  {found.mistake}" if found.mistake else f"{batch:>12}{peak:>12}"
        print(f"{name:{NAME}}{gpus:>6}{figures}")
    return shown


def print_json(args, flags: list[str], predictions) -> list:
    """Print JSON, with all sizes in bytes."""
    shown = list(predictions)
    rows = [
        {
            "technique": found.technique.name, "batch_size": found.batch_size,
            "kinds": found.kinds, "inputs": found.inputs, "mistake": found.mistake,
            "peak": found.peak, "sent": found.sent,
            "sent_in": {
                name: sum(message.sent for message in found.messages if message.phase == kind)
                for name, kind in PHASES.items()
            },
            "command": [*found.technique.command, *flags], "gpus": gpus_of(found.technique),
        } | ({"fits": fits(args, found)} if args.memory else {})
        | ({"most": found.most} if found.most else {})
        for found in shown
    ]  # fmt: skip
    print(json.dumps(rows, indent=2))
    return shown


def say_what_fits(args, predictions: list) -> None:
    """Print what fits in one line; exit with code 2 if nothing fits."""
    good = [found.technique.name for found in predictions if fits(args, found)]
    if good:
        if not args.json and not args.fit:
            room = f"fits {args.memory:.1f} GiB with {args.spare:.1f} GiB reserved: "
            whole = [name.replace(" ", "\0") for name in good]  # in one line each
            text = textwrap.fill(room + ", ".join(whole), WIDTH, break_on_hyphens=False)
            print("\n" + text.replace("\0", " "))
        return
    if args.fit:
        fail(
            f"no batch of two or more fits {args.memory:g} GiB with {args.spare:g} GiB reserved; "
            "use more --gpus, or a smaller model"
        )
    closest = min((f for f in predictions if not f.mistake), key=lambda found: found.peak)
    short = closest.peak / GIB + args.spare - args.memory
    fail(
        f"nothing fits {args.memory:g} GiB with {args.spare:g} GiB reserved; "
        f"{closest.technique.name} comes closest, {short:.2f} GiB too large: use more "
        f"--gpus or a smaller --batch-size (--fit finds the largest)"
    )
