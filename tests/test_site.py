"""The site: built from the pages, opened in headless Chromium as files, at two widths; its data is
the output of the programs."""

import json
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, environment, succeed

from measure import bubble
from website import make_data

DATA = {path.stem: json.loads(path.read_text()) for path in (ROOT / "website/data").glob("*.json")}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
PAGES = ("index", "techniques/FSDP", "explore", "your_own_model", "zh/index", "zh/techniques/PP")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "--site-dir", folder]
    subprocess.run(command, cwd=ROOT, check=True, env=environment(NO_MKDOCS_2_WARNING="1"))
    return folder


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM:
        pytest.skip("no Chromium")
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture(params=[390, 1280])
def page(request, browser, site):  # in this order: without a browser, nothing is built
    """That notes whatever it asks for which is not a file of the site, and errors of scripts."""
    opened = browser.new_page(viewport={"width": request.param, "height": 900})
    opened.goto_page = lambda name: opened.goto(f"file://{site}/{name}.html")
    wrong = []
    opened.on("request", lambda r: r.url.startswith(("file:", "data:")) or wrong.append(r.url))
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    yield opened
    opened.close()
    assert not wrong


def test_pages_fit_the_screen(page):
    for name in PAGES:
        page.goto_page(name)
        size = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(size) == 0, name
        assert page.locator("article h1").count() == 1
    diff = page.locator(".diff")
    page.goto_page("techniques/FSDP")
    assert diff.locator("ins").count() > 10 and diff.locator("del").count() > 10
    side_by_side = page.locator(".diff .equal .old").first.is_visible()
    assert side_by_side == (page.viewport_size["width"] == 1280)
    headings = page.locator("article h2").all_inner_texts()
    wanted = ("Difference from", "What it holds", "Memory over", "Proof", "Measured", "Traps")
    assert [any(h.startswith(word) for h in headings) for word in wanted] == [True] * 6
    assert page.locator("svg.area").count() == 2


def test_navigation_search_and_dark_mode(page):
    page.goto_page("index")
    page.locator("article a", has_text="FSDP_offload").first.click()
    assert page.url.endswith("/techniques/FSDP_offload.html")
    page.locator("article a", has_text="pytorch_FSDP.py").first.click()
    assert page.locator("article h1").inner_text().startswith("pytorch_FSDP.py")
    page.go_back()
    page.locator("header button[title*=anguage], header .md-select").first.hover()
    page.locator("header a", has_text="中文").click()
    assert page.url.endswith("/zh/techniques/FSDP_offload.html")
    scheme = page.locator("body").get_attribute("data-md-color-scheme")
    page.locator("header label[for^=__palette]:visible").click()
    assert page.locator("body").get_attribute("data-md-color-scheme") != scheme
    if page.viewport_size["width"] == 390:
        page.locator(".md-header__button[for=__search]").click()
    page.locator("input.md-search__input").press_sequentially("ZeroRedundancyOptimizer")
    page.locator(".md-search-result__item a").first.wait_for()
    assert page.locator(".md-search-result__item").count() > 1


def test_will_it_fit(page):
    page.goto_page("explore")
    form = page.locator('[data-widget="fit"]')
    for cell in DATA["fit"]["data"]["cells"]:
        for label in ("model", "gpus", "memory"):
            at = ("model", "gpus", "memory").index(label)
            form.locator("select").nth(at).select_option(str(cell[label]))
        said = form.locator("[role=status]").inner_text()
        assert f"{cell['peak'] / 2**30:.1f} GiB" in said and cell["way"] in said
        assert ("Nothing fits" in said) != cell["fits"]
        shown = form.locator('[data-result="fit-command"]').inner_text().strip()
        assert shown == (cell["command"] if cell["fits"] else cell["estimate"])


def test_the_schedule(page):
    page.goto_page("explore")
    form = page.locator('[data-widget="schedules"]')
    for found in DATA["schedules"]["data"][::5]:
        for at, key in enumerate(("schedule", "ranks", "microbatches")):
            form.locator("select").nth(at).select_option(str(found[key]))
        bubble = form.locator('[data-result="schedule-bubble"]').inner_text()
        assert f"{100 * found['bubble']:.1f}% of the time" in bubble
        assert form.locator("rect").count() == sum(map(len, found["rows"]))


def test_a_collective_by_keyboard(page):
    page.goto_page("explore")
    form = page.locator('[data-widget="collectives"]')
    for name, steps in DATA["collectives"]["data"].items():
        form.locator("select").select_option(name)
        form.locator("button", has_text="Next").focus()
        for cells in steps[1:]:
            page.keyboard.press("ArrowRight")
            rows = form.locator("tr").all()[1:]
            assert [row.locator("td").all_inner_texts() for row in rows] == cells
        assert form.locator("button", has_text="Next").is_disabled()


def test_what_fits_is_what_is_recommended():
    """A cell: the combination, its command and its peak."""
    cells = {(c["model"], c["gpus"], c["memory"]): c for c in DATA["fit"]["data"]["cells"]}
    cell = cells["gpt-12x12x768", 1, "RTX3090"]
    printed = succeed(cell["estimate"], forked=True).stdout
    first = printed.partition("\n\n1. ")[2].partition("\n\n")[0]
    assert first.startswith(f"{cell['way']}: peak {cell['peak'] / 2**30:.1f} GiB")
    assert first.splitlines()[-1].strip() == cell["command"]


PEAKS = [("GPT", "FSDP"), pytest.param("ResNet-50", "SingleGPU", marks=pytest.mark.full)]


@pytest.mark.parametrize("job, name", PEAKS)
def test_the_peak_of_a_picture_is_what_is_predicted(job, name):
    found = DATA["memory"]["data"]
    flags, batch = found["jobs"][job]
    command = f"python estimate.py {flags} -b {batch} --gpus {found['gpus']} --only {name} --json"
    rows = json.loads(succeed(command, forked=True).stdout)
    predicted = {row["technique"]: row["peak"] for row in rows}
    [series] = [s for s in found["series"] if (s["job"], s["technique"]) == (job, name)]
    assert max(map(sum, zip(*series["bytes"].values(), strict=True))) == predicted[name]


def test_schedules_and_collectives_are_what_the_program_makes():
    for found in DATA["schedules"]["data"][::12]:
        made = bubble.timetable(found["schedule"], found["ranks"], found["microbatches"])
        assert json.loads(json.dumps(made)) == found
        if found["schedule"] in ("gpipe", "1f1b"):
            assert found["bubble"] == pytest.approx(found["formula"])
    assert make_data.collectives() == DATA["collectives"]["data"]
