"""All pictures, as SVG by matplotlib: plots of the results, the README's picture of memory, and the
timelines of traces. A picture has the digest of its data, which says whether it is out of date."""

import hashlib
import io
import itertools
import json
import re
import warnings
from pathlib import Path

from report.blocks import size_name
from report.results import WORDS, name_of
from report.traces import Bar, Rank, read_traces
from techniques import technique

GREY = "#7d8590"  # readable on light and dark pages
COLOURS = ["#4c8dd6", "#e08a3c", "#54a868", "#c65f63", "#9179c0", "#9c8468", "#d288bd", "#8d8d8d"]
INKS = {"light": "#1f2328", "dark": "#f0f6fc"}  # on a page of this theme
INKED = "text.color axes.labelcolor axes.edgecolor xtick.color ytick.color".split()
FRONT = {  # rows of the suite gpt in the README's picture, and their names there
    "SingleGPU": "one process", "torchrun_DDP x4": "DDP", "DDP_ZeRO --use_zero x4": "ZeRO",
    "HSDP --shard 2 x4": "HSDP", "FSDP x4": "FSDP",
}  # fmt: skip
FRONT_TITLE = "Memory per rank, GiB: GPT with {} M parameters, AdamW, {} ranks"
LANGUAGES = {"": {}, ".zh-CN": WORDS["pictures"]}  # by the end of a picture's name
PHASES = {  # of a step, and their colours
    "data": COLOURS[5], "forward": COLOURS[0], "backward": COLOURS[1],
    "forward and backward": COLOURS[6], "optimizer": COLOURS[2], "rest": COLOURS[7],
}  # fmt: skip
COLLECTIVES = {  # their colours; others are grey
    "all_reduce": COLOURS[4], "all_gather": COLOURS[3], "reduce_scatter": "#2f7f86",
    "broadcast": "#5f6f9e", "all_to_all": "#9c6a2f", "send": "#6f8f3a", "recv": "#b0a04a",
}  # fmt: skip
PALE, SHADE = 0.3, 0.42  # opacity of a phase that does not compute; of compute over communication
IDLE, OVERLAP = "pale: it does not compute", "dark: communication under compute"
PHASE, LANES = 0.40, 0.34  # heights of phases and of communication; from rank to rank it is 1

# ------------------------------------------------------------------------- what pictures show


def plots(results: dict[str, dict]) -> dict[str, dict]:
    """The data of the plots in results/, by name; of memory, from GPUs if there are results."""
    plots = {"collectives": bandwidths(results["collectives"])}
    for suite, name, make in (
        ("cpu", "memory", memory),
        ("gpu", "memory", memory),  # replaces the CPU's
        ("local_sgd", "local_sgd", loss_by_bytes),
        ("shakespeare", "loss", loss_by_tokens),
    ):
        rows = [row for row in results[suite]["rows"] if row["runs"] and row["table"] == suite]
        if rows:
            plots[name] = make(rows)
    return plots


def memory(rows: list[dict]) -> dict:
    """Persistent MiB per rank, by kind; with offload these bytes are not on the device."""
    run = rows[0]["runs"][0]
    title = f"MiB per rank: {run['model']} at {run['image_size']}, {run['device']}"
    rows = [row for row in rows if "offload" not in row["name"]]
    return {"title": title, "values": {row["name"]: memory_parts(row["runs"][0]) for row in rows}}


def memory_parts(run: dict) -> dict[str, float]:
    """Persistent MiB per rank, by kind, and the rest of the peak where tensors were counted."""
    state = run["state_bytes"]
    sizes = {"parameters": state["parameters"], "gradients": state["gradients"]}
    sizes["optimizer state"] = state["optimizer"]
    if copies := sum(state.values()) - sum(sizes.values()):
        sizes["copies"] = copies
    if (peak := run["peak_memory_gib"]["allocated"]) is not None:
        sizes["activations and buffers"] = max(0, 2**30 * peak - sum(state.values()))
    return {kind: round(size / 2**20, 1) for kind, size in sizes.items()}


