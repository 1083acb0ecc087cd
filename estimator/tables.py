"""What estimate.py prints: tables, JSON, and the line that says what fits."""

import json
import math
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from estimator import network
from harness.cli import fail
from jobs.sizes import is_decoder

GIB = 2**30
WIDTH = 100  # of the output
NAME = 37  # width of the technique column
PHASES = {"forward": "activations", "backward": "temporary", "update": "update"}  # by kind
LINES = 5  # of a user's file
COLUMNS = {  # of a table: the kinds of memory in each
    "weights": ["parameters"],
    "grads": ["gradients"],
    "optim": ["optimizer"],
    "activ": ["activations"],
    "input": ["input"],
    "temp": ["temporary", "update"],
}
LONG = {"grads": "gradients", "optim": "optimizer state", "activ": "activations"}
LONG |= {"temp": "temporary"}
WORDS = {LONG.get(title, title): kinds for title, kinds in COLUMNS.items()}  # of a user's file
WORDS["offloaded"] = ["offloaded"]


def describe(flags: list[str]) -> str:
    return " ".join(flags).removeprefix("--model ")


def fits(args, prediction) -> bool:
    """Whether a prediction fits the GPU; and the CPU memory, if that is given."""
    return bool(prediction.kinds) and filled(args, prediction) <= 1


def filled(args, prediction) -> float:
    """The fraction of the GPU's memory that a prediction takes; or of the CPU's, if that is given
    and the fraction of it is larger."""
    of_host = prediction.host / (args.host_memory * GIB) if args.host_memory else 0.0
    return max(prediction.peak / room_of(args), of_host)


def more(size: int) -> str:
    """How much is missing, rounded up: never 0."""
    if size < 0.1 * GIB:
        return f"{-(-size // 2**20)} MiB"
    return f"{math.ceil(100 * size / GIB) / 100:.2f} GiB"


def room_of(args) -> int:
    """Bytes that tensors may take on one GPU."""
    return int((args.memory - args.spare) * GIB)


def gpus_of(technique) -> int:
    return max(technique.ranks, technique.gpus, 1)


def print_table(args, flags: list[str], predictions) -> list:
    """Print a row for each technique, without columns that contain only 0."""
    shown = list(predictions)
    shares = max(found.technique.shares for found in shown)
    each, left = divmod(args.batch_size, shares)
    each = f" = {shares} x {each}" if shares > 1 and not left else ""
    print(f"{describe(flags)}, {inputs_of(shown)}global batch {args.batch_size}{each}:")
    print("predicted peak per GPU in GiB (M: MiB), and MB that it sends per step;")
    print(f"{optimizer_of(flags)}, in float32 where neither the row nor a flag has a --dtype\n")
    rows = [cells_of(args, found) for found in shown]
    others = [title for title in (*COLUMNS, "host", "sent", "fits") if is_needed(title, rows)]
    widths = {title: max(5, len(title)) for title in ("peak", *others)}
    widths["peak"] = max(5, *(len(row.get("peak", "")) for row in rows))
    if "sent" in widths:
        widths["sent"] = 6
    width = max(NAME, *(len(found.technique.name) for found in shown))
    print("".ljust(width), "GPUs", *(title.rjust(width) for title, width in widths.items()))
    for found, row in zip(shown, rows, strict=True):
        cells = [row[title].rjust(width) for title, width in widths.items()] if row else []
        name = f"{found.technique.name:{width}} {gpus_of(found.technique):4}"
        print(name, *(cells or [found.mistake]))
    print_notes(shown)
    return shown


def is_needed(title: str, rows: list[dict[str, str]]) -> bool:
    """Whether a column has more than zeros and empty cells."""
    return any(row.get(title, "") not in ("", "0") for row in rows)


def optimizer_of(flags: list[str]) -> str:
    """The optimizer that the flags select, or that is the default of their model."""
    if "--optimizer" in flags:
        return flags[flags.index("--optimizer") + 1]
    given = " ".join(flags)
    texts = is_decoder(given) or any(word in given for word in ("encoder", "bert", "reviews"))
    return "adamw" if texts else "sgd"


