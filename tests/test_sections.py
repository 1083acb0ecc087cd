"""Sections of the pages that answer a question: their code is tried; and sentences of pages."""

import contextlib
import inspect
import mmap
import re
import subprocess
from importlib import metadata
from pathlib import Path
from textwrap import indent

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, run_program, succeed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_docs import ROWS, WORDS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness import clock
from techniques import technique

DEBUGGED = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for step in range(3):
    loss = torch.tensor(10.0 * dist.get_rank() + step)
    if step:
        dist.breakpoint(rank=1, skip=1)
    dist.all_reduce(loss)
    print(f"sum {loss.item()}", flush=True)
dist.destroy_process_group()
"""


def code_of(page, heading):
    """The blocks of Python in a section of a page."""
    _, _, section = (ROOT / "docs" / f"{page}.md").read_text().partition(f"# {heading}")
    section = re.split(r"^##", section, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def test_what_generates_alone_is_tested():
    """By test_docs.py, as a remedy that sends nothing."""
    [code] = code_of("techniques/GRPO", "generate() while training with FSDP")
    source = (ROOT / "examples/troubles/fsdp.py").read_text()
    _, _, function = source.partition("def gathers_for_each_token")
    for line in code.splitlines():
        assert line.startswith("...") or line.strip() in function, line


# ------------------------------------------------------------------------------------ a debugger
@pytest.mark.full  # of a library alone
def test_a_debugger_on_one_rank(tmp_path):
    """It reads the terminal of torchrun, and the other rank waits until it continues."""
    (tmp_path / "script.py").write_text(DEBUGGED)
    command = ["torchrun", "--standalone", "--nproc_per_node=2", tmp_path / "script.py"]
    options = {"capture_output": True, "text": True, "timeout": 100}
    ended = subprocess.run(command, input="up\np loss\nc\n", **options)
    assert ended.returncode == 0, ended.stderr
    assert "(Pdb) tensor(12.)" in ended.stdout  # of rank 1, in its last step
    assert ended.stdout.count("sum 14.0") == 2


def test_shapes_of_a_rank_in_one_process():
    [_, fake] = code_of("troubleshooting", "A debugger on one rank")
    exec(fake, {"dist": dist})
    mesh = init_device_mesh("cpu", (8,))
    weight = fully_shard(nn.Linear(4, 24), mesh=mesh).weight.to_local()
    dist.all_reduce(weight.detach())
    assert dist.get_rank() == 3 and weight.shape == (3, 4)
    dist.destroy_process_group()


# ---------------------------------------------------------------------------- metrics, and loggers
AREA = """
torch.manual_seed(0)
device = "cpu"
scores = torch.rand(8)
labels = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1])
mine = slice(0, 5) if dist.get_rank() else slice(5, 8)
evaluation = [(scores[mine], labels[mine])]
above = scores[labels == 1, None] > scores[labels == 0]
{}
assert abs(area - above.double().mean()) < 1e-6, area
"""
A_STAND_IN = """
from types import SimpleNamespace

def note(*what):
    with open("runs/said", "a") as file:
        print(*what, file=file)

def init(project, id, resume):
    note(id, resume)
    return SimpleNamespace(define_metric=lambda *_, **__: None, log=lambda row: note(row["step"]))
"""


def test_f1_over_all_ranks():
    """Sums over two parts give the F1 of all samples, which is no mean of the parts' F1."""
    [counts, _] = code_of("your_own_model", "Accuracy, F1 and AUC")
    names = {"nn": nn, "torch": torch}
    exec(counts, names)
    torch.manual_seed(0)
    output = torch.randn(20, 2)
    labels = torch.randint(2, (20,))
    parts = [slice(0, 5), slice(5, 20)]
    sums = sum(names["loss_of"](output[part], {"labels": labels[part]}) for part in parts)
    chosen = output.argmax(1)
    wrong = (chosen != labels).sum()
    right = (chosen * labels).sum()
    _, _, *metrics = (sums / sums[1]).tolist()
    assert names["f1"](*metrics) == pytest.approx((2 * right / (2 * right + wrong)).item())