def memory_pictures(gpt: dict) -> dict[str, dict]:
    """The README's picture for light and dark pages in both languages: GiB of one rank, by
    technique and kind."""
    runs = {row["name"]: row["runs"][0] for row in gpt["rows"] if row["runs"]}
    parts = {title: memory_parts(runs[name]) for name, title in FRONT.items() if name in runs}
    run, pictures = runs["FSDP x4"], {}
    for language, words in LANGUAGES.items():
        title = words.get("title", FRONT_TITLE)
        title = title.format(f"{run['parameters'] / 1e6:.0f}", run["world_size"])
        values = {
            words.get(name, name): {words.get(kind, kind): s / 1024 for kind, s in sizes.items()}
            for name, sizes in parts.items()
        }
        for theme in INKS:
            data = {"title": title, "values": values, "theme": theme}
            pictures[f"memory-{theme}{language}"] = data
    return pictures


def loss_by_tokens(rows: list[dict]) -> dict:
    """The loss on text against the tokens seen; lines become thinner, as they overlap."""
    run = rows[0]["runs"][0]
    millions = run["global_batch_size"] * run["context"] / 1e6
    curves = {row["name"]: row["runs"][0]["curve"] for row in rows if row["runs"][0]["curve"]}
    return {
        "axes": {"xlabel": "million tokens", "ylabel": f"training loss ({run['model']})"},
        "lines": {name: {"-": scaled(curve, millions)} for name, curve in curves.items()},
        "widths": [1 + 2 * i for i in reversed(range(len(curves)))],
    }


def loss_by_bytes(rows: list[dict]) -> dict:
    """The loss on text against the bytes that a rank has sent, by theory."""
    lines = {}
    for row in rows:
        run = row["runs"][0]
        ranks, options = run["world_size"], run["options"] | {"optimizer": run["optimizer"]}
        sent = sum(technique(run["technique"]).sends(ranks, options).values())
        if ranks > 1:
            lines[name_of(row)] = {"-": scaled(run["curve"], sent * run["parameters"] / 1e6)}
    said = f"training loss ({run['model']}, {ranks} ranks)"
    axes = {"xlabel": "MB sent by a rank", "ylabel": said, "xscale": "log"}
    return {"axes": axes, "lines": lines, "legend": {"loc": "upper left", "bbox_to_anchor": (1, 1)}}


def scaled(curve: list[tuple[int, float]], unit: float) -> tuple[list[float], list[float]]:
    """A curve of the loss by step, with the x-axis in another unit."""
    return [step * unit for step, _ in curve], [loss for _, loss in curve]


def bandwidths(sweep: dict) -> dict:
    """The bus bandwidth of each collective by message size, measured and fitted, as
    ``pytorch_collectives.py --sweep`` found them."""
    lines = {}
    for name, operation in sweep["operations"].items():
        sizes = [row["bytes"] for row in operation["rows"]]
        sent = [row["bytes"] * row["bus"] / row["algorithm"] for row in operation["rows"]]
        seconds = [operation["latency"] + each / operation["bandwidth"] for each in sent]
        fitted = [each / took / 1e9 for each, took in zip(sent, seconds, strict=True)]
        measured = [row["bus"] / 1e9 for row in operation["rows"]]
        lines[name] = {"o-": (sizes, measured), "--": (sizes, fitted)}
    axes = {
        "xlabel": "message", "xscale": "log", "xticks": sizes, "yscale": "log",
        "xticklabels": [size_name(size) for size in sizes],
        "ylabel": f"bus bandwidth, GB/s ({sweep['ranks']} ranks, {sweep['backend']})",
    }  # fmt: skip
    return {"axes": axes, "lines": lines, "key": {"--": "latency + size / bandwidth"}}


def percent_by_ranks(unit: str, lines: dict, ranks: list[int], key: dict) -> dict:
    """A plot of percentages by number of ranks; for the others see :func:`draw_lines`."""
    axes = {"xlabel": "ranks", "ylabel": unit, "xscale": "log", "ylim": (0, 110)}
    axes |= {"xticks": ranks, "xticklabels": [f"{n:,}" for n in ranks]}
    return {"axes": axes, "lines": lines, "key": key}


