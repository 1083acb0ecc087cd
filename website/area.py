"""Memory over one step as a stacked area chart: an inline SVG in the colours of its page."""

import itertools
from pathlib import Path

import jinja2

from report.palette import MEMORY

TONES = MEMORY | {"optimizer": MEMORY["optimizer state"], "temporary": MEMORY["rest"]}
WIDTH, HEIGHT, LEFT, TOP, GIB = 640, 250, 58, 20, 2**30
TEMPLATE = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(
    Path(__file__).with_name("area.svg.jinja").read_text()
)


def svg(series: dict, highest: float, names: dict[str, str], words: dict[str, str]) -> str:
    """Draw one step of a technique.

    Args:
        series: see :func:`make_data.series_of`.
        highest: bytes at the upper end of the axis, the same for all pictures to compare.
        names: of the kinds of memory, in stacking order.
        words: translations of the names of phases.
    """
    sums = totals(series)
    points, most = len(sums), max(sums)
    top = max(highest, most)

    def x(point: float) -> float:
        return LEFT + point * (WIDTH - LEFT - 8) / max(1, points - 1)

    def y(size: float) -> float:
        return TOP + HEIGHT * (1 - size / top)

    areas, below = [], [0] * points
    for kind in (kind for kind in names if kind in series["bytes"]):
        above = [a + b for a, b in zip(below, series["bytes"][kind], strict=True)]
        corners = [*enumerate(above), *reversed([*enumerate(below)])]
        areas.append((kind, "L".join(f"{x(i):.1f},{y(size):.1f}" for i, size in corners)))
        below = above
    begins = [x(begin * (points - 1)) for begin, _ in series["phases"]]
    shown = [words.get(name, name) for _, name in series["phases"]]
    drawn = TEMPLATE.render(
        width=WIDTH, height=HEIGHT, left=LEFT, top=TOP,
        areas=areas, tones=TONES, names=names,
        title=f"{series['technique']}, {series['job']}: {most / GIB:.2f} GiB",
        ticks=[(size, y(size * GIB)) for size in ticks(top / GIB)], lines=begins,
        labels=labels([*begins, x(points - 1)], shown),
        peak=(x(sums.index(most)), y(most)), most=f"{most / GIB:.2f}",
    )  # fmt: skip
    return drawn.replace("\n", "")  # Markdown would end it at a blank line


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to ``top``, at most six."""
    step = next(n * 10.0**e for e in range(-3, 9) for n in (1, 2, 5) if n * 10.0**e * 6 > top)
    return [step * i for i in range(int(top / step) + 1)]


def totals(series: dict) -> list[int]:
    return [sum(sizes) for sizes in zip(*series["bytes"].values(), strict=True)]


def peak(series: dict) -> int:
    return max(totals(series))


def legend(names: dict[str, str]) -> str:
    marks = [
        f'<span><i style="background:{TONES[k]}"></i>{name}</span>' for k, name in names.items()
    ]
    return f'<p class="legend">{" ".join(marks)}</p>'


def labels(borders: list[float], names: list[str]) -> list[tuple[float, int, str]]:
    """Where names of phases are written: the middle and the line, 0 or 1. A phase with room has its
    name below it; a name that found no room is written once, on the second line, as that of an
    optimizer that allocates nothing."""
    placed = []
    phases = [*zip(itertools.pairwise(borders), names, strict=True)]
    for (begin, end), name in phases:
        if name and end - begin > room(name):
            placed.append(((begin + end) / 2, 0, name))
    for (begin, end), name in phases:
        if name and name not in [known for *_, known in placed]:
            middle = min((begin + end) / 2, WIDTH - room(name) / 2)
            placed.append((middle, 1, name))
    return placed


def room(name: str) -> float:
    """About the width of a word; a Chinese character is twice as wide as a letter."""
    return sum(8 if letter.isascii() else 15 for letter in name)
