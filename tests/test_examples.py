"""The examples: each ends as the plain loop, also after it was killed and resumed on another number
of ranks; with dropout, with one's own model, and on a chat. Edited copies of them run."""

import ast
import functools
import json
import math
import re
import shutil
import subprocess
from itertools import pairwise, product
from types import SimpleNamespace
from typing import NamedTuple

import jinja2
import pytest
import test_chat
import torch
from conftest import ROOT, TABLES, cases, distance, launch, name_of, same_bits
from safetensors.torch import load_file, save_file
from test_llama import make_tokenizer

import jobs.chat

transformers = pytest.importorskip("transformers")
Decoder = transformers.AutoModelForCausalLM


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
ADAPTED = (("    optimizer =", "    adapt(model)\n    optimizer ="),)  # LoRA
TAUGHT = (  # distillation: the plain loop with a frozen model on the one process
    ("    optimizer =", "    teacher = make_teacher().eval()\n    optimizer ="),
    (
        "sums = loss_of(",
        'batch["frozen"] = forward(teacher, batch).detach()\n        sums = loss_of(',
    ),
    (
        "found += loss_of(",
        'batch["frozen"] = forward(teacher, batch)\n                found += loss_of(',
    ),
)
UNCLIPPED = (("clip_grad_norm_(trained, 1.0)", "clip_grad_norm_(trained, math.inf)"),)
AVERAGED = (  # EMA
    ("import glob", "import copy\nimport glob"),
    ("    start = 0\n", "    average = copy.deepcopy(model)\n    start = 0\n"),
    (
        "        optimizer.step()\n",
        "        optimizer.step()\n        pairs = zip(average.parameters(), model.parameters())\n"
        "        [a.data.lerp_(p.data, max(0.01, 9 / (10 + step))) for a, p in pairs]\n",
    ),
    ("        model.eval()\n", "        model, average = average, model\n        model.eval()\n"),
    ("        saved = {", "        model, average = average, model\n        saved = {"),
)
LOADER = "DataLoader(train_set, batch_sampler=batches, collate_fn=collate)"
STREAMED = ((LOADER, "DataLoader(Stream(train_set, start, 0, 1), None, collate_fn=collate)"),)
IN_PLAIN = {  # so that the plain loop does what the example does
    "optimizer_in_backward": UNCLIPPED,
    "lora": ADAPTED,
    "ema": AVERAGED,
    "distillation": TAUGHT,
    "stream": STREAMED,
}
ONE_DISK = ("ddp", "amp", "accumulation", "stream", "unequal_gpus", "zero")  # rank 0 saves
APART = "\nos.makedirs(os.environ['RANK'], exist_ok=True)\nos.chdir(os.environ['RANK'])"
SAME = {  # in a copy; and ranks have different numbers of labels
    "nn.Dropout(0.1)": "nn.Dropout(0.0)",
    '"labels": row[1:]}': '"labels": row[1:].where(torch.arange(16) > row[0] % 15, -100)}',
}
EXACT = """torch.set_default_dtype(torch.float64)
to, torch.Tensor.float = torch.Tensor.to, torch.Tensor.double  # models convert to float32, too
double = lambda x: torch.double if x is torch.float else x
torch.Tensor.to = lambda tensor, *xs, **named: to(tensor, *map(double, xs), **named)
"""
EAGER = {"dtype=torch.float32": 'dtype=torch.float64, experts_implementation="eager"'}


def read(name):
    return (ROOT / f"examples/{name}.py").read_text()


