"""Memory over one step as a stacked area chart: an inline SVG in the colours of its page."""

from html import escape

from report.draw import COLOURS
from report.results import WORDS

KINDS = {  # kinds of LiveBytes, in stacking order, and their names in the legend
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "activations": "activations",
    "input": "input",
    "temporary": "temporary buffers",
    "update": "temporary buffers of the optimizer",
}
TONES = dict(zip(KINDS, [COLOURS[i] for i in (0, 2, 1, 4, 5, 7, 6)], strict=True))
WIDTH, HEIGHT, LEFT, TOP, GIB = 640, 250, 58, 16, 2**30


def svg(series: dict, highest: float, chinese: bool) -> str:
    """Draw one step of a technique.

    Args:
        series: see :func:`make_data.series_of`.
        highest: bytes at the upper end of the axis, the same for all pictures to compare.
    """
    words = WORDS["pictures"] if chinese else {}
    sums = totals(series)
    points, top = len(sums), max(highest, *sums)

    def x(point: float) -> float:
        return LEFT + point * (WIDTH - LEFT - 8) / max(1, points - 1)

    def y(size: float) -> float:
        return TOP + HEIGHT * (1 - size / top)

    most = peak(series)
    title = f"{series['technique']}, {series['job']}: {most / GIB:.2f} GiB"
    lines = [
        f'<svg class="area" viewBox="0 0 {WIDTH} {TOP + HEIGHT + 44}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title>'
    ]
    below = [0.0] * points
    for kind in (kind for kind in KINDS if kind in series["bytes"]):
        above = [a + b for a, b in zip(below, series["bytes"][kind], strict=True)]
        path = [f"{x(i):.1f},{y(size):.1f}" for i, size in enumerate(above)]
        path += [f"{x(i):.1f},{y(size):.1f}" for i, size in reversed(list(enumerate(below)))]
        named = words.get(KINDS[kind], KINDS[kind])
        lines.append(
            f'<path d="M{"L".join(path)}Z" fill="{TONES[kind]}"><title>{named}</title></path>'
        )
        below = above
    for tick in range(5):
        size = top * tick / 4
        lines.append(f'<path class="line" d="M{LEFT} {y(size):.1f}H{WIDTH - 8}"/>')
        lines.append(text(LEFT - 6, y(size) + 4, f"{size / GIB:.2f}", "end"))
    for begin, end, name in phases(series["phases"]):
        lines.append(f'<path class="line" d="M{x(begin * (points - 1)):.1f} {TOP}v{HEIGHT + 6}"/>')
        if end - begin > 0.08:
            middle = x((begin + end) / 2 * (points - 1))
            lines.append(text(middle, TOP + HEIGHT + 18, words.get(name, name), "middle"))
    at = x(sums.index(most))
    side = "end" if at > WIDTH / 2 else "start"
    lines.append(f'<circle cx="{at:.1f}" cy="{y(most):.1f}" r="3"/>')
    lines.append(text(at + (-8 if side == "end" else 8), y(most) + 4, f"{most / GIB:.2f}", side))
    return "".join([*lines, "</svg>"])


def totals(series: dict) -> list[int]:
    return [sum(sizes) for sizes in zip(*series["bytes"].values(), strict=True)]


def peak(series: dict) -> int:
    return max(totals(series))


def legend(kinds: list[str], chinese: bool) -> str:
    words = WORDS["pictures"] if chinese else {}
    names = {kind: words.get(name, name) for kind, name in KINDS.items() if kind in kinds}
    marks = [
        f'<span><i style="background:{TONES[kind]}"></i>{name}</span>'
        for kind, name in names.items()
    ]
    return f'<p class="legend">{" ".join(marks)}</p>'


def phases(begins: list[float]) -> list[tuple[float, float, str]]:
    """Begin, end and name of each phase. Only a step of forward and backward passes that ends with
    the optimizer gets names."""
    if len(begins) < 4 or len(begins) % 2:
        return [(begin, begin, "") for begin in begins]
    names = ["forward", "backward"] * (len(begins) // 2 - 1) + ["", "optimizer"]
    return list(zip(begins, [*begins[1:], 1.0], names, strict=True))


def text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
