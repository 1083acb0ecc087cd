"""Put what the tests measured into results/proof.json, for benchmark.py --render.

python -m pytest -m '' --junitxml=measured.xml
python tests/collect_proof.py measured.xml [more.xml ...]
"""

import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from harness.measure import git_commit  # noqa: E402

PROOF = ROOT / "results" / "proof.json"
TABLES = ("parity", "parity_gpt", "bytes", "sent", "loss", "shared", "silent")


def read_measured(paths):
    """The properties that tests recorded, by table, sorted; each once, the last one counts."""
    found = {table: {} for table in TABLES}
    for node in (node for path in paths for node in ElementTree.parse(path).iter("property")):
        if node.get("name") in found:
            row = json.loads(node.get("value"))
            key = row["script"], row["ranks"], row.get("optimizer"), row.get("mistake")
            found[node.get("name")][key] = row
    found = {table: list(rows.values()) for table, rows in found.items()}
    for table, rows in found.items():
        if not rows:
            raise SystemExit(f"{paths} have no measurement for the table '{table}'")
        rows.sort(key=lambda row: json.dumps(row, sort_keys=True))
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    about = {"versions": versions, "machine": platform.processor() or platform.machine()}
    return about | {"git_commit": git_commit()} | found


if __name__ == "__main__":
    PROOF.write_text(json.dumps(read_measured(sys.argv[1:]), indent=1) + "\n")
