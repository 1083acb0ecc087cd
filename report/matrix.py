"""Which techniques work together: a matrix of what tests prove, and of what scripts refuse."""

import itertools
import json
import re
from pathlib import Path

from report.blocks import draw, footer
from techniques import TECHNIQUES

FOUND = json.loads(Path(__file__).with_name("matrix.json").read_text())
# By short name: the page, and what a command that uses the technique contains; by pair: a command
# that a script refuses, and words of the error.
MARKS, REFUSED = FOUND["marks"], {tuple(key.split()): v for key, v in FOUND["refused"].items()}


def proven(proof: dict) -> list[str]:
    """Commands with the result of one process: of the contract, and those that were measured."""
    cases = [(row, case) for row in TECHNIQUES for case in row.cases if "by_hand" not in row.name]
    found = [f"{t.script} {c.flags}" + " --tie" * ("tied" in c.traits) for t, c in cases]
    tables = ("parity", "parity_gpt", "parity_shared", "combinations")
    measured = [row["script"] for table in tables for row in proof[table]]
    return found + [command for command in measured if "by_hand" not in command]


def pairs(commands: list[str]) -> set[tuple[str, str]]:
    """The techniques that are in one command."""
    found = [[n for n, (_, mark) in MARKS.items() if re.search(mark, c)] for c in commands]
    return {pair for names in found for pair in itertools.permutations(names, 2)}


def matrix_block(root: Path, proof: dict) -> str:
    """Each technique has a row, those with many partners also a column."""
    good, bad = pairs(proven(proof)), {*REFUSED} | {pair[::-1] for pair in REFUSED}
    signs = {(True, False): "✓", (True, True): "(✓)", (False, True): "✗", (False, False): ""}

    often = [n for n in MARKS if len({pair for pair in good if pair[0] == n}) > 5]
    rows = []
    for name, (page, _) in MARKS.items():
        marks = {other: signs[(name, other) in good, (name, other) in bad] for other in often}
        rows.append(marks | {name: "–", "link": f"[{name}](docs/techniques/{page}.md)"})
    columns = {"": "{link}"} | {name: f"{{{name}}}" for name in often}
    lines = [f"- `{command}`: {words}" for command, words in REFUSED.values()]
    about = footer(root, proof["measured"]["combinations"], "proof.json")
    return draw(rows, columns) + about + "\n\n" + "\n".join(lines)
