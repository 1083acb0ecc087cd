"""The libraries' scripts beside the raw ones: lines, speed, bytes."""

import difflib
import re
import statistics
from pathlib import Path

from report import stale, tables
from report.results import Unusable, read_results, speeds_of
from report.theory import RAW

NAMES = ["pytorch_SingleGPU", *dict.fromkeys(RAW.values()), *RAW]


def blocks(root: Path) -> dict[str, str]:
    """What stands on docs/ecosystem.md, by the name of its place."""
    path = root / "results" / "ecosystem.json"
    if not path.is_file():
        return {"ecosystem": "not measured yet: `python benchmark.py --suite ecosystem`"}
    found = read_results(path)
    rows = [row for row in found["rows"] if row["table"] == "ecosystem"]
    where = tables.measured_where(found, rows) + stale.note_of_rows(root, found, rows)
    return {"ecosystem": f"{ecosystem_table(root, rows)}\n\n{where}"}


def ecosystem_table(root: Path, rows: list[dict]) -> str:
    """A row for each script. Speeds are shares: of the bare loop, and of the raw script's with as
    many ranks."""
    speeds, threads, kept = {}, {}, {}
    for row in rows:
        if row["runs"]:
            run = row["runs"][0]
            key = run["technique"], run["world_size"]
            speeds[key] = statistics.median(speeds_of(row["runs"]))
            threads[key] = run["threads"]
            if run["state_bytes"]:
                kept[key] = tables.kept_cell(run, tables.digits)

    def share(ours: tuple[str, int], theirs: tuple[str, int]) -> str:
        if ours == theirs or ours not in speeds or theirs not in speeds:
            return ""
        if threads[ours] != threads[theirs]:  # no comparison
            raise Unusable(f"{ours} had {threads[ours]} threads, {theirs} {threads[theirs]}")
        return f"{speeds[ours] / speeds[theirs]:.2f}"

    lines = []
    for name in NAMES:
        raw = RAW.get(name, name)
        cells = [f"`{name}`", len(code_of(root, name))]
        cells.append(count_new(root, "pytorch_SingleGPU", name) or "")
        cells.append(count_new(root, raw, name) or "")
        cells.append(share((name, 1), ("peer: bare", 1)))
        cells += [share((name, ranks), (raw, ranks)) for ranks in (1, 2)]
        lines.append([*cells, kept.get((name, 2), kept.get((name, 1), ""))])
    header = ["script", "lines", "not in SingleGPU", "not in the raw script"]
    header += ["of the bare loop, 1 rank", "of the raw script, 1 rank"]
    header += ["of the raw script, 2 ranks", "kept (theory)"]
    return tables.markdown(header, lines)


def code_of(root: Path, script: str) -> list[str]:
    """A script's lines below its docstring, without empty ones, comments and spaces."""
    lines = (root / f"{script}.py").read_text().split('"""\n', 1)[1].splitlines()
    lines = [re.sub(r"(^|  )#.*", "", line).strip() for line in lines]
    return [line for line in lines if line]


def count_new(root: Path, parent: str, script: str) -> int:
    """How many lines of a script its parent has not."""
    old, new = code_of(root, parent), code_of(root, script)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return len(new) - sum(block.size for block in matcher.get_matching_blocks())