def timelines(root: Path) -> dict[str, dict]:
    """The timeline of each folder in results/traces, in both languages."""
    return {
        f"timeline-{folder.name}{language}": {"ranks": read_traces(folder), "words": words}
        for folder in sorted((root / "results" / "traces").glob("*/"))
        for language, words in LANGUAGES.items()
    }


def digest(data: dict) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def digest_of(path: Path) -> str | None:
    """The digest of a plot's data, as :func:`draw` has written it into the file."""
    text = path.read_text() if path.is_file() else ""
    found = re.search(r"<dc:description>(\w+)</dc:description>", text)
    return found and found[1]


# ------------------------------------------------------------------------------------- drawing


def draw(path: Path, data: dict) -> None:
    """Draw what the functions above return: plots without a background and with grey text, for
    light and dark pages."""
    from matplotlib import style
    from matplotlib.figure import Figure

    ink = INKS.get(data.get("theme", "light" if "ranks" in data else ""), GREY)
    own = {"svg.hashsalt": path.stem} | dict.fromkeys(INKED, ink)
    metadata = {"Date": None, "Creator": "benchmark.py", "Description": digest(data)}
    file = io.StringIO()
    with style.context([Path(__file__).with_name("pictures.mplstyle"), own]):
        figure = Figure()
        axes = figure.subplots()
        if "ranks" in data:
            draw_timeline(axes, data["ranks"], data["words"])
        elif "lines" in data:
            draw_lines(axes, data)
        else:
            draw_bars(axes, data["values"], data["title"])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has its own fonts
            transparent = "ranks" not in data
            figure.savefig(file, format="svg", metadata=metadata, transparent=transparent)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", file.getvalue())  # hundredths of a point
    path.write_text(re.sub(r" \n(?=[LMz])", "", text))  # a line for each path


def draw_lines(axes, data: dict) -> None:
    """Lines and points of one colour for each title. ``data`` has ``lines``: x and y by title and
    matplotlib's style, of which the first is in the legend; ``axes``: their settings; and maybe
    ``widths`` of the titles, ``key``: what another style means, and the place of the ``legend``."""
    widths = data.get("widths", itertools.repeat(1.5))
    titles = zip(data["lines"].items(), widths, itertools.cycle(COLOURS), strict=False)
    for (title, styles), width, colour in titles:
        for i, (style, points) in enumerate(styles.items()):
            axes.plot(*points, style, color=colour, linewidth=width, label=None if i else title)
    for style, meaning in data.get("key", {}).items():
        axes.plot([], [], style, color=GREY, label=meaning)
    axes.set(**data["axes"])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(**data.get("legend", {}))


def draw_bars(axes, values: dict[str, dict[str, float]], title: str) -> None:
    """Stacked bars with their numbers, without axes."""
    axes.figure.set_figheight(0.28 * len(values) + 1.2)
    kinds = list(dict.fromkeys(kind for parts in values.values() for kind in parts))
    sums = [sum(parts.values()) for parts in values.values()]
    left = [0.0] * len(values)
    for kind, colour in zip(kinds, COLOURS, strict=False):
        sizes = [parts.get(kind, 0) for parts in values.values()]
        bars = axes.barh(list(values), sizes, left=left, label=kind, height=0.7, color=colour)
        inside = [f"{size:.2f}" if size > 0.06 * max(sums) else "" for size in sizes]
        axes.bar_label(bars, inside, label_type="center", color="white", fontsize=9)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.bar_label(bars, [f"{size:.2f}" for size in sums], padding=6, weight="bold")
    axes.set_title(title, loc="left", weight="bold", pad=28)
    axes.legend(ncols=len(kinds), loc="lower left", bbox_to_anchor=(0, 1))
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.invert_yaxis()
    axes.margins(y=0.01)


