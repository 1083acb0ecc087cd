"""Draw traces as timelines of all ranks: phases and compute above, communication below.

The input is the rows that --trace adds to a trace of torch.profiler (harness/trace_rows.py); files
with only these rows, as in results/traces/, are small.
"""

import gzip
import json
import math
import zlib
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from report.blocks import size_name
from report.plots import COLOURS, GREY
from report.results import Unusable, read_words

KINDS = ("phases", "compute", "communication", "overlap")
PHASES = {  # their colours
    "data": COLOURS[5], "forward": COLOURS[0], "backward": COLOURS[1],
    "forward and backward": COLOURS[6], "optimizer": COLOURS[2], "rest": COLOURS[7],
}  # fmt: skip
COLLECTIVES = {  # their colours; others are grey
    "all_reduce": COLOURS[4], "all_gather": COLOURS[3], "reduce_scatter": "#2f7f86",
    "broadcast": "#5f6f9e", "all_to_all": "#9c6a2f", "send": "#6f8f3a", "recv": "#b0a04a",
}  # fmt: skip
SHADE = 'fill="#000000" fill-opacity="0.42"'  # of communication that overlaps with compute
UNSEEN = 20  # microseconds: shorter gaps are closed
MIDDLE = 'text-anchor="middle"'
DAMAGED = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError)
PAPER, INK, PALE = "#ffffff", "#1f2328", 0.3  # an opaque page; phases where nothing computes
IDLE, OVERLAP = "pale: it does not compute", "dark: communication under compute"
WIDTH, LEFT, RIGHT, TOP = 900, 74, 12, 50
PHASE, COMM, RANK = 34, 30, 88  # heights: of bars above and below, and from rank to rank


class Bar(NamedTuple):
    """A span in a row, in milliseconds from the start of the trace."""

    name: str
    begin: float
    end: float
    bytes: int | None


Rank = dict[str, list[Bar]]  # bars by kind

# ------------------------------------------------------------------------------------------ reading


def read_traces(folder: Path) -> list[Rank]:
    """The rows of all ranks, on a common clock that starts with the first of them.

    Raises:
        Unusable: there is no trace, or one cannot be read or lacks the rows.
    """
    found = []
    for rows in read_ranks(list_traces(folder)):
        kinds = {kind: [] for kind in KINDS}
        for row in rows:
            begin, size = row["ts"] / 1e3, row.get("args", {}).get("bytes")
            kinds[row["cat"]].append(Bar(row["name"], begin, begin + row["dur"] / 1e3, size))
        found.append(kinds)
    return found


def list_traces(folder: Path) -> list[Path]:
    """The files of the ranks, in order."""
    again = "train with --trace N and give the folder trace of its --output-dir"
    if not folder.is_dir():
        raise Unusable(f"{folder} is no folder; {again}")
    files = {path.name.partition(".")[0]: path for path in folder.glob("rank*.json.gz")}
    if not files:
        raise Unusable(f"{folder} has no traces (rank0.pt.trace.json.gz, ...); {again}")
    missing = [f"rank{i}" for i in range(len(files)) if f"rank{i}" not in files]
    if missing:
        raise Unusable(f"{folder} has {len(files)} traces, but none of {missing[0]}; {again}")
    return [files[f"rank{i}"] for i in range(len(files))]


def read_rows(path: Path) -> list[dict]:
    """The events of the rows, in microseconds of the machine's clock."""
    again = "train with --trace once more"
    try:
        trace = json.loads(gzip.decompress(path.read_bytes()))
        rows = [row for row in trace["traceEvents"] if row.get("cat") in KINDS]
        base = trace.get("baseTimeNanoseconds", 0) / 1e3
        rows = [row | {"ts": row["ts"] + base, "dur": row["dur"] + 0} for row in rows]
    except DAMAGED as error:
        raise Unusable(f"{path} is damaged ({type(error).__name__}: {error}); {again}") from None
    if not any(row["cat"] == "phases" for row in rows):
        raise Unusable(f"{path} has no phases of a step, as --trace writes them; {again}")
    return rows


