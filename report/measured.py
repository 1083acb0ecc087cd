"""Tables of what tests, the programs of measure/ and model_inference.py measured."""

import itertools
import re
import statistics
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

from report.blocks import TABLES, digits, draw, footer, machine_line, size_name
from report.results import NOT_YET, Unusable
from report.suites import spread
from techniques import LESSONS


def in_order(rows: list[dict]) -> list[dict]:
    """In the order of the course, and of the number of ranks."""
    order = [row.script for row in LESSONS]
    place = {row["script"]: order.index(row["script"].split()[0]) for row in rows}
    return sorted(rows, key=lambda row: (place[row["script"]], row["script"], row["ranks"]))


def parity(rows: list[dict]) -> dict[str, str]:
    """The largest relative difference of any tensor, over all world sizes."""
    found = {"ranks": ", ".join(map(str, sorted({row["ranks"] for row in rows})))}
    for optimizer in ("sgd", "adamw"):
        values = [row["value"] for row in rows if row["optimizer"] == optimizer]
        found[optimizer] = f"{max(values):.0e}" if values else ""
    return found


def by_ranks(rows: list[dict], cell: Callable) -> dict[str, str]:
    return {f"x{n}": cell([row for row in rows if row["ranks"] == n]) for n in (1, 2, 4)}


def kept_parts(rows: list[dict]) -> str:
    """parameters + gradients + optimizer (+ others), for SGD (AdamW)."""
    at = {row["optimizer"]: row["kept"] for row in rows}
    sizes = {**at.get("adamw", {}), **at.get("sgd", {})}
    parts = [digits(sizes.pop(kind)) for kind in ("parameters", "gradients") if sizes]
    own = [digits(at["sgd"]["optimizer"])] if "sgd" in at else []
    own += [f"({digits(at['adamw']['optimizer'])})"] if "adamw" in at else []
    sizes.pop("optimizer", None)
    others = [f"{digits(sizes[k])} {k.replace('_', ' ')}" for k in sorted(sizes) if sizes[k]]
    return " + ".join([*parts, " ".join(own), *others])


def sent_parts(rows: list[dict]) -> str:
    sent = sorted(rows[-1]["sent"].items()) if rows else ()
    parts = [f"{digits(n)} {kind}" for kind, n in sent if digits(n) != "0"]
    return ", ".join(parts).replace("_", "-")


def shared(rows: list[dict]) -> list[dict]:
    rows = [row for row in in_order(rows) if row["ranks"] > 1]
    return [row | {"how": ", ".join(sorted(row["how"])).replace("_", "-")} for row in rows]


def optimizers(rows: list[dict]) -> list[dict]:
    rows = sorted(rows, key=lambda row: (row["ranks"], -row["sent"]))
    theory = [f" ({row['sent_theory']:.2f})" if "sent_theory" in row else "" for row in rows]
    return [row | {"theory": each} for row, each in zip(rows, theory, strict=True)]


worst_first = partial(sorted, key=lambda row: -row["value"])
GROUPED = {  # tables of results/proof.json with a row for each script: its cells
    **dict.fromkeys(("parity", "parity_gpt", "parity_shared"), parity),
    "bytes": partial(by_ranks, cell=kept_parts), "sent": partial(by_ranks, cell=sent_parts),
}  # fmt: skip
ORDERED = {  # and the others: how their rows are put in order, and made complete
    "loss": lambda rows: [r | {"difference": r["value"] / r["fp32"] - 1} for r in in_order(rows)],
    "shared": shared, "optimizers": optimizers, "silent": worst_first,
    "silent_examples": list,  # as pages.py has put them in order
}  # fmt: skip


def proof_table(name: str, rows: list[dict]) -> str:
    if name in GROUPED:
        groups = itertools.groupby(in_order(rows), lambda row: row["script"])
        rows = [{"script": script} | GROUPED[name]([*group]) for script, group in groups]
    else:
        rows = ORDERED[name](rows)
    rows = [row | {"name": short_name(row), "file": Path(row["script"]).name} for row in rows]
    return draw(rows, TABLES[name])


def short_name(row: dict) -> str:
    return row["script"].removeprefix("pytorch_").replace(".py", "", 1)


HANGS = {  # what rank 1 does, in measure/faults/hang.py
    "skip": "skips a collective", "order": "calls two collectives in another order",
    "shape": "passes a tensor of another shape", "dtype": "passes another dtype",
    "loop": "is in an endless loop", "stop": "is stopped (SIGSTOP)",
    "kill": "is killed (SIGKILL)", "sleep": "waits for its loader",
}  # fmt: skip


def hangs(found: dict) -> tuple:
    """The printed diagnosis, and scripts in which it did not name rank, collective and line."""
    rows = []
    for fault, does in HANGS.items():
        group = [row for row in found["rows"] if row["fault"] == fault]
        first = group[0]["lines"][0].partition("; recorded in")[0]
        missed = ", ".join(short_name(row) for row in group if row["missed"])
        rows.append({"does": does, "first": first, "scripts": len(group), "missed": missed})
    return rows, []


def saves(found: dict) -> tuple:
    """How long a checkpoint blocks training, synchronous or asynchronous."""
    middle = {call: statistics.median(seconds) for call, seconds in found["seconds"].items()}
    whole = {"save": middle["save"], "async_save": statistics.median(found["whole_after"])}
    rows = [
        {"call": call, "saves": len(seconds), "waits": spread([1e3 * s for s in seconds], ",.0f"),
         "relative": middle[call] / middle["save"], "complete": whole.get(call)}
        for call, seconds in found["seconds"].items()
    ]  # fmt: skip
    return rows, [machine_line(found["hardware"])], f"`{found['command']}`"


