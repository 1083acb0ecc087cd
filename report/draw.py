"""All pictures, as SVG by matplotlib: plots of the results, bars of memory, and the timelines of
traces. A picture has the digest of its data, which says whether it is out of date."""

import hashlib
import io
import itertools
import json
import re
import warnings
from pathlib import Path

from report.blocks import size_name
from report.palette import COLLECTIVES, MEMORY, PHASES, text_on, theme_style
from report.results import WORDS
from report.steps import draw_step
from report.traces import Bar, Rank, joined, read_traces

INK = "#010203"  # stands in pictures.mplstyle for the ink of the page's theme
PAGE = "#fdfeff"  # and for its background
LANGUAGES = {"": {}, ".zh-CN": WORDS["pictures"]}  # by the end of a picture's name
IDLE = "outline: no compute"
OVERLAP = "underlined: overlaps with compute"
OTHER = PHASES["rest"]  # the colour of what palette.json does not name
# The heights of the rows of a timeline, in which a rank has a height of 1:
NAMES = 0.24
PHASE = 0.3
LANES = 0.34


def plots(results: dict[str, dict]) -> dict[str, dict]:
    """The data of the plots in results/, by name."""
    rows = [row for row in results["shakespeare"]["rows"] if row["runs"]]
    return {"collectives": bandwidths(results["collectives"]), "loss": loss_by_tokens(rows)}


def loss_by_tokens(rows: list[dict]) -> dict:
    """The loss on text against the tokens seen; lines become thinner, as they overlap."""
    run = rows[0]["runs"][0]
    millions = run["global_batch_size"] * run["context"] / 1e6
    lines = {}
    for row in rows:
        steps, losses = zip(*row["runs"][0]["curve"], strict=True)
        lines[row["name"]] = {"-": ([step * millions for step in steps], losses)}
    return {
        "axes": {"xlabel": "million tokens", "ylabel": f"training loss ({run['model']})"},
        "lines": lines,
        "widths": [1 + 2 * i for i in reversed(range(len(lines)))],
    }


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


def draw(path: Path, data: dict) -> None:
    """Draw what the functions above return, in the colours of the page that shows it."""
    from matplotlib import style
    from matplotlib.figure import Figure

    metadata = {"Date": None, "Creator": "benchmark.py", "Description": digest(data)}
    file = io.StringIO()
    ours = Path(__file__).with_name("pictures.mplstyle")
    with style.context([ours, {"svg.hashsalt": path.stem}]):
        axes = Figure().subplots()
        if "ranks" in data:
            draw_timeline(axes, data["ranks"], data["words"])
        elif "series" in data:
            draw_step(axes, data, INK)
        elif "lines" in data:
            draw_lines(axes, data)
        else:
            draw_bars(axes, data, data["words"])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has its own fonts
            axes.figure.savefig(file, format="svg", metadata=metadata)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", file.getvalue())  # hundredths of a point
    text = re.sub(r" \n(?=[LMz])", "", text)  # a line for each path
    text = text.replace(INK, "var(--ink)").replace(PAGE, "var(--page)")
    path.write_text(text.replace("<defs>", f"{theme_style()}<defs>", 1))


def draw_lines(axes, data: dict) -> None:
    """Lines and points of one colour for each title. ``data`` has ``lines``: x and y by title and
    matplotlib's style, of which the first is in the legend; ``axes``: their settings; and maybe
    ``widths`` of the titles, and ``key``: what another style means."""
    widths = data.get("widths", itertools.repeat(1.5))
    titles = zip(data["lines"].items(), widths, itertools.cycle(COLLECTIVES.values()), strict=False)
    for (title, styles), width, colour in titles:
        colour = COLLECTIVES.get(title, colour)
        for i, (style, points) in enumerate(styles.items()):
            axes.plot(*points, style, color=colour, linewidth=width, label=None if i else title)
    for style, meaning in data.get("key", {}).items():
        axes.plot([], [], style, color=INK, label=meaning)
    axes.set(**data["axes"])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend()


def draw_bars(axes, data: dict, words: dict) -> None:
    """Stacked bars with their numbers, without axes, and a ``line`` at a limit."""
    values = data["values"]
    names = [words.get(name, name) for name in values]
    kinds = list(next(iter(values.values())))
    axes.figure.set_size_inches(4.5, 0.28 * len(values) + 1.2)
    sums = [sum(parts.values()) for parts in values.values()]
    left = [0.0] * len(values)
    for kind in kinds:
        sizes = [parts[kind] for parts in values.values()]
        colour = MEMORY[kind]
        bars = axes.barh(names, sizes, 0.7, left, color=colour, label=words.get(kind, kind))
        inside = [f"{size:.0f}" if size > 0.09 * max(sums) else "" for size in sizes]
        axes.bar_label(bars, inside, label_type="center", color=text_on(colour), fontsize=9)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for y, size in enumerate(sums):  # in a column, where the line crosses none
        axes.text(1.13 * max(sums), y, f"{size:.0f}", ha="right", va="center", weight="bold")
    axes.axvline(data["line"], color=INK, ls="--", lw=1, zorder=0, label=data["limit"])
    axes.set_title(data["title"], loc="left", weight="bold", fontsize=10)
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.3, 0))
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.invert_yaxis()
    axes.margins(y=0.01)