def functions_in(name):
    nodes = [n for n in ast.parse(read(name)).body if isinstance(n, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(read(name), node) for node in nodes}


def insert(text, own):
    """Someone's functions in place of those of the same names, and what else belongs to them."""
    for node in ast.parse(own).body:
        code = ast.get_source_segment(own, node)
        head = re.escape(code.partition(":")[0])  # with the arguments
        found = re.search(rf"^{head}:.*?(?=\n\n\n)", text, re.M | re.S)
        if isinstance(node, ast.FunctionDef) and found:
            text = text if node.name == "main" else text.replace(found[0], code)
        elif not isinstance(node, (ast.Expr, ast.If)):  # a docstring, or what starts main()
            text = text.replace("\n\n\n", f"\n\n{code}\n\n\n", 1)
    return text


def start(name, n, folder, code="", own="", kill=0, changes=SAME, exact=True):
    """A copy of an example on n ranks, or by python if 0."""
    text = insert(read(name), own)
    exact = EAGER | {"torch.float32": "torch.float64"} if exact else {}
    for old, new in (changes | exact | {":.4f}": ":.17g}"}).items():
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


def run(name, n, folder, code="", own="", kill=0, changes=SAME, exact=True):
    """The figures that it prints, by step."""
    finished = start(name, n, folder, code, own, kill, changes, exact)
    assert finished.code == (7 if kill else 0), str(finished)
    figures = r"^step (\d+): loss (\S+), evaluation loss (\S+), norm (\S+)( \S+)*$"
    found = re.findall(figures, finished.stdout, re.M)
    return {int(step): [float(each) for each in row if each] for step, *row in found}


def best(folder):
    [path] = (folder / "runs/best").glob("*model.safetensors")
    return load_file(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A function that runs the plain loop, with someone's functions: figures and folder. The same
    run is done only once."""

    @functools.cache
    def get(own="", code="", changes=(), exact=True):
        folder = tmp_path_factory.mktemp("plain")
        return run("plain", 0, folder, code, own, 0, SAME | dict(changes), exact), folder

    return get


def talk(*contents):
    roles = ["user", "assistant"] * (len(contents) // 2)
    pairs = zip(roles, contents, strict=True)
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in pairs]})


@pytest.fixture(scope="module")
def chat(hub):
    """What a copy of chat.py has to know: its model, and conversations."""
    path = hub("Qwen3") / "chat.jsonl"
    lines = [talk(f"{i % 7}, {i % 5}?", f"to be {i % 7} or not to be {i % 5}") for i in range(80)]
    path.write_text("\n".join(lines))
    return f"FOLDER, DATA, LENGTH, BATCH = {str(path.parent)!r}, {str(path)!r}, 64, 8\nLR = 1e-2"


@cases("name", ROWS, lambda n: ROWS[n].usual)
def test_an_example_is_the_plain_loop(name, plain, tmp_path, request):
    """On uneven shares; killed after three saves, of which two are kept, and resumed from the
    newest. Where rank 0 reads and writes for all, each rank has a folder of its own."""
    row = ROWS[name]
    exact = name not in ("amp", "zero_deepspeed")  # all others compute in float64
    given = request.getfixturevalue("chat") if name == "chat" else ""
    own = read(name) if given or "\nclass " in read(name) or name in DIFFER else ""
    changes = IN_PLAIN.get(name, ())
    expected, folder = plain(own, given, changes, exact)
    code = f"{row.code}\n{given}{APART if name in ONE_DISK else ''}"
    found = run(name, row.ranks, tmp_path, code, kill=13, exact=exact)
    for old, new in ("0x", "10", "x1") if name in ONE_DISK else ():  # rank 0 is another machine
        (tmp_path / old).rename(tmp_path / new)
    again = run(name, row.then, tmp_path, code, exact=exact)
    assert [*again] == [16] or name == "dcp" and [*again] == [12, 16]
    ours = tmp_path / "0" if name in ONE_DISK else tmp_path
    kept = {path.stem for path in tmp_path.glob("**/runs/step-*")}
    assert kept - {"step-00000008"} == {"step-00000012", "step-00000016"}
    assert name in ONE_DISK or len(kept) == 2
    assert all(a[1] > b[1] for a, b in pairwise(expected.values())), "the best is not the last"
    for step, figures in (found | again).items():
        assert figures == pytest.approx(expected[step], row.far[1]), step
    assert row.far[0] <= distance(best(ours), best(folder)) <= row.far[1]
    assert not given or generate(ours / "runs/best")
    assert not exact or {weight.dtype for weight in best(ours).values()} == {torch.float64}


@cases("name", ["ddp", "zero", "fsdp", "ema"], lambda n: n == "ddp")
def test_a_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    """To the last bit, with dropout, of which each rank draws its own. The best evaluation is the
    first here."""
    drawn = "dist.all_gather_object(drawn := [0] * world, torch.rand(1).item())\n        "
    drawn += "assert len({*drawn}) == world\n        factor ="
    worse = '[row | {"labels": row["input_ids"]} for row in rows[540:]]'
    options = {"code": ROWS[name].code, "changes": {"factor =": drawn, "rows[540:]": worse}}
    folders = tmp_path / "whole", tmp_path / "parts"
    [folder.mkdir() for folder in folders]
    whole = run(name, 2, folders[0], **options)
    first = run(name, 2, folders[1], kill=5, **options)
    early = best(folders[1])
    assert [*first] == [4] and first | run(name, 2, folders[1], **options) == whole
    assert whole[4][1] == min(figures[1] for figures in whole.values())
    assert same_bits(early, best(folders[1])) and same_bits(early, best(folders[0]))


@pytest.mark.full
def test_a_reference_for_preferences(plain, tmp_path):
    """DPO: the loss of a model that equals its reference is log 2. Then it learns to prefer, and a
    resumed run keeps the reference of the first start, not the model that it resumes."""
    own = read("own/dpo")
    both = insert(read("distillation"), own)
    expected, folder = plain(both, "EVERY, LR = 1, 1e-2", TAUGHT)
    found = run("distillation", 3, tmp_path, "EVERY, LR = 1, 1e-2", own, kill=13)
    found |= run("distillation", 2, tmp_path, "EVERY, LR = 1, 1e-2", own)
    assert found[1][0] == pytest.approx(math.log(2), 1e-12)
    for step, figures in found.items():
        assert figures == pytest.approx(expected[step], 1e-9), step
    assert found[16][3] > 0.9 > found[1][3], "pairs that the model orders as people did"
    assert distance(best(tmp_path), best(folder)) <= 1e-9


@pytest.mark.full
def test_a_head_is_trained_with_adapters(plain, tmp_path):
    """In fp32, and it is exported as peft reads it."""
    code = f"{ROWS['lora'].code}\nWHOLE = ['5']"
    expected, folder = plain(read("lora"), code.partition("\n")[2], ADAPTED)
    found = run("lora", 2, tmp_path, code, kill=13) | run("lora", 3, tmp_path, code)
    assert found[16] == pytest.approx(expected[16], 1e-9)
    weights = best(tmp_path)
    assert distance(weights, best(folder)) <= 1e-9
    assert weights["base_model.model.5.weight"].dtype == torch.float64
    config = json.loads((tmp_path / "runs/best/adapter_config.json").read_text())
    assert config["modules_to_save"] == ["5"]


NORM = """
class Norm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)
"""


@cases("name", ["ddp", "fsdp", "ema", "zero", "hsdp", "ep"], lambda n: n == "ddp")
def test_all_ranks_evaluate_what_is_exported(name, plain, tmp_path):
    """With BatchNorm, of which each rank saw other samples."""
    changes = SAME | {
        "nn.GELU(), ": "nn.GELU(), Norm(64), ",
        "self.norm = nn.RMSNorm(64)": "self.norm = Norm(64)",
    }
    ranks = max(2, ROWS[name].ranks)
    found = run(name, ranks, tmp_path, f"{ROWS[name].code}{NORM}", changes=changes)
    step = min(found, key=lambda step: found[step][1])
    text = insert(read("plain"), read(name) if name == "ep" else "").partition("\n\n\ndef main")[0]
    names = {}
    for old, new in changes.items():
        text = text.replace(old, new)
    exec(f"{text}\n{NORM}", names)
    model = names["make_model"]().double().eval()
    model.load_state_dict(best(tmp_path))
    rows = torch.utils.data.default_collate(names["make_data"]()[1])
    loss, count = names["loss_of"](names["forward"](model, rows), rows)
    assert found[step][1] == pytest.approx((loss / count).item(), 1e-5)


@cases("name", ["ddp", "fsdp", "pp", "zero_deepspeed"], lambda n: n == "fsdp")
def test_every_rank_can_stop_early(name, tmp_path):
    """And a run that has stopped early does not continue when it is started again."""
    changes = SAME | {"return False": "return len(values) == 2"}
    options = {"changes": changes, "exact": name != "zero_deepspeed"}
    assert [*run(name, 2, tmp_path, ROWS[name].code, **options)] == [4, 8]
    assert run(name, 2, tmp_path, ROWS[name].code, **options) == {}


FROZEN = {"nn.Embedding(64, 64)": "nn.Embedding(64, 64).requires_grad_(False)"}
STACK = "nn.Parameter(torch.randn(4, 64, 64) / 8"  # of the experts in ep.py
FROZEN[f"{STACK})"] = f"{STACK}, False)"
FREEZING = [n for n in ROWS if n not in ("chat", "lora", "amp", "stream", "zero_deepspeed")]


@cases("name", FREEZING, lambda n: n == "optimizer_in_backward")
def test_what_is_frozen_stays(name, plain, tmp_path):
    own = read(name) if "\nclass " in read(name) else ""
    _, folder = plain(own, "", (*FROZEN.items(), *IN_PLAIN.get(name, ())))
    run(name, 2 if ROWS[name].ranks < 4 else 4, tmp_path, ROWS[name].code, changes=SAME | FROZEN)
    assert distance(best(tmp_path), best(folder)) <= 1e-9


UNSEEDED = {"def make_model():\n    torch.manual_seed(0)\n": "def make_model():\n"}


@pytest.mark.full
@pytest.mark.parametrize("name", ["tp", "hsdp", "ep", "fsdp_tp", "cp", "pp"])
def test_ranks_draw_the_same_weights(name, plain, tmp_path):
    """As of a new head, which a user's make_model() need not seed."""
    _, folder = plain(read(name) if "\nclass " in read(name) else "")
    ranks = 2 if ROWS[name].ranks < 4 else 4
    run(name, ranks, tmp_path, ROWS[name].code, changes=SAME | UNSEEDED)
    assert distance(best(tmp_path), best(folder)) <= 1e-9


TIED = {
    "return nn.Sequential(nn.Embedding(64, 64), *blocks, nn.Linear(64, 64, bias=False))": (
        "model = nn.Sequential(nn.Embedding(64, 64), *blocks, nn.Linear(64, 64, bias=False))\n"
        "    model[-1].weight = model[0].weight\n    return model"
    ),
    '[{"params": [p for p in': '[{"lr": 3 * LR, "params": [p for p in',
    "loss, (labels >= 0).sum()]": "loss, 3 * (labels >= 0).sum()]",  # as a regression may count
}


@cases("name", ["plain", *FREEZING], lambda n: n in ("plain", "zero"))
def test_edits_that_people_make(name, plain, tmp_path):
    """A tied head is exported once; a group of parameters keeps its learning rate, resumed too;
    no warm-up; another count of labels."""
    own = read(name) if "\nclass " in read(name) else ""
    expected, folder = plain(own, "WARMUP = 0", (*TIED.items(), *IN_PLAIN.get(name, ())))
    n = 0 if name == "plain" else max(2, ROWS[name].ranks)
    code = f"{ROWS[name].code if n else ''}\nWARMUP = 0"
    found = run(name, n, tmp_path, code, changes=SAME | TIED)
    assert found[16] == pytest.approx(expected[16], 1e-9)
    weights = best(tmp_path)
    assert distance(weights, best(folder)) <= 1e-9
    assert own or ("0.weight" in weights and "5.weight" not in weights)


GROUP = "[p for p in model.parameters() if p.requires_grad]"
EDITS = {
    # Gradients that the optimizer does not have change no norm
    "no group": {GROUP: f"{GROUP}[2:]"},
    # A batch of which no rank has a label
    "no label": {'"labels": row[1:]}': '"labels": row[1:].where(row[:1] % 4 == 0, -100)}'},
}
EDITED = [(name, edit) for edit in ("no group", "no label") for name in ("plain", *FREEZING)]


@cases("name, edit", EDITED, lambda *row: row == ("ddp", "no label"))
def test_what_nobody_thought_of(name, edit, plain, tmp_path):
    own = read(name) if "\nclass " in read(name) else ""
    changes = EDITS[edit]
    needs_more = name in ("pp", "unequal_gpus") or "accumulation" in name
    size = "BATCH = 2" if edit == "no label" and not needs_more else ""
    expected, folder = plain(own, size, (*changes.items(), *IN_PLAIN.get(name, ())))
    n = 0 if name == "plain" else 2
    code = f"{ROWS[name].code if n else ''}\n{size}"
    found = run(name, n, tmp_path, code, changes=SAME | changes)
    assert found[16] == pytest.approx(expected[16], 1e-9)
    assert distance(best(tmp_path), best(folder)) <= 1e-9


PERMUTED = "torch.randperm(len(train_set), generator=generator)"
WEIGHTED = {PERMUTED: "torch.multinomial(weights, len(train_set), True, generator=generator)"}
MINE = "(batch[rank::world] for batch in"
OF_DATA = {  # what docs/data.md changes in several examples, and in the plain loop
    "weighted": (WEIGHTED, WEIGHTED, "weights = torch.arange(540.0)"),
    "unequal": (
        {MINE: "([batch[i] for i in share_of(len(batch), rank)] for batch in"},
        {},
        f"{functions_in('unequal_gpus')['share_of']}\n{ROWS['unequal_gpus'].code}",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "name, edit", [*product(("ddp", "fsdp"), ["weighted"]), ("fsdp", "unequal")]
)
def test_edits_of_the_data(name, edit, plain, tmp_path):
    """The same weights on 1, 2 and 3 ranks."""
    changes, of_plain, code = OF_DATA[edit]
    assert edit != "weighted" or WEIGHTED[PERMUTED] in (ROOT / "docs/data.md").read_text()
    expected, folder = plain("", "" if edit == "unequal" else code, tuple(of_plain.items()))
    run(name, 3, tmp_path, code, kill=13, changes=SAME | changes)
    found = run(name, 2, tmp_path, code, changes=SAME | changes)
    assert found[16] == pytest.approx(expected[16], 1e-9)
    assert distance(best(tmp_path), best(folder)) <= 1e-9


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_of_files(workers, plain, tmp_path_factory, tmp_path):
    """Of unequal lengths, over two epochs."""
    folder = tmp_path_factory.mktemp("files")
    for i in range(8):
        rows = [[(7 * k + 37 * j + i) % 64 for k in range(9 + j % 5)] for j in range(20 + 3 * i)]
        lines = [json.dumps({"tokens": row}) for row in rows]
        (folder / f"{i}.jsonl").write_text("\n".join([*lines, ""]))
    subprocess.run("wc -l *.jsonl > counts", shell=True, check=True, cwd=folder)
    counts = (folder / "counts").read_text()
    (folder / "counts").write_text(re.sub(r"(\d\.jsonl)", rf"{folder}/\1", counts))
    own = read("own/jsonl")
    code = f"DATA, LANES, BLOCK = {str(folder)!r}, 3, 8"
    expected, whole = plain(insert(read("stream"), own), code, STREAMED)
    code += f"\nWORKERS = {workers}"
    run("stream", 2, tmp_path, code, own, kill=13)
    found = run("stream", 3, tmp_path, code, own)
    assert found[16] == pytest.approx(expected[16], 1e-9)
    assert distance(best(tmp_path), best(whole)) <= 1e-9
    finished = start("stream", 2, tmp_path, code.replace("3, 8", "4, 8"), own)
    assert finished.code == 1 and "runs had other shards, BATCH, LANES" in finished.stderr


@cases("name", ["checkpointing", "fsdp_checkpointing"], lambda n: n == "checkpointing")
def test_batchnorm_counts_a_batch_once(name, plain, tmp_path):
    changes = SAME | {"nn.GELU(), ": "nn.GELU(), Norm(64), "}
    run(name, 1, tmp_path, NORM, changes=changes)
    counts = {t.item() for n, t in best(tmp_path).items() if "batches_tracked" in n}
    assert counts <= {4, 8, 12, 16} and len(counts) == 1


HALF = "half = torch.cuda.is_bf16_supported(including_emulation=False)"
HALVES = [n for n in ROWS if HALF in read(n)]


@cases("name", HALVES, lambda n: n == "fsdp")
def test_in_bfloat16(name, tmp_path, request):
    """As on a GPU that has it: close to float32."""
    given = request.getfixturevalue("chat") if name == "chat" else ""
    ranks = 2 if ROWS[name].ranks < 4 else 4
    code = f"{ROWS[name].code.replace('float64', 'bfloat16')}\n{given}"
    losses = []
    for half in ("False", "True"):
        folder = tmp_path / half
        folder.mkdir()
        found = run(name, ranks, folder, code, changes=SAME | {HALF: f"half = {half}"}, exact=False)
        losses.append(found[16][1])
    assert losses[0] == pytest.approx(losses[1], 0.1)


@pytest.mark.full
def test_a_contrastive_loss_with_shards(plain, tmp_path):
    """The functions of contrastive.py in fsdp.py, where each part of the evaluation has samples for
    both ranks, 7 and 6. A batch that is larger than it says is refused."""
    expected, folder = plain(read("contrastive"), "BATCH = 13")
    assert run("fsdp", 2, tmp_path, "BATCH = 13", read("contrastive")) == {
        step: pytest.approx(figures, 1e-9) for step, figures in expected.items()
    }
    assert distance(best(tmp_path), best(folder)) <= 1e-9
    larger = {"(i + 1) * BATCH]": "(i + 2) * BATCH]"}
    finished = start("contrastive", 2, tmp_path / "runs", "BATCH = 13", changes=larger)
    said = [line for line in finished.stderr.splitlines() if "more than BATCH 13 / 2" in line]
    assert said and "Traceback" not in finished.stderr, str(finished)


AVERAGES = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model = nn.ModuleList(nn.Linear(5, 7) for _ in range(4))
with torch.no_grad():
    [p.copy_(torch.arange(p.numel()).view_as(p)) for p in model.parameters()]
whole = {name: p.detach().clone() for name, p in model.named_parameters()}
for i in (0, 1):
    parallelize_module(model[i], mesh["tp"], ColwiseParallel())
fully_shard(model[1], mesh=mesh["dp"])
fully_shard(model[2], mesh=mesh)  # HSDP; the last one is whole on every rank
shards = dict(model.named_parameters())
average = {name: shard.detach().clone() for name, shard in shards.items()}
with CommDebugMode() as sent, torch.no_grad():
    for step in (1, 2, 3):
        [shard.mul_(step + 1) for shard in shards.values()]
        update(average, shards, step)
    swap(average, shards, model)
assert sent.get_total_counts() == 0
for name, start in whole.items():
    expected = start
    for factor, step in ((2, 1), (6, 2), (24, 3)):
        expected = expected + (factor * start - expected) * 9 / (10 + step)
    found = [getattr(one[name], "full_tensor", lambda: one[name])() for one in (shards, average)]
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[1], 24 * start)
print("the same")
dist.destroy_process_group()
"""


def test_an_average_of_shards_sends_nothing(tmp_path):
    """Of FSDP, HSDP and TP, of both, and of a tensor that every rank has; in uneven shards."""
    program = tmp_path / "averages.py"
    program.write_text(read("ema").partition("\n\n\ndef main")[0] + AVERAGES)
    finished = launch(f"torchrun --nproc_per_node=4 {program}", forked=True)
    assert finished.code == 0 and finished.stdout.count("the same") == 4, str(finished)


APART_HEADS = """
class Heads(nn.Module):  # each sample uses one of two layers of the same shape
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)])

    def forward(self, x):
        kind = x[:, 0, 0] > 0
        out = torch.zeros_like(x)
        for i in range(2):
            if (kind == i).any():
                out[kind == i] = self.heads[i](x[kind == i])
        return out