def draw_timeline(axes, ranks: list[Rank], words: dict[str, str]) -> None:
    """Ranks below each other: phases, pale where the rank does not compute; and below them
    communication, dark where it overlaps with compute."""
    from matplotlib.patches import Patch, PathPatch
    from matplotlib.path import Path as Outline

    longest = max(bar.end for rank in ranks for bars in rank.values() for bar in bars)
    axes.figure.set_size_inches(10, 0.8 * len(ranks) + 0.9)
    axes.set(xlim=(0, longest), ylim=(len(ranks), 0), xlabel="ms")

    def fill(bars: list[Bar], y: float, height: float, colour: str, alpha: float = 1) -> None:
        """As one path, which keeps the file small."""
        outlines = [
            Outline([(a, y), (b, y), (b, y + height), (a, y + height), (a, y)], closed=True)
            for _, a, b, _ in bars
        ]
        outline = Outline.make_compound_path(*outlines)
        axes.add_patch(PathPatch(outline, color=colour, alpha=alpha, lw=0))

    for i, rank in enumerate(ranks):
        for bar in rank["phases"]:
            colour, name = PHASES.get(bar.name, GREY), words.get(bar.name, bar.name)
            fill([bar], i, PHASE, colour, PALE)
            fill(cut(rank["compute"], bar, longest), i, PHASE, colour)
            write(axes, bar, i + PHASE / 2, longest, [name], 10)
        lanes = in_lanes(rank["communication"])
        height = LANES / (1 + max(lanes, default=0))
        for bar, lane in zip(rank["communication"], lanes, strict=True):
            y = i + PHASE + 0.04 + lane * height
            fill([bar], y, 0.95 * height, COLLECTIVES.get(bar.name, GREY))
            fill(cut(rank["overlap"], bar, longest), y, 0.95 * height, "black", SHADE)
            sizes = [] if bar.bytes is None else [f"{bar.name} {size_name(bar.bytes)}"]
            if height > LANES / 3:
                write(axes, bar, y + height / 2, longest, [*sizes, bar.name], 8, color="white")
    labels = [f"rank {i}" for i in range(len(ranks))]
    axes.set_yticks([i + PHASE / 2 for i in range(len(ranks))], labels)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    seen = {bar.name for rank in ranks for bar in rank["phases"]}
    sent = sorted({bar.name for rank in ranks for bar in rank["communication"]})
    known = [(colour, 1, name) for name, colour in PHASES.items() if name in seen]
    known += [(GREY, PALE, IDLE), *((COLLECTIVES.get(name, GREY), 1, name) for name in sent)]
    known += [("black", SHADE, OVERLAP)]
    handles = [Patch(color=c, alpha=a, lw=0, label=words.get(n, n)) for c, a, n in known]
    axes.legend(handles=handles, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))


def in_lanes(bars: list[Bar]) -> list[int]:
    """The lane of each bar: simultaneous ones are below each other."""
    lanes, ends = [], []  # of each bar; of each lane, when its last bar ends
    for bar in bars:
        lanes.append(next((i for i, end in enumerate(ends) if end <= bar.begin), len(ends)))
        ends[lanes[-1] : lanes[-1] + 1] = [bar.end]
    return lanes


def cut(spans: list[Bar], bar: Bar, longest: float) -> list[Bar]:
    """Clip spans to a bar; close gaps that are too short to see."""
    parts: list[Bar] = []
    for span in spans:
        begin, end = max(span.begin, bar.begin), min(span.end, bar.end)
        if begin < end and parts and begin - parts[-1].end < longest / 2000:
            parts[-1] = parts[-1]._replace(end=end)
        elif begin < end:
            parts.append(Bar(span.name, begin, end, None))
    return parts


def write(axes, bar: Bar, y: float, longest: float, names: list[str], size: int, **style) -> None:
    """The first of these names that fits into a bar."""
    room = 1300 / size * (bar.end - bar.begin) / longest  # letters; of Chinese, half as many
    fitting = (name for name in names if sum(2 - c.isascii() for c in name) < room)
    style |= {"ha": "center", "va": "center_baseline", "fontsize": size}
    axes.text((bar.begin + bar.end) / 2, y, next(fitting, ""), **style)
