"""All pictures, as SVG by matplotlib: plots of the results, the README's picture of memory, and the
timelines of traces. A picture has the digest of its data, which says whether it is out of date."""

import contextlib
import hashlib
import json
import os
import re
import warnings
from pathlib import Path

from report.blocks import size_name
from report.results import name_of, read_words
from report.traces import Bar, Rank, read_traces
from techniques import technique

GREY = "#7d8590"  # readable on light and dark pages
COLOURS = ["#4c8dd6", "#e08a3c", "#54a868", "#c65f63", "#9179c0", "#9c8468", "#d288bd", "#8d8d8d"]
INKS = {"light": "#1f2328", "dark": "#f0f6fc"}  # on a page of this theme
FRONT = {  # rows of the suite gpt in the README's picture, and their names there
    "SingleGPU": "one process",
    "torchrun_DDP x4": "DDP",
    "DDP_ZeRO --use_zero x4": "ZeRO",
    "HSDP --shard 2 x4": "HSDP",
    "FSDP x4": "FSDP",
}
KINDS = {  # of memory_parts() there
    "optimizer": "optimizer state",
    "activations and the rest": "activations and buffers",
}
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
PHASE, LANES, RANK = 0.40, 0.34, 1.0  # heights: of phases, of communication, from rank to rank

# ------------------------------------------------------------------------- what pictures show


def plot_data(results: dict) -> dict[str, dict]:
    """The data of the plots, by file name; from GPUs if there are results.

    Args:
        results: results of the suites, by name.
    """
    plots = {}
    for suite, name, make in (
        ("cpu", "memory", memory),
        ("gpu", "memory", memory),  # replaces the CPU's
        ("local_sgd", "local_sgd", loss_by_bytes),
        ("shakespeare", "loss", curves),
    ):
        rows = [row for row in results.get(suite, {"rows": []})["rows"] if row["runs"]]
        if rows := [row for row in rows if row["table"] == suite]:
            plots[name] = make(rows)
    return plots


def memory(rows: list[dict]) -> dict:
    """Persistent MiB per rank, by kind; with offload these bytes are not on the device."""
    run = rows[0]["runs"][0]
    job = f"{run['model']} at {run['image_size']}, {run['device']}"
    rows = [row for row in rows if "offload" not in row["name"]]
    values = {row["name"]: memory_parts(row["runs"][0]) for row in rows}
    return {"unit": f"MiB per rank ({job})", "values": values}


def curves(rows: list[dict]) -> dict:
    """The loss on text against the number of tokens seen."""
    values = {}
    for row in rows:
        run = row["runs"][0]
        tokens = run["global_batch_size"] * run["context"]
        if run["curve"]:
            values[row["name"]] = {str(step * tokens): loss for step, loss in run["curve"]}
    return {"unit": f"training loss ({rows[0]['runs'][0]['model']})", "values": values}


def loss_by_bytes(rows: list[dict]) -> dict:
    """The loss on text against the bytes that a rank has sent, by theory."""
    values = {}
    for row in rows:
        run = row["runs"][0]
        ranks = run["world_size"]
        options = run["options"] | {"optimizer": run["optimizer"]}
        sent = sum(technique(run["technique"]).sends(ranks, options).values())
        sent *= run["parameters"]
        if ranks > 1:
            values[name_of(row)] = {str(round(step * sent)): loss for step, loss in run["curve"]}
    return {"unit": f"training loss ({run['model']}, {ranks} ranks)", "values": values}


def bandwidths(sweep: dict) -> dict[str, dict]:
    """The bus bandwidth of each collective by message size, measured and fitted, if there are
    results of pytorch_collectives.py --sweep."""
    values = {}
    for name, operation in sweep.get("operations", {}).items():
        measured, fitted = {}, {}
        for row in operation["rows"]:
            sent = row["bytes"] * row["bus"] / row["algorithm"]  # the fit is of these bytes
            seconds = operation["latency"] + sent / operation["bandwidth"]
            measured[str(row["bytes"])] = float(f"{row['bus'] / 1e9:.3g}")
            fitted[str(row["bytes"])] = float(f"{sent / seconds / 1e9:.3g}")
        values[name] = {"measured": measured, "fitted": fitted}
    if not values:
        return {}
    unit = f"bus bandwidth, GB/s ({sweep['ranks']} ranks, {sweep['backend']})"
    return {"collectives": {"unit": unit, "values": values}}


