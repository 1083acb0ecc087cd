"""What a program writes on the pages that teach: a model worked out, milliseconds, and answers.

By the name of their block, of a row of techniques.py:

    problem-NAME   the peak of the technique that the page begins with, or the time of one GPU, or
                   the bytes that a rank sends with this technique or that of another page, or the
                   least tokens of a step, or the state of a larger model
    worked-NAME    GiB per GPU of a model, beside the technique that the page begins with
    comm-NAME      the bytes that a rank sends, and how long they take on two links
    answer-NAME-1  a folded answer, with figures of recorded runs
    million        peaks of a sequence of a million tokens, beside published ones: million.json
    tested-NAME    what the tests compare
    sync-GRPO      the weights that a generator gets
    failures       how often jobs of so many GPUs fail, at the rate of a published run

The sentences are in report/sentences.json. report/quoted.json has what others have published, for
a page whose technique is not predicted. report/lessons.json says which rows of results/ a page
shows.

The texts of the answers are in report/answers/NAME.md, and in Chinese in NAME.zh-CN.md, with
figures as ``{RUN/output/0/peak:.1f GiB}``: a path into results/course.json, or into
results/front.json if no run of the course has the name; as ``{H100/ROW/step_seconds:.2f}`` into a
row of results/one_gpu.json; as ``{fit llama3-8b 8 H100/peak:.1f GiB}`` into website/data/fit.json.
"""

import re
from pathlib import Path

from report.blocks import TABLES, Cell, draw, footer
from report.front import MEMORY, gpu_footer
from report.predictions import fit_footer
from report.results import Unusable, load
from report.steps import SHOWN
from techniques import LESSONS, Technique, technique
from theory import Decoder, K, by_dimension, decoder

SAID = load(Path(__file__).with_name("sentences.json"))
ANSWERS = Path(__file__).with_name("answers")
GPUS = 8
PROOF = "[Equivalence tests](docs/proof.md)"
SIZES = {"layers": 32, "width": 4096, "tokens": 128_256, "context": 8192}  # of Llama-3-8B


def llama(batch: int, **sizes: int) -> Decoder:
    """Llama-3-8B and a global batch, in sequences; ``sizes`` that are not the usual ones."""
    return decoder(**SIZES | sizes, batch=batch, kv=1 / 4, mlp=3 * 4096 * 14_336, llama=True)


LLAMA = llama(GPUS)  # one sequence per GPU
# Likewise of Qwen3-30B-A3B, a mixture of experts.
QWEN_SIZES = {"layers": 48, "width": 2048, "tokens": 151_936, "context": 8192, "batch": GPUS}
QWEN_SIZES |= {"heads": 2, "kv": 1 / 8, "mlp": 3 * 2048 * 768, "experts": 128, "top_k": 8}
QWEN = decoder(**QWEN_SIZES, llama=True)
LARGE = {"layers": 80, "width": 8192, "tokens": 128_256, "context": 8192, "batch": GPUS}
LARGE |= {"kv": 1 / 8, "mlp": 3 * 8192 * 28_672}
LLAMA_70B = decoder(**LARGE, llama=True)
MANY = 1024  # GPUs, for which a batch of one sequence each is large
LINKS = {"nvlink4": "NVLink 4", "ib400": "InfiniBand, 400 Gb/s per GPU"}
NAMES = LINKS | {"pcie4": "PCIe 4.0, 16 lanes"}
COLLECTIVES = {"allreduce": "all-reduces", "allgather": "all-gathers", "broadcast": "broadcasts"}
COLLECTIVES |= {"reduce_scatter": "reduce-scatters", "alltoall": "all-to-alls"}
COLLECTIVES |= {"send": "messages to neighbours"}
WRITTEN = 1e9  # bytes per second
SMALL = 0.001  # of the bytes of a step: collectives that a sentence leaves out
NUMBERED = re.compile(r"^## (\d+)\n+(.*?)\s*(?=^## |\Z)", re.MULTILINE | re.DOTALL)
RUN = re.compile(r"\{([^/{}]+)/")  # the run whose figure a text has
FOLDED = "<details>\n<summary>Answer</summary>\n\n{}\n\n</details>"


class Answer(Cell):
    """A text with the paths of figures."""

    def __init__(self, found: dict):
        self.found = found

    def get_field(self, field_name, args, kwargs):
        value = self.found
        for key in field_name.split("/"):
            value = value[int(key) if isinstance(value, list) else key]
        return value, field_name