def print_notes(shown: list) -> None:
    if any("LocalSGD" in found.technique.name for found in shown):
        print("\nLocalSGD sends in one of several steps; the predicted step is another one.")
    if any(found.most for found in shown):
        print("\nEP: if all experts get equally many tokens, and if one rank's get all of them.")
    ddp = [one for one in shown if one.kinds and re.search("DDP(?!_by)", one.technique.name)]
    size = size_of(ddp[0].kinds["gradients"] or ddp[0].kinds["parameters"]) if ddp else "0"
    if size != "0":
        size = f"{size[:-1]} MiB" if size.endswith("M") else f"{size} GiB"
        print("\nDDP's rows have gradient_as_bucket_view=True: a plain DDP(model) holds its "
              f"gradients\ntwice, which is {size} more.")  # fmt: skip


def inputs_of(shown: list) -> str:
    return next((f"{found.inputs}, " for found in shown if found.inputs), "")


def cells_of(args, found) -> dict[str, str]:
    """The cells of a row, by title; none if the technique reported an error."""
    if found.mistake:
        return {}
    cells = {"peak": size_of(found.peak)}
    cells |= {title: size_of(size) for title, size in by_group(found, COLUMNS).items()}
    cells |= {"host": size_of(found.host), "sent": f"{found.sent / 1e6:,.0f}"}
    if found.most:
        cells["peak"] += f"-{size_of(found.most)}"
    if args.memory:
        surely = "yes" if found.most <= room_of(args) else "maybe"
        cells["fits"] = surely if fits(args, found) else "no"
    return cells


def by_group(found, groups: dict[str, list[str]]) -> dict[str, int]:
    """Bytes at the peak of a prediction, by groups of kinds: ``COLUMNS``, or ``WORDS``."""
    sizes = {}
    for title, kinds in groups.items():
        sizes[title] = sum(found.kinds[kind] for kind in kinds)
    return sizes


def size_of(size: int) -> str:
    """A size in bytes as a short string."""
    mib = size / 2**20
    if mib < 9.95:
        return f"{mib:.1f}M" if mib >= 0.05 else "0"
    if size < 0.1 * GIB:
        return f"{mib:.0f}M"
    return f"{size / GIB:.2f}"[:5].rstrip(".")


def print_ways(args, flags: list[str], found: list, at: str, speeds: list[list[float]]) -> None:
    """Print each combination in a few lines, with its command and, ``at`` an MFU, the speed of each
    that has one."""
    print(
        f"{describe(flags)}, global batch {args.batch_size}, GPUs: {args.gpus} of "
        f"{args.memory:g} GiB, {args.spare:.2g} reserved:"
    )
    print("least recomputation, idle time and communication that compute does not hide first;")
    print(f"{at}peaks are predictions per GPU")
    for number, one in enumerate(found, 1):
        way = one.technique
        parts = by_group(one, COLUMNS)
        consists = ", ".join(f"{name} {in_words(n)}" for name, n in parts.items() if n > 2**16)
        print(f"\n{number}. {way.describe()}: peak {in_words(one.peak)} ({consists})")
        print(f"   {', '.join(costs_of(one))}")
        none = "no tokens/s: only those of data parallelism were near published speeds"
        said = "{:,.0f} to {:,.0f} tokens/s per GPU" if speeds[number - 1] else none
        print("  ", said.format(*speeds[number - 1]))
        print(f"   {way.launch(flags, args.batch_size)}")


def costs_of(found) -> Iterator[str]:
    """What a combination sends, recomputes, copies and waits for, in words."""
    way = found.technique
    digits = 0 if found.sent > 1e11 else 1
    yield f"sends {found.sent / 1e9:,.{digits}f} GB per step"
    if way.ac == "full":
        yield "recomputes all of forward"
    if way.ac == "selective":
        yield "recomputes every second matmul of forward"
    if found.host:
        yield f"keeps {in_words(found.host)} per GPU in CPU memory"
    if way.pp > 1:
        yield f"idle for {(way.pp - 1) / way.microbatches:.0%} of its compute time"


def in_words(size: int) -> str:
    if size < 2**20:
        return f"{size / 2**10:.0f} KiB"
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"


