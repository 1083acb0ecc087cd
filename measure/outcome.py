"""What a run left behind: what it printed, the curve of its loss, its parameters, or the reason why
it failed."""

import json
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

from harness.cli import fail

FIGURES = ("state_bytes", "train_loss", "eval_loss")  # of a run, that are recorded
MORE = {"pytorch_compile": "first_step_seconds", "--profile-memory": "peak_memory_gib"}


def read_curve(folder: Path) -> list[list[float]]:
    """Steps and losses from TensorBoard's file; empty if there is none."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    found = reader.Scalars("step/loss") if "step/loss" in reader.Tags()["scalars"] else []
    return [[point.step, round(point.value, 4)] for point in found]


def is_parameter(name: str) -> bool:
    """Whether a tensor is a parameter: not a statistic, a vocabulary or an encoder's extras."""
    buffers = ("running_mean", "running_var", "num_batches_tracked", "vocabulary")
    return not name.endswith((*buffers, "tokenizer", "config", "position_ids"))


def reason(text: str, code: int | None) -> str:
    """Why a run failed, in a few words, from its output."""
    text = text.replace("|", "/")  # which would end a table cell
    if re.search(r"out of memory|can't allocate memory|DefaultCPUAllocator", text, re.IGNORECASE):
        return "out of memory"
    if missing := re.search(r"No module named '([\w.]+)'", text):
        return f"{missing[1]} is not installed"
    if ours := re.findall(r"^\w+: error: (.*)$", text, re.MULTILINE):
        return ours[-1]
    raised = r"^(?:\[rank\d+\]: )?(\w*(?:Error|Exception): .*)$"
    if errors := re.findall(raised, text, re.MULTILINE):
        return errors[0][:200]
    lines = text.strip().splitlines() or ["no output"]
    return f"exit code {code}: {lines[-1][:200]}"


def record(commands: dict[str, str], root: Path, environment: dict) -> dict:
    """What each command prints: its lines, or the data of ``--json``; of a script that has an
    ``--output-dir``, instead, some figures of its ``result.json``, of times only that of
    compiling."""
    found = {}
    for number, (name, command) in enumerate(commands.items(), 1):
        print(f"{number} of {len(commands)}: {name}", flush=True)
        folder = re.search(r"--output-dir (runs/\S+)", command)
        result = root / folder[1] / "result.json" if folder else None
        if result:  # that of an earlier run would be recorded if this one fails
            result.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as cache:  # or it would find what another run compiled
            env = environment | {"TORCHINDUCTOR_CACHE_DIR": cache}
            run = subprocess.run(
                shlex.split(command), cwd=root, env=env, text=True, capture_output=True
            )
        ended = result.is_file() if result else run.stdout  # estimate.py: 2 if nothing fits
        if not ended:
            fail(f"{name}: {reason(run.stderr, run.returncode)}: {command}", code=3)
        if result:
            found[name] = {"command": command, "result": figures_of(result, command)}
            continue
        printed = run.stdout.replace(f"{root}/", "")  # paths of this machine
        output = json.loads(printed) if "--json" in command else printed.splitlines()
        found[name] = {"command": command, "output": output}
    return found


def figures_of(path: Path, command: str) -> dict:
    """What is recorded of a ``result.json``."""
    result = json.loads(path.read_text())
    names = [*FIGURES, *(key for word, key in MORE.items() if word in command)]
    figures = {name: result[name] for name in names}
    if "--trace" in command:
        figures["collectives"] = result["breakdown"]["collectives"]
    return figures
