"""The table of the libraries' scripts: how many lines they have, counted in the files."""

import difflib
import re

from report.blocks import TABLES, draw
from report.results import ROOT
from techniques import LIBRARIES

# Those of which theory depends: two ranks, AdamW, and what the scripts' commands give.
OPTIONS = {"optimizer": "adamw", "strategy": "ddp"}
OPTIONS["deepspeed_config"] = "config/zero_stage2_config.json"


def ecosystem_table() -> str:
    """A row for each script of a library, beside the raw script that it equals."""
    rows = []
    for one in LIBRARIES:
        raw = f"pytorch_{one.parent}"
        row = {"script": one.script, "raw": raw, "lines": len(code_of(one.script))}
        row |= {"of_raw": len(code_of(raw)), "new": count_new(raw, one.script)}
        rows.append(row | {"state": sum(one.keeps(2, OPTIONS).values())})
    return draw(rows, TABLES["ecosystem"])


def code_of(script: str) -> list[str]:
    """A script's lines below its docstring, without empty ones, comments and spaces."""
    _, code = (ROOT / f"{script}.py").read_text().split('"""\n', 1)
    lines = [re.sub(r"(^|  )#.*", "", line).strip() for line in code.splitlines()]
    return [line for line in lines if line]


def count_new(parent: str, script: str) -> int:
    """Number of lines of a script that its parent does not have."""
    diff = difflib.unified_diff(code_of(parent), code_of(script), n=0)
    return sum(line.startswith("+") and line != "+++ \n" for line in diff)
