"""Which techniques work together: a matrix of what tests prove, and of what scripts refuse."""

import itertools
import json
import re
from pathlib import Path

from report.blocks import draw
from techniques import TECHNIQUES

FOUND = json.loads(Path(__file__).with_name("matrix.json").read_text())
# By short name: the page, and what a command that uses the technique contains; by pair: a command
# that a script refuses, words of the error, and a sentence about it.
MARKS = FOUND["marks"]
REFUSED = {tuple(key.split()): said for key, said in FOUND["refused"].items()}
COMBINED = FOUND["combined"]  # commands that are no case of the contract: tests name them
MANY = 5  # partners, from which on a technique has a column


def proven() -> list[str]:
    """Commands that tests compare with one process: the contract, and :data:`COMBINED`."""
    found = list(COMBINED)
    for row in TECHNIQUES:
        for case in row.cases:
            tied = " --tie" if "tied" in case.traits else ""
            found.append(f"{row.script} {case.flags}{tied}")
    return [command for command in found if "by_hand" not in command]


def pairs(commands: list[str]) -> set[tuple[str, str]]:
    """The techniques that are in one command."""
    found = set()
    for command in commands:
        names = [name for name, (_, mark) in MARKS.items() if re.search(mark, command)]
        found |= {*itertools.permutations(names, 2)}
    return found


def matrix_block() -> str:
    """Each technique has a row, those with many partners also a column."""
    good = pairs(proven())
    bad = {*REFUSED} | {pair[::-1] for pair in REFUSED}
    signs = {(True, False): "✓", (True, True): "(✓)", (False, True): "✗", (False, False): ""}
    columns = {"": "{link}"}
    for name in MARKS:
        if len([pair for pair in good if pair[0] == name]) > MANY:
            columns[name] = f"{{{name}}}"
    rows = []
    for name, (page, _) in MARKS.items():
        row = {other: signs[(name, other) in good, (name, other) in bad] for other in columns}
        rows.append(row | {name: "–", "link": f"[{name}](docs/techniques/{page}.md)"})
    lines = [f"- `{command}`: {why}" for command, _, why in REFUSED.values()]
    return draw(rows, columns) + "\n\n" + "\n".join(lines)
