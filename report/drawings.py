"""The collectives as pictures, docs/collectives.svg: what four ranks have before and after each.

What is drawn after a collective is computed from what is there before it, by its definition.
"""

from collections.abc import Callable
from typing import NamedTuple
from xml.sax.saxutils import escape

from report.plots import COLOURS, GREY

# --------------------------------------------------------------------------------- what they do


class Tile(NamedTuple):
    """A part of what a rank has, or the sum of that part over several ranks."""

    ranks: tuple[int, ...]
    part: int | None = None  # None: all that the rank has, in one


Rows = list[list[Tile]]  # of each rank; an empty one if it has nothing

RANKS = range(4)
PARTS = [[Tile((rank,), part) for part in RANKS] for rank in RANKS]
WHOLE = [[Tile((rank,))] for rank in RANKS]


def add(rows: Rows) -> list[Tile]:
    """The sum of all ranks, part by part."""
    columns = zip(*rows, strict=True)
    return [Tile(sum((tile.ranks for tile in tiles), ()), tiles[0].part) for tiles in columns]


def join(rows: Rows) -> list[Tile]:
    return [tile for row in rows for tile in row]


def only_rank_0(row: list[Tile]) -> Rows:
    return [row, *([] for _ in RANKS[1:])]


def broadcast(before: Rows) -> Rows:
    return [before[0] for _ in RANKS]


def reduce(before: Rows) -> Rows:
    return only_rank_0(add(before))


def all_reduce(before: Rows) -> Rows:
    return [add(before) for _ in RANKS]


def gather(before: Rows) -> Rows:
    return only_rank_0(join(before))


def scatter(before: Rows) -> Rows:
    return [[part] for part in before[0]]


def all_gather(before: Rows) -> Rows:
    return [join(before) for _ in RANKS]


def reduce_scatter(before: Rows) -> Rows:
    return [[part] for part in add(before)]


def all_to_all(before: Rows) -> Rows:
    return [list(parts) for parts in zip(*before, strict=True)]


def send_and_receive(before: Rows) -> Rows:
    return [before[0], before[0], *before[2:]]


class Panel(NamedTuple):
    collective: Callable[[Rows], Rows]
    before: Rows
    titles: tuple[str, str]  # in English and in Chinese, as what follows
    captions: tuple[str, str]


PANELS = [
    Panel(broadcast, PARTS, ("broadcast", "广播 broadcast"),
          ("DDP begins with it: all take over rank 0's weights.",
           "DDP 开始时用它：所有进程都换成 rank 0 的权重。")),
    Panel(reduce, PARTS, ("reduce", "归约 reduce"),
          ("For a loss to print: only rank 0 needs the sum.",
           "打印损失时用它：只有 rank 0 需要总和。")),
    Panel(all_reduce, PARTS, ("all_reduce", "全归约 all_reduce"),
          ("DDP averages gradients so: a sum, then divided.",
           "DDP 用它平均梯度：求和，再除以进程数。")),
    Panel(gather, WHOLE, ("gather", "收集 gather"),
          ("Rank 0 gets what all have, to save or to print it.",
           "rank 0 得到所有进程的数据，用来保存或打印。")),
    Panel(scatter, only_rank_0(PARTS[0]), ("scatter", "分发 scatter"),
          ("Rank 0 deals out what it has: to each rank its part.",
           "rank 0 把自己的数据分给各进程，每个一份。")),
    Panel(all_gather, WHOLE, ("all_gather", "全收集 all_gather"),
          ("FSDP puts a layer together so; it is freed after use.",
           "FSDP 用它拼出一层的完整权重，用完即释放。")),
    Panel(reduce_scatter, PARTS, ("reduce_scatter", "归约分发 reduce_scatter"),
          ("FSDP averages gradients so; a rank keeps its part.",
           "FSDP 用它平均梯度：每个进程只留自己那份。")),
    Panel(all_to_all, PARTS, ("all_to_all", "全交换 all_to_all"),
          ("Experts get their tokens so; a matrix is transposed.",
           "专家模型用它分派 token；也就是矩阵转置。")),
    Panel(send_and_receive, PARTS, ("send and receive", "发送与接收 send, recv"),
          ("Pipelines hand activations on: here from rank 0 to 1.",
           "流水线用它传递激活值：这里由 rank 0 传给 1。")),
]  # fmt: skip

KEY = ("How to read it", "怎样看图")
MEANINGS = [
    (PARTS[0][2], ("part 2 of what rank 0 has, of 0 to 3", "rank 0 的数据的第 2 份（从 0 到 3）")),
    (WHOLE[0][0], ("all that rank 0 has, as one message", "rank 0 的全部数据，作为一条消息")),
    (add(PARTS)[2], ("the sum of part 2 over all ranks", "所有进程第 2 份数据之和")),
    (None, ("nothing, or nothing that counts", "没有数据，或数据没有意义")),
]  # fmt: skip
COLOURS_MEAN = ("A colour, like a letter, stands for a rank.", "每种颜色、每个字母代表一个进程。")

# ------------------------------------------------------------------------------ how it is drawn

