"""Tables of what benchmark.py measured: medians over the repeats of each row of a suite."""

import difflib
import re
import statistics
from collections.abc import Callable
from pathlib import Path

from report.blocks import Column, digits, draw, footer, gib, machine_line
from report.results import ROOT, Unusable, middle, name_of, runs_of, speeds_of, unit_of
from techniques import LIBRARIES, decoder, technique

# The memory to show, by the kind that was measured: on a GPU, on a CPU with --profile-memory, and
# without it. What the kind says in addition is in brackets.
MEMORY = {"reserved": ("allocated", "reserved"), "allocated": ("process", "allocated")}
KEPT, KEPT_ZH = "state B/param (theory)", "每参数字节（理论）"
BARE, BARE_ZH = "of the bare loop", "相对裸循环"
GPTS = {"gpt-nano": (4, 128), "gpt-mini": (6, 384), "gpt2": (12, 768)}  # layers, width

# ------------------------------------------------------------------------------------------ cells


def kind_of_memory(rows: list[dict]) -> str:
    """The kind of :data:`MEMORY` that these rows measured, or only that of the process."""
    runs = runs_of(rows)
    kinds = (kind for kind in MEMORY if middle(runs, "peak_memory_gib", kind) is not None)
    return next(kinds, "process")


def memory(row: dict) -> str:
    kinds = MEMORY.get(kind_of_memory([row]), ["process"])
    first, *more = (f"{middle(row['runs'], 'peak_memory_gib', kind):.2f}" for kind in kinds)
    return f"{first} ({more[0]})" if more else first


def spread(values: list[float], form: str = "") -> str:
    """Median, minimum and maximum, by default with as many digits as three repeats justify."""
    mid = statistics.median(values)
    form = form or (",.0f" if mid >= 100 else ",.1f")
    around = f" ({min(values):{form}}–{max(values):{form}})" if len(values) > 1 else ""
    return f"{mid:{form}}{around}"


def speed(row: dict) -> str:
    if not row["runs"]:
        return row["failed"] or f"left out: {row['left_out']}"
    return spread(speeds_of(row["runs"]))


def ranks(row: dict) -> str:
    """Number of ranks, and in brackets the number of GPUs if one rank uses several, as with DP."""
    if not row["runs"]:
        return (re.findall(r" x(\d+)$", row["name"]) or [""])[0]
    size, devices = (row["runs"][0][key] for key in ("world_size", "devices"))
    return str(size) if devices == size else f"{size} ({devices})"


def precision(row: dict) -> str:
    """The precision, with a note on TF32."""
    run = row["runs"][0]
    return f"{run['precision']} (TF32)" if any(run["tf32"].values()) else run["precision"]


def decoder_of(run: dict):
    """The sizes of a run's GPT, for theory; ``None`` if it is no GPT. The vocabulary follows from
    the number of parameters."""
    shape = re.fullmatch(r"gpt-(\d+)x\d+x(\d+)", run["model"])
    layers, width = map(int, shape.groups()) if shape else GPTS.get(run["model"], (0, 0))
    if not layers:
        return None
    sizes, more = (run["context"], run["global_batch_size"]), {"experts": run.get("experts") or 0}
    empty = decoder(layers, width, 0, *sizes, **more)
    vocabulary = round((run["parameters"] - empty.whole) / 2 / width)
    return decoder(layers, width, vocabulary, *sizes, **more, tied=bool(run.get("tie")))


def kept(run: dict, number: Callable = "{:.2f}".format) -> str | None:
    """State bytes per parameter of model.pt, where tied weights stand twice, with theory in
    brackets; a peer has neither."""
    if not run["state_bytes"]:
        return None
    model, each = decoder_of(run), sum(run["state_bytes"].values()) / run["parameters"]
    options = run["options"] | {"optimizer": run["optimizer"], "decoder": model}
    theory = sum(technique(run["technique"]).keeps(run["world_size"], options).values())
    theory *= model.whole / run["parameters"] if model else 1
    return f"{number(each)} ({number(theory)})"


def title(row: dict) -> str:
    some = row["runs"] and row["failed"]
    return f"`{name_of(row)}`" + (f" ({len(row['runs'])} runs; then {row['failed']})" * bool(some))


def steps(row: dict) -> str:
    return "{:.0f} ({:.0f})".format(*(middle(row["runs"], "step_ms", p) for p in ("p50", "p95")))


def model_flops(row: dict) -> str | None:
    """Model TFLOP/s of a device, and in brackets their share of its peak, if that is known."""
    each, share = (middle(row["runs"], name) for name in ("model_tflops", "mfu"))
    return each and f"{each:.3g}" + (f" ({share:.0%})" if share else "")


def measured(title: str | Callable, chinese: str | dict, value: Callable, form="") -> Column:
    """A column that is empty for a row without runs."""
    return Column(title, chinese, lambda row: value(row) if row["runs"] else None, form)


def median(name: str, chinese: str, *keys: str, form: str) -> Column:
    """A column with the median of a figure of all runs."""
    return Column(name, chinese, lambda row: middle(row["runs"], *keys), form)


# ---------------------------------------------------------------------------------------- columns
# fmt: off