def blocks(root: Path, results: dict) -> dict[str, str]:
    """All of them but the answers, by name."""
    found = {f"tested-{row.name}": tested(row) for row in LESSONS if row.cases[0].ranks}
    links = load(root / "estimator" / "links.json")
    for name, shown in SHOWN.items():
        found[f"problem-{name}"] = problem(shown, results, links)
        found[f"worked-{name}"] = worked(name, shown, results["front"])
        if theory_of(name, shown):
            found[f"comm-{name}"] = communication(name, shown, results, links)
    size = 2 * LLAMA.whole
    times = ", ".join(time_of({"broadcast": size}, links, link) for link in LINKS)
    found["sync-GRPO"] = f"Llama-3-8B in bfloat16 is {size / 1e9:.1f} GB of weights: {times}."
    found |= quotes() | saved() | {"million": million(results["course"]), "failures": failures()}
    return found


def problem(shown: dict, results: dict, links: dict) -> str:
    """How much memory a GPU needs, and how much it has; or how long it computes or sends."""
    why = shown.get("problem", "peak")
    before = shown.get("before")  # the page whose technique leaves the problem
    page = f"docs/techniques/{before}.md" if before else ""
    if why == "sends":
        [line, *_] = communication(before, SHOWN[before], results, links).split("\n\n")
        return SAID[why].format(before=before, line=line, page=page)
    if why == "time":
        each = alone(shown, results)["step_seconds"]
        return SAID[why].format(context=SIZES["context"], each=each, gpus=GPUS, all=GPUS * each)
    if why == "batch":
        least = MANY * SIZES["context"] / 1e6
        sizes = {"many": MANY, "context": SIZES["context"], "gpus": GPUS}
        return SAID[why].format(least=least, fewer=least / GPUS, **sizes)
    if why == "state":
        each = 8 + K["adamw"]
        billions = LLAMA_70B.whole / 1e9
        memory = GPUS * MEMORY * 2**30 / 1e9
        sizes = {"each": each, "billions": billions, "size": each * billions}
        return SAID[why].format(gpus=GPUS, memory=memory, **sizes)
    name = SHOWN[before]["front"] if before else shown.get("beside", shown["front"])
    found = results["front"]["outputs"][name]["output"][0]
    sizes = {kind: size / 2**30 for kind, size in found["kinds"].items()}
    sizes["state"] = sum(sizes[kind] for kind in ("parameters", "gradients", "optimizer"))
    sizes |= {"peak": found["peak"] / 2**30, "sent": found["sent"] / 1e9, "memory": MEMORY}
    times = ", ".join(time_of({"all": found["sent"]}, links, link) for link in LINKS)
    about = {"setting": setting(name, shown, found), "times": times, "page": page}
    return SAID[why].format(**sizes, **about)


def setting(name: str, shown: dict, found: dict) -> str:
    """Model, technique and tokens of a row of results/front.json: the beginning of a sentence."""
    model, row = model_and_row(name)
    tokens = f"{int(found['inputs'].split()[0]):,} tokens"
    sequences = shown.get("sequences", "one sequence")
    for said in (" per GPU", f", {sequences} of {tokens}", f", {sequences}", f", {tokens}"):
        row = row.removesuffix(said)
    where = f" per GPU: each of {found['gpus']} GPUs" if found["gpus"] > 1 else ": the GPU"
    return f"{model} with AdamW, {row}, {sequences} of {tokens}{where}"


def model_and_row(name: str) -> tuple[str, str]:
    """The model of a row of results/front.json, and its name without that."""
    model, _, row = name.rpartition(": ")
    return model or "Llama-3-8B", row


def worked(name: str, shown: dict, front: dict) -> str:
    """A table of predicted peaks, and the picture of the step."""
    names = [shown.get("beside"), *shown.get("between", []), shown["front"]]
    runs = [front["outputs"][one] for one in names if one]
    title = shown.get("title", shown["front"])
    model, _ = model_and_row(shown["front"])
    rows = []
    for one, run in zip(filter(None, names), runs, strict=True):
        [found] = run["output"]
        kinds = found["kinds"]
        small = kinds["input"] + kinds["temporary"] + kinds["update"]
        called = title if one == shown["front"] else one
        sizes = kinds | {"peak": found["peak"], "rest": small}
        rows.append(sizes | {"name": called.removeprefix(f"{model}: ")})
    dashed = f", {shown['beside']} dashed" if "beside" in shown else ""
    picture = f"![Memory over one training step: {title}{dashed}]"
    below = footer(front, "front", "predicted", runs)
    table = draw(rows, {key.format(model=model): form for key, form in TABLES["worked"].items()})
    return f"{table}{below}\n\n{picture}(docs/images/step-{name}.svg)"


