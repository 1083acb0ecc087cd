"""The course: pages that teach have all their parts, in an order; their figures are recorded."""

import functools
import json
import re

import pytest
from conftest import ROOT, name_of, succeed
from test_docs import FENCED, shell_lines
from test_report import SCHEMATICS

from jobs import sizes
from report import diffs, lessons, pages
from report.results import read_result
from report.translations import english_of
from techniques import LESSONS, PARTS, SHELF, TECHNIQUES, technique
from theory import decoder
from website import pages as site_pages

PARTS_OF_A_PAGE = ("The problem", "The idea", "One step, step by step", "Memory", "Communication")
PARTS_OF_A_PAGE += ("Predict, then run", "The code", "When to use it", "What goes wrong")
PARTS_OF_A_PAGE += ("Takeaway", "What is still unsolved", "Sources")
ORDER = pages.pages_of_parts(ROOT)
LINE = [page for part in PARTS for page in ORDER[part]]
PAGES = [ROOT / "docs" / page for page in LINE if page.startswith("techniques/")]
SHELVED = [ROOT / "docs" / page for page in ORDER[SHELF] if page.startswith("techniques/")]
ASKING = [page for page in SHELVED if "## Predict, then run" in page.read_text()]
START = ROOT / "docs/start.md"  # a lesson of its own, without a technique
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
RECORDED = json.loads((ROOT / "measure/suites/course.json").read_text())["outputs"]
FOUND = read_result(ROOT, "course")["outputs"]


def sections(page):
    """What people wrote under each heading, without code, tables and what a program writes."""
    text = pages.BLOCK.sub("", page.read_text())
    text = COMMENT.sub("", FENCED.sub("", text))
    text = re.sub(r"^\|.*\|$", "", text, flags=re.MULTILINE)
    return dict(part.split("\n", 1) for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:])


def words(text):
    return len(re.findall(r"\w[\w'’-]*", text))


def lacks(page):
    """What a page has to get before it teaches, in words."""
    found = sections(page)
    text = page.read_text()
    missing = [f"a section: ## {part}" for part in PARTS_OF_A_PAGE if part not in found]
    if missing:
        return missing
    if [part for part in found if part in PARTS_OF_A_PAGE] != list(PARTS_OF_A_PAGE):
        missing.append(f"its sections in this order: {', '.join(PARTS_OF_A_PAGE)}")
    told = words(found["The idea"] + found["One step, step by step"])
    if told < 200:
        missing.append(f"{200 - told} words in The idea and One step, step by step")
    written = sum(words(text) for name, text in found.items() if name != "Sources")
    if not 350 <= written <= 900:
        missing.append(f"350 to 900 words that people write: it has {written}")
    questions = re.findall(rf"<!-- answer-{page.stem}-\d -->", text)
    if not 2 <= len(questions) <= 3:
        missing.append("two or three questions, each with <!-- answer-NAME-N -->")
    for name in ("problem", "worked", "next", "tested"):
        if f"<!-- {name}-{page.stem} -->" not in text:
            missing.append(f"a place <!-- {name}-{page.stem} --> ... <!-- end -->")
    if not re.search(r"^> ", found["Takeaway"], re.MULTILINE):
        missing.append("a takeaway as a quotation (> ...)")
    return missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_of_the_course_teaches(page):
    missing = lacks(page)
    assert not missing, f"{page.name} lacks " + "; ".join(missing)


@pytest.mark.parametrize("page", [START, *PAGES, *ASKING], ids=name_of)
def test_figures_are_written_by_programs(page):
    """A measured size or time in a sentence would stay when the measurement changes."""
    for section in sections(page).values():
        prose = re.sub(r"`[^`]*`", "", section)
        assert not re.findall(r"\d[\d.,]* ?(?:GiB|GB|MiB|MB|kB|ms|s|%)(?!\w)", prose)


@pytest.mark.parametrize("page", [START, *PAGES, *ASKING], ids=name_of)
def test_commands_of_questions_are_recorded(page):
    """Their figures are in the answers."""
    text = page.read_text()
    asked = text.partition("## Predict, then run")[2].partition("\n## ")[0]
    known = {re.sub(r" --output-dir \S+| --json", "", line) for line in RECORDED.values()}
    commands = re.findall(r"^(?:python|torchrun) .*", asked, re.MULTILINE)
    assert len(commands) >= (1 if page in ASKING else 2) and {*commands} <= known
    assert {*commands} <= {*shell_lines(page)}
    assert {name: one["command"] for name, one in FOUND.items()} == RECORDED


# Lines that answers quote by their number, and words of each: another line would be shown in
# silence if a program printed one more.
QUOTED = {
    ("collectives-4", 34): "3   4  11", ("collectives-4", 40): "-> [ 68]",
    ("collectives-4", 46): "[ 2  12  22  32]", ("collectives-order", 2): "RuntimeError after",
    ("collectives-order", 3): "RuntimeError after", ("DTensor", 40): "x [8, 12] Partial(sum)",
    ("DTensor", 41): "output [8, 12] Replicate()", ("DTensor", 42): "sent all_reduce",
    ("DTensor", 48): "output [8, 12] Replicate()", ("DTensor", 49): "sent all_reduce",
    ("DTensor", 50): "x.grad [8, 12] Partial(sum)", ("DTensor", 53): "sent all_reduce",
    ("exam-32k", 6): "1. ", ("exam-32k", 7): "sends ",
}  # fmt: skip