SPEEDS = {"images": "图像", "tokens": "token", "reviews": "影评"}
SPEEDS = {f"{name}/s (min–max)": f"{chinese}/秒（最小–最大）" for name, chinese in SPEEDS.items()}
PEAKS = {"peak GiB": "峰值内存 GiB", "peak GiB (allocated)": "峰值内存 GiB（已分配）"}
PEAKS |= {"peak GiB (reserved)": "峰值显存 GiB（保留）"}
RANKS = Column(lambda rows: "ranks (GPUs)" if any(" (" in ranks(row) for row in rows) else "ranks",
               {"ranks": "进程数", "ranks (GPUs)": "进程数（GPU）"}, ranks)
SPEED = Column(lambda rows: f"{unit_of(next(iter(runs_of(rows)), {}))} (min–max)", SPEEDS, speed)
PEAK = measured(lambda rows: "peak GiB" if (kind := kind_of_memory(rows)) == "process"
                else f"peak GiB ({kind})", PEAKS, memory)
STATE = measured(KEPT, KEPT_ZH, lambda row: kept(row["runs"][0]))

# The columns of a technique's rows: for which suites and runs each is there; its titles and cells.
COLUMNS: list[tuple[str, Column]] = [
    ("timed", Column("technique", "技术", title)),
    ("untimed", Column("technique", "技术", lambda row: title(row) + (
        "" if row["runs"] else f" ({speed(row)})"))),
    ("", RANKS),
    ("", measured("precision", "精度", precision)),
    ("timed", SPEED),
    ("timed", measured("step ms (p95)", "每步毫秒（p95）", steps)),
    ("timed flops", measured("TFLOP/s (MFU)", "TFLOP/s（MFU）", model_flops)),
    ("timed text", median("first step s", "首步秒数", "first_step_seconds", form=",.1f")),
    ("timed no_text", measured(
        "epoch s", "每轮秒数",
        lambda row: row["runs"][0]["train_samples"] / statistics.median(speeds_of(row["runs"])),
        ",.1f")),
    ("", PEAK),
    ("gpu", median("GPU %", "", "gpu", "utilization_percent", form=".0f")),
    ("", STATE),
    ("weights", median("weights", "权重差", "weights_difference", form=".0e")),
    ("text", median("loss", "损失", "eval_loss", form=".4f")),
    ("no_text", median("accuracy", "准确率", "eval_accuracy", form=".1%")),
]
# fmt: on


# ----------------------------------------------------------------------------------------- tables


def techniques_table(rows: list[dict], times: bool = True) -> str:
    """All columns that the rows have; without times if the suite is about results alone."""
    runs = runs_of(rows)
    text = bool(runs) and unit_of(runs[0]) == "tokens/s"  # without a meaningful epoch
    known = {"timed" if times else "untimed", "text" if text else "no_text"}
    known |= {"gpu"} if any(run["device"] != "cpu" for run in runs) else set()
    known |= {"flops"} if middle(runs, "model_tflops") is not None else set()
    known |= {"weights"} if middle(runs, "weights_difference") is not None else set()
    return draw(rows, *(column for needs, column in COLUMNS if set(needs.split()) <= known))


def suite_table(root: Path, found: dict, table: str) -> str:
    """A table of a suite, and where its rows were measured."""
    rows = [row for row in found["rows"] if row["table"] == table]
    other = {"peers": peers_table, "amp": amp_table, "ecosystem": ecosystem_table}
    drawn = other.get(table.rpartition("-")[2])
    drawn = drawn(rows) if drawn else techniques_table(rows, found.get("times", True))
    return drawn + measured_where(root, found, rows)


def measured_where(root: Path, found: dict, rows: list[dict]) -> str:
    """The line below a table of a suite."""
    n, on_cpu = found["repeats"], {run["device"] for run in runs_of(found["rows"])} == {"cpu"}
    times = "1 run of each" if n == 1 else f"{n} runs of each, median (least–most)"
    commands = [run["command"] for run in runs_of(rows)]
    machine = machine_line(found["hardware"], on_cpu)
    return footer(root, found, f"{found['suite']}.json", machine, after=times, commands=commands)


def front_table(root: Path, found: dict, proof: dict, names: list[str], predicted: dict) -> str:
    """A row of a suite's results for each of these names, with links to docs/techniques/: time,
    memory, its prediction in bytes, and the difference from a single process in the proof."""
    known = {row["name"]: row for row in found["rows"]}
    missing = {"runs": [], "failed": "not measured yet"}
    rows = [known.get(name, missing | {"name": name}) for name in names]
    unit = unit_of(runs_of(found["rows"])[0])
    # fmt: off
    return draw(
        rows,
        Column("technique", "技术",
               lambda row: f"[`{name_of(row)}`](docs/techniques/{name_of(row).split()[0]}.md)"),
        RANKS,
        measured("difference from one process", "与单进程之差",
                 lambda row: against_one_process(f"pytorch_{name_of(row)}", proof, unit)),
        measured("predicted on a GPU", "GPU 上的预测值",
                 lambda row: gib(predicted.get(row["name"]))),
        PEAK, SPEED, measured(KEPT, KEPT_ZH, lambda row: kept(row["runs"][0], digits)),
    ) + measured_where(root, found, rows)
    # fmt: on