"""


@pytest.mark.full
@pytest.mark.parametrize("name", ["fsdp", "hsdp", "offload", "fsdp_checkpointing"])
def test_ranks_use_different_parameters(name, plain, tmp_path):
    """With one sample a rank, one rank uses one head and the other one another."""
    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("needs PyTorch 2.13")
    changes = {"*blocks, nn.Linear(64, 64, bias=False)": "*blocks, Heads()"}
    code = f"{APART_HEADS}\nBATCH = 2"
    # What no rank has used has a gradient of zeros under FSDP
    whole = code.replace("return out", "return out + 0 * sum(p.sum() for p in self.parameters())")
    expected, folder = plain("", whole, tuple(changes.items()))
    found = run(name, 2, tmp_path, f"{ROWS[name].code}\n{code}", changes=SAME | changes)
    assert found[16] == pytest.approx(expected[16], 1e-9)
    assert distance(best(tmp_path), best(folder)) <= 1e-9


UNUSED = """
class Unused(nn.Embedding):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.pooler = nn.Parameter(torch.ones(6))
"""


@cases("name", ["fsdp", "tp", "ep", "pp"], lambda n: n == "fsdp")
def test_a_parameter_without_a_gradient_is_resumed(name, tmp_path):
    """It has no optimizer state. A tensor that a checkpoint does not have is an error."""
    changes = {"nn.Embedding(64": "Unused(64"}
    code = f"{ROWS[name].code}{UNUSED}"
    run(name, 2, tmp_path, code, kill=13, changes=changes)
    assert [*run(name, 2, tmp_path, code, changes=changes)] == [16]
    shutil.rmtree(sorted(tmp_path.glob("runs/step-*"))[-1])
    code += "        self.new = nn.Parameter(torch.ones(6))\n"
    finished = start(name, 2, tmp_path, code, changes=changes)
    assert finished.code == 1 and "Missing key" in finished.stderr, str(finished)


def test_examples_stand_alone():
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert names == {"plain", *ROWS}
    for name in names:
        ours = r"(import|from) (common|harness|jobs|libraries|parallel)\b"
        assert not re.search(ours, read(name)), name


DIFFER = {
    "chat": {"make_model", "make_data", "forward", "export"},
    "lora": {"export"},
    "distillation": {"loss_of"},
    "contrastive": {"make_data", "forward", "loss_of"},
    "stream": {"make_data", "order"},
}
DIFFER |= dict.fromkeys(("tp", "pp", "ep", "cp", "fsdp_tp"), {"make_model"})  # named blocks


def test_what_is_edited_is_there():
    """An edit of the plain loop that finds nothing would compare a loop with itself."""
    for old in (*SAME, *FROZEN, *TIED, *dict(UNCLIPPED), *dict(AVERAGED), *UNSEEDED, GROUP):
        assert old in read("plain") + read("ep"), old


@pytest.mark.parametrize("name", ROWS)
def test_one_contract(name):
    """A user's functions work in every example: those of plain.py are in all of them, and main()
    knows inputs and labels by no name. Nothing runs when a file is imported."""
    expected = functions_in("plain")
    found = functions_in(name)
    main = found.pop("main")
    del expected["main"]
    changed = {each for each in expected if found.get(each) != expected[each]}
    assert changed == DIFFER.get(name, set())
    assert not re.search('"(input_ids|labels)"', main)
    *_, last = ast.parse(read(name)).body
    assert ast.unparse(last).startswith("if __name__ == '__main__':")


def test_what_every_example_has():
    """TF32, or fp32 matrix products take 8 times as long; patience with a rank that exports; and no
    factor of its own for all groups of parameters."""
    for name in ["plain", *ROWS]:
        text = read(name)
        assert 'torch.set_float32_matmul_precision("high")' in text, name
        assert name == "plain" or text.count("timeout=TIMEOUT") >= 1, name
        groups = text.count("init_process_group(") + text.count("new_group(")
        assert text.count("timeout=TIMEOUT") >= groups, name
        assert 'group["lr"] = rate * factor' in text and "broadcast_object_list([torch" not in text


@cases("name", ROWS, lambda n: n in ("ddp", "pp"))
def test_started_without_its_launcher(name):
    """One line, which torchrun's variables make unnecessary."""
    finished = launch(f"python {ROOT / 'examples' / name}.py", forked=True)
    assert finished.code == 1 and "Traceback" not in finished.stderr, str(finished)
    assert "start this file with the command in its first lines" in finished.stderr


