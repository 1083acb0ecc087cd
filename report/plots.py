"""The plots in results/, as SVG."""

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

from report.blocks import size_name
from report.results import name_of
from techniques import technique

GREY = "#7d8590"  # readable on light and dark pages
COLOURS = ["#4c8dd6", "#e08a3c", "#54a868", "#c65f63", "#9179c0", "#9c8468", "#d288bd", "#8d8d8d"]


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


def digest(data: dict) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def digest_of(path: Path) -> str | None:
    """The digest of a plot's data, as :func:`draw` has written it into the file."""
    with contextlib.suppress(OSError):
        found = re.search(r"<dc:description>(\w+)</dc:description>", path.read_text())
        return found and found[1]
    return None


def draw(path: Path, data: dict, kind: str = "") -> None:
    """Draw a plot for light and dark pages: no background, and grey text.

    Args:
        data: as :func:`plot_data` returns it.
        kind: of plot, if not given by the file name.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({
        "svg.hashsalt": path.stem, "svg.fonttype": "none", "font.family": "sans-serif",
        "font.size": 11, "text.color": GREY, "axes.labelcolor": GREY, "axes.edgecolor": GREY,
        "xtick.color": GREY, "ytick.color": GREY, "axes.spines.top": False,
        "axes.spines.right": False, "axes.prop_cycle": plt.cycler(color=COLOURS),
        "legend.frameon": False, "legend.fontsize": 9,
    })  # fmt: skip
    values = data["values"]
    lines = {"scaling": draw_scaling, "loss": draw_curves, "collectives": draw_bandwidths}
    lines |= {"shares": draw_shares, "local_sgd": draw_loss_by_bytes}
    kind = kind or path.stem
    if kind == "memory":
        figure, axes = plt.subplots(figsize=(8, 0.28 * len(values) + 1))
        draw_parts(axes, values)
        axes.set_xlabel(data["unit"])
    else:
        figure, axes = plt.subplots(figsize=(8, 4))
        lines[kind](axes, values)
        axes.set_ylabel(data["unit"])
    metadata = {"Date": None, "Creator": "benchmark.py", "Description": digest(data)}
    temporary = path.with_name(f".{path.name}.part")
    figure.savefig(
        temporary, format="svg", bbox_inches="tight", transparent=True, metadata=metadata
    )
    os.replace(temporary, path)
    plt.close(figure)


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
