"""Measure the scripts side by side on the same work, and render what was measured.

Measure     python benchmark.py --suite cpu
            The suites are files in config/: quick, cpu, gpu and inference. Each row is run in
            fresh processes by its own launch command, the rows taking turns (A B C, A B C, ...);
            results/SUITE.json gathers the figures. A row that fails says why, the others go on.
Continue    the same command again: what was stopped goes on where it was.
Render      python benchmark.py --render
            Rewrites the tables of README.md and README.zh-CN.md and draws the plots, from results/.
Check       python benchmark.py --check
            Fails if a table or a plot is not what results/ says.
"""

import argparse
import contextlib
import datetime
import difflib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from tqdm import tqdm

import common
import model_inference

ROOT = Path(__file__).resolve().parent
CONFIG, RESULTS, RUNS = ROOT / "config", ROOT / "results", ROOT / "runs" / "benchmark"
READMES = {"en": ROOT / "README.md", "zh": ROOT / "README.zh-CN.md"}
PARENTS = {
    "half_precision": "SingleGPU",
    "auto_mixed_precision": "SingleGPU",
    "DP": "SingleGPU",
    "DDP": "SingleGPU",
    "torchrun_DDP": "DDP",
    "FSDP": "torchrun_DDP",
    "DDP_ZeRO": "torchrun_DDP",
    "DeepSpeed": "torchrun_DDP",
    "DDP_AMP": "torchrun_DDP",
    "gradient_accumulation": "torchrun_DDP",
    "comm_hooks": "torchrun_DDP",
}
SCHEMA = 1  # of the files in results/ that a suite leaves
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
KEPT = (  # of result.json, in each run of a row
    "technique", "command", "world_size", "device", "threads", "model", "precision", "tf32",
    "dataset", "image_size", "global_batch_size", "optimizer", "train_samples", "steps",
    "seconds_total", "images_per_second", "step_ms", "peak_memory_gib", "state_bytes",
)  # fmt: skip


def main():
    args = parse_args()
    if args.render or args.check:
        render(check=args.check)
    else:
        measure(args)


def parse_args() -> argparse.Namespace:
    suites = sorted(path.stem.removeprefix("suite_") for path in CONFIG.glob("suite_*.json"))
    parser = common.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    # fmt: off
    parser.add_argument("--suite", choices=suites, help="measure config/suite_NAME.json")
    parser.add_argument("--only", nargs="+", metavar="ROW", default=[], help="these rows alone")
    parser.add_argument("--repeats", type=common.number(int, 1), metavar="N",
                        help="runs of each row (default: as the suite says)")
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="(default: results/SUITE.json; SUITE.only.json with --only)")
    parser.add_argument("--render", action="store_true", help="results/ into README and plots")
    parser.add_argument("--check", action="store_true", help="do README and plots say the same?")
    # fmt: on
    args = parser.parse_args()
    if bool(args.suite) + args.render + args.check != 1:
        common.fail("give one of --suite, --render and --check (--help lists the flags)")
    if not args.suite and (args.only or args.repeats or args.output):
        common.fail("--only, --repeats and --output go with --suite")
    return args


# ------------------------------------------------------------------------------------ 1 measure


def read_suite(name: str) -> dict:
    """``config/suite_NAME.json``, its rows spelled out: one for each number of ranks."""
    suite = json.loads((CONFIG / f"suite_{name}.json").read_text())
    gpus = torch.cuda.device_count()
    rows = []
    for row in suite["rows"]:
        ranks = row.get("ranks", [None])
        if ranks == "gpus":  # one, and all of them
            ranks = sorted({1, max(1, gpus)})
        for n in ranks:
            words = shlex.split(row["command"].replace("{ranks}", str(n)))
            words += shlex.split("" if row.get("own_job") else suite.get("job", ""))
            label = row["name"] if n is None else f"{row['name']} x{n}"
            table, reference = row.get("table", name), row.get("reference", False)
            rows.append({"name": label, "table": table, "command": words, "reference": reference})
    return suite | {"rows": rows}