def memory_parts(run: dict) -> dict[str, float]:
    """Persistent MiB per rank, by kind."""
    parts = {kind: size / 2**20 for kind, size in run["state_bytes"].items()}
    main = {kind: parts.pop(kind) for kind in ("parameters", "gradients", "optimizer")}
    main["copies"] = sum(parts.values())
    if run["peak_memory_gib"]["allocated"] is not None:
        rest = 1024 * run["peak_memory_gib"]["allocated"] - sum(main.values())
        main["activations and the rest"] = max(0.0, rest)
    return {kind: round(size, 1) for kind, size in main.items()}


def memory_pictures(gpt: dict) -> dict[str, dict]:
    """The README's picture for light and dark pages in both languages: GiB of one rank, by
    technique and kind. None if the suite lacks a row."""
    runs = {row["name"]: row["runs"] for row in gpt["rows"]}
    if not all(runs.get(name) for name in FRONT):
        return {}
    parts = {title: memory_parts(runs[name][0]) for name, title in FRONT.items()}
    run = runs["FSDP x4"][0]
    title = "Memory per rank, GiB: GPT with {} M parameters, AdamW, {} ranks"
    pictures = {}
    for language, words in (("", {}), (".zh-CN", read_words()["pictures"])):
        values = {
            words.get(name, name): {
                words.get(KINDS.get(kind, kind), KINDS.get(kind, kind)): size / 1024
                for kind, size in sizes.items()
                if kind != "copies"
            }
            for name, sizes in parts.items()
        }
        said = words.get("title", title).format(f"{run['parameters'] / 1e6:.0f}", run["world_size"])
        for theme in INKS:
            data = {"title": said, "values": values, "theme": theme}
            pictures[f"memory-{theme}{language}"] = data
    return pictures


def timelines(root: Path) -> dict[str, dict]:
    """The timeline of each folder in results/traces, in both languages."""
    return {
        f"timeline-{folder.name}{language}": {"ranks": read_traces(folder), "words": words}
        for folder in sorted((root / "results" / "traces").glob("*/"))
        for language, words in (("", {}), (".zh-CN", read_words()["pictures"]))
    }


def digest(data: dict) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def digest_of(path: Path) -> str | None:
    """The digest of a plot's data, as :func:`draw` has written it into the file."""
    with contextlib.suppress(OSError):
        found = re.search(r"<dc:description>(\w+)</dc:description>", path.read_text())
        return found and found[1]
    return None


# ------------------------------------------------------------------------------------- drawing


