"""Examples with the functions of examples/own in place of their own: a decoder as on the Hub, a
classifier, and others; what their model cannot do is refused."""

import re
import shutil
from itertools import product

import pytest
import torch
from conftest import TABLES, cases, distance, same_bits
from example_runs import DECODERS, ROWS, best, generate, read, run, start
from safetensors.torch import load_file, save_file

from measure.count_padding import functions_of

transformers = pytest.importorskip("transformers")

REFUSED = [tuple(row) for row in TABLES["refused_decoders"]]
BLOCKS = '[block for i in range(1, 5) for block in model.get_submodule(f"layer{i}")]'
CLASSIFIERS = {  # in place of resnet50(
    "resnet": {"resnet50(": "resnet18(norm_layer=lambda n: nn.GroupNorm(2, n), "},
    "vit": {"resnet50(": "VisionTransformer(16, 8, 2, 2, 32, 64, ", BLOCKS: "model.encoder.layers"},
}
STILL = {"v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip()": "v2.Resize((SIZE, SIZE))"}
STILL |= {"v2.Resize(SIZE), v2.CenterCrop(SIZE)": "v2.Resize((SIZE, SIZE))", "/val": "/test"}
STILL |= {'dropout": 0.1': 'dropout": 0.0'}
FAMILIES = ("ddp", "accumulation", "zero", "fsdp", "fsdp_checkpointing", "offload")
ALONE = ("segmentation", "two_inputs", "buckets")  # these make their own data
OWN_MODELS = [*product(FAMILIES, [*DECODERS, *CLASSIFIERS, *ALONE])]
OWN_MODELS += [*product(("tp", "cp", "pp"), DECODERS), ("ep", "Qwen3Moe")]
USUAL = ("fsdp", "Llama")
HEAD = """
def head_of(model):
    return model.lm_head
"""
FROM_CONFIG = """
from transformers import AutoConfig
CONFIG = AutoConfig.from_pretrained(FOLDER)
WEIGHTS = FOLDER"""


def own_decoder(name):
    """The functions of examples/own for a decoder, and what this example needs besides."""
    more = {"chunked_loss": HEAD, "pp": read("own/pp"), "cp": read("own/cp")}
    return f"{read('own/decoder')}\n\n{more.get(name, '')}"


def by_config(own):
    """Functions that read no weights: those of the folder are read in shards."""
    return own.replace("from_pretrained(FOLDER, dty", "from_config(CONFIG, dty")


def of_folder(folder):
    """The constants of a decoder's folder."""
    return f"FOLDER, DATA, LENGTH = {str(folder)!r}, {str(folder / 'text')!r}, 16\n"


@cases("name, kind", OWN_MODELS, lambda *row: row == USUAL)
def test_your_own_model(name, kind, plain, hub, image_folder, tmp_path):
    """Killed on two ranks, resumed on one, it writes what the plain loop does, and that loads and
    generates."""
    if kind in DECODERS:
        own = own_decoder(name)
        code = f"{of_folder(hub(kind))}LR = 3e-2"
    elif kind in CLASSIFIERS:
        own = read("own/classifier")
        code = f"DATA, CLASSES, SIZE = {str(image_folder)!r}, 3, 16\nLR = 1e-3"
    else:
        own = read(f"own/{kind}")
        code = "SIZE, LR = 32, 1e-3"
    changes = STILL | CLASSIFIERS.get(kind, {})
    expected, folder = plain(own, code, changes)
    for n, kill in ((2, 13), (1, 0)):
        options = {"own": own, "kill": kill, "changes": changes}
        found = run(name, n, tmp_path, f"{ROWS[name].code}\n{code}", **options)
        assert best(tmp_path).keys() == best(folder).keys()
    assert found[16] == pytest.approx(expected[16], 1e-6)
    assert distance(best(tmp_path), best(folder)) < 1e-6
    assert {weight.dtype for weight in best(tmp_path).values()} == {torch.float64}  # not bfloat16
    if kind in DECODERS:
        text = generate(tmp_path / "runs/best")
        assert text == generate(folder / "runs/best") and re.fullmatch(r" ?abcd.{,9}</s>", text)


def test_a_folder_is_read_as_in_transformers(hub, tmp_path):
    """By its index: the files of another save are not read. A model that is tied reads a head that
    is the embedding, and refuses one that differs."""
    options = {"own": by_config(read("own/decoder")), "exact": False}
    for kind in ("Qwen3", "Qwen2"):
        work = tmp_path / kind
        folder = tmp_path / kind / "folder"
        shutil.copytree(hub(kind), folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        theirs = model.state_dict()
        for path in folder.glob("*.safetensors"):
            older = {name: tensor + 1 for name, tensor in load_file(path).items()}
            save_file(older, folder / f"a-{path.name}")
            save_file(older, folder / f"z-{path.name}")
        if kind == "Qwen2":  # with the head
            theirs["lm_head.weight"] = theirs["lm_head.weight"].clone()
            save_file(theirs, path)
        code = f"{of_folder(folder)}LR = 0.0\n{FROM_CONFIG}"
        run("pretrained", 2, work, code, **options)
        assert same_bits(best(work), {n: theirs[n] for n in best(work)})
    theirs["lm_head.weight"] += 1
    save_file(theirs, path)
    with pytest.raises(AssertionError, match="its lm_head.weight differs from the parameter"):
        run("pretrained", 2, work, code, **options)
    path.unlink()
    with pytest.raises(AssertionError, match="folder has no model.safetensors"):
        run("pretrained", 2, work, code, **options)


@pytest.mark.full
def test_adapters_of_a_folder_are_those_of_the_whole_model(hub, tmp_path):
    """A rank that reads its shards of the frozen weights keeps the values of the adapters."""
    own = read("own/decoder").partition("def export")[0]
    code = f"{of_folder(hub('Llama'))}TARGETS = ['q_proj']"
    changes = {"    adapt(model)": "    torch.manual_seed(5)\n    adapt(model)"}
    options = {"changes": changes, "exact": False}
    for name in ("whole", "shards"):
        (tmp_path / name).mkdir()
    expected = run("lora", 2, tmp_path / "whole", code, own=own, **options)
    code += FROM_CONFIG
    found = run("lora", 2, tmp_path / "shards", code, own=by_config(own), **options)
    assert found == expected
    assert same_bits(best(tmp_path / "shards"), best(tmp_path / "whole"))


@cases("name, kind, words", REFUSED, lambda *row: row in REFUSED[1::3])
def test_a_part_that_is_not_the_models_is_refused(name, kind, words, hub, tmp_path):
    """Before the first step, on every rank, in one line."""
    code = f"{of_folder(hub(kind))}{ROWS[name].code}\nTARGETS = ['q_proj']"
    finished = start(name, 2, tmp_path, code, own_decoder(name), exact=False)
    assert finished.code == 1 and finished.stdout == "", str(finished)
    said = [line for line in finished.stderr.splitlines() if words in line]
    assert said and "Traceback" not in finished.stderr, str(finished)


SEVERAL = TABLES["parameters_of_several_stages"]


@pytest.mark.parametrize("name", SEVERAL)
def test_a_parameter_of_several_stages_is_refused(name):
    """Each would train a copy of it; the check of the logits finds no difference before a step."""
    pp = functions_of("pp.py")
    model = pp["make_model"]()
    exec(SEVERAL[name])
    with pytest.raises(SystemExit, match=f"^{name} is not trained"):
        pp["make_stage"](model, 0, 2, "cpu", pp["collate"](pp["make_data"]()[0][:1]))
