"""Tables of what tests, the programs of measure/ and model_inference.py measured."""

import itertools
import re
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path

from report.blocks import Column, digits, draw, field, footer, gib, machine_line, size_name
from report.results import NOT_YET, Unusable
from report.suites import KEPT, KEPT_ZH, spread
from techniques import LESSONS

# --------------------------------------------------------------------------------- of the tests


def without_prefix(script: str) -> str:
    return f"`{script.removeprefix('pytorch_')}`"


def in_order(rows: list[dict]) -> list[dict]:
    """In the order of the course."""
    order = [row.script for row in LESSONS]
    return sorted(rows, key=lambda row: (order.index(row["script"].split()[0]), row["script"]))


def by_script(rows: list[dict]) -> list[list[dict]]:
    """The rows of each script, in the order of the course."""
    return [[*group] for _, group in itertools.groupby(in_order(rows), lambda row: row["script"])]


def worst_first(rows: list[dict]) -> list[dict]:
    return sorted(rows, key=lambda row: -row["value"])


def worst(title: str, chinese: str, optimizer: str) -> Column:
    """A column of the largest relative difference of any tensor, over all world sizes."""

    def value(rows: list[dict]) -> str | None:
        values = [row["value"] for row in rows if row["optimizer"] == optimizer]
        return f"{max(values):.0e}" if values else None

    return Column(title, chinese, value)


def of_ranks(value: Callable, *numbers: int) -> list[Column]:
    """A column for each number of ranks."""
    return [
        Column(f"{n} rank{'s' * (n > 1)}", f"{n} 进程", lambda rows, n=n: value(rows, n))
        for n in numbers
    ]


def kept_parts(rows: list[dict], ranks: int) -> str:
    """parameters + gradients + optimizer (+ others), for SGD (AdamW)."""
    at = {row["optimizer"]: row["kept"] for row in rows if row["ranks"] == ranks}
    sizes = {**at.get("adamw", {}), **at.get("sgd", {})}
    parts = [digits(sizes.pop(kind)) for kind in ("parameters", "gradients") if sizes]
    own = [digits(at["sgd"]["optimizer"])] if "sgd" in at else []
    own += [f"({digits(at['adamw']['optimizer'])})"] if "adamw" in at else []
    sizes.pop("optimizer", None)
    others = [f"{digits(sizes[k])} {k.replace('_', ' ')}" for k in sorted(sizes) if sizes[k]]
    return " + ".join([*parts, " ".join(own), *others])


def sent_parts(rows: list[dict], ranks: int) -> str:
    sent = {row["ranks"]: sorted(row["sent"].items()) for row in rows}.get(ranks, ())
    parts = [f"{digits(n)} {kind}" for kind, n in sent if digits(n) != "0"]
    return ", ".join(parts).replace("_", "-")


# fmt: off
GROUP = Column("script", "脚本", lambda rows: without_prefix(rows[0]["script"]))
SCRIPT = Column("script", "脚本", lambda row: without_prefix(row["script"]))
RANKS = field("ranks", "ranks", "进程数")
MISTAKE = field("mistake", "mistake", "错误")
PARITY = by_script, [
    GROUP,
    Column("ranks", "进程数",
           lambda rows: ", ".join(map(str, sorted({row["ranks"] for row in rows})))),
    worst("SGD with momentum", "带动量的 SGD", "sgd"), worst("AdamW", "", "adamw"),
]
PROOF = {  # tables of results/proof.json: the order of the rows, and the columns
    "parity": PARITY, "parity_gpt": PARITY, "parity_shared": PARITY,
    "bytes": (by_script, [GROUP, *of_ranks(kept_parts, 1, 2, 4)]),
    "sent": (by_script, [GROUP, *of_ranks(sent_parts, 2, 4)]),
    "loss": (in_order, [
        SCRIPT, RANKS, field("fp32", "loss in fp32", "fp32 损失", ".4f"),
        field("value", "its loss", "它的损失", ".4f"),
        Column("difference", "差", lambda row: row["value"] / row["fp32"] - 1, "+.2%"),
    ]),
    "shared": (lambda rows: in_order(sorted(rows, key=lambda row: row["ranks"])), [
        SCRIPT, RANKS,
        Column(KEPT, KEPT_ZH, lambda row: f"{row['kept']:,.2f} ({row['kept_theory']:,.2f})"),
        Column("sent kB (theory)", "发送 kB（理论）",
               lambda row: f"{row['sent'] / 1e3:,.0f} ({row['sent_theory'] / 1e3:,.0f})"),
        Column("in", "方式", lambda row: ", ".join(sorted(row["how"])).replace("_", "-")),
    ]),
    "silent": (worst_first, [MISTAKE, SCRIPT, field("value", "off by", "偏差", ".2f")]),
    "silent_examples": (worst_first, [
        MISTAKE, field("effect", "effect", "后果"), field("value", "off by", "偏差", ".2g"),
        field("of", "measured on", "所测的量"),
        Column("run", "运行", lambda row: f"`{row['script']}.py`"),
    ]),
    "optimizers": (lambda rows: sorted(rows, key=lambda row: (row["ranks"], -row["sent"])), [
        Column("script", "脚本", lambda row: f"`{row['script']}`"), RANKS,
        Column("sent per matrix element (theory)", "每个矩阵元素的通信量（理论）",
               lambda row: f"{row['sent']:.2f}" + (
                   f" ({row['sent_theory']:.2f})" if "sent_theory" in row else "")),
        field("calls", "collectives", "集合通信次数"),
        field("flops", "FLOPs x N", "FLOPs × N", ".2f"),
    ]),
}