def test_answers_quote_the_lines_that_they_mean():
    """A program whose output is shown whole needs no row here."""
    for (name, number), meant in QUOTED.items():
        line = " ".join(FOUND[name]["output"][number].split())
        assert " ".join(meant.split()) in line, f"{name}, line {number}: {line}"
    numbered = {}
    for path in lessons.ANSWERS.glob("*.md"):
        for name, number in re.findall(r"\{([^{}:]+)/output/(\d+)\}", path.read_text()):
            numbered.setdefault(name, set()).add(int(number))
    for name, shown in numbered.items():
        known = {number for run, number in QUOTED if run == name}
        assert shown == known or len(FOUND[name]["output"]) <= 5, name


def test_answers_have_the_same_figures_in_both_languages():
    """And the same output, number by number."""
    same = re.compile(rf"{FENCED.pattern}|\{{.*?\}}|^## \d+$", FENCED.flags)
    for path in lessons.ANSWERS.glob("*.zh-CN.md"):
        found = [same.findall(p.read_text()) for p in (english_of(path), path)]
        assert sorted(found[0]) == sorted(found[1]), path.name


def test_the_first_script_prints_what_its_page_says(tmp_path):
    """As pasted. The ranks print in any order, and one may do so before the other's newline."""
    [script] = re.findall(r"^```python\n(import os\n.*?)^```", START.read_text(), re.S | re.M)
    [said] = re.findall(r"^```text\n(rank 0 of 2.*?)^```", START.read_text(), re.S | re.M)
    (tmp_path / "hello.py").write_text(script)
    [command] = [line for line in shell_lines(START) if line.endswith("hello.py")]
    printed = re.findall(r"rank .*?\]", succeed(command, cwd=tmp_path, forked=True).stdout)
    assert sorted(printed) == sorted(said.splitlines())


def test_the_calls_of_a_script_are_explained():
    """All that the first one makes, in the order of their lines; then those of later ones."""
    call = r"\b((?:common|run)\.\w+)"
    [table] = re.findall(r"^\| call \|.*\n((?:\|.*\n)+)", START.read_text(), re.MULTILINE)
    source = (ROOT / "pytorch_SingleGPU.py").read_text()
    called = dict.fromkeys(re.findall(rf"{call}\(", source))
    assert re.findall(rf"`{call}`", table)[: len(called)] == list(called)


def test_the_two_halves_of_an_all_reduce_are_drawn():
    _, before, _, between, _, after = SCHEMATICS["all_reduce"].splitlines()
    for letter, rank in zip("abcd", before.split("|"), strict=True):
        assert re.findall(r"gradients: (\w+)", rank) == [f"{letter}{i}" for i in range(4)]
    for number, rank in enumerate(between.split("|")):
        assert [i for i, box in enumerate(rank.split(",")) if "Σ" in box] == [number]
    assert re.findall(r"Σ(\d)", between) == [*"0123"]
    assert re.findall(r"Σ(\d)", after) == [*"0123"] and after.startswith("each: ")


def test_exercises_are_asked_for_on_the_pages_of_their_scripts():
    names = re.findall(r"^\| \[(\w+)\.py\]", (ROOT / "docs/exercises.md").read_text(), re.M)
    assert list(pages.COURSE["exercises"]) == names
    assert list(pages.COURSE["questions"]) == list(PARTS)
    assert "python exercises/check.py fsdp" in (ROOT / "docs/techniques/FSDP.md").read_text()


def test_a_script_is_read_after_its_parent():
    names = [row.name for row in LESSONS]
    for row in LESSONS:
        assert not row.parent or names.index(row.parent) < names.index(row.name)


def test_every_script_has_a_part():
    assert {row.part for row in TECHNIQUES} <= {*PARTS, SHELF}
    assert len(LINE) == len({*LINE}) and LINE[0] == "start.md"
    for row in LESSONS:
        assert not row.unsolved or re.fullmatch(r"[A-Z][^.]*\.", row.unsolved)


DRAWN = {"llama3-8b": lessons.LLAMA, "llama3-70b": lessons.LLAMA_70B}
DRAWN |= {"qwen3-30b-a3b": lessons.QWEN}


@pytest.mark.parametrize("name", DRAWN)
def test_a_model_of_the_pages_is_that_of_the_scripts(name):
    size = sizes.SIZES[name]
    numbers = size.layers, size.width, size.vocabulary, lessons.SIZES["context"], lessons.GPUS
    heads = size.heads * size.head_width / size.width
    shape = {"kv": size.kv_heads / size.heads, "heads": heads, "llama": True}
    shape |= {"mlp": size.mlp_matrices * size.width * size.mlp_width}
    shape |= {"experts": size.experts, "top_k": size.top_k} if size.experts else {}
    assert decoder(*numbers, **shape) == DRAWN[name]
    assert name != "llama3-70b" or round(DRAWN[name].whole / 1e9, 1) == 70.6