def one_gpu(found: dict) -> tuple:
    """One rank of several, alone on a GPU: predicted and measured memory, and compute."""
    rows = []
    for row in found["rows"]:
        ratio = row["predicted"] / row["allocated"] if row["allocated"] else None
        seconds = row["failed"] or f"{row['step_seconds']:.2f}"
        rows.append(row | {"ratio": ratio, "seconds": seconds})
    return rows, [machine_line(found["hardware"], on_cpu=False)]


def sweep(found: dict) -> tuple:
    """A row for each collective: latency and bandwidth."""
    rows = [
        one | {"name": name, "bus": one["rows"][-1]["bus"], "largest": one["rows"][-1]["bytes"]}
        for name, one in found["operations"].items()
    ]
    largest = size_name(rows[-1]["largest"])
    about = f"{found['backend']}, {found['ranks']} ranks, messages up to {largest}"
    return rows, [machine_line(found["hardware"], found["backend"] == "gloo"), about]


def losses_blocks(root: Path, found: dict) -> dict[str, str]:
    """Losses of a technique and of the one that it replaces, for three seeds each."""
    blocks = {}
    for name, one in found.items():
        rows = [
            {"name": short_name(row), "mean": statistics.mean(row["losses"]),
             "each": ", ".join(f"{loss:.4f}" for loss in row["losses"])}
            for row in one["rows"]
        ]  # fmt: skip
        about = footer(root, one, "losses.json", f"`{one['flags']}`")
        blocks[f"losses-{name}"] = draw(rows, TABLES["losses"]) + about
    return blocks


SPEED = "{images_per_second:,.1f} ({latency_ms[p50]:.1f}, {latency_ms[p95]:.1f})"
OUTCOMES = "clean", "wrong", "hung", "fallback", "silent", "failed"
TRIAL = re.compile(rf"trial +\d+: (\w+) .*?({'|'.join(OUTCOMES)})\b")


def outcomes_block(path: Path) -> str:
    """Trials by kind and outcome, from the output of measure/faults/*.py, with its last line."""
    command, where, *trials, summary = path.read_text().splitlines()
    command = command.removeprefix("$ ")
    found = [match.groups() for line in trials if (match := TRIAL.match(line))]
    if len(found) < len(trials) or not summary.startswith(f"{len(found)} trials: "):
        raise Unusable(f"{path} was modified; run {command} again")
    rows = []
    for kind in [*sorted({kind for kind, _ in found}), "all"]:
        ends = [end for name, end in found if kind in (name, "all")]
        counts = {outcome: ends.count(outcome) for outcome in OUTCOMES}
        rows.append({"kind": kind, "trials": len(ends)} | counts)
    table = draw(rows, TABLES["damage" if path.stem == "corrupt" else "fault"])
    link = f"[results/{path.name}](results/{path.name})"
    run, where = (textwrap.shorten(text, 360, placeholder=" …") for text in (command, where))
    return f"{table}\n\n`{run}`: {summary} ({where}; {link})"


def inference_table(found: dict) -> str:
    """images/s per batch size, and in brackets p50 and p95 of a call in ms."""
    rows, sizes = {}, {}
    for row in found["rows"]:
        size, memory = f"batch {row['batch_size']}", row["peak_memory_gib"]
        about = row | {"memory": memory["device"] or memory["process"]}
        first = rows.setdefault((row["runtime"], row["precision"]), about)
        first[size] = SPEED.format_map(row["host_to_host"])
        sizes[size] = f"{{{size}}}"
    columns = {"runtime": "{runtime}", "precision": "{precision}"} | sizes
    columns |= {"memory GiB": "{memory:.2f}", "first call s": "{first_call_s:.2f}"}
    return draw(rows.values(), columns)


def inference_block(root: Path, found: dict) -> str:
    """The same, with the hardware and versions."""
    where = machine_line(found["hardware"], found["device"] == "cpu")
    about = f"{found['model']}, {found['image_size']}×{found['image_size']}"
    return inference_table(found) + footer(root, found, "inference.json", about, where)


SINGLE = {  # of a file in results/: the rows of its table, and what the line below it says
    "hangs": hangs, "saves": saves, "one_gpu": one_gpu, "collectives": sweep,
    "bubble": lambda found: (found["rows"], [machine_line(found["hardware"])]),
}  # fmt: skip
OUTPUTS = ("faults", "faults_checkpoint", "corrupt")


def blocks(root: Path, results: dict) -> dict[str, str]:
    """All these tables, by the name of their block."""
    found = losses_blocks(root, results["losses"])
    found["inference"] = inference_block(root, results["inference"])
    for name in OUTPUTS:
        found[name.replace("_", "-")] = outcomes_block(root / "results" / f"{name}.txt")
    for name in (*GROUPED, *ORDERED):
        about = footer(root, results["proof"]["measured"][name], "proof.json")
        found[name] = proof_table(name, results["proof"][name]) + about
    for name, rows_of in SINGLE.items():
        if results[name].get("rows") == []:
            found[name] = NOT_YET.format(name)
            continue
        rows, before, *after = rows_of(results[name])
        about = footer(root, results[name], f"{name}.json", *before, after="".join(after))
        found[name] = draw(rows, TABLES[name]) + about
    return found