def draw_timeline(axes, ranks: list[Rank], words: dict[str, str]) -> None:
    """Ranks below each other; ``words``: translations of the names."""
    all_bars = [bar for rank in ranks for bars in rank.values() for bar in bars]
    longest = max(bar.end for bar in all_bars)
    axes.figure.set_size_inches(5, 0.85 * len(ranks) + 0.5)
    axes.figure.subplots_adjust(left=0, right=1, bottom=0, top=1)
    axes.set(xlim=(0, longest), ylim=(len(ranks), 0), xlabel="ms")
    for i, rank in enumerate(ranks):
        draw_phases(axes, rank, i + NAMES, longest, words)
        draw_communication(axes, rank, i + NAMES + PHASE + 0.04, longest)
    labels = [f"rank {i}" for i in range(len(ranks))]
    axes.set_yticks([i + NAMES + PHASE / 2 for i in range(len(ranks))], labels)
    draw_key(axes, ranks, words)


def draw_phases(axes, rank: Rank, y: float, longest: float, words: dict[str, str]) -> None:
    """The phases of a rank with their names, filled where the rank computes."""
    for bar in rank["phases"]:
        colour = PHASES.get(bar.name, OTHER)
        fill(axes, cut(rank["compute"], bar, longest), y, PHASE, colour)
        fill(axes, [bar], y, PHASE, "none", edgecolor=colour, linewidth=1)
        write(axes, bar, y - NAMES / 2, longest, [words.get(bar.name, bar.name)], 10)


def draw_communication(axes, rank: Rank, y: float, longest: float) -> None:
    """The communication of a rank with its bytes, underlined where it overlaps with compute."""
    bars = rank["communication"]
    lanes = in_lanes(bars)
    height = LANES / (1 + max(lanes, default=0))
    for bar, lane in zip(bars, lanes, strict=True):
        colour = COLLECTIVES.get(bar.name, OTHER)
        top = y + lane * height
        fill(axes, [bar], top, 0.8 * height, colour)
        fill(axes, cut(rank["overlap"], bar, longest), top + 0.85 * height, 0.12 * height, INK)
        if height > LANES / 3:
            names = [bar.name]
            if bar.bytes is not None:
                names.insert(0, f"{bar.name} {size_name(bar.bytes)}")
            write(axes, bar, top + 0.4 * height, longest, names, 8, color=text_on(colour))


def draw_key(axes, ranks: list[Rank], words: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    phases = {bar.name for rank in ranks for bar in rank["phases"]}
    sent = sorted({bar.name for rank in ranks for bar in rank["communication"]})
    styles = {name: {"facecolor": colour} for name, colour in PHASES.items() if name in phases}
    styles |= {name: {"facecolor": COLLECTIVES.get(name, OTHER)} for name in sent}
    styles[IDLE] = {"facecolor": "none", "edgecolor": INK}
    handles = [Patch(label=words.get(name, name), **style) for name, style in styles.items()]
    handles += axes.plot([], [], color=INK, linewidth=2, label=words.get(OVERLAP, OVERLAP))
    axes.legend(handles=handles, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))


def fill(axes, bars: list[Bar], y: float, height: float, colour: str, **style) -> None:
    spans = [(bar.begin, bar.end - bar.begin) for bar in bars]
    axes.broken_barh(spans, (y, height), facecolor=colour, **{"linewidth": 0, **style})


def in_lanes(bars: list[Bar]) -> list[int]:
    """The lane of each bar: simultaneous ones are below each other."""
    lanes = []
    ends = []  # of each lane: when its last bar ends
    for bar in bars:
        lane = next((i for i, end in enumerate(ends) if end <= bar.begin), len(ends))
        ends[lane : lane + 1] = [bar.end]
        lanes.append(lane)
    return lanes


def cut(spans: list[Bar], bar: Bar, longest: float) -> list[Bar]:
    """Clip spans to a bar; close gaps that are too short to see."""
    parts = [Bar("", max(span.begin, bar.begin), min(span.end, bar.end), None) for span in spans]
    return joined((part for part in parts if part.begin < part.end), longest / 2000)


def write(axes, bar: Bar, y: float, longest: float, names: list[str], size: int, **style) -> None:
    """Write the first of these names that fits into a bar."""
    room = 540 / size * (bar.end - bar.begin) / longest  # in letters
    fitting = (name for name in names if letters(name) < room)
    style |= {"ha": "center", "va": "center_baseline", "fontsize": size}
    axes.text((bar.begin + bar.end) / 2, y, next(fitting, ""), **style)


def letters(name: str) -> int:
    """The width of a name in Latin letters: a Chinese character is as wide as two."""
    return sum(1 if letter.isascii() else 2 for letter in name)
