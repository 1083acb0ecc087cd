"""The site: built from the pages, opened in headless Chromium as files, at two widths; its data is
the output of the programs."""

import functools
import http.server
import io
import itertools
import json
import os
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
from filelock import FileLock
from PIL import Image
from test_report import AFTER, BEFORE, TILES

from report import palette
from website import hooks, pages, schedules

DATA = {name: json.loads((ROOT / path).read_text()) for name, path in pages.DATA.items()}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
REPOSITORY = "https://example.org/owner/name"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built once: by the first worker of pytest-xdist that needs it."""
    pytest.importorskip("material")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "site"
    built = shared / "site-is-built"
    with FileLock(shared / "site.lock"):
        if not built.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", folder]
            told = environment(NO_MKDOCS_2_WARNING="1", SITE_REPO=REPOSITORY)
            subprocess.run(command, cwd=ROOT, check=True, env=told)
            built.touch()
    return folder


def test_the_site_needs_nothing_that_trains():
    """The workflow that publishes it installs requirements-docs.txt only."""
    blocked = "import sys; sys.modules |= dict.fromkeys(['torch', 'numpy', 'matplotlib', 'tqdm'])"
    command = [sys.executable, "-c", f"{blocked}; from website import hooks"]
    subprocess.run(command, cwd=ROOT, check=True)


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
    ours = ("file:", "data:", "http://127.0.0.1:")
    wrong = []
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


SAMPLE = ["index", "techniques/FSDP", "troubleshooting", "estimate", "proof", "diffs/PP"]
SAMPLE += ["zh/techniques/TP", "source/examples/fsdp_py"]


EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])


@EVERY
def test_nothing_is_clipped(page, site, every):
    """Nor is an identifier cut in a table: on a page of each kind, or on all."""
    names = [name for name in pages_of(site) if "404" not in name]
    assert {*SAMPLE} < {*names} and len(names) > 200
    for name in names if every else SAMPLE:
        page.goto_page(name)
        assert page.evaluate("siteChecks.layout()") == [], name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(tab, site, scheme):
    tab.emulate_media(color_scheme=scheme)
    widgets = [next(pages_of(site, name)) for name in ("fit", "schedules")]
    for name in dict.fromkeys(["index", "techniques/FSDP", "start", "estimate", *widgets]):
        tab.goto_page(name)
        assert tab.evaluate("siteChecks.contrast()") == [], name
    search(tab, "memory")
    tab.wait_for_timeout(500)  # the hits fade in
    assert tab.evaluate("siteChecks.contrast()") == []


def search(page, words):
    """Type into the search and return the links of its hits."""
    field = page.locator("input.md-search__input")
    hits = page.locator(".md-search-result__item")
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
        links = search(tab, words)
        found = [urlsplit(link.removeprefix(f"{base}/")).path for link in links]
        assert f"{folder}{wanted}.html" in found[:4], (words, found)
        assert not re.search(r"\b(source|diffs)/", str(found)), words
        for path in found:
            assert path.startswith("zh/") == bool(folder) and (site / path).is_file(), words
    index = (site / folder / "search" / "search_index.json").read_text()
    assert "DDP: averages the gradients in buckets" not in index  # a line of a diff


@pytest.mark.parametrize("folder, language", [("", "en"), ("zh/", "zh")])
def test_old_addresses_and_missing_pages(tab, site, folder, language):
    moved = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["extra"]["moved"]
    for old in list(moved)[::4]:  # that each leads to a page is known when the site is built
        tab.goto_page(f"{folder}{old.removesuffix('.html')}")
        tab.locator("article h1").wait_for()  # of the page itself, or of the one that has its text
        assert ("/zh/" in tab.url) == bool(folder)
    assert f'<html lang="{language}"' in (site / folder / "404.html").read_text()


def test_navigation_and_dark_mode(page):
    page.goto_page("index")
    page.locator('article a[href$="techniques/FSDP.html"]').first.click()
    page.wait_for_url("**/techniques/FSDP.html")
    page.locator('article a[href$="diffs/FSDP.html"]').click()
    page.wait_for_url("**/diffs/FSDP.html")  # count() does not wait
    diff = page.locator(".diff")
    assert diff.locator("ins").count() and diff.locator("del").count()
    assert diff.locator(".equal .old").first.is_visible() == (page.viewport_size["width"] == 1280)
    page.go_back()
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


@pytest.mark.parametrize("system", ["light", "dark"])
def test_pictures_have_the_theme_of_their_page(tab, system):
    """Also once the reader has switched it, whatever the system's is."""
    tab.emulate_media(color_scheme=system)
    tab.goto_page("techniques/FSDP")
    pictures = [tab.locator(f"img[src*={name}]").first for name in ("schematic", "timeline")]
    for theme in (system, "dark" if system == "light" else "light"):
        for picture in pictures:
            shown = Image.open(io.BytesIO(picture.screenshot())).convert("RGB")
            red, green, blue = shown.getpixel((2, 2))
            assert f"#{red:02x}{green:02x}{blue:02x}" == palette.THEMES[theme]["page"]
        tab.locator("header label[for^=__palette]:visible").click()


class Tags(HTMLParser):
    """Attributes with a tag in them."""

    def __init__(self, html):
        super().__init__()
        self.broken = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.broken += [text for _, text in attributes if text and "<" in text]


def test_options_are_marked_in_text_alone():
    """Elsewhere the mark would end a tag in whose attribute it stands."""
    attribute = '<img title="it\'s > x --flag" alt=\'--flag "x"\'>'
    for kept in (attribute, "<!-- it's --flag -->"):
        assert hooks.OPTION.sub(hooks.mark_option, kept) == kept
        marked = hooks.OPTION.sub(hooks.mark_option, f"<p>{kept} --flag</p>")
        assert marked == f'<p>{kept} <span class="option">--flag</span></p>'