def print_fit(args, flags: list[str], predictions) -> list:
    shown = list(predictions)
    where = f"{inputs_of(shown)}{args.gpus} GPUs of {args.memory:.1f} GiB"
    print(f"{describe(flags)}, {where}: the largest global batch\n")
    print(f"{'':{NAME}}{'GPUs':>6}{'batch':>12}{'peak GiB':>12}")
    for found in shown:
        figures = f"{found.batch_size or 'none':>12}{found.peak / GIB:>12.2f}"
        if found.mistake:
            figures = f"  {found.mistake}"
        print(f"{found.technique.name:{NAME}}{gpus_of(found.technique):>6}{figures}")
    return shown


def print_json(args, flags: list[str], predictions) -> list:
    """Print JSON, with all sizes in bytes."""
    shown = list(predictions)
    print(json.dumps([json_of(args, flags, found) for found in shown], indent=2))
    return shown


def json_of(args, flags: list[str], found) -> dict:
    sent_in = {}
    for name, kind in PHASES.items():
        sent_in[name] = sum(one.sent for one in found.messages if one.phase == kind)
    row = {
        "technique": found.technique.name, "batch_size": found.batch_size,
        "kinds": found.kinds, "inputs": found.inputs, "mistake": found.mistake,
        "peak": found.peak, "host": found.host, "sent": found.sent, "sent_in": sent_in,
        "command": [*found.technique.command, *flags],
        "gpus": gpus_of(found.technique),
    }  # fmt: skip
    if args.memory:
        row["fits"] = fits(args, found)
    if found.most:
        row["most"] = found.most
    return row


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
    if closest.peak <= room_of(args):
        fail(
            f"--host-memory {args.host_memory:g}: nothing fits; {closest.technique.name} comes "
            f"closest, and keeps {in_words(closest.host)} per GPU in CPU memory; use more of it"
        )
    short = more(closest.peak - room_of(args))
    fail(
        f"nothing fits {args.memory:g} GiB with {args.spare:g} GiB reserved; "
        f"{closest.technique.name} comes closest, {short} too large: use more "
        f"--gpus or a smaller --batch-size (--fit finds the largest)"
    )


# --------------------------------------------------------------------------------- a user's file


def print_file(args, found) -> None:
    """Print what a user's file takes, and its lines with the largest tensors."""
    gpus = f"{found.ranks} GPUs" if found.ranks > 1 else "one GPU"
    of = "a rank's batch" if found.ranks > 1 else "a batch"
    shapes = f"{found.name} on {gpus}, BATCH {found.batch}: {of} is {found.inputs}"
    print(textwrap.fill(shapes, WIDTH, subsequent_indent="  "))
    print(f"predicted peak per GPU: {in_words(found.peak)}{whether_it_fits(args, found)}")
    sizes = by_group(found, WORDS)
    parts = [f"{name} {in_words(size)}" for name, size in sizes.items() if size > 2**14]
    print(textwrap.fill(", ".join(parts), WIDTH, initial_indent="  ", subsequent_indent="  "))
    here = min(found.ranks, network.MACHINE)
    machine = f", {in_words(here * found.host_each)} for {here} ranks" if here > 1 else ""
    first = f"; {in_words(found.host)} on rank 0, {found.host_at}"
    first = first if found.host > found.host_each else ""
    print(f"CPU memory: {in_words(found.host_each)} per rank{machine}{first}")
    if found.ranks > 1:
        print(f"sends {in_bytes(found.sent)} per step and GPU")
    print(f"\nAt the peak, {found.at} runs: {found.at.text}")
    print("The lines that created most of what is allocated then, each with its largest tensor:")
    for line in found.lines[:LINES]:
        print(f"\n{in_words(line.size):>10}  {line.place}  {line.place.text}"[: WIDTH + 1])
        print(f"{'':12}{largest_of(line)}"[:WIDTH])
    if found.stand_ins:
        print(f"\nStand-ins: {'; '.join(found.stand_ins)}")


def largest_of(line) -> str:
    """The largest part of what a line created."""
    kind = next(word for word, kinds in WORDS.items() if line.kind in kinds)
    dtype = str(line.place.dtype).removeprefix("torch.")
    size = f"{in_words(line.part)} of " if line.part < line.size else ""
    where = ""
    if line.place.library:
        file, number = line.place.library
        where = f" from {'/'.join(Path(file).parts[-2:])}:{number}"
    return f"{size}{kind}{where}, up to {dtype} {list(line.place.shape)}"


