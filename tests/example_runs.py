"""Edited copies of the examples, run as somebody would run them, and the plain loop, which does the
same in one process. conftest.py has the fixtures of this file for all tests."""

import ast
import functools
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT, TABLES, distance, launch
from safetensors.torch import load_file


class Row(NamedTuple):
    """Of an example: which one it changes, on how many ranks it is killed and resumed, what is set
    in a copy, how far it may be from the plain loop."""

    parent: str
    ranks: int = 2
    then: int = 1
    code: str = ""
    far: tuple = (0, 1e-9)
    usual: bool = True


ROWS = {name: Row(**row) for name, row in TABLES["examples"].items()}
DIFFER = {  # functions that an example has in other words than the plain loop
    "chat": {"make_model", "make_data", "forward", "export"},
    "lora": {"export"},
    "distillation": {"loss_of"},
    "contrastive": {"make_data", "forward", "loss_of"},
    "stream": {"make_data", "order"},
}
DIFFER |= dict.fromkeys(("tp", "pp", "ep", "cp", "fsdp_tp"), {"make_model"})  # named blocks
IN_PLAIN = TABLES["in_plain"]
DECODERS = TABLES["own_decoders"]
SAME = {  # in a copy; and ranks have different numbers of labels
    "nn.Dropout(0.1)": "nn.Dropout(0.0)",
    '"labels": row[1:]}': '"labels": row[1:].where(torch.arange(16) > row[0] % 15, -100)}',
}
EXACT = """torch.set_default_dtype(torch.float64)
to, torch.Tensor.float = torch.Tensor.to, torch.Tensor.double  # models convert to float32, too
double = lambda x: torch.double if x is torch.float else x
torch.Tensor.to = lambda tensor, *xs, **named: to(tensor, *map(double, xs), **named)
"""
IN_FLOAT64 = {  # other implementations of experts know no float64
    "dtype=torch.float32": 'dtype=torch.float64, experts_implementation="eager"',
    "torch.float32": "torch.float64",
}
SMALL = dict(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def read(name):
    return (ROOT / f"examples/{name}.py").read_text()


def own_of(name):
    """The functions that the plain loop needs to do what an example does."""
    return read(name) if name in DIFFER else ""


def insert(text, own):
    """Somebody's functions in place of those of the same names, and what else belongs to them."""
    for node in ast.parse(own).body:
        code = ast.get_source_segment(own, node)
        head = re.escape(code.partition(":")[0])  # with the arguments
        found = re.search(rf"^{head}:.*?(?=\n\n\n)", text, re.M | re.S)
        if isinstance(node, ast.FunctionDef) and found:
            text = text if node.name == "main" else text.replace(found[0], code)
        elif not isinstance(node, (ast.Expr, ast.If)):  # a docstring, or what starts main()
            text = text.replace("\n\n\n", f"\n\n{code}\n\n\n", 1)
    return text


def start(name, n, folder, code="", own="", kill=0, changes=None, exact=True, same=SAME):
    """A copy of an example on n ranks, or by python if 0.

    Args:
        code: lines that follow the constants.
        own: somebody's functions in place of the example's.
        kill: in which step rank 0 dies.
        changes: what is replaced, and by what; with ``same``, which is usual.
        exact: whether it computes in float64.
    """
    text = insert(read(name), own)
    in_float64 = IN_FLOAT64 if exact else {}
    for old, new in (same | (changes or {}) | in_float64 | {":.4f}": ":.17g}"}).items():
        text = text.replace(old, new)
    code = f"{EXACT if exact else ''}OUT, STEPS, EVERY = 'runs', 16, 4\n{code}"
    text = text.replace("\n\n\n", f"\n{code}\n\n\n", 1)
    # Rank 0 dies: another one may be ahead of what rank 0 still has to save
    killed = f"os._exit(7) if step == {kill} and os.environ['RANK'] == '0' else None\n        "
    script = folder / f"transformers_{name}.py"  # forked where its libraries are imported
    script.write_text(re.sub(r"(?=torch.manual_seed\(step\b)", killed, text))
    how = "deepspeed --num_gpus " if "deepspeed" in name else "torchrun --nproc_per_node="
    how = f"{how}{n}" if n else "python"
    return launch(f"{how} {script}", cwd=folder, forked=True, DS_ACCELERATOR="cpu")


def run(name, n, folder, code="", kill=0, **options):
    """The figures that it prints, by step."""
    finished = start(name, n, folder, code, kill=kill, **options)
    assert finished.code == (7 if kill else 0), str(finished)
    line = r"^step (\d+): loss (\S+), evaluation loss (\S+), norm (\S+)( \S+)*$"
    figures = {}
    for step, *row in re.findall(line, finished.stdout, re.M):
        figures[int(step)] = [float(each) for each in row if each]
    return figures


def best(folder):
    [path] = (folder / "runs/best").glob("*model.safetensors")
    return load_file(path)


class Ended(NamedTuple):
    """What a run of the plain loop left behind."""

    figures: dict
    folder: Path


def check_end(figures, folder, expected):
    """A run ends as that of the plain loop: with its last figures, and its best weights."""
    assert figures[16] == pytest.approx(expected.figures[16], 1e-9)
    assert distance(best(folder), best(expected.folder)) <= 1e-9


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """A function that runs the plain loop, with somebody's functions, and returns what it left
    behind. The same run is done only once."""
    pytest.importorskip("transformers")  # whose server forks it
    ended = {}

    def get(own="", code="", changes=None, exact=True):
        key = own, code, str(changes), exact
        if key not in ended:
            folder = tmp_path_factory.mktemp("plain")
            figures = run("plain", 0, folder, code, own=own, changes=changes, exact=exact)
            ended[key] = Ended(figures, folder)
        return ended[key]

    return get


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """A function that makes a folder as on the Hub, of a decoder by name: Llama's in bfloat16,
    Qwen2's tied, Qwen3's in several files."""
    transformers = pytest.importorskip("transformers")
    from test_llama import make_tokenizer

    @functools.cache
    def get(kind):
        folder = tmp_path_factory.mktemp(kind)
        make_tokenizer(folder, 280)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"eos_token": "</s>"})
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
        torch.manual_seed(0)
        sizes = SMALL | (DECODERS | TABLES["unusual_decoders"])[kind]
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.to(torch.bfloat16 if kind == "Llama" else torch.float32)
        model.generation_config.eos_token_id = [tokenizer.eos_token_id]
        model.save_pretrained(folder, max_shard_size="20KB" if kind == "Qwen3" else "1GB")
        (folder / "text").write_text("abcde</s>" * 500)
        return folder

    return get


def generate(folder):
    """Until the token that ends it, as written into the folder, or too long."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]
    prompt = tokenizer("abc", add_special_tokens=False, return_tensors="pt").input_ids
    return tokenizer.decode(model.generate(prompt, do_sample=False, max_new_tokens=20)[0])


def talk(*contents):
    """A line of a file of conversations."""
    roles = ["user", "assistant"] * (len(contents) // 2)
    pairs = zip(roles, contents, strict=True)
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in pairs]})


@pytest.fixture(scope="session")
def conversations(hub):
    """Constants of a copy of chat.py: its model, and the file of its data."""
    path = hub("Qwen3") / "chat.jsonl"
    lines = [talk(f"{i % 7}, {i % 5}?", f"to be {i % 7} or not to be {i % 5}") for i in range(80)]
    path.write_text("\n".join(lines))
    sizes = {"LENGTH": 64, "BATCH": 8, "LR": 1e-2}
    return {"FOLDER": str(path.parent), "DATA": str(path), **sizes}


def as_code(constants):
    return "\n".join(f"{name} = {value!r}" for name, value in constants.items())