@EVERY
def test_tags_are_whole(browser, site, every):
    for name in pages_of(site) if every else SAMPLE:
        assert not Tags((site / f"{name}.html").read_text()).broken, name


def test_will_it_fit(page, site):
    page.goto_page(next(pages_of(site, "fit")))
    form = page.locator('[data-widget="fit"]')
    for cell in DATA["fit"]["data"]["cells"][::4]:
        for label in ("model", "gpus", "memory"):
            at = ("model", "gpus", "memory").index(label)
            form.locator("select").nth(at).select_option(str(cell[label]))
        said = form.locator("[role=status]").inner_text()
        assert f"{cell['peak'] / 2**30:.1f} GiB" in said and cell["way"] in said
        assert bool(cell["host"]) == (f"{cell['host'] / 2**30:,.0f} GiB of host memory" in said)
        if cell["fits"]:
            assert f"sends {cell['sent'] / 1e9:.1f} GB per step" in said
            assert bool(cell["copied"]) == (f"{cell['copied'] / 1e9:.1f} GB over PCIe" in said)
        colour = " over"
        if cell["fits"]:
            colour = " host" if cell["host"] else ""
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
        right = "all => all.map(x => x.getBoundingClientRect().right)"
        parts = form.locator("rect").evaluate_all(right)
        assert max(parts) <= form.bounding_box()["x"] + form.bounding_box()["width"]


def test_a_collective_by_keyboard(page, site):
    page.goto_page(next(pages_of(site, "collectives")))
    form = page.locator('[data-widget="collectives"]')
    for name, steps in DATA["collectives"].items():
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
OF_TEXTS = (
    "all => all.map(one => ({...one.getBoundingClientRect().toJSON(), text: one.textContent}))"
)


def test_memory_is_of_a_training_step():
    """Without the evaluation after it."""
    for one in SERIES:
        names = " ".join(name for _, name in one["phases"]).split()
        assert {"forward", "backward", "optimizer"} <= {*names} and "evaluation" not in names


@pytest.mark.parametrize("name", ["DeepSpeed", "LoRA", "optimizer_in_backward"])
def test_pictures_of_memory(page, name):
    """Their phases have names, none of which covers another; a number says the peak."""
    page.goto_page(f"techniques/{name}")
    pictures = page.locator(f'[data-script="{name}"] svg.area').all()
    rows = [one for one in SERIES if one["technique"].split()[0] == name]
    for picture, one in zip(pictures, rows, strict=True):
        assert picture.locator("path[fill]").count() == len(one["bytes"])
        texts = picture.locator("text").evaluate_all(OF_TEXTS)
        peak = max(map(sum, zip(*one["bytes"].values(), strict=True)))
        assert {"GiB", f"{peak / 2**30:.2f}"} <= {text["text"] for text in texts}
        names = [text for text in texts if text["text"][0].islower()]
        assert {text["text"] for text in names} == {name for _, name in one["phases"] if name}
        names.sort(key=lambda text: (text["y"], text["x"]))
        for before, after in itertools.pairwise(names):
            assert after["y"] > before["y"] or after["left"] > before["right"]


@pytest.mark.full
@pytest.mark.parametrize("job, name", [("GPT", "Muon"), ("ResNet-50", "torchrun_DDP")])
def test_the_peak_of_a_picture_is_what_is_predicted(job, name):
    found = DATA["memory"]["data"]
    flags, batch = found["jobs"][job]
    command = f"python estimate.py {flags} -b {batch} --gpus {found['gpus']} --only {name} --json"
    rows = json.loads(succeed(command, forked=True).stdout)
    predicted = {row["technique"]: row["peak"] for row in rows}
    [series] = [s for s in found["series"] if (s["job"], s["technique"]) == (job, name)]
    peak = max(map(sum, zip(*series["bytes"].values(), strict=True)))
    assert peak == pytest.approx(predicted[name], rel=0.01), "run website/make_data.py memory again"


def test_schedules_are_what_the_program_makes():
    for found in DATA["schedules"]["data"][::12]:
        made = schedules.timetable(found["schedule"], found["ranks"], found["microbatches"])
        assert json.loads(json.dumps(made)) == found
        if found["schedule"] in ("gpipe", "1f1b"):
            assert found["bubble"] == pytest.approx(found["formula"])


@pytest.mark.parametrize("steps", DATA["collectives"].values(), ids=DATA["collectives"])
def test_a_step_of_a_collective_sends_what_ranks_have(steps):
    """What a rank has after a step is the sum of what two ranks, or it alone, had before."""
    for before, after in itertools.pairwise(steps):
        known = {cell for row in (*before, *steps[0]) for cell in row}
        sums = {
            "+".join(sorted({*a.split("+"), *b.split("+")}))
            for a in known
            for b in known
            if a and b
        }
        cells = {cell for row in after for cell in row}
        assert cells <= known | sums | {""}


def test_collectives_end_with_what_torch_distributed_computes():
    """As tests/test_collectives.py has found it to be."""
    after = AFTER | {"all_gather": BEFORE.diag().expand(4, 4)}  # of one chunk per rank
    for name, steps in DATA["collectives"].items():
        for cells, row in zip(steps[-1], after[name], strict=True):
            sums = []
            for place, cell in enumerate(cells):
                chunks = cell.split("+") if cell else []
                assert name == "all_to_all" or all(int(c[-1]) == place for c in chunks), name
                if chunks:
                    sums.append(sum(TILES[chunk][0] for chunk in chunks))
            assert sums == ([] if row is None else row.tolist()), name
