"""Compare predictions with published peaks of language models: results/published.json.

measure/published.json has the runs, each with its source and configuration. A run is repeated on
fake tensors by :mod:`measure.estimates.llama`, or by pytorch_ND_parallel.py for a pipeline. For
reserved memory a range is predicted: from the peak of the tensors to what PyTorch's allocator would
have reserved for them, which depends on the order of allocations and on FSDP's streams.
"""

import json
import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.utils._pytree import tree_leaves

from estimate import job_of, parse_args
from estimator import recommend, techniques, trial
from estimator.allocator import replay
from estimator.live_bytes import LiveBytes, storages_of
from measure.estimates import GIVEN, count, llama

FIGURES = "published", "lowest", "highest"


class GraphBytes(LiveBytes):
    """Counts as if a traced graph ran: all on one stream, and a tensor is freed after the last
    operation that reads it. Eager PyTorch frees what autograd saved after the whole node, as it
    does for the loss if only the ``model`` is traced."""

    def __init__(self, model: bool):
        super().__init__()
        self.last, self.freed = {}, {}  # by storage number, and by index into changes
        self.eager = ("activations", "temporary") if model else ()  # kinds that llama.py sets

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        reads = not func.is_view and func.namespace != "prim"  # which asks for the device
        if out is not NotImplemented and reads:
            leaves = tree_leaves((args, kwargs, out))
            for storage in (s for t in leaves if isinstance(t, Tensor) for s in storages_of(t)):
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


def configuration(row: dict) -> str:
    """What a prediction depends on: the same for runs that differ in what is not predicted."""
    names = "program", "options", "gpus", "graph", "script", "rank", "few", "layers"
    return json.dumps([row.get(name) for name in names])


def predict(row: dict, layers: int) -> list[int]:
    """Bytes with so many layers: the peak of the tensors, and what is reserved for them. The
    process cannot be used for anything else afterwards."""
    if "script" in row:
        options = {"classes": llama.VOCABULARY, "rank": row["rank"], "layers": layers}
        live, _ = trial.run_script(row["script"].split(), row["gpus"], **options)
        before, left = live.changes[: live.begin], Counter()
        for number, more in before:
            left[number] += more  # 0: of another stage, which torchtitan has without data
        live.changes[: live.begin] = [change for change in before if left[change[0]]]
    else:
        live = GraphBytes(row["graph"] == "model") if "graph" in row else LiveBytes()
        train = partial(getattr(llama, row["program"]), layers=layers, **row["options"])
        count(live, row["gpus"] * (row["program"] == "pretrain"), train)
    if "graph" in row:
        live.reorder()
    [(_, *peaks)] = replay(live, [len(live.changes)], expandable=True)
    return peaks


def predict_all(rows: list[dict]) -> Iterator[list[int]]:
    """Predictions with all layers; from two with few, if the row says so: the peak of the tensors
    grows linearly with layers of which each peak has some, and what is reserved nearly so."""
    tasks = [partial(predict, row, n) for row in rows for n in row.get("few", [row["layers"]])]
    found = techniques.side_by_side(tasks, os.cpu_count())
    for row in rows:
        sizes = next(found)
        if "few" in row:
            few, more = row["few"]
            times = (row["layers"] - more) / (more - few)
            sizes = [round(m + times * (m - f)) for f, m in zip(sizes, next(found), strict=True)]
        yield sizes


def compare(done: dict[str, list[int]]) -> dict:
    """Published and predicted: peaks in GiB, and speeds; and differences of two peaks and ratios of
    two speeds, which depend less on what both lack."""
    peaks, speeds, found = {}, {}, {"differences": [], "slopes": []}
    for row in GIVEN["runs"]:
        of_tensors, reserved = (size / 2**30 for size in done[configuration(row)])
        highest = reserved if row["memory"] == "reserved" and reserved else of_tensors
        peaks[row["name"]] = row | beside(row["published"], of_tensors, highest, highest)
    for row in GIVEN["speeds"]:
        speeds[row["name"]] = row | beside(row["published"], *predict_speed(row))
    for one, other in GIVEN["pairs"]:
        figures = (peaks[one][key] - peaks[other][key] for key in (*FIGURES, "highest"))
        found["differences"].append({"from": one, "to": other} | beside(*figures))
    for one, other in GIVEN["slopes"]:
        figures = (speeds[other][key] / speeds[one][key] for key in FIGURES)
        found["slopes"].append({"from": one, "to": other} | beside(*figures))
    return found | {"peaks": [*peaks.values()], "speeds": [*speeds.values()]}


def beside(published: float, low: float, high: float, predicted: float | None = None) -> dict:
    """A published figure, the predicted range, and how far ``predicted`` is off: by default the
    range's nearest point."""
    nearest = min(max(published, min(low, high)), max(low, high))
    off = (nearest if predicted is None else predicted) / published - 1
    return dict(zip(FIGURES, (published, low, high), strict=True)) | {"off": off}


def predict_speed(row: dict) -> list[float]:
    """Tokens per second and GPU: lowest and highest."""
    args, flags = parse_args([*row["flags"].split(), "--recommend"])
    way = recommend.Way("ND_parallel", (), ranks=args.gpus, steps=1, **row["way"])
    return recommend.speed_of(job_of(args, flags), way, args.link)


def main() -> None:
    """Write DIR/published.json: peaks in GiB, tokens per second; or print the bytes of a run."""
    rows = {row["name"]: row for row in GIVEN["runs"]}
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=rows, help="print its bytes")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/published"), metavar="DIR")
    args = parser.parse_args()
    if args.name:
        return print(*next(predict_all([rows[args.name]])))
    todo = {configuration(row): row for row in rows.values()}
    found = compare(dict(zip(todo, predict_all([*todo.values()]), strict=True)))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "published.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
