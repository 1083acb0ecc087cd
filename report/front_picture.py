"""The README's picture: memory of one rank by technique, as stacked bars, from results/gpt.json."""

from report.plots import COLOURS, memory_parts
from report.results import read_words
from report.timeline_picture import text

ROWS = {  # of the suite, and the bar's label
    "SingleGPU": "one process",
    "torchrun_DDP x4": "DDP",
    "DDP_ZeRO --use_zero x4": "ZeRO",
    "HSDP --shard 2 x4": "HSDP",
    "FSDP x4": "FSDP",
}
KINDS = {  # of memory_parts(), and the legend's label
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations and the rest": "activations and buffers",
}
THEMES = {"light": ("#1f2328", "#57606a"), "dark": ("#f0f6fc", "#9198a1")}  # ink, and paler
WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 640, 112, 76, 78, 30, 12


def pictures(gpt: dict) -> dict[str, str]:
    """SVGs by name, for light and dark pages, in both languages; none without all the rows."""
    rows = {row["name"]: row["runs"] for row in gpt["rows"]}
    if not all(rows.get(name) for name in ROWS):
        return {}
    runs = {title: rows[name][0] for name, title in ROWS.items()}
    return {
        f"memory-{theme}{language}.svg": draw(runs, *THEMES[theme], words)
        for theme in THEMES
        for language, words in (("", {}), (".zh-CN", read_words()["pictures"]))
    }


def draw(runs: dict[str, dict], ink: str, pale: str, words: dict[str, str]) -> str:
    """A bar for each run, with the bytes of every part, and their sum at its end."""
    parts = {title: memory_parts(run) for title, run in runs.items()}
    scale = (WIDTH - LEFT - RIGHT) / max(sum(sizes.values()) for sizes in parts.values())
    height = TOP + len(runs) * (BAR + GAP)
    run = list(runs.values())[-1]
    millions, ranks = run["parameters"] / 1e6, run["world_size"]
    title = words.get("title", "Memory per rank, GiB: GPT with {} M parameters, AdamW, {} ranks")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" fill="{ink}">',
        text(0, 18, title.format(f"{millions:.0f}", ranks), 17, more='font-weight="600"'),
    ]
    x = 0
    for kind, colour in zip(KINDS, COLOURS, strict=False):
        named = words.get(KINDS[kind], KINDS[kind])
        lines.append(f'<rect x="{x}" y="38" width="14" height="14" rx="3" fill="{colour}"/>')
        lines.append(text(x + 20, 50, named, 15, more=f'fill="{pale}"'))
        x += 38 + sum(8 if letter.isascii() else 15 for letter in named)
    for i, (name, sizes) in enumerate(parts.items()):
        x, y = LEFT, TOP + i * (BAR + GAP)
        end = f'text-anchor="end" fill="{ink}"'
        lines.append(text(LEFT - 10, y + 20, words.get(name, name), 16, more=end))
        for kind, colour in zip(KINDS, COLOURS, strict=False):
            width = scale * sizes[kind]
            place = f'x="{x:.1f}" y="{y}" width="{max(width - 1, 0.5):.1f}" height="{BAR}"'
            lines.append(f'<rect {place} fill="{colour}"/>')
            if width > 46:
                middle = 'text-anchor="middle" fill="#ffffff"'
                size = f"{sizes[kind] / 1024:.2f}"
                lines.append(text(round(x + width / 2, 1), y + 20, size, 14, more=middle))
            x += width
        total = f"{sum(sizes.values()) / 1024:.2f}"
        lines.append(text(round(x + 8, 1), y + 20, total, 16, more='font-weight="600"'))
    return "\n".join([*lines, "</svg>"]) + "\n"
