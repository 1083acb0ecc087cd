"""The README: where to start, the diff to FSDP, a model that people train, recorded outputs."""

import json
import re
from pathlib import Path

from report.blocks import TABLES, draw, footer, machine_line
from report.diffs import fenced, pair_of
from report.draw import LANGUAGES
from report.recorded import WORDS as MISTAKES
from report.recorded import outputs
from report.results import WORDS, load
from techniques import LESSONS, technique

MEMORY = 79.1  # GiB of an H100
LIMIT = "H100, 80 GB"
TITLE = "Predicted GiB per GPU: Llama-3-8B, context 8,192, 8 GPUs"
PUBLISHED = "[{published:.2f}]({source}) ({lowest:.2f}–{highest:.2f})"
MEASURED = ("allocated", "step_seconds")  # of the H100
KINDS = {  # in the picture, by the kinds that are predicted
    "parameters": ["parameters"], "gradients": ["gradients"], "optimizer state": ["optimizer"],
    "activations": ["activations"], "rest": ["input", "temporary", "update"],
}  # fmt: skip
# The lines that the README shows of the diff from DDP to FSDP
SHOWN = r"model = |device\(.me|mesh =|Policy\(\)|units_of\(m|fully_shard\([um]|to_e|init_w|backward"
START = json.loads(Path(__file__).with_name("front.json").read_text())  # by what a reader wants


def blocks(root: Path, results: dict) -> dict[str, str]:
    """The tables of the README and the outputs of all pages, by the name of their block."""
    found = {"front-diff": diff_block(root), "front-llama": llama_table(root, results)}
    return found | {"front-start": start_table(results)} | outputs(root, results["outputs"])


def start_table(results: dict) -> str:
    """What a reader wants, and the page where that begins."""
    rows = [row for row in results["one_gpu"]["rows"] if row["allocated"]]
    off = max(abs(row["allocated"] / row["predicted"] - 1) for row in rows)
    figures = {"scripts": len(LESSONS), "mistakes": len(MISTAKES), "off": off}
    rows = [{"wish": wish, "start": text.format_map(figures)} for wish, text in START.items()]
    return draw(rows, TABLES["front-start"])


def llama_table(root: Path, results: dict) -> str:
    """Predicted peaks, the memory and the time of an H100, and published peaks. A row that is not
    predicted yet is left out."""
    peaks = {row["name"]: PUBLISHED.format_map(row) for row in results["published"]["peaks"]}
    gpu = results["one_gpu"]
    predicted = results["front"]["outputs"]
    alone = {row["name"]: row for row in gpu["rows"]}
    rows = []
    for name, row in load(root / "measure" / "suites" / "front.json")["front"].items():
        if name not in predicted:
            continue
        found = predicted[name]["output"][0]
        row |= found | {"name": name, "fits": "yes" if found["fits"] else "no"}
        row["most"] = f"–{found['most'] / 2**30:.2f}" if "most" in found else ""
        row |= {key: alone.get(row.get("alone"), {}).get(key) for key in MEASURED}
        context = found["command"][found["command"].index("--context") + 1]
        row["tokens"] = found["batch_size"] * int(context) // found["gpus"]
        rows.append(row | {"published": peaks.get(row.get("published"))})
    below = footer(results["front"], "front", "predicted", predicted.values())
    below += gpu_footer(gpu, gpu["rows"])
    return draw(rows, TABLES["front-llama"]) + below


def gpu_footer(found: dict, rows: list[dict]) -> str:
    """The line below what a GPU measured of some rows of results/one_gpu.json."""
    return footer(found, "one_gpu", machine_line(found["hardware"], on_cpu=False), rows)


def pictures(root: Path, results: dict) -> dict[str, dict]:
    """The README's picture in both languages: GiB of one GPU by technique and kind, and the memory
    of an H100."""
    values = {}
    shown = load(root / "measure" / "suites" / "front.json")["picture"]
    for label, name in shown.items():
        kinds = results["front"]["outputs"][name]["output"][0]["kinds"]
        sums = {title: sum(kinds[kind] for kind in some) for title, some in KINDS.items()}
        values[label] = {title: round(size / 2**30, 2) for title, size in sums.items()}
    found = {}
    for language, words in LANGUAGES.items():
        words = words and words | WORDS["front"]
        data = {"values": values, "line": MEMORY, "words": words}
        data |= {"title": words.get(TITLE, TITLE), "limit": words.get(LIMIT, LIMIT)}
        found[f"memory{language}"] = data
    return found


def diff_block(root: Path) -> str:
    """The lines of the diff from DDP to FSDP that train, without the options of both scripts."""
    pair = pair_of(root, technique("FSDP"))
    lines = [line.replace("    ", "", 1) for line in pair.diff(0) if re.search(SHOWN, line)]
    return fenced("diff", [f"# {pair.old} -> {pair.new}", *lines])