@pytest.mark.parametrize("name", lessons.SHOWN)
def test_theory_on_a_page_is_what_is_predicted(name):
    shown = lessons.SHOWN[name]
    theory = lessons.theory_of(name, shown)
    sent = sum(theory.values())
    predicted = read_result(ROOT, "front")["outputs"][shown["front"]]["output"][0]["sent"]
    # Theory is the mean over the stages of a pipeline; the first and the last one send less.
    close = 0.1 if "pp" in shown.get("options", {}) else 1e-3
    if set(theory) == {"send"}:  # the busiest stage is between others, and sends both ways
        sent *= lessons.GPUS / (lessons.GPUS - 1)
    assert sent == pytest.approx(predicted, rel=close)


RUNS = [name for name in RECORDED if "--output-dir" in RECORDED[name]]


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith(("state-", "zero-"))])
def test_recorded_state_is_the_formula(name):
    """Of fp32 and AdamW, but for a few numbers that count steps, and ZeRO's whole tensors."""
    command = RECORDED[name]
    row = technique(re.search(r"(pytorch_\w+)\.py", command)[1])
    ranks = int((re.findall(r"--nproc_per_node=(\d)", command) or [1])[0])
    optimizer = "sgd" if "--optimizer sgd" in command else "adamw"
    found = FOUND[name]["result"]["state_bytes"]
    model = decoder(6, 384, 27, 64, 8)  # gpt-6x6x384, and the 27 letters of synthetic text
    options = {"optimizer": optimizer, "use_zero": "--use_zero" in command, "decoder": model}
    options["stage"] = 2 if "--stage 2" in command else 1
    each = row.keeps(ranks, options)
    parameters = FOUND["state-SingleGPU"]["result"]["state_bytes"]["parameters"] / 4
    for kind, size in each.items():
        assert found[kind] == pytest.approx(size * parameters, rel=5e-3)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A function that trains the run of a folder, and returns where it is."""

    @functools.cache
    def get(folder):
        command = next(RECORDED[n] for n in RUNS if f"--output-dir {folder}" in RECORDED[n])
        own = tmp_path_factory.mktemp("earlier")
        succeed(f"{command} --output-dir {own}", forked=True)
        return str(own)

    return get


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_a_question_has_the_answer_that_is_recorded(name, tmp_path, earlier):
    command = re.sub(r"--output-dir \S+", f"--output-dir {tmp_path}", RECORDED[name])
    command = re.sub(r"(?<=--weights )runs/[\w-]+", lambda found: earlier(found[0]), command)
    succeed(command, forked=not command.startswith("sh "))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["state_bytes"] == FOUND[name]["result"]["state_bytes"]
    if not name.startswith("state-"):  # in whose twelve steps SGD diverges
        expected = FOUND[name]["result"]["eval_loss"]
        assert result["eval_loss"] == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_answers_are_folded_on_the_site(page):
    text = site_pages.page(ROOT, page, set())
    answers = len(re.findall(r"^<!-- answer-", text, re.MULTILINE))
    assert text.count('??? answer "Answer"\n\n    ') == answers and "<details>" not in text


def test_terms_lead_to_the_glossary_where_they_are_first_used():
    """In prose alone, once."""
    other = "# A rank\n\n`rank` [a rank](x.md)\n\n| rank |\n\n"
    text = f"{other}Two ranks, and **process\ngroups** of a rank.\n"
    page = ROOT / "docs/techniques/FSDP.md"
    expected = f"{other}Two [ranks](../start.md#rank){{.term}}, and **[process\ngroups]"
    expected += "(../start.md#process-group){.term}** of a rank.\n"
    assert site_pages.link_terms(ROOT, page, text) == expected
    for path, same in (page.with_suffix(".zh-CN.md"), text), (page, "[A](../start.md#rank). Rank"):
        assert site_pages.link_terms(ROOT, path, same) == same


@pytest.mark.parametrize("row", [row for row in TECHNIQUES if row.parent], ids=lambda row: row.name)
def test_a_page_shows_the_tagged_lines_of_its_script(row):
    """Each hunk has a line with the tag; of a script without tags, or with many, its page shows the
    definitions that its row names."""
    tagged = diffs.tagged_hunks(ROOT, row)
    hunks = "\n".join(tagged).split("@@ -")[1:]
    lines = [line for hunk in hunks for line in hunk.splitlines() if line.startswith("+")]
    source = (ROOT / f"{row.script}.py").read_text()
    assert all(line[1:] in source for line in lines)
    assert all(re.search(r"^\+.*# [\w -]+: ", hunk, re.MULTILINE) for hunk in hunks)
    assert 0 < len(tagged) <= diffs.LONGEST_SCRIPT or row.shows
    shown = diffs.shown_definitions(ROOT, row)
    assert all(re.search(rf"^(def|class) {name}\b", shown, re.M) for name in row.shows)