def read_ranks(paths: list[Path]) -> list[list[dict]]:
    """The rows of all ranks, sorted by start, in microseconds from the first."""
    ranks = [read_rows(path) for path in paths]
    first = min(row["ts"] for rows in ranks for row in rows)
    ranks = [[row | {"ts": row["ts"] - first} for row in rows] for rows in ranks]
    return [sorted(rows, key=lambda row: row["ts"]) for rows in ranks]


def slim(source: Path, target: Path) -> None:
    """Copy only these rows of traces, and close gaps in compute that are too short to see."""
    target.mkdir(parents=True, exist_ok=True)
    paths = list_traces(source)
    for path, rows in zip(paths, read_ranks(paths), strict=True):
        kept, last = [], {}  # the last row of a kind
        for row in rows:
            kind, begin, end = row["cat"], row["ts"], row["ts"] + row["dur"]
            before = last.get(kind) if kind in ("compute", "overlap") else None
            if before and begin - before["ts"] - before["dur"] < UNSEEN:
                before["dur"] = round(end - before["ts"], 1)
                continue
            last[kind] = row | {"ts": round(begin, 1), "dur": round(end - begin, 1)}
            kept.append(last[kind])
        text = json.dumps({"traceEvents": kept}, separators=(",", ":"))
        name = f"{path.name.partition('.')[0]}.json.gz"
        (target / name).write_bytes(gzip.compress(text.encode(), mtime=0))


# ------------------------------------------------------------------------------------------ drawing


def pictures(root: Path) -> dict[str, str]:
    """The SVG of each folder in results/traces, in both languages, by file name."""
    found = {}
    for folder in sorted((root / "results" / "traces").glob("*/")):
        ranks = read_traces(folder)
        found[f"timeline-{folder.name}.svg"] = draw(ranks)
        found[f"timeline-{folder.name}.zh-CN.svg"] = draw(ranks, read_words()["pictures"])
    return found


