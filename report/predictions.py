"""Predictions beside published and measured figures: tables and a plot."""

from pathlib import Path

from report.blocks import column, draw, field, footer, gib
from report.draw import percent_by_ranks
from report.results import middle
from report.suites import measured_where

OURS = {  # rows of the suite gpu that are published techniques, where the names differ
    "auto_mixed_precision": "auto_mixed_precision --dtype float16",
    "half_precision": "half_precision --dtype float16",
    "torchrun_DDP": "torchrun_DDP x4",
    "DDP_ZeRO": "DDP_ZeRO --use_zero x4",
    "FSDP": "FSDP x4",
}


def blocks(root: Path, results: dict) -> dict[str, str]:
    """The tables, by the name of their block."""
    found, scaled = results["estimate"], results["scaling"]
    where = measured_where(root, scaled, scaled["rows"])
    published = published_table(found, results["gpu"]) + footer(root, found, "estimate.json")
    return {"estimate": published, "scaling": scaling_table(found, scaled) + where}


def published_table(found: dict, gpu: dict) -> str:
    """Published and predicted figures, and for our own workload predicted and measured ones."""
    runs = {row["name"]: row["runs"] for row in gpu["rows"]}

    def ours(row: dict) -> str:
        return OURS.get(row["name"], row["name"])

    # fmt: off
    return draw(
        found["published"], column("technique", "技术", lambda row: f"`{row['name']}`"),
        field("gpus", "GPUs", "GPU 数"), field("published_gb", "published GB", "公布值 GB", ".2f"),
        column("predicted for that job", "对该任务的预测",
               lambda row: row["predicted"] / 1e9, ".2f"),
        column("ratio", "比值", lambda row: row["predicted"] / 1e9 / row["published_gb"], ".3f"),
        column("predicted for ours, GiB", "对我们任务的预测 GiB",
               lambda row: gib(found["suites"]["gpu"].get(ours(row)))),
        column("measured, GiB", "实测 GiB",
               lambda row: middle(runs.get(ours(row), []), "peak_memory_gib", "allocated"), ".2f"),
    )
    # fmt: on


def steps_of(found: dict, scaled: dict) -> dict[str, dict[int, float]]:
    """Milliseconds of a measured step, by technique of the prediction and number of ranks."""
    steps = {name: {} for name in found["messages"]}
    for row in scaled["rows"]:
        name, _, ranks = row["name"].rpartition(" x")
        if row["runs"] and name in steps:
            steps[name][int(ranks)] = middle(row["runs"], "step_ms", "p50")
    return {name: took for name, took in steps.items() if 1 in took}


def scaling_table(found: dict, scaled: dict) -> str:
    """The step time on two ranks: predicted from one rank and communication, and measured."""
    took = steps_of(found, scaled)

    def predicted(name: str) -> float:
        return took[name][1] + 1e3 * found["messages"][name]["2"]

    # fmt: off
    return draw(
        took, column("technique", "技术", "`{}`".format),
        column("step ms, 1 rank", "每步毫秒，1 进程", lambda name: took[name][1], ".0f"),
        column("2 ranks, predicted", "2 进程，预测", predicted, ".0f"),
        column("2 ranks, measured", "2 进程，实测", lambda name: took[name].get(2), ".0f"),
        column("ratio", "比值",
               lambda name: predicted(name) / took[name][2] if 2 in took[name] else None, ".2f"),
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