def communication(name: str, shown: dict, results: dict, links: dict) -> str:
    """A sentence: bytes by theory, and their time at the rates of two links; and the compute, if
    one GPU has measured it."""
    gpus = shown.get("gpus", GPUS)
    sent = theory_of(name, shown)
    if between := shown.get("between_machines"):
        inside = {kind: size for kind, size in sent.items() if kind not in between}
        across = {kind: sent[kind] for kind in between}
        said = f"within its machine {bytes_of(inside)}: {time_of(inside, links, 'nvlink4')}; and "
        said += f"between machines {bytes_of(across)}: {time_of(across, links, 'ib400')}"
    else:
        times = [time_of(sent, links, link) for link in LINKS]
        said = f"{bytes_of(sent, ' per step')}: {', '.join(times)}"
    model, _ = model_and_row(shown["front"])
    tokens = f"{shown.get('context', SIZES['context']):,} tokens"
    sequences = {1: "one sequence"}.get(batch := shown.get("batch", 0), f"{batch} sequences")
    of = f", {sequences} of {tokens}" if batch else ""  # where the bytes depend on them
    mean = " on average" if "pp" in shown.get("options", {}) else ""  # over unequal stages
    line = f"{model} on {gpus} GPUs{of}: a rank sends{mean} {said}{compute(shown, results)}."
    for where, each in shown.get("copied", {}).items():  # bytes per parameter of the shard
        size = {"pcie": each * LLAMA.whole / gpus}
        line += f" It copies {size['pcie'] / 1e9:.1f} GB {where}: {time_of(size, links, 'pcie4')}."
    if dimensions := shown.get("dimensions"):
        sums = {key: sum(value.values()) for key, value in by_dimension(options_of(shown)).items()}
        own = [f"{sums[key] * LLAMA.whole / 1e9:.1f} GB by {key}" for key in dimensions]
        line += f" Of these bytes it sends {listed(own)}."
    below = "Bytes: the formula in [techniques.py](techniques.py); "
    below += "rates of [estimator/links.json](estimator/links.json)"
    if "alone" in shown:
        rows = [alone(shown, results)]
        below += f"; compute: {gpu_footer(results['one_gpu'], rows).strip()}"
    return f"{line}\n\n{below}"


def compute(shown: dict, results: dict) -> str:
    """What one GPU computes meanwhile, if it has been measured."""
    if "alone" not in shown:
        return ""
    return f", beside {1e3 * alone(shown, results)['step_seconds']:,.0f} ms of compute"


def theory_of(name: str, shown: dict) -> dict[str, float]:
    """Bytes that a rank sends per step, by collective. ``theory``: the script that is predicted, if
    the page is of another one."""
    options = options_of(shown)
    found = technique(shown.get("theory", name)).sends(shown.get("gpus", GPUS), options)
    return {kind: each * options["decoder"].whole for kind, each in found.items()}


def quotes() -> dict[str, str]:
    """What others have published about a technique that this repository cannot predict."""
    found = {}
    columns = {"run": "{name}", "tokens/s per GPU": "{rate:,.0f}", "reserved GiB": "{memory:.1f}"}
    for name, quote in load(Path(__file__).with_name("quoted.json")).items():
        without, using = quote["rows"]
        faster = using["rate"] / without["rate"] - 1
        said = SAID["quoted"].format(setting=quote["setting"], rate=without["rate"], faster=faster)
        found[f"problem-{name}"] = said
        below = f"{quote['setting']}: published by [{quote['who']}]({quote['source']})"
        found[f"worked-{name}"] = f"{draw(quote['rows'], columns)}\n\n{below}"
    return found


def saved() -> dict[str, str]:
    """The bytes of a checkpoint, and the time to write them at a rate that many disks have."""
    whole = LLAMA.whole * (4 + K["adamw"])
    one, all_of_them = (whole / WRITTEN / ranks for ranks in (1, GPUS))
    sizes = {"whole": whole / 1e9, "rate": WRITTEN / 1e9, "ranks": GPUS}
    line = SAID["saved"].format(one=one, all=all_of_them, **sizes)
    rows = [{"ranks": n, "each": whole / n, "whole": whole} for n in (1, GPUS, 64)]
    columns = {"ranks": "{ranks}", "a rank writes GB": "{each:.1f GB}"}
    columns |= {
        "--async-save: CPU memory of a rank, GB": "{each:.1f GB}",
        "all files GB": "{whole:.1f GB}",
    }
    below = "Llama-3-8B: 12 bytes per parameter, by the formula in [techniques.py](techniques.py)"
    return {"problem-checkpoint": line, "worked-checkpoint": f"{draw(rows, columns)}\n\n{below}"}


def failures() -> str:
    """A table: what share of its time a job loses at the rate at which Llama 3's training failed.
    It loses 20 minutes to start, and half of the hour between two snapshots."""
    rate = 419 / (54 * 24 * 16_384)  # per hour and GPU
    rows = [{"gpus": n, "every": 1 / n / rate, "lost": n * rate * 5 / 6} for n in (8, MANY, 16_384)]
    columns = {"GPUs": "{gpus:,}", "hours between failures": "{every:,.0f}"}
    return draw(rows, columns | {"time lost": "{lost:.2%}"})


