"""Put tables into the README and docs/, in both languages: between <!-- NAME --> and <!-- end -->.

Every page has two files, NAME.md and NAME.zh-CN.md; every table is on one page.
"""

import ast
import json
import os
import re
import statistics
import textwrap
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from report import ecosystem, front_picture, plots, predictions, stale, tables, timeline_picture
from report.results import ROOT, Unusable, read_figures, read_results, read_words, size_of
from report.scripts import BEYOND, DEFINITIONS, PARENTS

# The rendered suites, and measurements of the tests.
SUITES = ("gpt", "shakespeare", "by_hand", "cpu", "peers", "gpu", "reviews", "parallel")
SUITES += ("local_sgd", "ecosystem")
PROOF = ("parity", "parity_gpt", "parity_shared", "bytes", "sent", "loss", "shared", "silent")
PROOF += ("silent_examples", "optimizers")
BLOCK = re.compile(r"<!-- (?!end )([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
# Chinese translations: whole cells, and phrases in notes.
CELLS, PHRASES = (read_words()[kind] for kind in ("cells", "phrases"))
NOTE = re.compile(r"; (?:measured on|since then|在未提交|此后)[^\n]*")  # of stale.py, on a page


def find_changes(root: Path = ROOT) -> tuple[dict[Path, str], dict[Path, dict]]:
    """What rendering would change: pages with their new text, and plots with what they show.

    Raises:
        Unusable: a result or a page is invalid, and nothing can be rendered.
    """
    results = {
        name: read_results(path)
        for name in (*SUITES, "scaling")
        if (path := root / "results" / f"{name}.json").is_file()
    }
    sweep = read_sweep(root)
    shown = plots.plot_data(results) | plots.bandwidths(sweep)
    shown |= predictions.scaling_plot(predictions.read(root), results.get("scaling"))
    drawn = {root / "results" / f"{name}.svg": data for name, data in shown.items()}
    drawn = {p: data for p, data in drawn.items() if plots.digest_of(p) != plots.digest(data)}
    blocks = make_blocks(root, results) | {"collectives": sweep_block(root, sweep)}
    pictures = timeline_picture.pictures(root) | front_picture.pictures(root)
    pictures = {root / "docs" / name: text for name, text in pictures.items()}
    changed = {p: text for p, text in pictures.items() if not p.is_file() or p.read_text() != text}
    for chinese in (False, True):
        missing = dict.fromkeys(blocks)
        for path in list_pages(root, chinese):
            text = read_page(path)
            up = "../" * (len(path.relative_to(root).parts) - 1)
            new = fill(path, text, blocks, missing, up, chinese)
            if new != text:
                changed[path] = new
        if missing:
            pages = "README.zh-CN.md and docs/*.zh-CN.md" if chinese else "README.md and docs/*.md"
            raise Unusable(f"{pages} have no place <!-- {next(iter(missing))} --> ... <!-- end -->")
    return changed, drawn


def render(changed: dict[Path, str], drawn: dict[Path, dict]) -> None:
    """Write what :func:`find_changes` found."""
    for path, text in changed.items():
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_text(text)
        os.replace(temporary, path)
    for path, data in drawn.items():
        plots.draw(path, data)


def read_sweep(root: Path) -> dict:
    """What ``--suite collectives`` measured; see :func:`report.results.read_figures`."""
    keys = ("operations", "command", "hardware", "versions", "git_commit")
    again = "python benchmark.py --suite collectives"
    return read_figures(root / "results" / "collectives.json", keys, again)


def list_pages(root: Path, chinese: bool) -> list[Path]:
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    pages = [path for path in pages if not path.name.endswith(".zh-CN.md")]
    return [path.with_suffix(".zh-CN.md") for path in pages] if chinese else pages


def read_page(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise Unusable(f"{path} cannot be read ({error.strerror})") from None


def make_blocks(root: Path, results: dict[str, dict]) -> dict[str, str]:
    """All tables, by the name of their block."""
    folder = root / "results"
    proof = json.loads((folder / "proof.json").read_text())
    inference = json.loads((folder / "inference.json").read_text())
    blocks = {name: getattr(tables, f"{name}_table")(proof[name]) + proof_note(root, proof, name)
              for name in PROOF}  # fmt: skip
    since = stale.note(root, inference["git_commit"], [inference["command"]])
    blocks["inference"] = tables.inference_table(inference) + since
    blocks["hardware"] = tables.hardware_table(results, inference)
    blocks["faults"] = tables.outcomes_table(folder / "faults.txt", "fault")
    blocks["faults-checkpoint"] = tables.outcomes_table(folder / "faults_checkpoint.txt", "fault")
    blocks["saves"] = saves_block(root)
    blocks["overhead"] = overhead_block(root)
    blocks |= losses_blocks(root)
    blocks["faults-copies"] = tables.outcomes_table(folder / "faults_copies.txt", "fault")
    blocks["corrupt"] = tables.outcomes_table(folder / "corrupt.txt", "damage")
    blocks["hangs"] = hangs_block(root)
    blocks["bubble"] = bubble_block(root / "results" / "bubble.json")
    estimate = predictions.read(root)
    for name in SUITES:
        predicted = estimate.get("suites", {}).get(name, {})
        blocks |= suite_blocks(root, name, results.get(name, {"rows": []}), proof, predicted)
    blocks |= predictions.blocks(root, estimate, results)
    return blocks | {name: technique_block(root, name, results) for name in PARENTS}


def suite_blocks(root: Path, name: str, found: dict, proof: dict, predicted: dict) -> dict:
    """A suite's tables, each with what has changed since its rows were measured."""
    suite = json.loads((root / "config" / f"suite_{name}.json").read_text())
    drawn, since = {}, partial(stale.note_of_rows, root, found)
    for table in suite["tables"]:
        rows = [row for row in found["rows"] if row["table"] == table]
        drawn[table] = rows and tables.suite_table(found, table) + since(rows)
    if drawn.get("ecosystem"):
        where = tables.measured_where(found, rows) + since(rows)
        drawn["ecosystem"] = f"{ecosystem.ecosystem_table(root, rows)}\n\n{where}"
    if "front" in suite:
        rows = [row for row in found["rows"] if row["name"] in suite["front"]]
        text = rows and tables.front_table(found, proof, suite["front"], predicted) + since(rows)
        drawn["front" if name == "cpu" else f"front-{name}"] = text
    if not any(drawn.values()):
        drawn[suite["tables"][0]] = f"not measured yet: `python benchmark.py --suite {name}`"
    return {table: text or "" for table, text in drawn.items()}


def proof_note(root: Path, proof: dict, name: str) -> str:
    """The line below a table of the proof."""
    scripts = [f"{row['script'].split()[0]}.py" for row in proof[name]]
    below = ["examples/silent/ranks.py"] if name == "silent_examples" else stale.BELOW
    since = stale.note(root, proof["commits"][name], scripts, below)
    about = f"torch {proof['versions']['torch']}; [results/proof.json](results/proof.json)"
    return f"\n\n{about}{since}"


def sweep_block(root: Path, found: dict) -> str:
    """A row for each collective: latency and bandwidth."""
    if not found:
        return "not measured yet: `python benchmark.py --suite collectives`"
    rows = []
    for name, operation in found["operations"].items():
        largest = operation["rows"][-1]["bus"]
        speeds = [f"{speed / 1e9:.2f}" for speed in (operation["bandwidth"], largest)]
        rows.append([f"`{name}`", f"{1e6 * operation['latency']:,.0f}", *speeds])
    size = plots.size_name(operation["rows"][-1]["bytes"])
    header = ["collective", "latency µs", "bandwidth GB/s (fitted)", "bus GB/s (largest message)"]
    about = f"{tables.machine_line(found['hardware'], found['backend'] == 'gloo')}; "
    about += f"{found['backend']}, {found['ranks']} ranks, messages up to {size}; "
    about += f"torch {found['versions']['torch']}; "
    about += "[results/collectives.json](results/collectives.json)"
    since = stale.note(root, found["git_commit"], [found["command"]])
    return f"{tables.markdown(header, rows)}\n\n{about}{since}"


def hangs_block(root: Path) -> str:
    """The results of measure/faults/hang.py."""
    found = json.loads((root / "results" / "hangs.json").read_text())
    scripts = {f"{row['script']}.py" for row in found["rows"]}
    about = f"torch {found['torch']}; [results/hangs.json](results/hangs.json)"
    since = stale.note(root, found["commit"], sorted(scripts))
    return f"{tables.hangs_table(found['rows'])}\n\n{about}{since}"


def bubble_block(path: Path) -> str:
    """The bubble: the share of a step in which a rank is idle."""
    found = json.loads(path.read_text())
    lines = []
    for row in found["rows"]:
        shares = [f"{row[kind]:.1%}" for kind in ("formula", "order", "core", "clock")]
        lines.append([f"`{row['schedule']}`", row["microbatches"], *shares])
    head = ["schedule", "micro-batches", "formula", "order", "compute alone", "clock"]
    where = f"{tables.machine_line(found['hardware'], True)}; torch {found['versions']['torch']}; "
    where += f"[results/{path.name}](results/{path.name})"
    return f"{tables.markdown(head, lines)}\n\n{where}"


def saves_block(root: Path) -> str:
    """How long a checkpoint blocks training, synchronous or asynchronous."""
    found, lines = json.loads((root / "results" / "saves.json").read_text()), []
    whole = {"save": found["seconds"]["save"], "async_save": found["whole_after"]}
    at_once = statistics.median(whole["save"])
    for kind, seconds in found["seconds"].items():
        middle, after = statistics.median(seconds), statistics.median(whole[kind])
        held = f"{1e3 * middle:,.0f} ({1e3 * min(seconds):,.0f}–{1e3 * max(seconds):,.0f})"
        share = f"{middle / at_once:.0%}"
        lines.append([f"`{kind}`", len(seconds), held, share, f"{1e3 * after:,.0f}"])
    head = ["call", "saves", "step waits ms (min–max)", "relative to `save`", "complete after ms"]
    return f"{tables.markdown(head, lines)}\n\n{overhead_note(root, 'saves', found)}"


def overhead_block(root: Path) -> str:
    """Steps of a script and of a bare loop, in turns in one process."""
    found, lines = json.loads((root / "results" / "overhead.json").read_text()), []
    medians = {loop: statistics.median(seconds) for loop, seconds in found["seconds"].items()}
    names = {"bare": "bare loop", "script": "`pytorch_SingleGPU.py`"}
    for loop, name in names.items():
        steps = len(found["seconds"][loop])
        share = f"{medians['bare'] / medians[loop]:.3f}"
        lines.append([name, steps, f"{1e3 * medians[loop]:.1f}", share])
    head = ["loop", "steps", "median step ms", "of the bare loop"]
    return f"{tables.markdown(head, lines)}\n\n{overhead_note(root, 'overhead', found)}"


def overhead_note(root: Path, name: str, found: dict) -> str:
    """The line below a table of measure/overhead.py."""
    where = f"{tables.machine_line(found['hardware'], True)}; torch {found['versions']['torch']}; "
    where += f"`{found['command']}`; [results/{name}.json](results/{name}.json)"
    scripts = [word for word in found["command"].split() if word.startswith("pytorch_")]
    return where + stale.note(root, found["git_commit"], scripts)


def losses_blocks(root: Path) -> dict[str, str]:
    """Losses of a technique and of the one that it replaces, for three seeds each."""
    blocks, file = {}, "results/losses.json"
    for name, found in json.loads((root / file).read_text()).items():
        lines, scripts = [], []
        for row in found["rows"]:
            script, _, flags = row["script"].partition(".py")
            scripts.append(f"{script}.py")
            label = f"`{script.removeprefix('pytorch_')}{flags}`"
            each = ", ".join(f"{loss:.4f}" for loss in row["losses"])
            lines.append([label, f"{statistics.mean(row['losses']):.4f}", each])
        about = f"`{found['flags']}`; torch {found['versions']['torch']}; [{file}]({file})"
        since = stale.note(root, found["git_commit"], sorted(set(scripts)))
        head = ["script", "evaluation loss (mean)", "of each seed"]
        blocks[f"losses-{name}"] = f"{tables.markdown(head, lines)}\n\n{about}{since}"
    return blocks


def technique_block(root: Path, name: str, results: dict[str, dict]) -> str:
    """A technique's rows, the command that shows its diff, and its tagged lines."""
    script, parent = f"pytorch_{name}", f"pytorch_{PARENTS[name]}"
    suites = ("parallel",) if name in BEYOND else ("gpt", "shakespeare", "cpu", "gpu")
    parts = []
    for suite in ("by_hand",) if name in DEFINITIONS else suites:
        found = results.get(suite, {"rows": []})
        rows = [row for row in found["rows"] if row["runs"]]
        rows = [row for row in rows if row["runs"][0]["technique"] == script]
        rows = [row for row in rows if row["table"] == rows[0]["table"]]  # the first that has some
        if rows:
            run = rows[0]["runs"][0]
            job = f"{run['model']}, {size_of(run)}, {run['device']}:"
            parts += [job, tables.techniques_table(rows, found.get("times", True))]
    parts.append(f"```bash\ndiff {parent}.py {script}.py\n```")
    lines = technique_lines((root / f"{script}.py").read_text(), DEFINITIONS.get(name, ()))
    return "\n\n".join([*parts, "\n".join(["```python", *lines, "```"])])


def technique_lines(source: str, names: Iterable[str]) -> list[str]:
    """The lines of a script that implement its technique: some definitions, or the lines with the
    tag that its docstring names."""
    if names:
        nodes = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") in names]
        parts = [ast.get_source_segment(source, node, padded=True) for node in nodes]
        return "\n\n\n".join(map(textwrap.dedent, parts)).splitlines()
    _, doc, code = source.split('"""', 2)
    tag = re.search(r'tagged\s+"(# [\w-]+:)"', doc)
    lines = [line for line in code.splitlines() if tag and tag[1] in line]
    return textwrap.dedent("\n".join(lines)).splitlines()


def fill(path: Path, text: str, blocks: dict, missing: dict, up: str, chinese: bool) -> str:
    """The text of a page with all its tables updated.

    Args:
        missing: the blocks that are on no page so far; those of this page are removed.
        up: relative path from this page to the repository's root.
    """

    def block(match: re.Match) -> str:
        name = match[1]
        if name not in missing or "<!-- " in match[2]:
            raise Unusable(f"{path}: <!-- {name} --> is no table, has no end, or stands twice")
        missing.pop(name)
        lines = blocks[name]
        if lines.endswith(stale.UNKNOWN):  # keep the note of a complete clone
            said = NOTE.search(match[2])
            lines = lines.removesuffix(stale.UNKNOWN) + (said[0] if said else "")
        lines = translate(lines) if chinese else lines
        lines = re.sub(r"\]\((results|docs)/", rf"]({up}\1/", lines)
        return f"<!-- {name} -->\n" + (f"\n{lines}\n\n" if lines else "") + "<!-- end -->"

    text, found = BLOCK.subn(block, text)
    if found != text.count("<!-- end -->"):
        raise Unusable(f"{path}: <!-- end --> without a beginning")
    return text


def translate(lines: str) -> str:
    """Translate a table to Chinese: headers, notes, and cells that are not names."""
    lines = lines.splitlines()
    for i, line in enumerate(lines):
        if line.startswith("| "):
            cells = [CELLS.get(cell, cell) for cell in line[2:-2].split(" | ")]
            lines[i] = "| " + " | ".join(cells) + " |"
        if "](results/" in line or "](docs/" in line or line.startswith("not measured yet"):
            for english, chinese in PHRASES.items():
                lines[i] = lines[i].replace(english, chinese)
            lines[i] = re.sub(r"(\]\(docs/techniques/\w+)\.md", r"\1.zh-CN.md", lines[i])
    return "\n".join(lines)