def measure(args: argparse.Namespace) -> None:
    """Run the rows in turns; write the result when all are done, and after each what there is."""
    suite = read_suite(args.suite)
    names = [row["name"] for row in suite["rows"]]
    for name in args.only:
        if name not in names:
            common.fail(f"--only {name!r}: suite {args.suite} has {', '.join(names)}")
    if suite.get("device") == "cuda" and not torch.cuda.is_available():
        common.fail(f"--suite {args.suite} needs a GPU and PyTorch finds none; try --suite cpu")
    some = ".only" if args.only else ""  # a few rows are not to replace all
    output = args.output or RESULTS / f"{args.suite}{some}.json"
    common.check_writable(output.parent, f"--output {output}")
    if output.is_dir():
        common.fail(f"--output {output} is a folder; give a file")
    if suite.get("steps"):
        return run_steps(suite["steps"], output)
    rows = [row for row in suite["rows"] if not args.only or row["name"] in args.only]
    repeats = args.repeats or suite["repeats"]
    partial = output.with_name(f"{output.stem}.partial.json")
    found = start_or_continue(partial, suite, args, repeats)
    by_name = {row["name"]: row for row in found["rows"]}
    for row in rows:
        if row["name"] not in by_name:
            entry = {"name": row["name"], "table": row["table"], "failed": None, "runs": []}
            by_name[row["name"]] = entry
            found["rows"].append(entry)
    todo = [
        (repeat, row)
        for repeat in range(repeats)
        for row in rows
        if len(by_name[row["name"]]["runs"]) <= repeat and not by_name[row["name"]]["failed"]
    ]
    bar = tqdm(todo, args.suite, unit="run", disable=None)
    try:
        for _, row in bar:
            entry = by_name[row["name"]]
            if entry["failed"]:
                continue
            bar.set_postfix_str(row["name"])
            folder = RUNS / output.stem / slug(row["name"])
            against = None
            for other in rows:  # of the same work
                if other["reference"] and other["table"] == row["table"]:
                    against = RUNS / output.stem / slug(other["name"]) / "model.pt"
            run, why = run_row(row["command"], folder, suite.get("timeout", 900), against)
            if run:
                entry["runs"].append(run)
            else:
                entry["failed"] = why
                tqdm.write(f"{row['name']} failed: {why}", file=sys.stderr)
            write_json(partial, found)
    except KeyboardInterrupt:
        bar.close()
        print(f"stopped; the same command goes on from {partial}", file=sys.stderr)
        raise SystemExit(130) from None
    write_json(partial, found | {"complete": True})
    os.replace(partial, output)
    for table in suite["tables"]:
        if any(row["table"] == table for row in found["rows"]):
            print(suite_table(found, table), end="\n\n")
    failed = [row["name"] for row in found["rows"] if row["failed"]]
    print(f"done: {output}" + (f"; failed: {', '.join(failed)}" if failed else ""))


def start_or_continue(partial: Path, suite: dict, args: argparse.Namespace, repeats: int) -> dict:
    """What a stopped measurement has so far, if it is of this suite, commit and machine."""
    about = {
        "schema": SCHEMA, "suite": args.suite, "about": suite["about"], "complete": False,
        "job": suite.get("job", ""), "repeats": repeats,
        "hardware": common.hardware() | power_limits(),
        "versions": versions(), "git_commit": common.git_commit(),
    }  # fmt: skip
    with contextlib.suppress(FileNotFoundError):
        found = read_results(partial)
        same = ("suite", "job", "hardware", "versions", "git_commit")
        changed = [key for key in same if found.get(key) != about[key]]
        if changed:
            common.fail(f"{partial} is of another {' and '.join(changed)}; remove it to begin anew")
        runs = sum(len(row["runs"]) for row in found["rows"])
        print(f"going on from {partial}, which has {runs} runs")
        return found | {"repeats": repeats}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return about | {"date": today, "rows": []}


def versions() -> dict[str, str]:
    import importlib.metadata as metadata

    found = common.versions()
    for package in ("deepspeed", "lightning-fabric", "accelerate"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def run_steps(steps: list[str], output: Path) -> None:
    """A suite whose last step writes its own file: model_inference.py, a process per row."""
    folder = RUNS / output.stem
    for step in steps:
        words = shlex.split(step.format(folder=folder.relative_to(ROOT)))
        code = subprocess.run(words, cwd=ROOT, env=environment()).returncode
        if code:
            raise SystemExit(code)
    write_json(output, json.loads((folder / "inference.json").read_text()))
    print(f"done: {output}")


def environment() -> dict[str, str]:
    """Ours, without what a launcher may have left, and with our Python's programs first."""
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHERS}
    return env | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])}


