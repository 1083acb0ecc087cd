"""The README: a model that people train, predicted; a small one, measured; and recorded outputs."""

import re
from pathlib import Path

from report.blocks import TABLES, draw, footer, machine_line
from report.diffs import example_of, fenced
from report.draw import LANGUAGES
from report.results import WORDS, load, name_of
from report.suites import measured_where, table_of

MEMORY, LIMIT = 79.1, "H100, 80 GB"
TITLE = "Predicted GiB per GPU: Llama-3-8B, context 8,192, 8 GPUs"
PUBLISHED = "[{published:.2f}]({source}) ({lowest:.2f}–{highest:.2f})"
KINDS = {  # in the picture, by the kinds that are predicted
    "parameters": ["parameters"], "gradients": ["gradients"], "optimizer state": ["optimizer"],
    "activations": ["activations"], "rest": ["input", "temporary", "update"],
}  # fmt: skip
DIFFS = {  # the lines of an example that the README shows
    "ddp": r"init_process_group|DistributedDataParallel\(|rank::world|backward\(\)",
    "fsdp": r"DistributedDataParallel\(|fully_shard\((layer|model)|for layer|recomputed\(",
}


def blocks(root: Path, results: dict) -> dict[str, str]:
    """The tables of the README and the outputs of all pages, by the name of their block."""
    found = {"front-llama": llama_table(root, results), "front-gpt": gpt_table(root, results)}
    return found | {"front-diff": diff_block(root)} | outputs(root, results)


def llama_table(root: Path, results: dict) -> str:
    """Predicted peaks, and those that were published for the same configuration."""
    peaks = {row["name"]: PUBLISHED.format_map(row) for row in results["published"]["peaks"]}
    rows, gpu = [], results["one_gpu"]
    alone = {row["name"]: row["allocated"] for row in gpu["rows"]}
    for name, row in load(root / "config" / "suite_front.json")["front"].items():
        found = results["front"]["outputs"][name]["output"][0]
        row |= found | {"name": name, "fits": "yes" if found["fits"] else "no"}
        row["most"] = f"–{found['most'] / 2**30:.2f}" if "most" in found else ""
        row["allocated"] = alone.get(row.get("alone"))
        rows.append(row | {"published": peaks.get(row.get("published"))})
    below = footer(root, results["front"], "front.json")
    below += "; " + footer(root, gpu, "one_gpu.json", machine_line(gpu["hardware"], False)).strip()
    return draw(rows, TABLES["front-llama"]) + below


def pictures(results: dict) -> dict[str, dict]:
    """The README's picture in both languages: GiB of one GPU by technique and kind, and the memory
    of an H100."""
    values = {}
    for name, one in results["front"]["outputs"].items():
        kinds = one["output"][0]["kinds"]
        sizes = {title: sum(kinds[kind] for kind in some) for title, some in KINDS.items()}
        values[name] = {title: round(size / 2**30, 2) for title, size in sizes.items()}
    found = {}
    for language, words in LANGUAGES.items():
        words = words and words | WORDS["front"]
        data = {"values": values, "line": MEMORY, "words": words}
        data |= {"title": words.get(TITLE, TITLE), "limit": words.get(LIMIT, LIMIT)}
        found[f"memory{language}"] = data
    return found


def gpt_table(root: Path, results: dict) -> str:
    """What was measured of some rows of the suite gpt, and the worst difference in the proof."""
    found = results["gpt"]
    known = {row["name"]: row for row in found["rows"]}
    rows = [known[n] for n in load(root / "config/suite_gpt.json")["front"] if n in known]
    for row in rows:
        script = f"pytorch_{name_of(row)}"
        values = [r["value"] for r in results["proof"]["parity_gpt"] if r["script"] == script]
        row["difference"] = f"{max(values):.0e}" if values else None
        row["page"] = name_of(row).split()[0]
    return table_of("front-gpt", rows) + measured_where(root, found, rows)


def diff_block(root: Path) -> str:
    """The lines that train, of the diffs of two examples."""
    lines = []
    for name, shown in DIFFS.items():
        pair = example_of(root, name)
        lines += [f"# {pair.old} -> {pair.new}"]
        lines += [line for line in pair.diff(0) if re.search(shown, line) and line[0] in "+-"]
    return fenced("diff", lines)


def outputs(root: Path, results: dict) -> dict[str, str]:
    """What commands have printed, maybe from some line on, and what a run that hangs has."""
    found, shown = {}, load(root / "config" / "suite_outputs.json")["shown"]
    for name, one in results["outputs"]["outputs"].items():
        lines, begin = one["output"], shown.get(name, "")
        first = next(i for i, line in enumerate(lines) if line.startswith(begin))
        found[f"output-{name}"] = fenced("text", lines[first:])
    hang = next(row for row in results["hangs"]["rows"]
                if (row["script"], row["fault"]) == ("pytorch_FSDP", "stop"))  # fmt: skip
    lines = [re.sub(r"/tmp/hang-\w+/run/", "runs/pytorch_FSDP/", line) for line in hang["lines"]]
    return found | {"output-hang": fenced("text", lines)}
