"""Put what the tests measured into results/proof.json, for benchmark.py --render.

python -m pytest -m '' --junitxml=measured.xml; python measure/collect_proof.py measured.xml
"""

import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from harness.measure import git_commit  # noqa: E402
from report import fresh  # noqa: E402

PROOF = ROOT / "results" / "proof.json"
TABLES = "parity parity_gpt bytes sent loss shared silent parity_shared silent_examples optimizers"
TABLES += " combinations"


def read_measured(paths):
    """The properties that passed tests recorded, by table, sorted; each once, the last one counts.
    Tables that have none stay as they were."""
    found = {table: {} for table in TABLES.split()}
    cases = (case for path in paths for case in ElementTree.parse(path).iter("testcase"))
    for node in (n for c in cases if c.find("failure") is None for n in c.iter("property")):
        if node.get("name") in found:
            row = json.loads(node.get("value"))
            key = row["script"], row.get("ranks"), row.get("optimizer"), row.get("mistake")
            found[node.get("name")][key] = row
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    before, tables = json.loads(PROOF.read_text()), {}
    measured = before["measured"]
    for table, rows in found.items():
        rows = sorted(rows.values(), key=lambda row: json.dumps(row, sort_keys=True))
        tables[table] = rows or before.get(table, [])
        if rows:
            scripts = {f"{row['script'].split()[0]}.py" for row in rows}
            below = ["examples/silent/two_ranks.py"] if table == "silent_examples" else fresh.BELOW
            files = fresh.files_of(ROOT, scripts, below)
            measured[table] = {"git_commit": git_commit(), "versions": versions, "files": files}
    return {"machine": platform.processor() or platform.machine(), "measured": measured} | tables


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE.xml", help="what pytest wrote")
    found = read_measured(parser.parse_args().files)
    PROOF.write_text(json.dumps(found, indent=1) + "\n")
