"""The picture of memory over one training step of a large model, with another one dashed behind it.

website/make_data.py counts the bytes: website/data/worked.json.
"""

from collections.abc import Callable
from pathlib import Path

from report.blocks import UNITS
from report.palette import MEMORY
from report.results import WORDS, load

# Which rows of results/ the pages of the course show, by the name of a row of techniques.py.
SHOWN = load(Path(__file__).with_name("lessons.json"))
KINDS = {  # names in the legend, in the order in which they are stacked
    "parameters": "parameters", "optimizer": "optimizer state", "gradients": "gradients",
    "activations": "activations", "input": "input", "temporary": "rest", "update": "update",
}  # fmt: skip
SMALL = 0.01  # of the peak: what nobody would see


def pictures(root: Path, translate: Callable[[str], str]) -> dict[str, dict]:
    """The data of the pictures ``step-NAME`` in both languages; ``translate``: rows to Chinese."""
    series = load(root / "website" / "data" / "worked.json").get("data", {})
    found = {}
    for name, shown in SHOWN.items():
        if shown["front"] in series:
            data = {"series": series[shown["front"]], "title": shown.get("title", shown["front"])}
            if beside := shown.get("beside"):
                data |= {"dashed": series[beside], "beside": beside}
            rows = filter(None, [data["title"], beside])
            words = {row: translate(row) for row in rows} | WORDS["pictures"] | WORDS["steps"]
            found |= {f"step-{name}": data, f"step-{name}.zh-CN": data | {"words": words}}
    return found


def totals(series: dict) -> list[float]:
    """GiB of all kinds together."""
    return [sum(parts) / UNITS["GiB"] for parts in zip(*series["bytes"].values(), strict=True)]


def places(series: dict) -> tuple[list[float], list[str]]:
    """Where the phases begin, of those that are wide enough to see, and their names."""
    ends = [begin for begin, _ in series["phases"][1:]] + [1]
    spans = zip(series["phases"], ends, strict=True)
    wide = [phase for phase, end in spans if end - phase[0] > SMALL]
    return [begin for begin, _ in wide], [name for _, name in wide]


def draw_step(axes, data: dict, ink: str) -> None:
    """Stacked areas with the names of the phases, and the peak; the other total as a dashed line,
    stretched so that its phases begin where those of the areas do, if they are the same ones."""
    import numpy as np

    series = data["series"]
    sums = totals(series)
    x = np.linspace(0, 1, len(sums))
    below = np.zeros(len(sums))
    for kind, name in KINDS.items():
        sizes = np.array(series["bytes"].get(kind, [0])) / UNITS["GiB"]
        if sizes.max() > SMALL * max(sums):
            axes.fill_between(x, below, below + sizes, color=MEMORY[name], label=name, linewidth=0)
            below = below + sizes
    begins, names = places(series)
    if "dashed" in data:
        other = totals(data["dashed"])
        theirs, same = places(data["dashed"])
        share = np.linspace(0, 1, len(other))
        if same == names:
            share = np.interp(share, [*theirs, 1], [*begins, 1])
        axes.plot(share, other, "--", color=ink, linewidth=1.2, label=data["beside"])
    near = {"ha": "center", "textcoords": "offset points"}
    fontsize = 10 if len(names) < 6 else 7  # a step with micro-batches has many narrow phases
    for begin, end, name in zip(begins, [*begins[1:], 1], names, strict=True):
        axes.axvline(begin, color=ink, linewidth=0.6)
        axes.annotate(name, ((begin + end) / 2, 0), (0, -14), fontsize=fontsize, **near)
    at = sums.index(max(sums))
    axes.plot(x[at], sums[at], "o", color=ink)
    axes.annotate(f"{sums[at]:.1f}", (x[at], sums[at]), (0, 5), fontsize=10, weight="bold", **near)
    words = data.get("words", {})
    model = "" if ": " in data["title"] else "Llama-3-8B: "
    title = model + words.get(data["title"], data["title"])
    axes.set(xlim=(0, 1), xticks=[], ylabel="GiB per GPU", title=title)
    axes.set_ylim(0, 1.1 * axes.dataLim.y1)
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    for text in axes.findobj(lambda artist: hasattr(artist, "set_text")):
        text.set_text(words.get(text.get_text(), text.get_text()))
