"""The examples: each ends as the plain loop, also after it was killed and resumed on another number
of ranks; with dropout, and with what people edit in them. With one's own model:
test_examples_own.py; the functions of chat.py: test_examples_chat.py."""

import ast
import itertools
import json
import math
import re
import shutil
import subprocess
from typing import NamedTuple

import example_runs
import pytest
import torch
from conftest import ROOT, TABLES, cases, distance, launch, run_program, same_bits
from example_runs import IN_PLAIN, ROWS, best, check_end, generate, insert, own_of, read, run, start

pytest.importorskip("transformers")  # whose server forks them

ONE_DISK = ("ddp", "amp", "accumulation", "stream", "unequal_gpus", "zero")  # rank 0 saves
APART = "\nos.makedirs(os.environ['RANK'], exist_ok=True)\nos.chdir(os.environ['RANK'])"


def functions_in(name):
    nodes = [n for n in ast.parse(read(name)).body if isinstance(n, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(read(name), node) for node in nodes}


@pytest.fixture
def given(name, request):
    """The constants that a copy of chat.py has to have; other examples need none."""
    return example_runs.as_code(request.getfixturevalue("conversations")) if name == "chat" else ""


@cases("name", ROWS, lambda n: ROWS[n].usual)
def test_an_example_is_the_plain_loop(name, given, plain, tmp_path):
    """On uneven shares; killed after three saves, of which two are kept, and resumed from the
    newest. Where rank 0 reads and writes for all, each rank has a folder of its own."""
    row = ROWS[name]
    exact = name not in ("amp", "zero_deepspeed")  # all others compute in float64
    expected, folder = plain(own_of(name), given, IN_PLAIN.get(name), exact)
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
    falls = [a[1] > b[1] for a, b in itertools.pairwise(expected.values())]
    assert all(falls), "the best is not the last"
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
    options = {"changes": {"factor =": drawn, "rows[540:]": worse}, "same": {}}
    options["code"] = ROWS[name].code
    folders = tmp_path / "whole", tmp_path / "parts"
    for folder in folders:
        folder.mkdir()
    whole = run(name, 2, folders[0], **options)
    first = run(name, 2, folders[1], kill=5, **options)
    early = best(folders[1])
    assert [*first] == [4]
    assert first | run(name, 2, folders[1], **options) == whole
    assert whole[4][1] == min(figures[1] for figures in whole.values())
    assert same_bits(early, best(folders[1]))
    assert same_bits(early, best(folders[0]))


@pytest.mark.full
def test_a_reference_for_preferences(plain, tmp_path):
    """DPO: the loss of a model that equals its reference is log 2. Then it learns to prefer, and a
    resumed run keeps the reference of the first start, not the model that it resumes."""
    own = read("own/dpo")
    both = insert(read("distillation"), own)
    code = "EVERY, LR = 1, 1e-2"
    expected, folder = plain(both, code, IN_PLAIN["distillation"])
    found = run("distillation", 3, tmp_path, code, own=own, kill=13)
    found |= run("distillation", 2, tmp_path, code, own=own)
    assert found[1][0] == pytest.approx(math.log(2), 1e-12)
    for step, figures in found.items():
        assert figures == pytest.approx(expected[step], 1e-9), step
    assert found[16][3] > 0.9 > found[1][3], "pairs that the model orders as people did"
    assert distance(best(tmp_path), best(folder)) <= 1e-9


@pytest.mark.full
def test_a_head_is_trained_with_adapters(plain, tmp_path):
    """In fp32, and it is exported as peft reads it."""
    expected = plain(read("lora"), "WHOLE = ['5']", IN_PLAIN["lora"])
    code = f"{ROWS['lora'].code}\nWHOLE = ['5']"
    found = run("lora", 2, tmp_path, code, kill=13) | run("lora", 3, tmp_path, code)
    check_end(found, tmp_path, expected)
    assert best(tmp_path)["base_model.model.5.weight"].dtype == torch.float64
    config = json.loads((tmp_path / "runs/best/adapter_config.json").read_text())
    assert config["modules_to_save"] == ["5"]


NORM = """
class Norm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)
"""
NORMED = {"nn.GELU(), ": "nn.GELU(), Norm(64), "}
NORMED |= {"self.norm = nn.RMSNorm(64)": "self.norm = Norm(64)"}  # of ep.py


@cases("name", ["ddp", "fsdp", "ema", "zero", "hsdp", "ep"], lambda n: n == "ddp")
def test_all_ranks_evaluate_what_is_exported(name, tmp_path):
    """With BatchNorm, of which each rank saw other samples."""
    found = run(name, ROWS[name].ranks, tmp_path, f"{ROWS[name].code}{NORM}", changes=NORMED)
    step = min(found, key=lambda step: found[step][1])
    text = read("ep" if name == "ep" else "plain").partition("\n\n\ndef main")[0]
    for old, new in (example_runs.SAME | NORMED).items():
        text = text.replace(old, new)
    names = {}
    exec(f"{text}\n{NORM}", names)
    model = names["make_model"]().double().eval()
    model.load_state_dict(best(tmp_path))
    rows = torch.utils.data.default_collate(names["make_data"]()[1])
    loss, count = names["loss_of"](names["forward"](model, rows), rows)
    assert found[step][1] == pytest.approx((loss / count).item(), 1e-5)


@cases("name", ["checkpointing", "fsdp_checkpointing"], lambda n: n == "checkpointing")
def test_batchnorm_counts_a_batch_once(name, tmp_path):
    run(name, 1, tmp_path, NORM, changes=NORMED)
    counts = {t.item() for n, t in best(tmp_path).items() if "batches_tracked" in n}
    assert counts <= {4, 8, 12, 16} and len(counts) == 1


@cases("name", ["ddp", "fsdp", "pp", "zero_deepspeed"], lambda n: n == "fsdp")
def test_every_rank_can_stop_early(name, tmp_path):
    """And a run that has stopped early does not continue when it is started again."""
    changes = {"return False": "return len(values) == 2"}
    options = {"changes": changes, "exact": name != "zero_deepspeed"}
    assert [*run(name, 2, tmp_path, ROWS[name].code, **options)] == [4, 8]
    assert run(name, 2, tmp_path, ROWS[name].code, **options) == {}


NOT_EDITED = ("chat", "lora", "amp", "stream", "zero_deepspeed")
EDITABLE = tuple(name for name in ROWS if name not in NOT_EDITED)
IN_PARTS = ("pp", "unequal_gpus", "accumulation", "fsdp_accumulation")  # two samples are too few


class Edit(NamedTuple):
    """What somebody edits in examples, and in the plain loop if that is not ``of_plain``."""

    changes: dict
    code: str = ""
    most: int = 4  # ranks
    names: tuple = EDITABLE
    usual: tuple = ()
    of_plain: dict | None = None


EDITS = {name: Edit(**row) for name, row in TABLES["edits"].items()}
EDITED = [(edit, n) for edit, row in EDITS.items() for n in row.names]


@cases("edit, name", EDITED, lambda edit, name: name in EDITS[edit].usual)
def test_an_edit_does_what_it_does_in_the_plain_loop(edit, name, plain, tmp_path):
    row = EDITS[edit]
    own = own_of(name)
    code = "" if edit == "no label" and name in IN_PARTS else row.code
    of_plain = row.changes if row.of_plain is None else row.of_plain
    expected = plain(own, code, of_plain | IN_PLAIN.get(name, {}))
    example = ROWS[name]
    ranks = min(example.ranks, row.most)
    found = run(name, ranks, tmp_path, f"{example.code}\n{code}", changes=row.changes)
    check_end(found, tmp_path, expected)
    if edit == "tied" and not own:
        assert "0.weight" in best(tmp_path) and "5.weight" not in best(tmp_path)


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


EDITED_DATA = [("ddp", "weighted"), ("fsdp", "weighted"), ("fsdp", "unequal")]


@pytest.mark.full
@pytest.mark.parametrize("name, edit", EDITED_DATA)
def test_edits_of_the_data(name, edit, plain, tmp_path):
    """The same weights on 1, 2 and 3 ranks."""
    changes, of_plain, code = OF_DATA[edit]
    assert edit != "weighted" or WEIGHTED[PERMUTED] in (ROOT / "docs/data.md").read_text()
    expected = plain("", "" if edit == "unequal" else code, of_plain)
    run(name, 3, tmp_path, code, kill=13, changes=changes)
    check_end(run(name, 2, tmp_path, code, changes=changes), tmp_path, expected)


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_of_files(workers, plain, tmp_path_factory, tmp_path):
    """Of unequal lengths, over two epochs."""
    folder = tmp_path_factory.mktemp("files")
    for i in range(8):
        lines = []
        for j in range(20 + 3 * i):
            tokens = [(7 * k + 37 * j + i) % 64 for k in range(9 + j % 5)]
            lines.append(json.dumps({"tokens": tokens}))
        (folder / f"{i}.jsonl").write_text("\n".join([*lines, ""]))
    subprocess.run("wc -l *.jsonl > counts", shell=True, check=True, cwd=folder)
    counts = (folder / "counts").read_text()
    (folder / "counts").write_text(re.sub(r"(\d\.jsonl)", rf"{folder}/\1", counts))
    own = read("own/jsonl")
    both = insert(read("stream"), own)
    code = f"DATA, LANES, BLOCK = {str(folder)!r}, 3, 8"
    expected = plain(both, code, IN_PLAIN["stream"])
    code += f"\nWORKERS = {workers}"
    run("stream", 2, tmp_path, code, own=own, kill=13)
    check_end(run("stream", 3, tmp_path, code, own=own), tmp_path, expected)
    finished = start("stream", 2, tmp_path, code.replace("3, 8", "4, 8"), own)
    assert finished.code == 1 and "runs had other shards, BATCH, LANES" in finished.stderr


HALF = "half = torch.cuda.is_bf16_supported(including_emulation=False)"
HALVES = [n for n in ROWS if HALF in read(n)]


@cases("name", HALVES, lambda n: n == "fsdp")
def test_in_bfloat16(name, given, plain, tmp_path):
    """As on a GPU that has it: close to the plain loop in float64."""
    expected = plain(own_of(name), given, IN_PLAIN.get(name)).figures
    ranks = 2 if ROWS[name].ranks < 4 else 4
    code = f"{ROWS[name].code.replace('float64', 'bfloat16')}\n{given}"
    found = run(name, ranks, tmp_path, code, changes={HALF: "half = True"}, exact=False)
    assert found[16][1] == pytest.approx(expected[16][1], 0.1)


@pytest.mark.full
def test_a_contrastive_loss_with_shards(plain, tmp_path):
    """The functions of contrastive.py in fsdp.py, where each part of the evaluation has samples for
    both ranks, 7 and 6. A batch that is larger than it says is refused."""
    expected, folder = plain(read("contrastive"), "BATCH = 13")
    assert run("fsdp", 2, tmp_path, "BATCH = 13", own=read("contrastive")) == {
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
"""


def test_an_average_of_shards_sends_nothing(tmp_path):
    """Of FSDP, HSDP and TP, of both, and of a tensor that every rank has; in uneven shards."""
    functions = read("ema").partition("\n\n\ndef main")[0]
    run_program(functions + AVERAGES, 4, tmp_path)


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
    expected = plain("", whole, changes)
    found = run(name, 2, tmp_path, f"{ROWS[name].code}\n{code}", changes=changes)
    check_end(found, tmp_path, expected)


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


def test_what_is_edited_is_there():
    """An edit of the plain loop that finds nothing would compare a loop with itself."""
    edits = [example_runs.SAME, *IN_PLAIN.values(), *(row.changes for row in EDITS.values())]
    for old in itertools.chain(*edits):
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
    assert changed == example_runs.DIFFER.get(name, set())
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


def test_the_page_lists_the_files():
    """Each with its parent."""
    page = (ROOT / "docs/your_own_model.md").read_text()
    parents = {name: row.parent for name, row in ROWS.items()}
    assert dict(re.findall(r"\[(\w+)\.py\]\(\.\./examples/\1\.py\) \| (\w+) \|", page)) == parents
