"""Compare the libraries' scripts with the raw ones: lines, speed, bytes."""

import difflib
import re
from pathlib import Path

from report import tables
from report.results import Unusable
from report.theory import RAW

NAMES = ["pytorch_SingleGPU", *dict.fromkeys(RAW.values()), *RAW]


def ecosystem_table(root: Path, rows: list[dict]) -> str:
    """A row for each script. Speeds are relative: to the bare loop, and to the raw script on as
    many ranks; in brackets the range over the rounds."""
    measured = [row["runs"] for row in rows if row["runs"]]
    runs = {(run[0]["technique"], run[0]["world_size"]): run for run in measured}

    def share(ours: tuple[str, int], theirs: tuple[str, int]) -> str:
        if ours == theirs or not {ours, theirs} <= set(runs):
            return ""
        threads = [runs[key][0]["threads"] for key in (ours, theirs)]
        if len(set(threads)) > 1:  # no comparison
            raise Unusable(f"{ours} had {threads[0]} threads, {theirs} {threads[1]}")
        return tables.relative_speed(runs[ours], runs[theirs])

    lines = []
    for name in NAMES:
        raw, own = RAW.get(name, name), runs.get((name, 2), runs.get((name, 1), [{}]))[0]
        cells = [f"`{name}`", len(code_of(root, name))]
        cells += [count_new(root, old, name) or "" for old in ("pytorch_SingleGPU", raw)]
        cells.append(share((name, 1), ("peer: bare", 1)))
        cells += [share((name, ranks), (raw, ranks)) for ranks in (1, 2)]
        cells.append(tables.kept_cell(own, tables.digits) if own.get("state_bytes") else "")
        lines.append(cells)
    header = ["script", "lines", "not in SingleGPU", "not in the raw script"]
    header += ["of the bare loop, 1 rank", "of the raw script, 1 rank"]
    header += ["of the raw script, 2 ranks", tables.KEPT]
    return tables.markdown(header, lines)


def code_of(root: Path, script: str) -> list[str]:
    """A script's lines below its docstring, without empty ones, comments and spaces."""
    lines = (root / f"{script}.py").read_text().split('"""\n', 1)[1].splitlines()
    lines = [re.sub(r"(^|  )#.*", "", line).strip() for line in lines]
    return [line for line in lines if line]


def count_new(root: Path, parent: str, script: str) -> int:
    """Number of lines of a script that its parent does not have."""
    old, new = code_of(root, parent), code_of(root, script)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return len(new) - sum(block.size for block in matcher.get_matching_blocks())
