"""Compare predictions with published peaks of language models: results/published.json.

    python -m measure.estimates.language_models [NAME]

measure/published.json has the runs, each with its source and configuration. A run is repeated on
fake tensors by :mod:`measure.estimates.llama`, or by pytorch_ND_parallel.py for a pipeline. For
reserved memory a range is predicted: from the peak of the tensors to what PyTorch's allocator would
have reserved for them, which depends on the order of allocations and on FSDP's streams.
"""

import json
import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from estimator import techniques, trial
from estimator.allocator import replay
from estimator.live_bytes import LiveBytes, storages_of
from measure.estimates import kempner, litgpt, llama

GIVEN = json.loads((trial.ROOT / "measure" / "published.json").read_text())
PROGRAMS = {"pretrain": llama.pretrain, "finetune": llama.finetune}
PROGRAMS |= {"forge": kempner.forge, "adapt": litgpt.adapt}


class GraphBytes(LiveBytes):
    """Counts as if a traced graph ran: all on one stream, and a tensor is freed after the last
    operation that reads it. Eager PyTorch frees what autograd saved after the whole node, as it
    does for the loss if only the ``model`` is traced."""

    def __init__(self, model: bool):
        super().__init__()
        self.last = {}  # by storage number
        self.freed = {}  # by index into changes
        self.eager = ("activations", "temporary") if model else ()  # kinds that llama.py sets

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        reads = not func.is_view and func.namespace != "prim"  # which asks for the device
        if out is not NotImplemented and reads:
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
            for storage in (storage for t in tensors for storage in storages_of(t)):
                number, _ = self.alive.get(storage._cdata, (None, 0))
                self.last[number] = len(self.changes)
        return out

    def forget(self, address: int) -> None:
        number, _ = self.alive[address]
        if self.kinds[number] not in self.eager:
            self.freed[len(self.changes)] = self.last[number] - 0.5  # before the next change
        super().forget(address)

    def reorder(self) -> None:
        times = [(self.freed.get(at, at), change) for at, change in enumerate(self.changes)]
        self.changes = [change for _, change in sorted(times, key=lambda time: time[0])]
        self.streams = [0] * len(self.streams)


def run_script(row: dict) -> LiveBytes:
    """Repeat a run by our script. What only other stages have, torchtitan has without data."""
    options = {"classes": llama.VOCABULARY, "rank": row["rank"], "layers": row["layers"]}
    live, _ = trial.run_script(row["script"].split(), row["gpus"], **options)
    before = live.changes[: live.begin]
    left = Counter()
    for number, more in before:
        left[number] += more
    live.changes[: live.begin] = [change for change in before if left[change[0]]]
    return live


def run_program(row: dict) -> LiveBytes:
    """Train as others do, as rank 0, on fake tensors; on one GPU without a process group."""
    live = GraphBytes(row["graph"] == "model") if "graph" in row else LiveBytes()
    ranks = row["gpus"] if row["gpus"] > 1 else 0
    trial.prepare(ranks)
    if ranks:
        dist.init_process_group("fake", rank=0, world_size=ranks)
    with trial.counting(live, ranks):
        PROGRAMS[row["program"]](live, layers=row["layers"], **row["options"])
    return live


def predict(row: dict) -> tuple[int, int]:
    """Bytes: the peak of the tensors, and what is reserved for them. The process cannot be used for
    anything else afterwards."""
    if "script" in row:
        live = run_script(row)
    else:
        live = run_program(row)
    if "graph" in row:
        live.reorder()
    return replay(live, row.get("expandable", True))


def predict_all(rows: list[dict]) -> list[tuple[int, int]]:
    """The same of each row, in processes of its own. If a row has two ``smaller`` numbers of
    layers, the tensors' peak is extrapolated from them, and nothing is said of what is reserved."""
    parts = [row | {"layers": n} for row in rows for n in row.get("smaller", [row["layers"]])]
    tasks = [partial(predict, part) for part in parts]
    found = techniques.side_by_side(tasks, os.cpu_count())
    peaks = []
    for row in rows:
        of_tensors, reserved = next(found)
        if "smaller" in row:
            few, more = row["smaller"]
            of_more, _ = next(found)
            of_tensors += (of_more - of_tensors) * (row["layers"] - few) // (more - few)
            reserved = of_tensors
        peaks.append((of_tensors, reserved))
    return peaks


def compare(row: dict, of_tensors: int, reserved: int) -> dict:
    """A run with what was published and the predicted range, in GiB."""
    found = {key: row[key] for key in ("name", "source", "memory")}
    found["published"] = row.get("published") or row["published_gb"] * 1e9 / 2**30
    found["lowest"] = of_tensors / 2**30
    found["highest"] = reserved / 2**30 if row["memory"] == "reserved" else found["lowest"]
    return found


def main() -> None:
    """Write DIR/published.json, with peaks in GiB; or print the bytes of a run."""
    rows = {row["name"]: row for row in GIVEN["runs"]}
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=rows, help="print its bytes")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/published"), metavar="DIR")
    args = parser.parse_args()
    if args.name:
        [sizes] = predict_all([rows[args.name]])
        return print(*sizes)
    found = predict_all([*rows.values()])
    peaks = [compare(row, *sizes) for row, sizes in zip(rows.values(), found, strict=True)]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "published.json").write_text(json.dumps({"peaks": peaks}, indent=1) + "\n")


if __name__ == "__main__":
    main()
