"""The site: built from the pages, opened in headless Chromium as files, at two widths; its data is
the output of the programs."""

import functools
import http.server
import itertools
import json
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest
import yaml
from conftest import ROOT, environment, succeed
from test_collectives import expected
from test_report import TILES

from website import area, hooks, make_data, schedules

DATA = {path.stem: json.loads(path.read_text()) for path in (ROOT / "website/data").glob("*.json")}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
REPOSITORY = "https://example.org/owner/name"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "--site-dir", folder]
    told = environment(NO_MKDOCS_2_WARNING="1", SITE_REPO=REPOSITORY)
    subprocess.run(command, cwd=ROOT, check=True, env=told)
    return folder


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM:
        pytest.skip("no Chromium")
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def server(site):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


@pytest.fixture
def tab(browser, site):  # in this order: without a browser, nothing is built
    """A page that notes whatever it asks for which is not of the site, and errors of scripts."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.add_init_script(path=ROOT / "tests" / "site.js")
    opened.goto_page = lambda name: opened.goto(f"file://{site}/{name}.html")
    ours, wrong = ("file:", "data:", "http://127.0.0.1:"), []
    opened.on("request", lambda r: r.url.startswith(ours) or wrong.append(r.url))
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    yield opened
    opened.close()
    assert not wrong


@pytest.fixture(params=[390, 1280])
def page(request, tab):
    tab.set_viewport_size({"width": request.param, "height": 900})
    return tab


def pages_of(site, widget=None):
    """Names of all pages but redirects, or of those that have a widget."""
    for path in sorted(site.rglob("*.html")):
        text = path.read_text()
        if 'http-equiv="refresh"' not in text and (not widget or f'="{widget}"' in text):
            yield str(path.relative_to(site).with_suffix(""))


@pytest.mark.parametrize("code", [False, pytest.param(True, marks=pytest.mark.full)])
def test_nothing_is_clipped(page, site, code):
    """Nor is an identifier cut in a table: on all pages, of text or of code."""
    names = [name for name in pages_of(site) if ("source/" in name) == code and "404" not in name]
    assert len(names) > 20
    for name in names:
        page.goto_page(name)
        assert page.evaluate("siteChecks.layout()") == [], name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(tab, site, scheme):
    tab.emulate_media(color_scheme=scheme)
    widgets = [next(pages_of(site, name)) for name in ("fit", "schedules")]
    for name in dict.fromkeys(["index", "techniques/FSDP", "under_the_hood", "estimate", *widgets]):
        tab.goto_page(name)
        assert tab.evaluate("siteChecks.contrast()") == [], name
    search(tab, "memory")
    tab.wait_for_timeout(500)  # the hits fade in
    assert tab.evaluate("siteChecks.contrast()") == []


def search(page, words):
    """Type into the search and return the links of its hits."""
    field, hits = page.locator("input.md-search__input"), page.locator(".md-search-result__item")
    for typed in ("", words):
        field.fill(typed)
        field.press("Shift")  # the search listens to keys
        hits.first.wait_for(state="visible" if typed else "detached")
    return hits.evaluate_all("hits => hits.map(hit => hit.querySelector('a').href)")


@pytest.mark.parametrize("folder", ["", "zh/"])
@pytest.mark.parametrize("scheme", ["file", "http"])
def test_search(tab, site, server, scheme, folder):
    """Among the first four hits is the page that site_queries.tsv names; all are of the reader's
    language, and none is a diff or code."""
    base = site.as_uri() if scheme == "file" else server
    tab.goto(f"{base}/{folder}index.html")
    queries = (ROOT / "tests" / "site_queries.tsv").read_text()
    for words, wanted in re.findall(rf"^{folder or 'en/'}\t(.+)\t(.+)$", queries, re.MULTILINE):
        found = [urlsplit(link.removeprefix(f"{base}/")).path for link in search(tab, words)]
        assert f"{folder}{wanted}.html" in found[:4], (words, found)
        assert not re.search(r"\b(source|diffs)/", str(found)), words
        for path in found:
            assert path.startswith("zh/") == bool(folder) and (site / path).is_file(), words
    index = (site / folder / "search" / "search_index.json").read_text()
    assert "DDP: averages the gradients in buckets" not in index  # a line of a diff


@pytest.mark.parametrize("folder, language", [("", "en"), ("zh/", "zh")])
def test_old_addresses_and_missing_pages(tab, site, folder, language):
    moved = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["extra"]["moved"]
    for old in moved:
        tab.goto_page(f"{folder}{old.removesuffix('.html')}")
        tab.locator("article h1").wait_for()  # of the page itself, or of the one that has its text
        assert ("/zh/" in tab.url) == bool(folder)
    assert f'<html lang="{language}"' in (site / folder / "404.html").read_text()


def test_navigation_and_dark_mode(page):
    page.goto_page("index")
    page.locator('article a[href$="techniques/FSDP.html"]').first.click()
    page.wait_for_url("**/techniques/FSDP.html")  # count() does not wait
    diff = page.locator(".diff").first
    assert diff.locator("ins").count() and diff.locator("del").count()
    assert diff.locator(".equal .old").first.is_visible() == (page.viewport_size["width"] == 1280)
    assert page.locator("svg.area").count() >= 2
    assert page.locator(".md-path a").count() and page.locator(".md-footer__link--next").count()
    edit = page.locator("a[rel=edit]").get_attribute("href")
    assert edit == f"{REPOSITORY}/edit/main/docs/techniques/FSDP.md"
    page.locator("article a", has_text="pytorch_FSDP.py").first.click()
    assert page.locator("article h1").inner_text().startswith("pytorch_FSDP.py")
    page.go_back()
    page.locator("header button[title*=anguage], header .md-select").first.hover()
    page.locator("header a", has_text="中文").click()
    page.wait_for_url("**/zh/techniques/FSDP.html")
    scheme = page.locator("body").get_attribute("data-md-color-scheme")
    page.locator("header label[for^=__palette]:visible").click()
    assert page.locator("body").get_attribute("data-md-color-scheme") != scheme


class Tags(HTMLParser):
    """Attributes with a tag in them, and the number of areas of each picture of memory."""

    def __init__(self, html):
        super().__init__()
        self.broken, self.areas = [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.broken += [text for text in named.values() if text and "<" in text]
        if tag == "svg" and named.get("class") == "area":
            self.areas.append(0)
        elif tag == "path" and self.areas and "fill" in named:
            self.areas[-1] += 1


def test_options_are_marked_in_text_alone():
    """Elsewhere the mark would end a tag in whose attribute it stands, and empty a picture."""
    pictures = [area.svg(series, 0, KINDS, {}) for series in SERIES]
    attribute = '<img title="it\'s > x --flag" alt=\'--flag "x"\'>'
    for kept in (*pictures, attribute, "<!-- it's --flag -->"):
        assert hooks.OPTION.sub(hooks.mark_option, kept) == kept
        marked = hooks.OPTION.sub(hooks.mark_option, f"<p>{kept} --flag</p>")
        assert marked == f'<p>{kept} <span class="option">--flag</span></p>'


def test_tags_are_whole_and_pictures_have_areas(browser, site):
    areas = []
    for path in sorted(site.rglob("*.html")):
        tags = Tags(path.read_text())
        assert not tags.broken, path
        areas += tags.areas
    assert min(areas) > 1 and len(areas) >= 2 * len(SERIES)  # in two languages


def test_will_it_fit(page, site):
    page.goto_page(next(pages_of(site, "fit")))
    form = page.locator('[data-widget="fit"]')
    for cell in DATA["fit"]["data"]["cells"]:
        for label in ("model", "gpus", "memory"):
            at = ("model", "gpus", "memory").index(label)
            form.locator("select").nth(at).select_option(str(cell[label]))
        said = form.locator("[role=status]").inner_text()
        assert f"{cell['peak'] / 2**30:.1f} GiB" in said and cell["way"] in said
        assert bool(cell["host"]) == (f"{cell['host'] / 2**30:,.0f} GiB of host memory" in said)
        if cell["fits"]:
            assert f"sends {cell['sent'] / 1e9:.1f} GB per step" in said
            assert bool(cell["copied"]) == (f"{cell['copied'] / 1e9:.1f} GB over PCIe" in said)
        colour = " over" if not cell["fits"] else " host" if cell["host"] else ""
        assert form.locator(".bar").get_attribute("class") == f"bar{colour}"
        assert ("Nothing fits" in said) != cell["fits"]
        shown = form.locator('[data-result="fit-command"]').inner_text().strip()
        assert shown == (cell["command"] if cell["fits"] else cell["estimate"])


def test_the_schedule(page, site):
    page.goto_page(next(pages_of(site, "schedules")))
    form = page.locator('[data-widget="schedules"]')
    for found in DATA["schedules"]["data"][::5]:
        for at, key in enumerate(("schedule", "ranks", "microbatches")):
            form.locator("select").nth(at).select_option(str(found[key]))
        bubble = form.locator('[data-result="schedule-bubble"]').inner_text()
        assert f"{100 * found['bubble']:.1f}% of the time" in bubble
        assert form.locator("rect").count() == sum(map(len, found["rows"]))
        parts = form.locator("rect").evaluate_all(
            "all => all.map(x => x.getBoundingClientRect().right)"
        )
        assert max(parts) <= form.bounding_box()["x"] + form.bounding_box()["width"]


def test_a_collective_by_keyboard(page, site):
    page.goto_page(next(pages_of(site, "collectives")))
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


SERIES = DATA["memory"]["data"]["series"]
KINDS = dict.fromkeys(make_data.LiveBytes.KINDS, "")


@pytest.mark.parametrize("series", SERIES, ids=lambda one: f"{one['job']}, {one['technique']}")
def test_a_picture_of_memory_names_its_axes(series):
    """All phases of a training step are in it, and no evaluation; no name covers another."""
    texts = re.findall(r'<text x="(.+?)" y="(.+?)".*?>(.*?)</text>', area.svg(series, 0, KINDS, {}))
    names = {name for *_, name in texts}
    assert {"forward", "backward", "optimizer"} <= {*" ".join(names).split()}
    assert "GiB" in names and "evaluation" not in names
    for line in {y for _, y, name in texts if name[0].isalpha()}:
        row = sorted((float(x), name) for x, y, name in texts if y == line)
        for (x, name), (after, other) in itertools.pairwise(row):
            assert after - x >= (area.room(name) + area.room(other)) / 2


PEAKS = [("GPT", "FSDP"), pytest.param("ResNet-50", "SingleGPU", marks=pytest.mark.full)]


@pytest.mark.parametrize("job, name", PEAKS)
def test_the_peak_of_a_picture_is_what_is_predicted(job, name):
    found = DATA["memory"]["data"]
    flags, batch = found["jobs"][job]
    command = f"python estimate.py {flags} -b {batch} --gpus {found['gpus']} --only {name} --json"
    rows = json.loads(succeed(command, forked=True).stdout)
    predicted = {row["technique"]: row["peak"] for row in rows}
    [series] = [s for s in found["series"] if (s["job"], s["technique"]) == (job, name)]
    peak = max(map(sum, zip(*series["bytes"].values(), strict=True)))
    assert peak == pytest.approx(predicted[name], rel=0.01), "run website/make_data.py memory again"


def test_schedules_and_collectives_are_what_the_program_makes():
    for found in DATA["schedules"]["data"][::12]:
        made = schedules.timetable(found["schedule"], found["ranks"], found["microbatches"])
        assert json.loads(json.dumps(made)) == found
        if found["schedule"] in ("gpipe", "1f1b"):
            assert found["bubble"] == pytest.approx(found["formula"])
    assert make_data.collectives() == DATA["collectives"]["data"]


def test_collectives_end_with_what_torch_distributed_computes():
    """As tests/test_collectives.py has found it to be."""
    before, after = expected(4)
    after["all_gather"] = before.diag().expand(4, 4)  # of one chunk per rank
    for name, steps in DATA["collectives"]["data"].items():
        for cells, row in zip(steps[-1], after[name], strict=True):
            sums = [sum(TILES[c][0] for c in cell.split("+")) for cell in cells if cell]
            places = [{int(c[-1]) for c in cell.split("+")} for cell in cells if cell]
            assert name == "all_to_all" or all(cells[i] for at in places for i in at), name
            assert sums == ([] if row is None else row.tolist()), name
