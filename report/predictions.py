"""Predictions beside published and measured figures: tables and a plot."""

from pathlib import Path

from report.blocks import Column, draw, field, footer
from report.draw import percent_by_ranks
from report.results import middle
from report.suites import measured_where


def blocks(root: Path, results: dict) -> dict[str, str]:
    """The tables, by the name of their block."""
    found, scaled = results["estimate"], results["scaling"]
    where = measured_where(root, scaled, scaled["rows"])
    published = published_table(found) + footer(root, found, "estimate.json")
    tables = {"estimate": published, "scaling": scaling_table(found, scaled) + where}
    return tables | language_models(root, results["published"])


def language_models(root: Path, found: dict) -> dict[str, str]:
    """Peaks, speeds, and the differences and ratios of two of them, published and predicted."""
    run = Column("run", "运行", lambda row: f"[{row['name']}]({row['source']})")
    pair = field("from", "from", "从"), field("to", "to", "到")
    first = {"peaks": (run, field("memory", "metric", "指标")), "differences": pair}
    first |= {"speeds": (run,), "slopes": pair}
    titles = {"published": "公布值", "lowest": "最低预测", "highest": "最高预测"}
    after, blocks = footer(root, found, "published.json"), {}
    for name, columns in first.items():
        form = ",.0f" if name == "speeds" else ".2f"
        figures = [field(key, key, chinese, form) for key, chinese in titles.items()]
        table = draw(found[name], *columns, *figures, field("off", "off", "偏差", "+.1%"))
        blocks[f"published-{name}"] = table + after
    return blocks


def steps_of(found: dict, scaled: dict) -> dict[str, dict[int, float]]:
    """Milliseconds of a measured step, by technique of the prediction and number of ranks."""
    runs = {row["name"]: row["runs"] for row in scaled["rows"]}
    return {
        name: {n: middle(runs[f"{name} x{n}"], "step_ms", "p50") for n in (1, 2)}
        for name in found["messages"]
    }


# fmt: off
def published_table(found: dict) -> str:
    """Published and predicted figures."""
    return draw(
        found["published"], Column("technique", "技术", lambda row: f"`{row['name']}`"),
        field("gpus", "GPUs", "GPU 数"), field("published_gb", "published GB", "公布值 GB", ".2f"),
        Column("predicted for that job", "对该任务的预测",
               lambda row: row["predicted"] / 1e9, ".2f"),
        Column("ratio", "比值", lambda row: row["predicted"] / 1e9 / row["published_gb"], ".3f"),
    )


def scaling_table(found: dict, scaled: dict) -> str:
    """The step time on two ranks: predicted from one rank and communication, and measured."""
    took = steps_of(found, scaled)
    predicted = {name: took[name][1] + 1e3 * found["messages"][name]["2"] for name in took}
    return draw(
        took, Column("technique", "技术", "`{}`".format),
        Column("step ms, 1 rank", "每步毫秒，1 进程", lambda name: took[name][1], ".0f"),
        Column("2 ranks, predicted", "2 进程，预测", predicted.get, ".0f"),
        Column("2 ranks, measured", "2 进程，实测", lambda name: took[name][2], ".0f"),
        Column("ratio", "比值", lambda name: predicted[name] / took[name][2], ".2f"),
    )
# fmt: on


def plots(results: dict) -> dict[str, dict]:
    """Speed per rank relative to one rank: measured, and predicted up to 1,024 ranks."""
    found, scaled, lines = results["estimate"], results["scaling"], {}
    for name, took in steps_of(found, scaled).items():
        messages = {1: 0.0} | {int(n): seconds for n, seconds in found["messages"][name].items()}
        predicted = [100 * took[1] / (took[1] + 1e3 * seconds) for seconds in messages.values()]
        measured = [100 * took[1] / step for step in took.values()]
        lines[name] = {"-": ([*messages], predicted), "o": ([*took], measured)}
    run = next(run for row in scaled["rows"] for run in row["runs"])
    unit = f"% of one rank's speed ({run['model']} at {run['image_size']}, {run['device']}, gloo)"
    return {"scaling": percent_by_ranks(unit, lines, [*messages], {"o": "measured"})}