def against_one_process(script: str, proof: dict, unit: str) -> str:
    """The largest difference of weights with SGD; of the loss, for a technique that rounds."""
    rows = proof["parity" if unit == "images/s" else "parity_gpt"]
    weights = [r["value"] for r in rows if (r["script"], r["optimizer"]) == (script, "sgd")]
    if weights:
        return f"weights {max(weights):.0e}".replace(" 0e+00", " 0")
    losses = [row["value"] / row["fp32"] - 1 for row in proof["loss"] if row["script"] == script]
    return f"loss {max(losses, key=abs):+.2%}" if losses and unit == "images/s" else ""


def relative_speed(runs: list[dict], reference: list[dict] | None) -> str | None:
    """The ratio of the medians, and its range over the rounds; ``None`` without a reference."""
    if not reference or runs is reference:
        return reference and "1.00"
    ours, theirs = speeds_of(runs), speeds_of(reference)
    ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
    around = f" ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ours) / statistics.median(theirs):.2f}{around}"


def peers_table(rows: list[dict]) -> str:
    """Training loops on the same workload, relative to the bare one of the same precision."""
    bare = [row for row in rows if row["runs"] and row["name"].startswith("bare loop")]
    bare = {precision(row): row["runs"] for row in bare}
    return draw(
        rows, Column("loop", "训练循环", lambda row: row["name"]), SPEED,
        measured(BARE, BARE_ZH, lambda row: relative_speed(row["runs"], bare.get(precision(row)))),
        PEAK,
    )  # fmt: skip


def amp_table(rows: list[dict]) -> str:
    """One model in SingleGPU, DP and DDP, each in fp32, with autocast and with a GradScaler, as in
    the rows' names. Speed is also relative to the same technique in fp32."""
    name, kind = (lambda row, i=i: name_of(row).split(", ")[i] for i in (0, 1))
    fp32 = {(name(row), ranks(row)): row["runs"] for row in rows if kind(row) == "fp32"}
    return draw(
        rows, Column("technique", "技术", name), Column("precision", "精度", kind), RANKS, SPEED,
        measured("of fp32", "相对 fp32",
                 lambda row: relative_speed(row["runs"], fp32.get((name(row), ranks(row))))),
        PEAK,
    )  # fmt: skip


# -------------------------------------------------------------- the libraries' scripts and ours


def ecosystem_table(rows: list[dict]) -> str:
    """A row for each script of a library and of ours that equals one: lines, speed, bytes. Speeds
    are relative: to the bare loop, and to the raw script on as many ranks; in brackets the range
    over the rounds."""
    found = [row["runs"] for row in rows if row["runs"]]
    runs = {(run[0]["technique"], run[0]["world_size"]): run for run in found}
    raw = {one.script: f"pytorch_{one.parent}" for one in LIBRARIES}
    raw = {"pytorch_SingleGPU": "pytorch_SingleGPU"} | {p: p for p in raw.values()} | raw

    def share(name: str, n: int, reference: str) -> str | None:
        ours, theirs = runs.get((name, n)), runs.get((reference, n))
        if not ours or not theirs or ours is theirs:
            return None
        threads = [run[0]["threads"] for run in (ours, theirs)]
        if len(set(threads)) > 1:  # no comparison
            raise Unusable(f"{name} had {threads[0]} threads, {reference} {threads[1]}")
        return relative_speed(ours, theirs)

    def bytes_of(name: str) -> str | None:
        own = runs.get((name, 2), runs.get((name, 1)))
        return own and kept(own[0], digits)

    # fmt: off
    return draw(
        raw, Column("script", "脚本", "`{}`".format),
        Column("lines", "行数", lambda name: len(code_of(name))),
        Column("not in SingleGPU", "SingleGPU 没有的行",
               lambda name: count_new("pytorch_SingleGPU", name) or None),
        Column("not in the raw script", "原生脚本没有的行",
               lambda name: count_new(raw[name], name) or None),
        Column(f"{BARE}, 1 rank", f"{BARE_ZH}，1 进程",
               lambda name: share(name, 1, "peer: bare")),
        *(Column(f"of the raw script, {n} rank{'s' * (n > 1)}", f"相对原生脚本，{n} 进程",
                 lambda name, n=n: share(name, n, raw[name])) for n in (1, 2)),
        Column(KEPT, KEPT_ZH, bytes_of),
    )
    # fmt: on


def code_of(script: str) -> list[str]:
    """A script's lines below its docstring, without empty ones, comments and spaces."""
    lines = (ROOT / f"{script}.py").read_text().split('"""\n', 1)[1].splitlines()
    lines = [re.sub(r"(^|  )#.*", "", line).strip() for line in lines]
    return [line for line in lines if line]


def count_new(parent: str, script: str) -> int:
    """Number of lines of a script that its parent does not have."""
    diff = difflib.unified_diff(code_of(parent), code_of(script), n=0)
    return sum(line.startswith("+") and line != "+++ \n" for line in diff)