SMALL = dict(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
DECODERS = {"Llama": {}, "Qwen2": {"tie_word_embeddings": True}, "Qwen3": {}}
DECODERS |= {"Mistral": {"sliding_window": 8}}
DECODERS |= {"Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}}
UNUSUAL = {  # what the functions of an example cannot say
    "Gemma2": {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "Granite": {"embedding_multiplier": 6.0},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "initializer_range": 0.2},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "Phi3": {"pad_token_id": 0},
    "Olmo2": {},
}
REFUSED = [  # by which example, for which decoder, with which words
    ("chunked_loss", "Gemma2", "soft cap"),
    ("pp", "Granite", "scaling embeddings"),
    ("cp", "Gemma2", "has softcap"),
    ("cp", "GptOss", "has s_aux"),
    ("tp", "GPT2", "need the layers of the model"),
    ("tp", "Phi3", "need the layers of model.layers.0.mlp"),
    ("tp", "Olmo2", "all heads together"),
    ("lora", "GPT2", "no layer has the name q_proj"),
]
BLOCKS = '[block for i in range(1, 5) for block in model.get_submodule(f"layer{i}")]'
CLASSIFIERS = {  # in place of resnet50(
    "resnet": {"resnet50(": "resnet18(norm_layer=lambda n: nn.GroupNorm(2, n), "},
    "vit": {"resnet50(": "VisionTransformer(16, 8, 2, 2, 32, 64, ", BLOCKS: "model.encoder.layers"},
}
STILL = {"v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip()": "v2.Resize((SIZE, SIZE))"}
STILL |= {"v2.Resize(SIZE), v2.CenterCrop(SIZE)": "v2.Resize((SIZE, SIZE))", "/val": "/test"}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A function that makes a folder as on the Hub, of a decoder by name: Llama's in bfloat16,
    Qwen2's tied, Qwen3's in several files, and those of `UNUSUAL`."""

    @functools.cache
    def get(kind):
        folder = tmp_path_factory.mktemp(kind)
        make_tokenizer(folder, 280)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"eos_token": "</s>"})
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SMALL | {**DECODERS, **UNUSUAL}[kind])
        model = Decoder.from_config(config).to(torch.bfloat16 if kind == "Llama" else torch.float32)
        model.generation_config.eos_token_id = [tokenizer.eos_token_id]
        model.save_pretrained(folder, max_shard_size="20KB" if kind == "Qwen3" else "1GB")
        (folder / "text").write_text("abcde</s>" * 500)
        return folder

    return get


FAMILIES = ("ddp", "accumulation", "zero", "fsdp", "fsdp_checkpointing", "offload")
ALONE = ("segmentation", "two_inputs", "buckets")  # these make their own data
OWN_MODELS = [*product(FAMILIES, [*DECODERS, *CLASSIFIERS, *ALONE])]
OWN_MODELS += [*product(("tp", "cp", "pp"), DECODERS), ("ep", "Qwen3Moe")]
USUAL = ("fsdp", "Llama")


def own_name(kind):
    return f"own/{kind if kind in ALONE else 'classifier'}"


@cases("name, kind", OWN_MODELS, lambda *row: row == USUAL)
def test_your_own_model(name, kind, plain, hub, image_folder, tmp_path):
    """The functions of examples/own in place of the example's: killed on two ranks, resumed on
    one, it writes what the plain loop does, and that loads and generates."""
    own = own_decoder(name) if kind in DECODERS else read(own_name(kind))
    changes = STILL | CLASSIFIERS.get(kind, {}) | {'dropout": 0.1': 'dropout": 0.0'}
    if kind in DECODERS:
        text = hub(kind) / "text"
        code = f"FOLDER, DATA, LENGTH = {str(text.parent)!r}, {str(text)!r}, 16\nLR = 3e-2"
    elif kind in CLASSIFIERS:
        code = f"DATA, CLASSES, SIZE = {str(image_folder)!r}, 3, 16\nLR = 1e-3"
    else:
        code = "SIZE, LR = 32, 1e-3"
    expected, folder = plain(own, code, tuple(changes.items()))
    for n, kill in ((2, 13), (1, 0)):
        found = run(name, n, tmp_path, f"{ROWS[name].code}\n{code}", own, kill, SAME | changes)
        assert best(tmp_path).keys() == best(folder).keys()
    assert found[16] == pytest.approx(expected[16], 1e-6)
    assert distance(best(tmp_path), best(folder)) < 1e-6
    assert {weight.dtype for weight in best(tmp_path).values()} == {torch.float64}  # not bfloat16
    if kind in DECODERS:
        text = generate(tmp_path / "runs/best")
        assert text == generate(folder / "runs/best") and re.fullmatch(r" ?abcd.{,9}</s>", text)


FROM_CONFIG = """
from transformers import AutoConfig
CONFIG = AutoConfig.from_pretrained(FOLDER)
WEIGHTS = FOLDER"""


def test_a_folder_is_read_as_in_transformers(hub, tmp_path):
    """By its index: the files of another save are not read. A model that is tied reads a head that
    is the embedding, and refuses one that differs."""
    own = read("own/decoder").replace("from_pretrained(FOLDER, dty", "from_config(CONFIG, dty")
    for kind in ("Qwen3", "Qwen2"):
        work = tmp_path / kind
        folder = tmp_path / kind / "folder"
        shutil.copytree(hub(kind), folder)
        theirs = Decoder.from_pretrained(folder, dtype=torch.float32).state_dict()
        for path in folder.glob("*.safetensors"):
            older = {name: tensor + 1 for name, tensor in load_file(path).items()}
            save_file(older, folder / f"a-{path.name}")
            save_file(older, folder / f"z-{path.name}")
        if kind == "Qwen2":  # with the head
            theirs["lm_head.weight"] = theirs["lm_head.weight"].clone()
            save_file(theirs, path)
        code = f"FOLDER, DATA, LENGTH = {str(folder)!r}, {str(folder / 'text')!r}, 16\nLR = 0.0\n"
        code += FROM_CONFIG
        run("pretrained", 2, work, code, own, exact=False)
        assert same_bits(best(work), {n: theirs[n] for n in best(work)})
    theirs["lm_head.weight"] += 1
    save_file(theirs, path)
    with pytest.raises(AssertionError, match="its lm_head.weight differs from the parameter"):
        run("pretrained", 2, work, code, own, exact=False)
    path.unlink()
    with pytest.raises(AssertionError, match="folder has no model.safetensors"):
        run("pretrained", 2, work, code, own, exact=False)


@pytest.mark.full
def test_adapters_of_a_folder_are_those_of_the_whole_model(hub, tmp_path):
    """A rank that reads its shards of the frozen weights keeps the values of the adapters."""
    own = read("own/decoder").partition("def export")[0]
    text = hub("Llama") / "text"
    code = f"FOLDER, DATA, LENGTH = {str(text.parent)!r}, {str(text)!r}, 16\nTARGETS = ['q_proj']"
    changes = SAME | {"    adapt(model)": "    torch.manual_seed(5)\n    adapt(model)"}
    for name in ("whole", "shards"):
        (tmp_path / name).mkdir()
    expected = run("lora", 2, tmp_path / "whole", code, own, changes=changes, exact=False)
    own = own.replace("from_pretrained(FOLDER, dty", "from_config(CONFIG, dty")
    code += FROM_CONFIG
    found = run("lora", 2, tmp_path / "shards", code, own, changes=changes, exact=False)
    assert found == expected
    assert same_bits(best(tmp_path / "shards"), best(tmp_path / "whole"))


HEAD = """
def head_of(model):
    return model.lm_head
"""


def own_decoder(name):
    """The functions of examples/own for a decoder, and what this example needs besides."""
    more = {"chunked_loss": HEAD, "pp": read("own/pp"), "cp": read("own/cp")}
    return f"{read('own/decoder')}\n\n{more.get(name, '')}"


@cases("name, kind, words", REFUSED, lambda *row: row in REFUSED[1::3])
def test_a_part_that_is_not_the_models_is_refused(name, kind, words, hub, tmp_path):
    """Before the first step, on every rank, in one line."""
    text = hub(kind) / "text"
    code = f"FOLDER, DATA, LENGTH = {str(text.parent)!r}, {str(text)!r}, 16\n"
    code += f"{ROWS[name].code}\nTARGETS = ['q_proj']"
    finished = start(name, 2, tmp_path, code, own_decoder(name), exact=False)
    assert finished.code == 1 and finished.stdout == "", str(finished)
    said = [line for line in finished.stderr.splitlines() if words in line]
    assert said and "Traceback" not in finished.stderr, str(finished)


def generate(folder):
    """Until the token that ends it, as written into the folder, or too long."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    model = Decoder.from_pretrained(folder, dtype=torch.float32)
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]
    prompt = tokenizer("abc", add_special_tokens=False, return_tensors="pt").input_ids
    return tokenizer.decode(model.generate(prompt, do_sample=False, max_new_tokens=20)[0])


def functions_of(code, name="chat"):
    """Of an example, where constants are set by a line."""
    text = read(name).partition("\n\n\ndef main")[0]
    found = {}
    exec(text.replace("\n\n\n", f"\n{code}\n\n\n", 1), found)
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "tests/chat/templates").iterdir()), ids=name_of)
def test_answers_alone_are_learned(path):
    """By the same functions as in our script, so with the same tokens and labels."""
    tokenizer = test_chat.make_tokenizer(re.sub(r"\{%- (end)?generation %\}", "", path.read_text()))
    ours = (ROOT / "jobs/conversations.py").read_text()
    found = functions_of("")
    assert ours.partition("TemplateError\n\n")[2] in read("chat")
    lines = ROOT / "tests/chat/kinds.jsonl"
    for i, line in enumerate(lines.open("rb")):
        try:
            texts = found["documents_of"](line, tokenizer)
        except (ValueError, TypeError, jinja2.TemplateError):
            continue
        documents = [found["tokenize"](*each, tokenizer) for each in texts]
        both = zip(documents, jobs.chat.encode(tokenizer, lines, 99, i, i + 1, None), strict=True)
        for (tokens, labels), expected in both:
            signed = [t if label >= 0 else ~t for t, label in zip(tokens, labels, strict=True)]
            assert signed == expected[:-1].tolist()
            assert all(label in (t, -100) for t, label in zip(tokens, labels, strict=True))