def million(course: dict) -> str:
    """A table: predictions of pytorch_ND_parallel.py, and what others have published of theirs."""
    shown = load(Path(__file__).with_name("million.json"))
    rows = []
    runs = []
    for row in shown["rows"]:
        run = course["outputs"][row["run"]]
        [found] = run["output"]
        rows.append(row | {"peak": found["peak"], "host": GPUS * found["host"]})
        if "from" in run:  # begins with a machine, of which a prediction does not depend
            _, _, since = run["from"].partition("; ")
            run = run | {"from": f"predicted; {since}"}
        runs.append(run)
    return draw(rows, shown["columns"]) + footer(course, "course", "predicted", runs)


def options_of(shown: dict) -> dict:
    """What the formulas of a technique need to know about the run that a page shows."""
    sizes = {"context": shown["context"]} if "context" in shown else {}
    model = llama(shown.get("batch", GPUS), **sizes)
    if model_and_row(shown["front"])[0] == "Qwen3-30B-A3B":
        model = QWEN
    return {"optimizer": "adamw", "decoder": model} | shown.get("options", {})


def bytes_of(sent: dict[str, float], per_step: str = "") -> str:
    """The sum, if it has several parts, and each part that is not much smaller."""
    whole = sum(sent.values())
    large = {kind: size for kind, size in sent.items() if size > SMALL * whole}
    parts = [f"{size / 1e9:.1f} GB in {COLLECTIVES[kind]}" for kind, size in large.items()]
    total = f"{whole / 1e9:.1f} GB{per_step}, " if len(parts) > 1 else ""
    return f"{total}{listed(parts)}"


def time_of(sent: dict[str, float], links: dict, link: str) -> str:
    """How long these bytes take on a link."""
    rate = links[link]["bandwidth"]
    taken = 1e3 * sum(sent.values()) / rate
    return f"at {rate / 1e9:.4g} GB/s ({NAMES[link]}) {taken:,.0f} ms"


def alone(shown: dict, results: dict) -> dict:
    """What one GPU measured of the compute of a rank."""
    return next(row for row in results["one_gpu"]["rows"] if row["name"] == shown["alone"])


def answers(root: Path, results: dict, chinese: bool) -> dict[str, str]:
    """The folded answers of all pages, by the name of their block; in Chinese where there is a
    file report/answers/NAME.zh-CN.md."""
    course = results["course"]
    gpu = results["one_gpu"]
    measured = {row["name"]: row for row in gpu["rows"]}
    fit = load(root / "website" / "data" / "fit.json")
    cells = {f"fit {c['model']} {c['gpus']} {c['memory']}": c for c in fit["data"]["cells"]}
    figures = Answer(results["front"]["outputs"] | course["outputs"] | {"H100": measured} | cells)
    found = {}
    for path in sorted(ANSWERS.glob("*.md")):  # CP.md before CP.zh-CN.md
        name, _, language = path.stem.partition(".")
        if language and not chinese:
            continue
        for number, text in NUMBERED.findall(path.read_text()):
            try:
                filled = figures.vformat(text, (), {})
            except (KeyError, IndexError) as error:
                raise Unusable(f"{path}, answer {number}: no result has {error}") from None
            runs = [course["outputs"].get(run, {}) for run in sorted({*RUN.findall(text)})]
            below = fit_footer(fit)
            if "{fit " not in text:
                below = footer(course, "course", course["hardware"]["cpu"], runs or [{}])
            if "{H100/" in text:
                below += gpu_footer(gpu, [{}])
            found[f"answer-{name}-{number}"] = FOLDED.format(filled + below)
    return found


OPTIMIZERS = {"Muon": "Muon and AdamW", "low_bit_optimizer": "AdamW"}  # that a script has


def tested(row: Technique) -> str:
    """What tests/test_contract.py does with a script, in a sentence."""
    usual = [one for one in row.cases if not {"rounds", "full"} & one.traits] or row.cases
    counts = sorted({ranks for one in usual for ranks in one.ranks})
    ranks = "one process" if counts == [1] else f"{listed(counts)} ranks"
    flags = [f"`{one.flags}`" for one in usual if one.flags]
    said = f"Tested: `{row.script}.py` on {ranks}"
    said += f" ({', '.join(flags)})" if flags else ""
    if row.parent and not {"differs", "rounds"} & row.traits:
        optimizers = OPTIMIZERS.get(row.name, "SGD and AdamW")
        said += f", with {optimizers}. Its weights are those of one process on the same batches, "
        said += "up to the rounding of float64"
    return f"{said}; the bytes that it keeps and sends equal the formulas. {PROOF}"


def listed(values: list) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}" if first else last
