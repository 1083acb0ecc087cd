"""The README: a model that people train, predicted; a small one, measured; and recorded outputs."""

import re
from pathlib import Path

from report.blocks import TABLES, draw, footer, machine_line
from report.diffs import example_of, fenced
from report.draw import LANGUAGES
from report.recorded import outputs
from report.results import WORDS, load, name_of
from report.suites import measured_where, table_of

MEMORY = 79.1  # GiB of an H100
LIMIT = "H100, 80 GB"
TITLE = "Predicted GiB per GPU: Llama-3-8B, context 8,192, 8 GPUs"
PUBLISHED = "[{published:.2f}]({source}) ({lowest:.2f}–{highest:.2f})"
KINDS = {  # in the picture, by the kinds that are predicted
    "parameters": ["parameters"], "gradients": ["gradients"], "optimizer state": ["optimizer"],
    "activations": ["activations"], "rest": ["input", "temporary", "update"],
}  # fmt: skip
DIFFS = {  # the lines of an example that the README shows
    "ddp": r"init_process_group|DistributedDataParallel\(|rank::world|backward\(\)",
    "fsdp": r"DistributedDataParallel\(|fully_shard\((layer|model)|for layer",
}


def blocks(root: Path, results: dict) -> dict[str, str]:
    """The tables of the README and the outputs of all pages, by the name of their block."""
    found = {"front-llama": llama_table(root, results), "front-gpt": gpt_table(root, results)}
    return found | {"front-diff": diff_block(root)} | outputs(root, results["outputs"])


def llama_table(root: Path, results: dict) -> str:
    """Predicted peaks, and those that were published for the same configuration."""
    peaks = {row["name"]: PUBLISHED.format_map(row) for row in results["published"]["peaks"]}
    gpu = results["one_gpu"]
    predicted = results["front"]["outputs"]
    alone = {row["name"]: row["allocated"] for row in gpu["rows"]}
    rows = []
    for name, row in load(root / "measure" / "suites" / "front.json")["front"].items():
        found = predicted[name]["output"][0]
        row |= found | {"name": name, "fits": "yes" if found["fits"] else "no"}
        row["most"] = f"–{found['most'] / 2**30:.2f}" if "most" in found else ""
        row["allocated"] = alone.get(row.get("alone"))
        rows.append(row | {"published": peaks.get(row.get("published"))})
    below = footer(results["front"], "front", "predicted", predicted.values())
    below += footer(gpu, "one_gpu", machine_line(gpu["hardware"], on_cpu=False), gpu["rows"])
    return draw(rows, TABLES["front-llama"]) + below


def pictures(root: Path, results: dict) -> dict[str, dict]:
    """The README's picture in both languages: GiB of one GPU by technique and kind, and the memory
    of an H100. Some rows are for pages of the course alone."""
    apart = load(root / "measure" / "suites" / "front.json")["pages"]
    drawn = {n: one for n, one in results["front"]["outputs"].items() if n not in apart}
    values = {}
    for name, one in drawn.items():
        kinds = one["output"][0]["kinds"]
        values[name] = {}
        for title, some in KINDS.items():
            values[name][title] = round(sum(kinds[kind] for kind in some) / 2**30, 2)
    found = {}
    for language, words in LANGUAGES.items():
        words = words and words | WORDS["front"]
        data = {"values": values, "line": MEMORY, "words": words}
        data |= {"title": words.get(TITLE, TITLE), "limit": words.get(LIMIT, LIMIT)}
        found[f"memory{language}"] = data
    return found


def gpt_table(root: Path, results: dict) -> str:
    """What was measured of some rows of the suite gpt."""
    found = results["gpt"]
    shown = load(root / "measure" / "suites" / "gpt.json")["front"]
    rows = [row for row in found["rows"] if row["name"] in shown]
    rows = [row | {"page": name_of(row).split()[0]} for row in rows]
    return table_of("front-gpt", rows) + measured_where(found, rows)


def diff_block(root: Path) -> str:
    """The lines that train, of the diffs of two examples."""
    lines = []
    for name, shown in DIFFS.items():
        pair = example_of(root, name)
        lines += [f"# {pair.old} -> {pair.new}"]
        lines += [line for line in pair.diff(0) if re.search(shown, line) and line[0] in "+-"]
    return fenced("diff", lines)