def test_a_conversation_without_an_answer_is_skipped(chat, tmp_path, capsys):
    question = json.dumps({"messages": [{"role": "user", "content": "to be"}]})
    late = talk("to be" * 50, "or not")
    (tmp_path / "chat").write_text("\n".join([question, "", talk("a", "b"), late, talk("c", "d")]))
    make_data = functions_of(f"{chat}\nDATA = {str(tmp_path / 'chat')!r}")["make_data"]
    train_set, eval_set = make_data()
    assert len(train_set) == len(eval_set) == 1
    assert "2 conversations; 2 without an answer in 64 tokens skipped" in capsys.readouterr().out
    (tmp_path / "chat").write_text(question)
    with pytest.raises(SystemExit, match="no conversation has an answer within 64 tokens"):
        make_data()


@pytest.mark.parametrize("kind", DECODERS)
def test_documents_of_a_row_do_not_see_each_other(kind, hub, chat):
    """The loss of rows is the sum over their documents alone. With a cache, it would not be."""
    found = functions_of(f"{chat}\nLENGTH = 50")
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    model = Decoder.from_pretrained(hub(kind), **options)
    documents = [(torch.randperm(200)[:n].tolist(),) * 2 for n in (20, 9, 2, 30, 10)]
    rows = torch.utils.data.default_collate(found["pack"](documents))
    assert rows["labels"].shape == (2, 50)
    logits = [model(torch.tensor([tokens[:-1]])).logits[0] for tokens, _ in documents]
    labels = torch.tensor([label for _, labels in documents for label in labels[1:]])
    expected = torch.nn.functional.cross_entropy(torch.cat(logits), labels, reduction="sum")
    loss, count = found["loss_of"](found["forward"](model, rows), rows)
    assert loss.item() == pytest.approx(expected.item(), 1e-6) and count == len(labels)
    weight = model.get_input_embeddings().weight
    ours, theirs = (torch.autograd.grad(one, weight) for one in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma2", "Mistral", "GptOss", "OPT", "Lfm2"])
def test_packed_documents_that_see_each_other_are_refused(kind, hub, chat):
    found = functions_of(f"{chat}\nLENGTH = 50")
    reduce = {"all_reduce": lambda *args: None, "ReduceOp": torch.distributed.ReduceOp}
    found["dist"] = SimpleNamespace(**reduce)  # of one rank
    model = Decoder.from_pretrained(hub(kind), dtype=torch.float32)
    rows = found["pack"]([(torch.randperm(200)[:n].tolist(),) * 2 for n in (20, 9)])
    if kind in DECODERS or kind == "Gemma2":
        found["check_packing"](model, rows, "cpu")
        return
    with pytest.raises(SystemExit, match="PACKED = False"):
        found["check_packing"](model, rows, "cpu")
    rows = functions_of(f"{chat}\nPACKED, LENGTH = False, 50")["pack"]([((1, 2, 3),) * 2] * 2)
    assert len(rows) == 2


SEVERAL = TABLES["parameters_of_several_stages"]


@pytest.mark.parametrize("name", SEVERAL)
def test_a_parameter_of_several_stages_is_refused(name):
    """Each would train a copy of it; the check of the logits finds no difference before a step."""
    pp = functions_of("", "pp")
    model = pp["make_model"]()
    exec(SEVERAL[name])
    with pytest.raises(SystemExit, match=f"^{name} is not trained"):
        pp["make_stage"](model, 0, 2, "cpu", pp["collate"](pp["make_data"]()[0][:1]))


def test_data_that_is_not_there_is_named(chat, tmp_path):
    with pytest.raises(SystemExit, match=r"none.jsonl: .*No such file.*; set it to your .jsonl"):
        functions_of(f"{chat}\nDATA = {str(tmp_path / 'none.jsonl')!r}")["make_data"]()


BAD = TABLES["wrong_conversations"]


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named(line, chat, tmp_path):
    both = zip(("Q", "A"), json.loads(talk("a", "b"))["messages"], strict=True)
    written = line
    for name, message in both:
        written = re.sub(rf"\b{name}\b", json.dumps(message), written)
    (tmp_path / "bad.jsonl").write_text(f"{talk('a', 'b')}\n{written}\n")
    said = rf"bad.jsonl, line 2: .*{re.escape(BAD[line])}.*; correct or remove it"
    with pytest.raises(SystemExit, match=said):
        functions_of(f"{chat}\nDATA = {str(tmp_path / 'bad.jsonl')!r}")["make_data"]()


def test_the_page_lists_the_files():
    """Each with its parent."""
    page = (ROOT / "docs/your_own_model.md").read_text()
    parents = {name: row.parent for name, row in ROWS.items()}
    assert dict(re.findall(r"\[(\w+)\.py\]\(\.\./examples/\1\.py\) \| (\w+) \|", page)) == parents
