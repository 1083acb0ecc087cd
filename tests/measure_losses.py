"""The evaluation loss of a technique that changes it, against the one it replaces; for three seeds.

    python tests/measure_losses.py muon [flags, such as --data-dir]
    python tests/measure_losses.py float8

muon    pytorch_Muon.py against AdamW, by nanoGPT's recipe (config/shakespeare.args), at three
        learning rates each, as the best one may differ.
float8  pytorch_float8.py against bfloat16, after 300 steps of it.

Written to results/losses.json.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from harness.measure import git_commit, hardware, versions  # noqa: E402

RECIPE = "@config/shakespeare.args --device cpu --print-freq 500"
RATES = ("--lr 0.001", "--lr 0.002", "--lr 0.004")
ROWS = {
    "muon": [
        f"{script}.py {RECIPE} {rate}"
        for script in ("pytorch_FSDP", "pytorch_Muon")
        for rate in RATES
    ],
    "float8": [
        f"{script} {RECIPE} --max-steps 300"
        for script in (
            "pytorch_FSDP.py",
            "pytorch_FSDP.py --dtype bfloat16",
            "pytorch_float8.py",
            "pytorch_float8.py --scaling rowwise",
        )
    ],
}
RESULTS = ROOT / "results" / "losses.json"


def loss(script, seed):
    with tempfile.TemporaryDirectory() as folder:
        command = f"torchrun --standalone --nproc_per_node=2 {script} --seed {seed}"
        command = [*shlex.split(command), *sys.argv[2:], "--output-dir", folder]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(folder, "result.json").read_text())["eval_loss"]


what = sys.argv[1]
rows = []
for script in ROWS[what]:
    losses = [loss(script, seed) for seed in range(3)]
    rows.append({"command": script, "losses": losses})
    print(script, *(f"{each:.4f}" for each in losses), flush=True)
found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
found[what] = {
    "rows": rows, "hardware": hardware(), "versions": versions(),
    "git_commit": git_commit(),
}  # fmt: skip
RESULTS.write_text(json.dumps(found, indent=1) + "\n")