@pytest.mark.full  # torchmetrics takes seconds to import
def test_area_over_unequal_ranks(tmp_path):
    pytest.importorskip("torchmetrics")
    [_, area] = code_of("your_own_model", "Accuracy, F1 and AUC")
    run_program(AREA.format(area), 2, tmp_path)


def test_loggers_on_rank_0(tmp_path):
    """In ddp.py, on two ranks, which lose their last checkpoint and start again."""
    text = (ROOT / "examples" / "ddp.py").read_text().replace("EVERY = ", "EVERY = 2  # ")
    for number, block in enumerate(code_of("your_own_model", "W&B, TensorBoard or MLflow")):
        before, _, each = re.sub(r"(?<!\.)\blog\b", f"log{number}", block).rpartition("\n\n")
        text = insert(text, before, "    # Averages the")
        text = insert(text, each, "            print(line,")
    (tmp_path / "wandb.py").write_text(A_STAND_IN)
    out = tmp_path / "runs" / "ddp"
    for steps in (4, 6):
        (tmp_path / "script.py").write_text(text.replace("STEPS = ", f"STEPS = {steps}  # "))
        command = f"torchrun --standalone --nproc_per_node=2 {tmp_path}/script.py"
        succeed(command, forked=True, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        (out / "step-00000004.pt").unlink(missing_ok=True)
    said = (tmp_path / "runs" / "said").read_text().splitlines()
    run = (out / "wandb-id").read_text()
    assert said == [f"{run} allow", "2", "4", f"{run} allow", "4", "6"]
    reader = EventAccumulator(str(out / "tensorboard"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("loss/evaluation")] == [2, 4, 6]


def insert(text, lines, above):
    """With the margin of the line that begins with ``above``."""
    assert text.count(above) == 1
    margin = above[: len(above) - len(above.lstrip())]
    return text.replace(above, f"{indent(lines.strip(), margin)}\n{above}")


# ------------------------------------------------------------------------------------- memory
def test_tensors_that_stay_are_counted():
    [count] = code_of("troubleshooting", "GPU memory grows")
    count, _, difference = count.rpartition("# after a few more steps:")
    names = {"torch": torch, "print": lambda rows: kept.append(rows)}
    kept = []
    exec(count, names)
    layer = nn.Linear(7, 11)
    for _ in range(3):
        kept.append(layer(torch.ones(5, 7)).sin().sum())
    exec(difference, names)
    found = {shape for (shape, _, _), times in kept[-1] if times == 3}
    assert found == {"[]", "[5, 7]", "[5, 11]"}  # losses, inputs, what sin() saved


# --------------------------------------------------------------------------------- recompilation
def noting(graphs):
    """A compiler that compiles nothing, but notes its graphs."""

    def compile_nothing(graph, _):
        graphs.append(graph)
        return graph.forward

    return compile_nothing


class Numbered(nn.Module):
    def __init__(self, number, reads_it):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number = number
        self.reads_it = reads_it

    def forward(self, x):
        x = self.linear(x).sin()
        return x * (self.number + 2) if self.reads_it else x


COMPILED = [  # dynamic, reads its number, is sharded, and graphs after each of three lengths
    (None, False, True, [2, 4, 4]),
    (True, False, True, [2, 2, 2]),
    (None, True, True, [2, 4, 4]),
    (None, True, False, [8, 8, 8]),
]


@pytest.mark.skipif(torch.__version__ < "2.14", reason="counted in PyTorch 2.14")
@pytest.mark.full  # of PyTorch alone
@pytest.mark.parametrize("is_dynamic, reads_it, shards, expected", COMPILED)
def test_how_often_blocks_are_compiled(is_dynamic, reads_it, shards, expected, alone):
    """Ten blocks, of which the first one gets an input that needs no gradient."""
    torch._dynamo.reset()
    graphs = []
    backend = noting(graphs)  # another one for each block would compile each
    model = nn.Sequential(*(Numbered(i, reads_it) for i in range(10)))
    for block in model:
        if shards:
            fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
        block.compile(backend=backend, dynamic=is_dynamic)
    found = []
    for length in (3, 5, 7):
        model(torch.ones(2, length, 4)).sum().backward()
        found.append(len(graphs))
    assert found == expected and torch._dynamo.config.recompile_limit == 8


# ------------------------------------------------------------------ one GPU, variables, versions
@pytest.mark.full  # of a library alone
def test_accelerate_refuses_a_model_on_several_devices(monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.hf_device_map = {"0": 0, "1": 1}  # as from_pretrained(device_map="auto") leaves it
    several = accelerate.DistributedType.MULTI_CPU
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", several)
    with pytest.raises(ValueError, match="can't train a model that has been loaded") as refused:
        accelerate.Accelerator(cpu=True).prepare(model)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    said = str(refused.value).partition(".")[0].replace("`", "")
    assert said in " ".join((ROOT / "docs/troubleshooting.md").read_text().replace("`", "").split())


def words_in(path, words):
    """Those that a library has."""
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return {word for word in words if content.find(word.encode()) >= 0}


PACKAGES = Path(torch.__file__).parents[1]


def test_nccl_has_the_variables_and_lines_of_the_pages():
    library = PACKAGES / "nvidia/nccl/lib/libnccl.so.2"
    if not library.is_file():
        pytest.skip("PyTorch for a CPU has no nccl")
    text = "".join((ROOT / f"docs/{n}.md").read_text() for n in ("multi_node", "troubleshooting"))
    words = set(re.findall(r"\bNCCL_[A-Z0-9_]+", text))
    words |= {"Using network %s", "NET/IB : Using", "NET/Socket : Using", "/GDRDMA"}
    assert words_in(library, words) == words


OF_LIBRARIES = {seen: where[1:-1] for seen, where in ROWS if re.fullmatch("`(lib|dist).+`", where)}


def test_troubles_of_a_gpu():
    """Their words are in the library that prints them, if it is here."""
    for seen, name in OF_LIBRARIES.items():
        for path in [*PACKAGES.glob(f"torch/*/{name}"), *PACKAGES.glob(f"nvidia/nccl/lib/{name}")]:
            assert words_in(path, WORDS.findall(seen)), seen


@pytest.mark.full
def test_another_accelerator_in_the_lines_of_an_example(tmp_path):
    """There is none here: the loss is that of the example as it is, on the CPU."""
    [lines] = code_of("multi_node", "AMD (ROCm), Intel")
    lines, backend = lines.rstrip().rsplit("\n", 1)
    text = (ROOT / "examples" / "ddp.py").read_text().replace("STEPS = ", "STEPS = 2  # ")
    whole = text.replace('    backend = "nccl" if device.type == "cuda" else "gloo"', backend)
    _, begin, rest = whole.partition('    device = torch.device("cpu")\n')
    own, end, _ = rest.partition("  # a GPU that has bfloat16\n")
    whole = whole.replace(begin + own + end, f"{lines}\n")
    assert "torch.cuda" not in whole and "nccl" in whole
    printed = []
    for name, script in (("as_it_is", text), ("replaced", whole)):
        (tmp_path / f"{name}.py").write_text(script.replace("runs/ddp", f"runs/{name}"))
        command = f"torchrun --standalone --nproc_per_node=2 {tmp_path}/{name}.py"
        printed.append(succeed(command, forked=True, cwd=tmp_path).lines)
    assert printed[0] == printed[1] != []


def test_versions_of_the_page():
    """What a package asks for, of those that are installed in the version of the page."""
    page = (ROOT / "docs/ecosystem.md").read_text()
    rows = re.findall(r"^\| (\S+) (\d\S+) \| (.*?) \|", page, re.MULTILINE)
    assert len(rows) == 6
    checked = 0
    for name, version, said in rows:
        with contextlib.suppress(metadata.PackageNotFoundError):
            if metadata.version(name) != version:
                continue
            asked = [one.partition(";")[0] for one in metadata.requires(name) or []]
            asked = [one.replace(" ", "").replace("(", "").replace(")", "") for one in asked]
            asked = [one for one in asked if re.match(r"torch[<>=]", one)]
            assert said == (f"`{asked[0]}`" if asked else "nothing")
            checked += 1
    if not checked:
        pytest.skip("no package is installed in the version of the page")


# ------------------------------------------------------------------------------ single sentences
def sent_by(name, dtype):
    """Bytes per parameter and step, by the formula, on four ranks."""
    return sum(technique(name).sends(4, {"dtype": dtype}).values())


def directions_share():
    """The setting exists since PyTorch 2.14, and has another name since 2.15. Without a GPU that
    the group of all ranks is bound to, 2.14 cannot split it."""
    config = getattr(dist, "config", None)
    names = ("pipeline_per_direction_p2p", "pipeline_per_edge_p2p")
    found = [name for name in names if hasattr(config, name)]
    if found == [names[0]]:
        with pytest.raises(RuntimeError, match="No device"):
            dist.split_group(split_ranks=[[0]])
    is_new = torch.__version__ >= "2.14"
    return len(found) == is_new and not any(getattr(config, name) for name in found)


def launcher_reads_the_variable():
    runner = pytest.importorskip("deepspeed.launcher.runner")
    source = inspect.getsource(runner.main)
    return source.index("visible_devices_env") < source.index("args.include = ")


def wrapper_sends_buffers():
    """In evaluation, too, and only if there are any."""
    both = (DistributedDataParallel(layer).eval() for layer in (nn.Linear(2, 2), nn.BatchNorm1d(2)))
    return [wrapper.will_sync_module_buffers() for wrapper in both] == [False, True]


def graph_is_split_unless_it_was_made_before():
    """By the number of graphs of four layers, each as large as a bucket."""
    found = {}
    for when in ("before", "after", "in between"):
        torch._dynamo.reset()
        graphs = []
        model = Layers()
        backend = noting(graphs)
        if when != "after":
            model.compile(backend=backend)
        if when == "in between":
            model(torch.ones(1, 600))
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
        if when == "after":
            wrapped.compile(backend=backend)
        wrapped(torch.ones(1, 600))
        found[when] = len(graphs)
    return found["before"] == found["after"] > 1 == found["in between"]


class Layers(nn.Module):
    """PyTorch 2.11 does not compile an nn.Sequential."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("name, said, holds", [
    ("techniques/FSDP", "in fp32 FSDP sends 1.5 times DDP's bytes",
     lambda: sent_by("FSDP", "float32") == 1.5 * sent_by("torchrun_DDP", "float32")),
    ("techniques/FSDP", "With `--dtype bfloat16` it sends as many",
     lambda: sent_by("FSDP", "bfloat16") == sent_by("torchrun_DDP", "float32")),
    ("techniques/PP", "pipeline_per_direction_p2p = True`, off by default", directions_share),
    pytest.param("techniques/compile", "do not run the compiled model in between",
                 graph_is_split_unless_it_was_made_before, marks=pytest.mark.full),
    ("techniques/torchrun_DDP", "evaluating the DDP wrapper there if the model has buffers",
     wrapper_sends_buffers),
    ("techniques/DeepSpeed", "Without both, the launcher takes the GPUs of the variable",
     launcher_reads_the_variable),
    ("measuring", "the first half of its steps if it has fewer than twenty",
     lambda: clock.WARMUP_STEPS == 10),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_a_page_says_holds(name, said, holds, alone):
    """Each sentence has been wrong, and may become so with a version of its library."""
    assert said in " ".join((ROOT / f"docs/{name}.md").read_text().split())
    assert holds()