def proof_table(name: str, rows: list[dict]) -> str:
    order, columns = PROOF[name]
    return draw(order(rows), *columns)


def proof_blocks(root: Path, proof: dict) -> dict[str, str]:
    return {
        name: proof_table(name, proof[name]) + footer(root, proof["measured"][name], "proof.json")
        for name in PROOF
    }


# ------------------------------------------------------------------------- of programs of measure/

HANGS = {  # what rank 1 does, in measure/faults/hang.py
    "skip": "skips a collective", "order": "calls two collectives in another order",
    "shape": "passes a tensor of another shape", "dtype": "passes another dtype",
    "loop": "is in an endless loop", "stop": "is stopped (SIGSTOP)",
    "kill": "is killed (SIGKILL)", "sleep": "waits for its loader",
}


def hangs_block(root: Path, found: dict) -> str:
    """The printed diagnosis, and the scripts whose rank, collective and line it named."""
    groups = {fault: [row for row in found["rows"] if row["fault"] == fault] for fault in HANGS}
    return draw(
        groups, Column("rank 1", "进程 1", HANGS.get),
        Column("first line, of DDP", "第一行（DDP）",
               lambda f: f"`{groups[f][0]['lines'][0].partition('; recorded in')[0]}`"),
        Column("named in", "能指出的脚本",
               lambda f: ", ".join(row["script"].removeprefix("pytorch_") for row in groups[f]
                                   if not row["missed"])),
    ) + footer(root, found, "hangs.json")


def bubble_block(root: Path, found: dict) -> str:
    """The bubble: the share of a step in which a rank is idle."""
    return draw(
        found["rows"], Column("schedule", "调度", lambda row: f"`{row['schedule']}`"),
        field("microbatches", "micro-batches", "微批次"),
        field("formula", "formula", "公式", ".1%"), field("order", "order", "顺序", ".1%"),
        field("core", "compute alone", "只算计算", ".1%"), field("clock", "clock", "时钟", ".1%"),
    ) + footer(root, found, "bubble.json", machine_line(found["hardware"]))


def saves_block(root: Path, found: dict) -> str:
    """How long a checkpoint blocks training, synchronous or asynchronous."""
    waits = {kind: [1e3 * s for s in seconds] for kind, seconds in found["seconds"].items()}
    median = {kind: statistics.median(each) for kind, each in waits.items()}
    whole = {"save": median["save"], "async_save": 1e3 * statistics.median(found["whole_after"])}
    return draw(
        waits, Column("call", "调用", "`{}`".format),
        Column("saves", "保存次数", lambda kind: len(waits[kind])),
        Column("step waits ms (min–max)", "训练步等待毫秒（最小–最大）",
               lambda kind: spread(waits[kind], ",.0f")),
        Column("relative to `save`", "相对 `save`",
               lambda kind: median[kind] / median["save"], ".0%"),
        Column("complete after ms", "写完所需毫秒", whole.get, ",.0f"),
    ) + footer(root, found, "saves.json", machine_line(found["hardware"]),
               after=f"`{found['command']}`")


def one_gpu_block(root: Path, found: dict) -> str:
    """One rank of several, alone on a GPU: predicted and measured memory, and compute."""
    if not found["rows"]:
        return NOT_YET.format("one_gpu")
    sizes = {"predicted": "预测", "allocated": "已分配", "reserved": "已保留"}
    return draw(
        found["rows"], Column("technique", "技术", lambda row: f"`{row['name']}`"),
        field("layers", "layers", "层数"), field("context", "context", "上下文长度", ","),
        *(Column(f"{kind} GiB", f"{chinese} GiB", lambda row, kind=kind: gib(row[kind]))
          for kind, chinese in sizes.items()),
        Column("predicted / allocated", "预测 / 已分配",
               lambda row: row["allocated"] and row["predicted"] / row["allocated"], ".3f"),
        Column("compute, s per step", "计算，每步秒数",
               lambda row: row["failed"] or f"{row['step_seconds']:.2f}"),
    ) + footer(root, found, "one_gpu.json", machine_line(found["hardware"], on_cpu=False))


def losses_blocks(root: Path, found: dict) -> dict[str, str]:
    """Losses of a technique and of the one that it replaces, for three seeds each."""
    columns = (
        Column("script", "脚本", lambda row: without_prefix(row["script"].replace(".py", "", 1))),
        Column("evaluation loss (mean)", "评估损失（平均）",
               lambda row: statistics.mean(row["losses"]), ".4f"),
        Column("of each seed", "各随机种子",
               lambda row: ", ".join(f"{loss:.4f}" for loss in row["losses"])),
    )
    return {
        f"losses-{name}": draw(one["rows"], *columns)
        + footer(root, one, "losses.json", f"`{one['flags']}`")
        for name, one in found.items()
    }


