"""python tests/live_file.py FILE fake|real: bytes of the live tensors at the peak of one rank of a
file of examples/, by kind; of fake tensors, or of real ones."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from estimator import own_file, trial  # noqa: E402
from estimator.live_bytes import LiveBytes  # noqa: E402

path, how = sys.argv[1:]
module = own_file.load(Path(path))
if how == "real":
    trial.become_rank(0, 1)
    os.environ["MASTER_PORT"] = "0"
run = own_file.Rehearsal(module, LiveBytes(1, finds_places=True))
run.run(None if how == "real" else 1, as_on_a_gpu=False)
found = own_file.Found(path, 1, module.BATCH)
run.report(found)
print(json.dumps({"kinds": found.kinds, "host": found.host}), flush=True)
os._exit(0)  # nothing is left to be destroyed
