"""Put what the tests measured into the README's tables.

    python -m pytest --junitxml=measured.xml
    python tests/render_tables.py measured.xml [more.xml ...]

writes results/proof.json, and from it the tables between ``<!-- name -->`` and ``<!-- end -->`` in
README.md. Without an argument the README is rendered from what is in results/, which is also where
model_inference.py --benchmark puts its own.
"""

import json
import platform
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import model_inference  # noqa: E402

PROOF, README = ROOT / "results" / "proof.json", ROOT / "README.md"
INFERENCE = ROOT / "results" / "inference.json"
TABLES = ("parity", "bytes", "sent", "loss")


def read_measured(paths):
    """The properties that tests recorded, by table, sorted; each once, the last one counts."""
    found = {table: {} for table in TABLES}
    for node in (node for path in paths for node in ElementTree.parse(path).iter("property")):
        if node.get("name") in found:
            row = json.loads(node.get("value"))
            key = row["script"], row["ranks"], row.get("optimizer")
            found[node.get("name")][key] = row
    found = {table: list(rows.values()) for table, rows in found.items()}
    for table, rows in found.items():
        if not rows:
            raise SystemExit(f"{paths} have no measurement for the table '{table}'")
        rows.sort(key=lambda row: json.dumps(row, sort_keys=True))
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"versions": versions, "machine": platform.processor() or platform.machine(), **found}


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def name_of(row):
    """``pytorch_DDP_ZeRO --use_zero`` as the README writes it."""
    return "`" + row["script"].removeprefix("pytorch_") + "`"


def by_script(rows):
    """Rows of each script, scripts in the order of the README's first table."""
    order = re.findall(r"^\| `(pytorch_\w+)\.py`", README.read_text(), re.MULTILINE)
    scripts = sorted({row["script"] for row in rows}, key=lambda s: (order.index(s.split()[0]), s))
    return {s: [row for row in rows if row["script"] == s] for s in scripts}


def parity(rows):
    """Largest relative difference of any tensor; worst over the world sizes."""
    lines = []
    for group in by_script(rows).values():
        cells = [name_of(group[0]), ", ".join(map(str, sorted({row["ranks"] for row in group})))]
        for optimizer in ("sgd", "adamw"):
            values = [row["value"] for row in group if row["optimizer"] == optimizer]
            cells.append(f"{max(values):.0e}" if values else "")
        lines.append(cells)
    return markdown(["script", "ranks", "SGD with momentum", "AdamW"], lines)


def number(value):
    return f"{value:.2f}".rstrip("0").rstrip(".")


def state_bytes(rows):
    """parameters + gradients + optimizer (+ what else), for SGD / AdamW, at 1, 2 and 4 ranks."""
    lines = []
    kinds = ("parameters", "gradients", "optimizer")
    for group in by_script(rows).values():
        cells = [name_of(group[0])]
        for ranks in (1, 2, 4):
            at = {row["optimizer"]: row for row in group if row["ranks"] == ranks}
            if not at:
                cells.append("")
                continue
            kept = at.get("sgd", at.get("adamw"))["kept"]
            text = " + ".join(number(kept[kind]) for kind in kinds[:2]) + " +"
            if "sgd" in at:
                text += f" {number(kept['optimizer'])}"
            if "adamw" in at:
                text += f" ({number(at['adamw']['kept']['optimizer'])})"
            for extra in sorted(kind for kind in kept if kept[kind] and kind not in kinds):
                text += f" + {number(kept[extra])} {extra.replace('_', ' ')}"
            cells.append(text)
        lines.append(cells)
    return markdown(["script", "1 rank", "2 ranks", "4 ranks"], lines)


def sent(rows):
    lines = []
    for group in by_script(rows).values():
        cells = [name_of(group[0])]
        for ranks in (2, 4):
            parts = []
            for row in group:
                if row["ranks"] == ranks:
                    sent = sorted(row["sent"].items())
                    parts = [f"{number(size)} {kind.replace('_', '-')}" for kind, size in sent]
            cells.append(", ".join(part for part in parts if not part.startswith("0 ")))
        lines.append(cells)
    return markdown(["script", "2 ranks", "4 ranks"], lines)


def loss(rows):
    lines = []
    for group in by_script(rows).values():
        for row in group:
            change = f"{row['value'] / row['fp32'] - 1:+.2%}"
            cells = [name_of(row), row["ranks"], f"{row['fp32']:.4f}", f"{row['value']:.4f}"]
            lines.append([*cells, change])
    return markdown(["script", "ranks", "loss in fp32", "its loss", "difference"], lines)


def render(text, proof):
    """The README's text with its tables made anew."""
    draw = {"parity": parity, "bytes": state_bytes, "sent": sent, "loss": loss}
    drawn = {table: draw[table](proof[table]) for table in TABLES}
    drawn["inference"] = model_inference.table(json.loads(INFERENCE.read_text()))
    for table, lines in drawn.items():
        pattern = rf"(<!-- {table} -->\n).*?(<!-- end -->)"
        new = f"\\g<1>\n{lines}\n\n\\g<2>"
        text, found = re.subn(pattern, new, text, flags=re.DOTALL)
        if found != 1:
            raise SystemExit(f"README.md has {found} places for the table '{table}'")
    return text


def main():
    if len(sys.argv) > 1:
        PROOF.parent.mkdir(exist_ok=True)
        PROOF.write_text(json.dumps(read_measured(sys.argv[1:]), indent=1) + "\n")
    README.write_text(render(README.read_text(), json.loads(PROOF.read_text())))


if __name__ == "__main__":
    main()
