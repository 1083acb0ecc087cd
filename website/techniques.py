"""What the site adds to a technique's page: memory and communication out of the script's own
header, its memory over one step, its rows of the proof, and the diff against its parent."""

import ast
import json
import re
from html import escape
from pathlib import Path

from report import tables
from report.pages import translate
from report.scripts import PARENTS
from website import side_by_side

HEADINGS = {  # by key, in both languages
    "Holds": ("What it holds and sends", "保存什么、发送什么"),
    "memory": ("Memory over one step", "一步之内的内存"),
    "proof": ("Proof", "验证"),
    "measured": ("Measured", "实测"),
    "diff": ("Difference from {}", "与 {} 的区别"),
}
PROOF = {  # tables of results/proof.json, and what they show
    "parity": ("Largest relative difference of any weight from one process: ResNet, float64",
               "与单进程相比权重的最大相对误差：ResNet，float64"),
    "parity_gpt": ("The same for a GPT", "GPT 的同一数值"),
    "parity_shared": ("The same for a GPT", "GPT 的同一数值"),
    "bytes": ("Bytes per parameter that a rank holds: parameters + gradients + optimizer state, "
              "SGD (AdamW)", "每个 rank 每个参数的字节数：参数 + 梯度 + 优化器状态，SGD（AdamW）"),
    "sent": ("Bytes per parameter that a rank sends in a step",
             "每步每个 rank 每个参数发送的字节数"),
    "shared": ("State bytes per parameter and communication per step, counted and by theory",
               "每个参数的状态字节数与每步通信量：计数与理论值"),
    "loss": ("Loss at lower precision, and in fp32", "较低精度下的损失，与 fp32 相比"),
    "optimizers": ("The optimizer's communication and FLOPs", "优化器的通信与 FLOPs"),
}  # fmt: skip
BLOCK = re.compile(r"<!-- (\w+) -->\n(.*?)```bash\ndiff .*?```\n\n```python.*?```\n\n<!-- end -->",
                   re.DOTALL)  # fmt: skip


def add_to(root: Path, path: Path, text: str) -> str:
    """A page with its sections; one of no technique as it is."""
    chinese = path.name.endswith(".zh-CN.md")
    name = path.name.partition(".")[0]
    if name == "SingleGPU":
        return "\n\n".join([text, *sections(root, name, chinese)]) + "\n"
    if name not in PARENTS:
        return text

    def block(match: re.Match) -> str:
        old, new = (f"pytorch_{script}.py" for script in (PARENTS[name], name))
        both = (root / old).read_text(), (root / new).read_text()
        parts = [heading("diff", chinese, PARENTS[name])]
        parts.append(" → ".join(f"[{script}](../../{script})" for script in (old, new)))
        parts += [side_by_side.diff(*both, (old, new)), *sections(root, name, chinese)]
        if measured := match[2].strip():
            parts += [heading("measured", chinese), measured]
        return "\n\n".join(parts)

    return "---\nhide: [toc]\n---\n\n" + BLOCK.sub(block, text)  # the diff needs the room


def sections(root: Path, name: str, chinese: bool) -> list[str]:
    parts = [heading("Holds", chinese), header_fields(root / f"pytorch_{name}.py")]
    if rows := proof(root, name, chinese):
        parts += [heading("proof", chinese), *rows]
    return parts


def heading(key: str, chinese: bool, *names: str) -> str:
    return "## " + HEADINGS[key][chinese].format(*names)


def header_fields(script: Path) -> str:
    """ "Holds" and "Sends", as the script's docstring says them."""
    doc = ast.get_docstring(ast.parse(script.read_text()))
    fields = re.findall(r"^(Holds|Sends)\s+(.*?)(?=^\S|\Z)", doc, re.DOTALL | re.MULTILINE)
    lines = [f"<dt>{key}</dt><dd>{escape(' '.join(text.split()))}</dd>" for key, text in fields]
    return '<dl class="fields" lang="en">\n' + "\n".join(lines) + "\n</dl>"


def proof(root: Path, name: str, chinese: bool) -> list[str]:
    """The rows of every table that are about this script."""
    found, parts = json.loads((root / "results" / "proof.json").read_text()), []
    for table, words in PROOF.items():
        rows = [row for row in found[table] if row["script"].split()[0] == f"pytorch_{name}"]
        if rows and (table != "optimizers" or name == "Muon"):  # FSDP's are there to compare with
            drawn = getattr(tables, f"{table}_table")(rows)
            parts += [f"{words[chinese]}:", translate(drawn) if chinese else drawn]
    return parts