WIDTH, PANEL_WIDTH, PANEL_HEIGHT, GAP = 900, 436, 236, 24
TILE_WIDTH, TILE_HEIGHT, STEP_X, STEP_Y = 33, 29, 38, 34
BEFORE, ARROW, AFTER, TOP = 74, 233, 268, 54  # in a panel
DARK, LIGHT = "#0d1117", "#ffffff"


def pictures() -> dict[str, str]:
    """The SVG in both languages, by name of the file."""
    return {"collectives.svg": draw(0), "collectives.zh-CN.svg": draw(1)}


def draw(language: int) -> str:
    """All panels, two in a row, and how to read them.

    Args:
        language: 0 for English, 1 for Chinese.
    """
    panels = [draw_panel(panel, language) for panel in PANELS] + [draw_key(language)]
    down, across = PANEL_HEIGHT + GAP, WIDTH - PANEL_WIDTH - 2
    height = 2 + (len(panels) + 1) // 2 * down - GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" fill="{GREY}">',
        *stripes(),
    ]
    for i, panel in enumerate(panels):
        x, y = 1 + i % 2 * across, 1 + i // 2 * down
        frame = f'width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" rx="8" fill="none"'
        lines += [
            f'<g transform="translate({x} {y})">',
            f'<rect {frame} stroke="{GREY}" stroke-opacity="0.35"/>',
            *panel,
            "</g>",
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def stripes() -> list[str]:
    """The filling of a sum: all ranks' colours, from the top."""
    stops = []
    for rank in RANKS:
        for edge in (rank, rank + 1):
            stops.append(f'<stop offset="{edge / len(RANKS)}" stop-color="{COLOURS[rank]}"/>')
    return ['<linearGradient id="sum" x2="0" y2="1">', *stops, "</linearGradient>"]


def draw_panel(panel: Panel, language: int) -> list[str]:
    """Title, every rank's tiles before and after, and who uses it."""
    after = panel.collective(panel.before)
    lines = [text(20, 34, panel.titles[language], 19, "bold")]
    for rank in RANKS:
        y = TOP + rank * STEP_Y
        lines.append(text(20, y + 20, f"rank {rank}", 14))
        lines += draw_row(BEFORE, y, panel.before, rank)
        lines += draw_row(AFTER, y, after, rank)
    y = TOP + (3 * STEP_Y + TILE_HEIGHT) / 2
    lines.append(
        f'<path d="M{ARROW} {y}h22m-8 -7l8 7l-8 7" fill="none" stroke="{GREY}" stroke-width="2.5" '
        'stroke-linecap="round" stroke-linejoin="round"/>'
    )
    return [*lines, text(20, PANEL_HEIGHT - 19, panel.captions[language], 15)]


def draw_row(x: float, y: float, rows: Rows, rank: int) -> list[str]:
    """A rank's tiles, in the middle of where there is room for four; empty ones if it has none."""
    widest = max(len(row) for row in rows)
    x += (len(RANKS) - widest) * STEP_X / 2
    tiles = rows[rank] or [None] * widest
    return [line for i, tile in enumerate(tiles) for line in draw_tile(x + i * STEP_X, y, tile)]


def draw_key(language: int) -> list[str]:
    lines = [text(20, 34, KEY[language], 19, "bold")]
    for i, (tile, meaning) in enumerate(MEANINGS):
        y = TOP + i * STEP_Y
        lines += draw_tile(20, y, tile)
        lines.append(text(66, y + 20, meaning[language], 15))
    return [*lines, text(20, PANEL_HEIGHT - 19, COLOURS_MEAN[language], 15)]


def draw_tile(x: float, y: float, tile: Tile | None) -> list[str]:
    """In the colour of its rank, or striped, with its name; an outline if there is none."""
    place = f'x="{x:g}" y="{y:g}" width="{TILE_WIDTH}" height="{TILE_HEIGHT}" rx="4"'
    if tile is None:
        return [f'<rect {place} fill="none" stroke="{GREY}" stroke-dasharray="3 3"/>']
    fills = [COLOURS[rank] for rank in tile.ranks]
    fill = fills[0] if len(fills) == 1 else "url(#sum)"
    name = f'text-anchor="middle" fill="{ink(fills)}"'
    middle = x + TILE_WIDTH / 2
    return [f'<rect {place} fill="{fill}"/>', text(middle, y + 20, label(tile), 16, more=name)]


def label(tile: Tile) -> str:
    """A letter for each rank, or Σ, and the number of the part."""
    letter = "abcd"[tile.ranks[0]] if len(tile.ranks) == 1 else "Σ"
    return letter if tile.part is None else f"{letter}{tile.part}"


def text(x: float, y: float, words: str, size: int, weight: str = "", more: str = "") -> str:
    attributes = f'x="{x:g}" y="{y:g}" font-size="{size}"'
    attributes += f' font-weight="{weight}"' if weight else ""
    return f"<text {attributes}{' ' + more if more else ''}>{escape(words)}</text>"


def ink(fills: list[str]) -> str:
    """Black or white: what can be read better on the worst of these colours."""
    return max((DARK, LIGHT), key=lambda ink: min(contrast(ink, fill) for fill in fills))


def contrast(one: str, other: str) -> float:
    """Of two colours, 1 to 21, as WCAG defines it (https://www.w3.org/TR/WCAG22)."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
