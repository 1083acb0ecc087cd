"""Compare evaluation losses of a technique and the one it replaces, by seed: results/losses.json.

    python measure/losses.py muon
    python measure/losses.py float8

muon    pytorch_Muon.py against AdamW, after 600 steps of nanoGPT's recipe
        (config/shakespeare.args), at three learning rates each, as the best one may differ.
float8  pytorch_float8.py against bfloat16, after 300 steps.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from harness.measure import git_commit, hardware, versions  # noqa: E402
from report.fresh import files_of  # noqa: E402

RECIPE = "@config/shakespeare.args --device cpu --print-freq 500"
FLAGS = {"muon": f"{RECIPE} --max-steps 600", "float8": f"{RECIPE} --max-steps 300"}
MUON = itertools.product(("pytorch_FSDP", "pytorch_Muon"), (0.001, 0.002, 0.004))
ROWS = {
    "muon": [f"{script}.py --lr {lr}" for script, lr in MUON],
    "float8": ["pytorch_FSDP.py", "pytorch_FSDP.py --dtype bfloat16", "pytorch_float8.py",
               "pytorch_float8.py --scaling rowwise"],
}  # fmt: skip
RESULTS = ROOT / "results" / "losses.json"


def loss(command: str) -> float:
    """The last evaluation loss of a run on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        words = f"torchrun --standalone --nproc_per_node=2 {command} --output-dir {folder}"
        subprocess.run(words.split(), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(folder, "result.json").read_text())["eval_loss"][-1]


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=ROWS)
    what = parser.parse_args().what
    rows, flags = [], FLAGS[what]
    for row in ROWS[what]:
        script, _, own = row.partition(" ")
        command = f"{script} {flags} {own} --seed"
        losses = [loss(f"{command} {seed}") for seed in range(3)]
        rows.append({"script": row, "losses": losses})
        print(row, *(f"{each:.4f}" for each in losses), flush=True)
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    found[what] = {
        "rows": rows, "flags": flags, "hardware": hardware(), "versions": versions(),
        "git_commit": git_commit(), "files": files_of(ROOT, ROWS[what]),
    }  # fmt: skip
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