OUTCOMES = {  # of trials, with their Chinese names
    "fault": {"clean": "完好", "wrong": "有误", "hung": "挂起"},
    "damage": {"fallback": "退回上一个", "silent": "未察觉", "failed": "失败"},
}
TRIAL = re.compile(r"trial +\d+: (\w+) .*?(clean|wrong|hung|fallback|silent|failed)\b")


def outcomes_block(path: Path) -> str:
    """Trials by kind and outcome, from the output of measure/faults/*.py, with its last line."""
    what = "damage" if path.stem == "corrupt" else "fault"
    command, where, *trials, summary = path.read_text().splitlines()
    command = command.removeprefix("$ ")
    found = [TRIAL.match(line) for line in trials]
    if not all(found) or not summary.startswith(f"{len(found)} trials: "):
        raise Unusable(f"{path} was modified; run {command} again")
    ends = {kind: [m[2] for m in found if m[1] == kind] for kind in sorted({m[1] for m in found})}
    ends["all"] = [match[2] for match in found]
    table = draw(
        ends, Column(what, {"fault": "故障", "damage": "损坏"}[what], str),
        Column("trials", "次数", lambda kind: len(ends[kind])),
        *(Column(name, chinese, lambda kind, name=name: ends[kind].count(name))
          for name, chinese in OUTCOMES[what].items()))
    link = f"[results/{path.name}](results/{path.name})"
    run, where = (textwrap.shorten(text, 360, placeholder=" …") for text in (command, where))
    return f"{table}\n\n`{run}`: {summary} ({where}; {link})"


def sweep_block(root: Path, found: dict) -> str:
    """A row for each collective: latency and bandwidth."""
    operations = found["operations"]
    drawn = draw(
        operations, Column("collective", "集合通信", "`{}`".format),
        Column("latency µs", "延迟 µs", lambda name: 1e6 * operations[name]["latency"], ",.0f"),
        Column("bandwidth GB/s (fitted)", "带宽 GB/s（拟合）",
               lambda name: operations[name]["bandwidth"] / 1e9, ".2f"),
        Column("bus GB/s (largest message)", "总线带宽 GB/s（最大的消息）",
               lambda name: operations[name]["rows"][-1]["bus"] / 1e9, ".2f"))
    largest = size_name(list(operations.values())[-1]["rows"][-1]["bytes"])
    about = f"{found['backend']}, {found['ranks']} ranks, messages up to {largest}"
    machine = machine_line(found["hardware"], found["backend"] == "gloo")
    return drawn + footer(root, found, "collectives.json", machine, about)


# ------------------------------------------------------------------------ of model_inference.py


def inference_table(found: dict) -> str:
    """images/s per batch size, and in brackets p50 and p95 of a call in ms."""
    rows, sizes = {}, list(dict.fromkeys(row["batch_size"] for row in found["rows"]))
    for row in found["rows"]:
        rows.setdefault((row["runtime"], row["precision"]), {})[row["batch_size"]] = row

    def speed(group: dict, size: int) -> str | None:
        if size not in group:
            return None
        now = group[size]["host_to_host"]
        p50, p95 = now["latency_ms"]["p50"], now["latency_ms"]["p95"]
        return f"{now['images_per_second']:,.1f} ({p50:.1f}, {p95:.1f})"

    first = {key: next(iter(group.values())) for key, group in rows.items()}
    memory = {key: row["peak_memory_gib"] for key, row in first.items()}

    return draw(
        rows, Column("runtime", "运行时", lambda key: key[0]),
        Column("precision", "精度", lambda key: key[1]),
        *(Column(f"batch {n}", f"批 {n}", lambda key, n=n: speed(rows[key], n)) for n in sizes),
        Column("memory GiB", "内存 GiB",
               lambda key: memory[key]["device"] or memory[key]["process"], ".2f"),
        Column("first call s", "首次调用 s", lambda key: first[key]["first_call_s"], ".2f"))
# fmt: on


def inference_block(root: Path, found: dict) -> str:
    """The same, with the hardware and versions."""
    versions, where = found["versions"], machine_line(found["hardware"], found["device"] == "cpu")
    onnx = [f"{name} {versions[name]}" for name in versions if name.startswith("onnx")]
    packages = {"versions": {"torch": ", ".join([versions["torch"], *onnx])}}
    about = f"{found['model']}, {found['image_size']}×{found['image_size']}"
    return inference_table(found) + footer(root, found | packages, "inference.json", about, where)


BLOCKS = {  # of the files in results/ with one table
    "hangs": hangs_block, "bubble": bubble_block, "saves": saves_block, "one_gpu": one_gpu_block,
    "collectives": sweep_block, "inference": inference_block,
}  # fmt: skip