def run_row(words: list[str], folder: Path, timeout: float, against: Path | None):
    """One run of a row, in processes of its own.

    Returns:
        Its figures and ``None``, or ``None`` and why there are none.
    """
    shutil.rmtree(folder, ignore_errors=True)
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log, GpuWatch() as watch:
        try:
            process = subprocess.Popen(
                [*words, "--output-dir", os.path.relpath(folder, ROOT)], cwd=ROOT,
                env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            return None, f"{words[0]} is not installed"
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        log.seek(0)
        text = log.read()
    if code is None:
        return None, f"no end after {timeout:.0f} s"
    if code or not (folder / "result.json").is_file():
        return None, reason(text, code)
    result = json.loads((folder / "result.json").read_text())
    run = {key: result[key] for key in KEPT} | {"gpu": watch.peak}
    run["eval_accuracy"], run["eval_samples"] = result["eval_accuracy"][-1], result["eval_samples"]
    run["seconds_process"] = time.perf_counter() - started
    weights = folder / "model.pt"
    run["weights_difference"] = None
    if weights.is_file():
        state = torch.load(weights, weights_only=True)
        run["parameters"] = sum(t.numel() for name, t in state.items() if is_parameter(name))
        if against and against.is_file() and against != weights:
            run["weights_difference"] = distance(state, torch.load(against, weights_only=True))
    shutil.rmtree(folder / "snapshots", ignore_errors=True)  # large; nobody goes on from here
    return run, None


def end(process: subprocess.Popen) -> None:
    """End a launcher that still runs: asked to, it ends its workers, which have sessions of their
    own; if it does not obey, kill what can be reached."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def is_parameter(name: str) -> bool:
    return not name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def distance(ours: dict, theirs: dict) -> float | None:
    """How far apart the parameters of two models are, relative to the second's length."""
    names = [name for name in theirs if is_parameter(name)]
    if names != [name for name in ours if is_parameter(name)]:
        return None
    flat, other = (torch.cat([s[n].flatten().double() for n in names]) for s in (ours, theirs))
    return ((flat - other).norm() / other.norm()).item()


def reason(text: str, code: int | None) -> str:
    """Why a run failed, in a few words, from what it printed."""
    text = text.replace("|", "/")  # which would end a cell of a table
    if re.search(r"out of memory|can't allocate memory|DefaultCPUAllocator", text, re.IGNORECASE):
        return "out of memory"
    if missing := re.search(r"No module named '([\w.]+)'", text):
        return f"{missing[1]} is not installed"
    if ours := re.findall(r"^\w+: error: (.*)$", text, re.MULTILINE):
        return ours[-1]
    if errors := re.findall(
        r"^(?:\[rank\d+\]: )?(\w*(?:Error|Exception): .*)$", text, re.MULTILINE
    ):
        return errors[0][:200]
    lines = text.strip().splitlines() or ["no output"]
    return f"exit code {code}: {lines[-1][:200]}"


class GpuWatch:
    """The largest utilization and memory of any GPU while the block runs, four times a second."""

    def __enter__(self):
        self.peak, self.stop = None, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        if torch.cuda.is_available():
            self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        if self.thread.is_alive():
            self.thread.join(5)

    def watch(self):
        while not self.stop.wait(0.25):
            rows = query_gpus("utilization.gpu", "memory.used")
            if rows:
                percent, mebibytes = (max(values) for values in zip(*rows, strict=True))
                before = self.peak or {"utilization_percent": 0, "memory_used_gib": 0}
                self.peak = {
                    "utilization_percent": max(before["utilization_percent"], percent),
                    "memory_used_gib": max(before["memory_used_gib"], mebibytes / 1024),
                }


def query_gpus(*what: str) -> list[list[float]]:
    """Figures of each GPU, by NVIDIA's Python bindings or else its program; empty without both."""
    try:
        import pynvml  # of the package nvidia-ml-py

        pynvml.nvmlInit()
        ask = {
            "utilization.gpu": lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "memory.used": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**20,
            "power.limit": lambda gpu: pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000,
        }
        gpus = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [[float(ask[name](gpu)) for name in what] for gpu in gpus]
    except Exception:  # not installed, no driver, not permitted
        pass
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        command = ["nvidia-smi", f"--query-gpu={','.join(what)}", "--format=csv,noheader,nounits"]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return [[float(v) for v in line.split(",")] for line in printed.stdout.splitlines()]
    return []


def power_limits() -> dict:
    watts = query_gpus("power.limit") if torch.cuda.is_available() else []
    return {"power_limits": [f"{row[0]:.0f} W" for row in watts]}


def slug(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def write_json(path: Path, value: dict) -> None:
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)


def read_results(path: Path) -> dict:
    """A suite's file; raises FileNotFoundError if there is none."""
    try:
        found = json.loads(path.read_text())
        known = found["schema"] == SCHEMA and isinstance(found["rows"], list)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        common.fail(f"{path} cannot be used ({type(error).__name__}: {error}); measure it again")
    if not known:
        common.fail(
            f"{path} is of schema {found['schema']}, and this is {SCHEMA}; measure it again"
        )
    return found


# ------------------------------------------------------------------------------------- 2 theory


def theory(words: list[str], ranks: int, optimizer: str) -> dict[str, float]:
    """Bytes per parameter that a rank keeps after a step (README, "What a rank keeps and sends").

    DeepSpeed's copies are counted where its script counts them, besides parameters, gradients and
    optimizer.
    """
    script = next(Path(word).stem for word in words if word.endswith(".py"))
    k = {"sgd": 4, "adamw": 8}[optimizer]
    kept = {"parameters": 4, "gradients": 4, "optimizer": k}
    if script == "pytorch_half_precision":
        kept = {"parameters": 2, "gradients": 2, "optimizer": k / 2}
        if "--master-weights" in words:
            kept |= {"optimizer": k, "master_weights": 4}
    if script == "pytorch_FSDP":
        kept = {name: value / ranks for name, value in kept.items()}
    if script == "pytorch_DDP_ZeRO" and {"--use_zero", "--use-zero"} & set(words):
        kept["optimizer"] /= ranks
    if script == "pytorch_DeepSpeed":
        config = words[words.index("--deepspeed_config") + 1]
        settings = json.loads((ROOT / config).read_text())
        stage = settings["zero_optimization"]["stage"]
        if stage >= 1:
            kept["optimizer"] /= ranks
            kept["gradients"] /= ranks
            kept["fp32_copy"] = 4 / ranks
        if stage == 3:
            kept["parameters"] /= ranks
            kept["gradient_buffer"] = 4 / ranks
    return kept


# ------------------------------------------------------------------------------------- 3 render

CHINESE = {  # what stands in the tables' heads and cells
    "technique": "技术", "ranks": "进程数", "precision": "精度",
    "images/s (min–max)": "图像/秒（最小–最大）",
    "step ms (p95)": "每步毫秒（p95）", "epoch s": "每轮秒数", "peak GiB": "峰值内存 GiB",
    "peak GiB (reserved)": "峰值显存 GiB（保留）", "GPU %": "GPU %",
    "kept (theory)": "每参数字节（理论）", "weights": "权重差", "accuracy": "准确率",
    "loop": "训练循环", "of the bare loop": "相对裸循环", "script": "脚本", "its loss": "它的损失",
    "SGD with momentum": "带动量的 SGD", "loss in fp32": "fp32 损失", "difference": "差",
    "1 rank": "1 进程", "2 ranks": "2 进程", "4 ranks": "4 进程", "runtime": "运行时",
    "batch 1": "批 1", "batch 8": "批 8", "batch 32": "批 32", "batch 128": "批 128",
    "fault": "故障", "damage": "损坏", "trials": "次数", "clean": "完好", "wrong": "有误",
    "hung": "挂起", "fallback": "退回上一个", "silent": "未察觉", "failed": "失败",
    "memory GiB": "内存 GiB", "first call s": "首次调用 s", "not measured yet": "尚未测量",
    " cores": " 核", " runs of each": " 次重复", "median (least–most)": "中位数（最小–最大）",
}  # fmt: skip


def render(check: bool) -> None:
    """Rewrite the READMEs and draw the plots; or fail, changing nothing, if that would."""
    texts = {language: read_readme(path) for language, path in READMES.items()}
    results = {
        path.stem: read_results(path)
        for name in ("cpu", "gpu")
        if (path := RESULTS / f"{name}.json").is_file()
    }
    rendered = {language: fill(text, language, results) for language, text in texts.items()}
    wrong = [READMES[language].name for language in texts if texts[language] != rendered[language]]
    plots = {RESULTS / f"{name}.svg": data for name, data in plot_data(results).items()}
    wrong += [path.name for path, data in plots.items() if digest_of(path) != digest(data)]
    if check:
        if wrong:
            fix = "python benchmark.py --render"
            print(f"not what results/ says: {', '.join(wrong)}; {fix}", file=sys.stderr)
            raise SystemExit(1)
        return
    for language, path in READMES.items():
        if texts[language] != rendered[language]:
            temporary = path.with_name(f".{path.name}.part")
            temporary.write_text(rendered[language])
            os.replace(temporary, path)
    for path, data in plots.items():
        if digest_of(path) != digest(data):
            draw(path, data)
    print(f"rendered: {', '.join(wrong) if wrong else 'all were as results/ says'}")


def read_readme(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        common.fail(f"{path} cannot be read ({error.strerror})")


def fill(text: str, language: str, results: dict) -> str:
    """The text with every table between ``<!-- name -->`` and ``<!-- end -->`` made anew."""
    proof = json.loads((RESULTS / "proof.json").read_text())
    tables = {
        "parity": parity_table(proof["parity"], text),
        "bytes": bytes_table(proof["bytes"], text),
        "sent": sent_table(proof["sent"], text),
        "loss": loss_table(proof["loss"], text),
        "inference": inference_table(json.loads((RESULTS / "inference.json").read_text())),
        "faults": outcomes_table(RESULTS / "faults.txt", "fault"),
        "corrupt": outcomes_table(RESULTS / "corrupt.txt", "damage"),
    }
    for suite in ("cpu", "gpu"):
        for table in json.loads((CONFIG / f"suite_{suite}.json").read_text())["tables"]:
            if suite in results:
                tables[table] = suite_table(results[suite], table)
            else:
                tables[table] = f"not measured yet: `python benchmark.py --suite {suite}`"
    tables |= {name: technique_block(name, results) for name in PARENTS}
    for name, lines in tables.items():
        lines = translate(lines) if language == "zh" else lines
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text, found = re.subn(pattern, f"\\g<1>\n{lines}\n\n\\g<2>", text, flags=re.DOTALL)
        if found != 1:
            name_of = READMES[language].name
            common.fail(f"{name_of} has {found} places <!-- {name} --> ... <!-- end -->, not one")
    return text


def translate(lines: str) -> str:
    """The heads of tables in Chinese, and what stands below; the rows are names and figures."""
    lines = lines.splitlines()
    for i, line in enumerate(lines):
        if lines[i + 1 : i + 2] and lines[i + 1].startswith("| --- "):
            cells = [CHINESE.get(cell.strip(), cell.strip()) for cell in line.strip("|").split("|")]
            lines[i] = "| " + " | ".join(cells) + " |"
        elif "](results/" in line or line.startswith("not measured yet"):
            for english in ("not measured yet", " cores", " runs of each", "median (least–most)"):
                lines[i] = lines[i].replace(english, CHINESE[english])
    return "\n".join(lines)


def technique_block(name: str, results: dict) -> str:
    """A technique's rows, and its diff against its parent, without the docstrings."""
    script, parent = f"pytorch_{name}", f"pytorch_{PARENTS[name]}"
    blocks = []
    for suite in results:
        rows = [row for row in results[suite]["rows"] if row["table"] == suite and row["runs"]]
        rows = [row for row in rows if row["runs"][0]["technique"] == script]
        if rows:
            run = rows[0]["runs"][0]
            job = f"{run['model']}, {run['image_size']}×{run['image_size']}, {run['device']}:"
            blocks += [job, techniques_table(rows)]
    old, new = (
        (ROOT / f"{which}.py").read_text().split('"""\n', 1)[1].splitlines()
        for which in (parent, script)
    )
    _, _, *diff = difflib.unified_diff(old, new, n=1, lineterm="")
    diff = "\n".join("" if line.startswith("@@") else line for line in diff).strip("\n")
    summary = f"<details><summary><code>diff {parent}.py {script}.py</code></summary>"
    return "\n\n".join([*blocks, summary, f"```diff\n{diff}\n```", "</details>"])


def markdown(header: list[str], rows: list[list]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def middle(values: list[float]) -> float | None:
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def of_all(runs: list[dict], *keys: str) -> list[float]:
    """A figure of each run."""
    values = runs
    for key in keys:
        values = [value and value[key] for value in values]
    return values


def name_of(row: dict) -> str:
    """Of a row, without its number of ranks."""
    return re.sub(r" x\d+$", "", row["name"])


def spread(values: list[float]) -> str:
    """Median, and least and most; as many digits as three repeats are worth."""
    low, mid, high = min(values), statistics.median(values), max(values)
    digits = 0 if mid >= 100 else 1
    return f"{mid:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


def kept_bytes(run: dict) -> tuple[float, float]:
    """Bytes per parameter that a rank keeps: counted, and in theory."""
    expected = theory(shlex.split(run["command"]), run["world_size"], run["optimizer"])
    return sum(run["state_bytes"].values()) / run["parameters"], sum(expected.values())


def suite_table(found: dict, table: str | None = None) -> str:
    """One of a suite's tables, in Markdown: medians over the repeats, and where they are from."""
    table = table or found["suite"]
    rows = [row for row in found["rows"] if row["table"] == table]
    drawn = peers_table(rows) if table.endswith("-peers") else techniques_table(rows)
    machine = found["hardware"]
    on_cpu = all(run["device"] == "cpu" for row in rows for run in row["runs"])
    about = f"{machine_line(machine, on_cpu)}; torch {found['versions']['torch']}; "
    about += f"{found['repeats']} runs of each, median (least–most); "
    about += f"[results/{found['suite']}.json](results/{found['suite']}.json)"
    return f"{drawn}\n\n{about}"


def inference_table(found: dict) -> str:
    on_cpu = found["device"] == "cpu"
    packages = [f"{name} {version}" for name, version in found["versions"].items()
                if name.startswith(("torch", "onnx")) and name != "torchvision"]  # fmt: skip
    about = f"{found['model']}, {found['image_size']}×{found['image_size']}; "
    about += f"{machine_line(found['hardware'], on_cpu)}; {', '.join(packages)}; "
    about += "[results/inference.json](results/inference.json)"
    return f"{model_inference.table(found)}\n\n{about}"


def machine_line(machine: dict, on_cpu: bool) -> str:
    if on_cpu:
        return ", ".join([machine["cpu"], f"{machine['cores']} cores", *machine["cpu_flags"]])
    return ", ".join(machine["gpus"] + machine.get("power_limits", []))


def techniques_table(rows: list[dict]) -> str:
    gpu = any(run["peak_memory_gib"]["allocated"] is not None for r in rows for run in r["runs"])
    header = ["technique", "ranks", "precision", "images/s (min–max)", "step ms (p95)", "epoch s"]
    header += ["peak GiB (reserved)", "GPU %"] if gpu else ["peak GiB"]
    header += ["kept (theory)", "weights", "accuracy"]
    lines = []
    for row in rows:
        name, runs = f"`{name_of(row)}`", row["runs"]
        if not runs:
            ranks = re.search(r" x(\d+)$", row["name"])
            cells = [name, ranks[1] if ranks else "", "", row["failed"]]
            lines.append(cells + [""] * (len(header) - len(cells)))
            continue
        run = runs[0]
        if row["failed"]:
            name += f" ({len(runs)} runs; then {row['failed']})"
        speeds = of_all(runs, "images_per_second")
        p50, p95 = (middle(of_all(runs, "step_ms", p)) for p in ("p50", "p95"))
        cells = [
            name,
            run["world_size"],
            run["precision"],
            spread(speeds),
            f"{p50:.0f} ({p95:.0f})",
        ]
        cells.append(f"{run['train_samples'] / statistics.median(speeds):,.1f}")
        memory = {kind: middle(of_all(runs, "peak_memory_gib", kind)) for kind in
                  ("allocated", "reserved", "process")}  # fmt: skip
        if gpu:
            cells.append(f"{memory['allocated']:.2f} ({memory['reserved']:.2f})")
            used = middle(of_all(runs, "gpu", "utilization_percent"))
            cells.append("" if used is None else f"{used:.0f}")
        else:
            cells.append(f"{memory['process']:.2f}")
        if run["state_bytes"]:
            kept, expected = kept_bytes(run)
            cells.append(f"{kept:.2f} ({expected:.2f})")
        else:  # a peer's
            cells.append("")
        apart = middle(of_all(runs, "weights_difference"))
        cells.append("" if apart is None else f"{apart:.0e}")
        accuracy = middle(of_all(runs, "eval_accuracy"))
        lines.append([*cells, "" if accuracy is None else f"{accuracy:.1%}"])
    return markdown(header, lines)


def peers_table(rows: list[dict]) -> str:
    """Loops on the same work, against the bare one."""
    speeds = [of_all(r["runs"], "images_per_second") for r in rows if r["name"] == "bare loop"]
    bare = middle(speeds[0]) if speeds else None
    lines = []
    for row in rows:
        if not row["runs"]:
            lines.append([row["name"], row["failed"], "", ""])
            continue
        speeds = of_all(row["runs"], "images_per_second")
        memory = middle(of_all(row["runs"], "peak_memory_gib", "allocated"))
        memory = memory or middle(of_all(row["runs"], "peak_memory_gib", "process"))
        part = f"{statistics.median(speeds) / bare:.2f}" if bare else ""
        lines.append([row["name"], spread(speeds), part, f"{memory:.2f}"])
    return markdown(["loop", "images/s (min–max)", "of the bare loop", "peak GiB"], lines)


def by_script(rows: list[dict], text: str) -> dict[str, list[dict]]:
    """Rows of each script, scripts in the order of the README's list of them."""
    order = re.findall(r"^\| `(pytorch_\w+)\.py`", text, re.MULTILINE)
    scripts = sorted({row["script"] for row in rows}, key=lambda s: (order.index(s.split()[0]), s))
    return {s: [row for row in rows if row["script"] == s] for s in scripts}


def short(script: str) -> str:
    return f"`{script.removeprefix('pytorch_')}`"


def parity_table(rows: list[dict], text: str) -> str:
    """Largest relative difference of any tensor; worst over the world sizes."""
    lines = []
    for script, group in by_script(rows, text).items():
        cells = [short(script), ", ".join(map(str, sorted({row["ranks"] for row in group})))]
        for optimizer in ("sgd", "adamw"):
            values = [row["value"] for row in group if row["optimizer"] == optimizer]
            cells.append(f"{max(values):.0e}" if values else "")
        lines.append(cells)
    return markdown(["script", "ranks", "SGD with momentum", "AdamW"], lines)


def digits(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def bytes_table(rows: list[dict], text: str) -> str:
    """parameters + gradients + optimizer (+ what else), for SGD (AdamW), at 1, 2 and 4 ranks."""
    lines = []
    kinds = ("parameters", "gradients", "optimizer")
    for script, group in by_script(rows, text).items():
        cells = [short(script)]
        for ranks in (1, 2, 4):
            at = {row["optimizer"]: row for row in group if row["ranks"] == ranks}
            if not at:
                cells.append("")
                continue
            kept = at.get("sgd", at.get("adamw"))["kept"]
            words = " + ".join(digits(kept[kind]) for kind in kinds[:2]) + " +"
            if "sgd" in at:
                words += f" {digits(kept['optimizer'])}"
            if "adamw" in at:
                words += f" ({digits(at['adamw']['kept']['optimizer'])})"
            for extra in sorted(kind for kind in kept if kept[kind] and kind not in kinds):
                words += f" + {digits(kept[extra])} {extra.replace('_', ' ')}"
            cells.append(words)
        lines.append(cells)
    return markdown(["script", "1 rank", "2 ranks", "4 ranks"], lines)


def sent_table(rows: list[dict], text: str) -> str:
    lines = []
    for script, group in by_script(rows, text).items():
        cells = [short(script)]
        for ranks in (2, 4):
            parts = []
            for row in group:
                if row["ranks"] == ranks:
                    sent = sorted(row["sent"].items())
                    parts = [f"{digits(size)} {kind.replace('_', '-')}" for kind, size in sent]
            cells.append(", ".join(part for part in parts if not part.startswith("0 ")))
        lines.append(cells)
    return markdown(["script", "2 ranks", "4 ranks"], lines)


def loss_table(rows: list[dict], text: str) -> str:
    lines = []
    for script, group in by_script(rows, text).items():
        for row in group:
            change = f"{row['value'] / row['fp32'] - 1:+.2%}"
            figures = [row["ranks"], f"{row['fp32']:.4f}", f"{row['value']:.4f}", change]
            lines.append([short(script), *figures])
    return markdown(["script", "ranks", "loss in fp32", "its loss", "difference"], lines)


TRIAL = re.compile(
    r"trial +\d+: (?P<kind>\w+) .*?(?P<end>clean|wrong|hung|fallback|silent|failed)\b"
)


def outcomes_table(path: Path, what: str) -> str:
    """Trials by kind and outcome, counted in what tests/faults/*.py printed, and its last line."""
    if not path.is_file():
        return "not measured yet"
    command, where, *trials, summary = path.read_text().splitlines()
    found = [TRIAL.match(line) for line in trials]
    if not all(found) or not summary.startswith(f"{len(found)} trials: "):
        common.fail(f"{path} is not what it was written as; run {command.removeprefix('$ ')} again")
    outcomes = ["clean", "wrong", "hung"] if what == "fault" else ["fallback", "silent", "failed"]
    lines = []
    for kind in sorted({match["kind"] for match in found}):
        ends = [match["end"] for match in found if match["kind"] == kind]
        lines.append([kind, len(ends), *(ends.count(outcome) for outcome in outcomes)])
    ends = [match["end"] for match in found]
    lines.append(["all", len(ends), *(ends.count(outcome) for outcome in outcomes)])
    table = markdown([what, "trials", *outcomes], lines)
    link = f"[results/{path.name}](results/{path.name})"
    return f"{table}\n\n`{command.removeprefix('$ ')}`: {summary} ({where}; {link})"


# -------------------------------------------------------------------------------------- 4 plots


def plot_data(results: dict) -> dict[str, dict]:
    """What the plots show, by name of the file: of a GPU's figures where there are any."""
    plots = {}
    for suite in ("cpu", "gpu"):  # the latter wins
        rows = results.get(suite, {"rows": []})["rows"]
        rows = [row for row in rows if row["table"] == suite and row["runs"]]
        memory, epochs, scaling = {}, {}, {}
        for row in rows:
            run, title = row["runs"][0], row["name"]
            speed = middle(of_all(row["runs"], "images_per_second"))
            epochs[title] = round(run["train_samples"] / speed, 2)
            scaling.setdefault(name_of(row), {})[str(run["world_size"])] = round(speed, 1)
            if "offload" in title:  # counted, but not on the device
                continue
            parts = {kind: size / 2**20 for kind, size in run["state_bytes"].items()}
            main = {kind: parts.pop(kind) for kind in ("parameters", "gradients", "optimizer")}
            main["copies"] = sum(parts.values())
            if run["peak_memory_gib"]["allocated"] is not None:
                rest = 1024 * run["peak_memory_gib"]["allocated"] - sum(main.values())
                main["activations and the rest"] = max(0.0, rest)
            memory[title] = {kind: round(size, 1) for kind, size in main.items()}
        scaling = {title: speeds for title, speeds in scaling.items() if len(speeds) > 1}
        for name, unit, values in (
            ("memory", "MiB per rank", memory),
            ("epoch", "seconds per epoch", epochs),
            ("scaling", "images/s", scaling),
        ):
            if values:
                run = rows[0]["runs"][0]
                job = f"{run['model']} at {run['image_size']}, {run['device']}"
                plots[name] = {"unit": f"{unit} ({job})", "values": values}
    return plots


def digest(data: dict) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def digest_of(path: Path) -> str | None:
    """Of what a plot shows, as :func:`draw` left it in the file."""
    with contextlib.suppress(OSError):
        found = re.search(r"<dc:description>(\w+)</dc:description>", path.read_text())
        return found and found[1]
    return None


def draw(path: Path, data: dict) -> None:
    """A plot for light and dark pages: no background, and text in a grey that both can bear."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    grey = "#7d8590"
    plt.rcParams.update({
        "svg.hashsalt": path.stem, "svg.fonttype": "none", "font.family": "sans-serif",
        "font.size": 11, "text.color": grey, "axes.labelcolor": grey, "axes.edgecolor": grey,
        "xtick.color": grey, "ytick.color": grey, "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": plt.cycler(color=["#4c8dd6", "#e08a3c", "#54a868", "#c65f63", "#9179c0",
                                             "#9c8468", "#d288bd", "#8d8d8d"]),
    })  # fmt: skip
    values = data["values"]
    if path.stem == "scaling":
        figure, axes = plt.subplots(figsize=(8, 4))
        for i, (title, speeds) in enumerate(values.items()):
            ranks = [int(n) for n in speeds]
            style = "o-" if i < 8 else "s--"
            axes.plot(ranks, list(speeds.values()), style, label=title)
        axes.set(xlabel="ranks", ylabel=data["unit"], ylim=(0, None))
        axes.set_xticks(sorted({int(n) for speeds in values.values() for n in speeds}))
        axes.legend(frameon=False, fontsize=9, bbox_to_anchor=(1, 1), loc="upper left")
    else:
        figure, axes = plt.subplots(figsize=(8, 0.28 * len(values) + 1))
        titles, left = list(values), [0.0] * len(values)
        if path.stem == "memory":
            kinds = list(dict.fromkeys(kind for parts in values.values() for kind in parts))
            for kind in kinds:
                sizes = [parts.get(kind, 0) for parts in values.values()]
                axes.barh(titles, sizes, left=left, label=kind, height=0.7)
                left = [a + b for a, b in zip(left, sizes, strict=True)]
            axes.legend(frameon=False, fontsize=9, ncols=len(kinds), loc="lower left",
                        bbox_to_anchor=(0, 1))  # fmt: skip
        else:
            axes.barh(titles, list(values.values()), height=0.7)
            for i, seconds in enumerate(values.values()):
                axes.text(seconds, i, f" {seconds:g}", va="center", fontsize=9)
        axes.invert_yaxis()
        axes.margins(y=0.01)
        axes.set_xlabel(data["unit"])
    metadata = {"Date": None, "Creator": "benchmark.py", "Description": digest(data)}
    temporary = path.with_name(f".{path.name}.part")
    figure.savefig(
        temporary, format="svg", bbox_inches="tight", transparent=True, metadata=metadata
    )
    os.replace(temporary, path)
    plt.close(figure)


if __name__ == "__main__":
    main()