def draw(path: Path, data: dict, kind: str = "") -> None:
    """Draw a picture: plots without a background and with grey text, for light and dark pages.

    Args:
        data: as the functions above return it.
        kind: of picture, if not given by the file name.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    ink = INKS.get(data.get("theme", "light" if "ranks" in data else ""), GREY)
    plt.rcParams.update({
        "svg.hashsalt": path.stem, "svg.fonttype": "none", "font.family": "sans-serif",
        "font.size": 11, "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": ink,
        "xtick.color": ink, "ytick.color": ink, "axes.spines.top": False,
        "axes.spines.right": False, "axes.prop_cycle": plt.cycler(color=COLOURS),
        "legend.frameon": False, "legend.fontsize": 9,
    })  # fmt: skip
    kind = kind or path.name.partition(".")[0].partition("-")[0]
    kind = "front" if "theme" in data else kind
    drawn = {
        "memory": draw_parts, "scaling": draw_scaling, "loss": draw_curves, "shares": draw_shares,
        "collectives": draw_bandwidths, "local_sgd": draw_loss_by_bytes, "front": draw_front,
    }  # fmt: skip
    heights = {"memory": 0.28 * len(data.get("values", ())) + 1, "front": 2.6}
    heights["timeline"] = 0.8 * len(data.get("ranks", ())) + 0.9
    figure, axes = plt.subplots(figsize=(8, heights.get(kind, 4)))
    if kind == "timeline":
        figure.set_size_inches(10, heights[kind])
        draw_timeline(axes, data["ranks"], data["words"])
    else:
        drawn[kind](axes, data["values"])
    if kind == "memory":
        axes.set_xlabel(data["unit"])
    elif "unit" in data:
        axes.set_ylabel(data["unit"])
    elif "title" in data:
        axes.set_title(data["title"], loc="left", weight="bold", pad=28)
    metadata = {"Date": None, "Creator": "benchmark.py", "Description": digest(data)}
    temporary = path.with_name(f".{path.name}.part")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has its own fonts
        figure.savefig(
            temporary, format="svg", bbox_inches="tight", metadata=metadata,
            transparent=kind != "timeline",
        )  # fmt: skip
    plt.close(figure)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", temporary.read_text())  # hundredths of a point
    temporary.write_text(re.sub(r" \n(?=[LMz])", "", text))  # a line for each path
    os.replace(temporary, path)


def draw_scaling(axes, values: dict[str, dict[str, dict]]) -> None:
    """Speed by number of ranks: points are measured, lines are predicted."""
    for i, (title, lines) in enumerate(values.items()):
        style = {"color": COLOURS[i % len(COLOURS)]}
        ranks = [int(n) for n in lines["model"]]
        axes.plot(ranks, [100 * share for share in lines["model"].values()], label=title, **style)
        points = {int(n): 100 * share for n, share in lines["measured"].items()}
        axes.plot(list(points), list(points.values()), "o", **style)
    axes.plot([], [], "o", color=GREY, label="measured")
    show_ranks(axes, ranks, highest=110)
    axes.legend()


def show_ranks(axes, ranks: list[int], highest: int) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{n:,}" for n in ranks])
    axes.set(xlabel="ranks", ylim=(0, highest))


def draw_curves(axes, values: dict[str, dict[str, float]]) -> None:
    """Loss by tokens; lines become thinner, as they overlap."""
    for i, (title, losses) in enumerate(values.items()):
        tokens = [int(n) / 1e6 for n in losses]
        width = 1 + 2 * (len(values) - 1 - i)
        axes.plot(tokens, list(losses.values()), label=title, linewidth=width)
    axes.set(xlabel="million tokens")
    axes.legend()


def draw_loss_by_bytes(axes, values: dict[str, dict[str, float]]) -> None:
    """Loss by MB that a rank has sent, in powers of ten."""
    for title, losses in values.items():
        axes.semilogx([int(n) / 1e6 for n in losses], list(losses.values()), label=title)
    axes.set(xlabel="MB sent by a rank")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def draw_bandwidths(axes, values: dict[str, dict[str, dict[str, float]]]) -> None:
    """Bandwidth by size, both logarithmic; dashed: latency + size / bandwidth."""
    for i, (title, lines) in enumerate(values.items()):
        sizes = [int(size) for size in lines["measured"]]
        style = {"color": COLOURS[i % len(COLOURS)]}
        axes.loglog(sizes, list(lines["measured"].values()), "o-", ms=4, label=title, **style)
        axes.loglog(sizes, list(lines["fitted"].values()), "--", linewidth=0.9, **style)
    axes.set(xlabel="message")
    axes.set_xticks(sizes, [size_name(size) for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.plot([], [], "--", color=GREY, linewidth=0.9, label="latency + size / bandwidth")
    axes.legend()


def draw_shares(axes, values: dict[str, dict[str, list[float]]]) -> None:
    """Shares by number of ranks: a band from minimum to maximum."""
    for title, shares in values.items():
        ranks = [int(n) for n in shares]
        least, most = ([100 * pair[i] for pair in shares.values()] for i in range(2))
        [line] = axes.plot(ranks, most, label=title)
        axes.plot(ranks, least, "--", color=line.get_color(), linewidth=0.9)
        axes.fill_between(ranks, least, most, color=line.get_color(), alpha=0.15, linewidth=0)
    show_ranks(axes, ranks, highest=100)
    axes.legend()


def draw_parts(axes, values: dict[str, dict[str, float]]) -> None:
    """Stacked bars."""
    kinds = list(dict.fromkeys(kind for parts in values.values() for kind in parts))
    left = [0.0] * len(values)
    for kind in kinds:
        sizes = [parts.get(kind, 0) for parts in values.values()]
        axes.barh(list(values), sizes, left=left, label=kind, height=0.7)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.legend(ncols=len(kinds), loc="lower left", bbox_to_anchor=(0, 1))
    axes.invert_yaxis()
    axes.margins(y=0.01)


def draw_front(axes, values: dict[str, dict[str, float]]) -> None:
    """Stacked bars with their numbers, without axes."""
    draw_parts(axes, values)
    longest = max(sum(parts.values()) for parts in values.values())
    for bars in axes.containers:
        widths = [bar.get_width() for bar in bars]
        inside = [f"{width:.2f}" if width > 0.06 * longest else "" for width in widths]
        axes.bar_label(bars, inside, label_type="center", color="white", fontsize=9)
    sums = [f"{sum(parts.values()):.2f}" for parts in values.values()]
    axes.bar_label(axes.containers[-1], sums, padding=6, weight="bold")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)


def draw_timeline(axes, ranks: list[Rank], words: dict[str, str]) -> None:
    """Ranks below each other: phases, pale where the rank does not compute; and below them
    communication, dark where it overlaps with compute."""
    from matplotlib.patches import Patch

    longest = max(bar.end for rank in ranks for bars in rank.values() for bar in bars)
    axes.set(xlim=(0, longest), ylim=(len(ranks) * RANK, 0), xlabel="ms")
    boxes: dict[tuple[str, float], list] = {}  # by colour and opacity

    def add(bars: list[Bar], y: float, height: float, *style) -> None:
        places = [(bar.begin, bar.end, y, y + height) for bar in bars]
        boxes.setdefault(style, []).extend(places)

    for i, rank in enumerate(ranks):
        for bar in rank["phases"]:
            colour, name = PHASES.get(bar.name, GREY), words.get(bar.name, bar.name)
            add([bar], i, PHASE, colour, PALE)
            add(cut(rank["compute"], bar, longest), i, PHASE, colour, 1)
            write(axes, bar, i + PHASE / 2, longest, [name], 10)
        lanes = in_lanes(rank["communication"])
        height = LANES / (1 + max(lanes, default=0))
        for bar, lane in zip(rank["communication"], lanes, strict=True):
            y = i + PHASE + 0.04 + lane * height
            add([bar], y, 0.95 * height, COLLECTIVES.get(bar.name, GREY), 1)
            add(cut(rank["overlap"], bar, longest), y, 0.95 * height, "black", SHADE)
            sizes = [] if bar.bytes is None else [f"{bar.name} {size_name(bar.bytes)}"]
            if height > LANES / 3:
                write(axes, bar, y + height / 2, longest, [*sizes, bar.name], 8, color="white")
    for style, places in boxes.items():
        fill(axes, places, *style)
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


def fill(axes, places: list, colour: str, alpha: float) -> None:
    """Fill boxes (left, right, top, bottom) as one path, which keeps the file small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    corners = [[(a, y), (b, y), (b, z), (a, z), (a, y)] for a, b, y, z in places]
    outline = Outline.make_compound_path(*(Outline(each, closed=True) for each in corners))
    axes.add_patch(PathPatch(outline, color=colour, alpha=alpha, lw=0))


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
    room = 1300 / size * (bar.end - bar.begin) / longest  # letters
    for name in names:
        if sum(1 if letter.isascii() else 2 for letter in name) < room:
            middle = {"ha": "center", "va": "center_baseline", "fontsize": size}
            axes.text((bar.begin + bar.end) / 2, y, name, **middle, **style)
            return
