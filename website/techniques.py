"""What the site adds to a technique's page: memory and communication from the script's docstring,
its memory over one step, its results of the proof, and the diff against its parent."""

import ast
import json
import re
from html import escape
from pathlib import Path

from report import measured
from report.pages import translate
from techniques import TECHNIQUES
from website import area, side_by_side

HEADINGS = {  # by key, in both languages
    "Holds": ("What it holds and sends", "保存什么、发送什么"),
    "memory": ("Memory over one step", "一步之内的内存"),
    "proof": ("Proof", "验证"),
    "measured": ("Measured", "实测"),
    "diff": ("Difference from {}", "与 {} 的区别"),
}
PROOF = {  # tables of results/proof.json, and their captions
    "parity": ("Largest relative difference of any weight from one process: ResNet, float64",
               "与单进程相比权重的最大相对误差：ResNet，float64"),
    "parity_gpt": ("Largest relative difference of any weight from one process: GPT, float64",
                   "与单进程相比权重的最大相对误差：GPT，float64"),
    "parity_shared": ("Largest relative difference of any weight from one process: GPT, float64",
                      "与单进程相比权重的最大相对误差：GPT，float64"),
    "bytes": ("Bytes per parameter that a rank holds: parameters + gradients + optimizer state, "
              "SGD (AdamW)", "每个 rank 每个参数的字节数：参数 + 梯度 + 优化器状态，SGD（AdamW）"),
    "sent": ("Bytes per parameter that a rank sends in a step",
             "每步每个 rank 每个参数发送的字节数"),
    "shared": ("State bytes per parameter and communication per step, counted and in theory",
               "每个参数的状态字节数与每步通信量：计数与理论值"),
    "loss": ("Loss in lower precision, and in fp32", "较低精度下的损失，与 fp32 相比"),
    "optimizers": ("The optimizer's communication and FLOPs", "优化器的通信与 FLOPs"),
}  # fmt: skip
BLOCK = re.compile(r"<!-- (\w+) -->\n(.*?)```bash\ndiff .*?```\n\n```python.*?```\n\n<!-- end -->",
                   re.DOTALL)  # fmt: skip


def add_to(root: Path, path: Path, text: str) -> str:
    """Add the sections to a technique's page; return any other page unchanged."""
    chinese = path.name.endswith(".zh-CN.md")
    name = path.name.partition(".")[0]
    if name == "SingleGPU":
        return "\n\n".join([text, *sections(root, name, chinese)]) + "\n"
    if name not in (parents := {row.name: row.parent for row in TECHNIQUES}):
        return text

    def block(match: re.Match) -> str:
        old, new = (f"pytorch_{script}.py" for script in (parents[name], name))
        both = (root / old).read_text(), (root / new).read_text()
        parts = [heading("diff", chinese, parents[name])]
        parts.append(" → ".join(f"[{script}](../../{script})" for script in (old, new)))
        parts += [side_by_side.diff(*both, (old, new)), *sections(root, name, chinese)]
        if figures := match[2].strip():
            parts += [heading("measured", chinese), figures]
        return "\n\n".join(parts)

    return "---\nhide: [toc]\n---\n\n" + BLOCK.sub(block, text)  # the diff needs the room


def sections(root: Path, name: str, chinese: bool) -> list[str]:
    parts = [heading("Holds", chinese), header_fields(root / f"pytorch_{name}.py")]
    if pictures := memory(root, name, chinese):
        parts += [heading("memory", chinese), *pictures]
    if rows := proof(root, name, chinese):
        parts += [heading("proof", chinese), *rows]
    return parts


def heading(key: str, chinese: bool, *names: str) -> str:
    return "## " + HEADINGS[key][chinese].format(*names)


def header_fields(script: Path) -> str:
    """The fields Holds and Sends of the script's docstring, as HTML."""
    doc = ast.get_docstring(ast.parse(script.read_text()))
    fields = re.findall(r"^(Holds|Sends)\s+(.*?)(?=^\S|\Z)", doc, re.DOTALL | re.MULTILINE)
    lines = [f"<dt>{key}</dt><dd>{escape(' '.join(text.split()))}</dd>" for key, text in fields]
    return '<dl class="fields" lang="en">\n' + "\n".join(lines) + "\n</dl>"


SAYS = (
    "Memory of the tensors on rank 0 of {gpus} GPUs during one training step, in GiB, counted by "
    "[estimate.py](../estimate.md) on fake tensors: `{flags}`, global batch {batch}. The axis ends "
    "at DDP's peak, or at the technique's own peak if that is higher.",
    "{gpus} 个 GPU 中 rank 0 的张量在一个训练步内占用的显存（GiB），由 "
    "[estimate.py](../estimate.zh-CN.md) 在 fake tensor 上数出：`{flags}`，全局批大小 {batch}。"
    "坐标轴到 DDP 的峰值为止，更高时到自己的峰值。",
)


def memory(root: Path, name: str, chinese: bool) -> list[str]:
    """A picture of each variant of a script, for a GPT and for a ResNet."""
    found = json.loads((root / "website" / "data" / "memory.json").read_text())["data"]
    parts, script = [], name if name != "checkpoint" else "FSDP"
    for job, (flags, batch) in found["jobs"].items():
        rows = [one for one in found["series"] if one["job"] == job]
        [ddp] = [one for one in rows if one["technique"] == "torchrun_DDP"]
        rows = [one for one in rows if one["technique"].split()[0] == script]
        if rows:
            said = SAYS[chinese].format(gpus=found["gpus"], flags=flags, batch=batch)
            kinds = [kind for one in rows for kind in one["bytes"]]
            parts += [f"**{job}.** {said}", area.legend(kinds, chinese)]
        for one in rows:
            if len(rows) > 1:
                parts.append(f"`{one['technique']}`:")
            parts.append(area.svg(one, area.peak(ddp), chinese))
    return parts


def proof(root: Path, name: str, chinese: bool) -> list[str]:
    """The rows of every table that are about this script."""
    found, parts = json.loads((root / "results" / "proof.json").read_text()), []
    for table, words in PROOF.items():
        rows = [row for row in found[table] if row["script"].split()[0] == f"pytorch_{name}"]
        if rows and (table != "optimizers" or name == "Muon"):  # FSDP's are there to compare with
            drawn = measured.proof_table(table, rows)
            parts += [f"{words[chinese]}:", translate(drawn) if chinese else drawn]
    return parts