def in_bytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def whether_it_fits(args, found) -> str:
    if not args.memory:
        return ""
    room = f"{args.memory:.1f} GiB with {args.spare:.1f} GiB reserved"
    return f", {'fits' if fits(args, found) else 'does not fit'} {room}"


def print_file_json(args, found) -> None:
    """Print JSON, with all sizes in bytes."""
    lines = []
    for line in found.lines:
        one = {"line": str(line.place), "code": line.place.text, "bytes": line.size}
        one |= {"kind": line.kind, "of_kind": line.part, "library": line.place.library}
        lines.append(one | {"shape": line.place.shape, "dtype": str(line.place.dtype)})
    row = {
        "file": found.name, "gpus": max(1, found.ranks), "batch": found.batch,
        "inputs": found.inputs, "peak": found.peak, "kinds": found.kinds, "host": found.host,
        "host_each": found.host_each, "host_at": found.host_at, "sent": found.sent,
        "at": str(found.at), "lines": lines,
        "stand_ins": found.stand_ins,
    }  # fmt: skip
    if args.memory:
        row["fits"] = fits(args, found)
    print(json.dumps(row, indent=2))


def say_whether_it_fits(args, found) -> None:
    """Exit with code 2 if it does not fit."""
    if not args.memory or fits(args, found):
        return
    if found.peak <= room_of(args):
        takes = f"{found.name} takes {in_words(found.host)}"
        fail(f"--host-memory {args.host_memory:g}: {takes} on rank 0; use more, or --recommend")
    short = more(found.peak - room_of(args))
    use = "use a smaller BATCH (--fit finds the largest), more --gpus, or --recommend"
    fail(f"{found.name} needs {short} more than {args.memory:g} GiB with {args.spare:g} GiB "
         f"reserved; {use}")  # fmt: skip


def print_files(args, path, good: list, others: list) -> None:
    """Print the files of examples/ that fit with the functions of ``path``, and the others."""
    room = f"{args.gpus} GPUs of {args.memory:.1f} GiB, {args.spare:.1f} reserved"
    print(f"{path.name} as other files of examples/, on {room}:")
    print("what divides only the batch first, then what recomputes, splits or offloads; per GPU")
    for number, one in enumerate(good, 1):
        costs = f"sends {in_bytes(one.sent)} per step, {in_words(one.host)} of CPU memory"
        print(f"\n{number}. {one.name}: peak {in_words(one.peak)}, {costs}")
        to = f"my_{one.name}.py"
        write = f"python {sys.argv[0]} init {to} --from {one.name} --own {path}"
        print(f"   {to + ' is there' if Path(to).exists() else write}")
    print()
    for one in others:
        print(f"{one.name}: {one.mistake or 'needs ' + in_words(one.peak)}")


def print_scale(args, flags: list[str], about: str, compute: tuple, shares: dict) -> None:
    """Print the shares of a step that ranks wait, in a row per technique: for the ``compute`` time
    in seconds, shortest and longest."""
    times = " to ".join(f"{1e3 * seconds:.3g}" for seconds in dict.fromkeys(compute))
    print(
        f"{describe(flags)}, {about}: % of a step that a rank waits for\ncommunication, "
        f"with the best overlap with {times} ms of compute and with no overlap\n"
    )
    ranks = next(iter(shares.values()))
    print(f"{'ranks':24}" + "".join(f"{n:>9,}" for n in ranks))
    for name, row in shares.items():
        cells = [f"{100 * least:.0f}–{100 * most:.0f}" for least, most in row.values()]
        print(f"{name:24}" + "".join(f"{cell:>9}" for cell in cells))


def print_speeds(speeds: dict[str, dict[int, list[float]]]) -> None:
    for name, row in speeds.items():
        cells = [f"{low:,.0f}–{high:,.0f}" for low, high in (row[min(row)], row[max(row)])]
        print(f"{name}: {cells[0]} tokens/s per GPU on {min(row)}, {cells[1]} on {max(row):,}")
