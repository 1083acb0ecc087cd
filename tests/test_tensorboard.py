"""How a browser shows the runs' TensorBoard files; skipped without a browser."""

import functools
import http.server
import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from conftest import environment, free_port, launcher, succeed

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
SCRIPTS = ["pytorch_SingleGPU", "pytorch_torchrun_DDP"]
JOB = "--dataset synthetic --train-samples 64 --eval-samples 16 --batch-size 16 --epochs 2"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a TensorBoard over the runs of two scripts."""
    runs, port = tmp_path_factory.mktemp("runs"), free_port()
    for script in SCRIPTS:
        succeed(f"{launcher(script)} {JOB} --output-dir {runs}/{script}", forked=True)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", runs, "--port", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
    )
    try:
        deadline = time.monotonic() + 60
        while set(ask(port, "data/runs") or []) != set(SCRIPTS):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.5)
        yield port
    finally:
        process.kill()
        process.wait()


def ask(port, what, data=None):
    try:
        data = data and json.dumps(data).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/{what}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        return None


def test_hparams_has_a_session_of_each_run(address):
    """As the HPARAMS page asks for them: the technique in the one, final figures in the other."""
    experiment = ask(address, "data/plugin/hparams/experiment", {"experimentName": ""})
    assert {"technique", "batch_size", "lr"} <= {h["name"] for h in experiment["hparamInfos"]}
    tags = {info["name"]["tag"] for info in experiment["metricInfos"]}
    assert {"final/accuracy", "final/images_per_second"} <= tags
    wanted = {"experimentName": "", "allowedStatuses": ["STATUS_SUCCESS", "STATUS_UNKNOWN"]}
    wanted |= {"colParams": [{"hparam": "technique"}], "startIndex": 0, "sliceSize": 100}
    groups = ask(address, "data/plugin/hparams/session_groups", wanted)["sessionGroups"]
    assert {group["hparams"]["technique"] for group in groups} == set(SCRIPTS)


# TensorBoard draws parts of its pages in shadow trees, which --dump-dom leaves out: this page holds
# one of its pages and, when that has had time to load, writes down all of its text.
FRAME = """<iframe id="page" width="1400" height="900" src="http://127.0.0.1:{port}/#{page}"></iframe>
<pre id="text"></pre>
<script>
function text(node) {{
  const below = [...(node.shadowRoot ? [node.shadowRoot] : []), ...node.childNodes];
  return (node.nodeType === Node.TEXT_NODE ? node.data + " " : "") + below.map(text).join("");
}}
setTimeout(() => {{
  const shown = document.getElementById("page").contentDocument.body;
  document.getElementById("text").textContent = "text of the page: " + text(shown);
}}, 20000);
</script>"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome")
@pytest.mark.parametrize("page", ["timeseries", "hparams"])
def test_the_browser_shows_both_scripts(page, address, tmp_path):
    """Side by side: each script by name, and on the HPARAMS page its final accuracy."""
    (tmp_path / "index.html").write_text(FRAME.format(port=address, page=page))
    handler = functools.partial(Quiet, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --disable-web-security --dump-dom"
    flags += " --disable-site-isolation-trials --virtual-time-budget=30000"
    command = [BROWSER, *flags.split(), f"--user-data-dir={tmp_path}/profile"]
    try:
        shown = subprocess.run(
            [*command, f"http://127.0.0.1:{server.server_port}/index.html"],
            capture_output=True, text=True, timeout=120,
        ).stdout  # fmt: skip
    finally:
        server.shutdown()
    shown = shown.partition("text of the page: ")[2]
    for word in [*SCRIPTS, *(["final/accuracy", "technique"] if page == "hparams" else [])]:
        assert word in shown