def draw(ranks: list[Rank], words: dict[str, str] | None = None) -> str:
    """Draw all ranks below each other, with an axis in milliseconds and a legend; optionally
    translated by a dictionary of words."""
    words = words or {}
    longest = max(bar.end for rank in ranks for bars in rank.values() for bar in bars)
    scale = (WIDTH - LEFT - RIGHT) / longest  # pixels per millisecond
    bottom = TOP + RANK * len(ranks)
    height = bottom + 26
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>',
        *draw_legend(ranks, words),
        *draw_axis(longest, scale, bottom),
    ]
    for i, rank in enumerate(ranks):
        lines += [
            f'<g transform="translate({LEFT} {TOP + i * RANK})">',
            text(12 - LEFT, PHASE / 2 + 5, f"rank {i}", 14),
            *draw_phases(rank, scale, words),
            *draw_communication(rank["communication"], rank["overlap"], scale),
            "</g>",
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def draw_legend(ranks: list[Rank], words: dict) -> list[str]:
    seen = {bar.name for rank in ranks for bar in rank["phases"]}
    above = [(colour, 1, name) for name, colour in PHASES.items() if name in seen]
    sent = {bar.name for rank in ranks for bar in rank["communication"]}
    below = [(COLLECTIVES.get(name, GREY), 1, name) for name in sorted(sent)]
    overlap = ("#000000", 0.42, OVERLAP)
    lines = []
    for y, entries in ((8, [*above, (GREY, PALE, IDLE)]), (28, [*below, overlap])):
        x = LEFT
        for colour, opacity, word in entries:
            named = words.get(word, word)
            box = f'<rect x="{x:g}" y="{y}" width="14" height="14" rx="3"'
            lines.append(f'{box} fill="{colour}" fill-opacity="{opacity}"/>')
            lines.append(text(x + 19, y + 12, named, 13))
            x += 40 + 7 * sum(1 if letter.isascii() else 2 for letter in named)
    return lines


def draw_axis(longest: float, scale: float, bottom: float) -> list[str]:
    """A grid line every 1, 2 or 5 milliseconds, times a power of ten."""
    power = 10.0 ** math.floor(math.log10(longest / 4))
    step = next(n * power for n in (1, 2, 5, 10) if longest / (n * power) <= 12)
    lines = []
    for i in range(int(longest / step) + 1):
        x, unit = LEFT + i * step * scale, "" if i else " ms"
        line = f'<path d="M{x:.1f} {TOP - 4}V{bottom}" stroke="{GREY}" stroke-opacity="0.3"/>'
        lines += [line, text(round(x, 1), bottom + 16, f"{i * step:g}{unit}", 12, more=MIDDLE)]
    return lines


def draw_phases(rank: Rank, scale: float, words: dict) -> list[str]:
    """Pale bars, solid where the rank computes; a name if it fits."""
    lines = []
    for bar in rank["phases"]:
        colour, word = PHASES.get(bar.name, GREY), words.get(bar.name, bar.name)
        x, width = bar.begin * scale, (bar.end - bar.begin) * scale
        place = f'x="{x:.1f}" width="{max(width, 0.3):.1f}" height="{PHASE}"'
        lines += [f'<rect {place} fill="{colour}" fill-opacity="{PALE}">', said(bar, word)]
        lines.append("</rect>")
        if parts := cut(rank["compute"], bar, scale):
            lines.append(f'<path d="{boxes(parts, 0, PHASE)}" fill="{colour}"/>')
        if width > 9 * len(word):
            lines.append(text(round(x + width / 2, 1), PHASE / 2 + 5, word, 14, more=MIDDLE))
    return lines


def draw_communication(bars: list[Bar], overlap: list[Bar], scale: float) -> list[str]:
    """A bar for each collective; simultaneous ones in lanes below each other."""
    lanes, ends = [], []  # of each bar; of each lane, when its last bar ends
    for bar in bars:
        lanes.append(next((i for i, end in enumerate(ends) if end <= bar.begin), len(ends)))
        ends[lanes[-1] : lanes[-1] + 1] = [bar.end]
    height, lines = COMM / max(1, len(ends)), []
    for bar, lane in zip(bars, lanes, strict=True):
        x, y, width = bar.begin * scale, PHASE + 4 + lane * height, (bar.end - bar.begin) * scale
        place = f'x="{x:.1f}" y="{y:g}" width="{max(width, 0.5):.1f}" height="{height - 1:g}"'
        colour = COLLECTIVES.get(bar.name, GREY)
        lines += [f'<rect {place} fill="{colour}">', said(bar, bar.name), "</rect>"]
        if parts := cut(overlap, bar, scale):
            lines.append(f'<path d="{boxes(parts, y, height - 1)}" {SHADE}/>')
        name = next((n for n in (name_of(bar), bar.name) if 6.5 * len(n) < width), "")
        if name and height > 10:
            more = f'{MIDDLE} fill="{PAPER}"'
            lines.append(text(round(x + width / 2, 1), y + height / 2 + 3.5, name, 11, more=more))
    return lines


def name_of(bar: Bar) -> str:
    """The name of a collective, with its bytes."""
    return bar.name if bar.bytes is None else f"{bar.name} {size_name(bar.bytes)}"


def said(bar: Bar, word: str) -> str:
    """A tooltip for browsers."""
    word = word if bar.bytes is None else name_of(bar)
    return f"<title>{escape(word)}, {bar.end - bar.begin:.3g} ms</title>"


def cut(spans: list[Bar], bar: Bar, scale: float) -> list[tuple[float, float]]:
    """Clip spans to a bar, in pixels; close gaps that are too short to see."""
    parts = []
    for span in spans:
        begin, end = max(span.begin, bar.begin) * scale, min(span.end, bar.end) * scale
        if begin >= end:
            continue
        if parts and begin - parts[-1][1] < 0.4:
            parts[-1] = parts[-1][0], end
        else:
            parts.append((begin, end))
    return parts


def boxes(parts: list[tuple[float, float]], y: float, height: float) -> str:
    """One SVG path for several rectangles."""
    return "".join(f"M{a:.1f} {y:g}h{b - a:.1f}v{height:g}H{a:.1f}z" for a, b in parts)


def text(x: float, y: float, words: str, size: int, more: str = "") -> str:
    more = f" {more}" if more else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{more}>{escape(words)}</text>'
