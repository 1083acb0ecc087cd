"""estimate.py FILE: the user's file, unchanged, on fake tensors; and the file that init writes."""

import json
import re

import pytest
from conftest import ROOT, cases, succeed
from test_estimate import estimate

from estimator.compose import compose

EXAMPLES = {path.stem: path.read_text() for path in (ROOT / "examples").glob("*.py")}
READY = sorted(name for name, text in EXAMPLES.items() if "\ndef forward(" in text)
# They need conversations, a router's choices, several ranks, or their own launcher.
OTHERS = ("chat", "ep", "fsdp_tp", "hsdp", "unequal_gpus", "zero_deepspeed")
ALONE = [name for name in READY if name not in OTHERS]


@cases("name", ALONE, lambda name: name in ("plain", "ddp", "fsdp"))
def test_what_is_predicted_is_what_tensors_take(name):
    """Bytes at the peak of a step, an evaluation, a checkpoint and an export: within 1 %."""
    start = f"python tests/live_file.py examples/{name}.py"
    runs = [succeed(f"{start} {how}", forked=True) for how in ("fake", "real")]
    predicted, real = (json.loads(run.lines[-1]) for run in runs)
    assert sum(predicted["kinds"].values()) == pytest.approx(sum(real["kinds"].values()), rel=0.01)
    assert predicted["host"] == pytest.approx(real["host"], rel=0.01)
    for kind, size in real["kinds"].items():
        assert predicted["kinds"][kind] == pytest.approx(size, rel=0.01, abs=2**10), kind


OWN = """
import functools

WIDTH = 512
BATCH = 64


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, y):
        x = self.first(x) + y
        for block in self.blocks:
            x = block(x)
        return torch.cat([x] * 40, -1).square()


@functools.cache
def samples():
    return [{"x": torch.ones(WIDTH), "y": torch.tensor([i / 7])} for i in range(80)]


def make_model():
    return Wide()


def layers_of(model):
    return model.blocks


def make_data():
    return samples()[:70], samples()[70:]


def forward(model, batch):
    return model(batch["x"], batch["y"]).float()


def loss_of(output, batch):
    return torch.stack([output.square().sum(), torch.tensor(float(len(output)))])
"""


@pytest.fixture
def mine(tmp_path):
    """A function that writes an example with these functions; plain.py with the mark at its begin
    that editors of Windows write."""

    def write(name, changes=()):
        text = compose(EXAMPLES[name], OWN, "mine", name)
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "mine.py").write_text(text, "utf-8-sig" if name == "plain" else "utf-8")
        return tmp_path / "mine.py"

    return write


def test_lines_of_a_file(mine):
    """With what is known: parameters, their shards, and a tensor that a line of the file makes."""
    parameters = 4 * 4 * (512 * 512 + 512)
    large = "return torch.cat([x] * 40, -1).square()"
    found = json.loads(estimate(f"{mine('fsdp')} --gpus 4 --json --memory 24").stdout)
    assert found["inputs"] == "x [16, 512] float32, y [16, 1] float32" and found["fits"]
    assert found["kinds"]["parameters"] == pytest.approx(parameters / 4, rel=0.01)
    assert found["kinds"]["optimizer"] == pytest.approx(parameters / 2, rel=0.01)
    assert found["host"] == pytest.approx(parameters, rel=0.01)
    assert found["sent"] == pytest.approx(parameters * (2 * 2 + 4) / 4 * 3 / 4, rel=0.3)
    [line] = [one for one in found["lines"] if one["code"] == large]
    assert line["shape"] == [16, 40 * 512] and line["bytes"] >= 16 * 40 * 512 * 2
    text = estimate(f"{mine('plain')} --memory 24").stdout
    assert large in text and "\npredicted peak per GPU: " in text and ", fits 24.0 GiB" in text


@pytest.mark.full
def test_the_largest_batch_of_a_file(mine):
    """Which has fewer samples than that. It is said if the file's own does not fit."""
    flags = "--gpus 2 --memory 1.6 --spare 1.5"
    found = json.loads(estimate(f"{mine('ddp')} {flags} --fit --json").stdout)
    assert found["fits"] and found["batch"] > 70 and found["batch"] % 2 == 0
    more = [("BATCH = 64", f"BATCH = {found['batch'] + 2}"), ("range(80)", "range(9999)")]
    more += [("[:70]", "[:9000]"), ("[70:]", "[9000:]")]
    assert "more than 1.6 GiB" in estimate(f"{mine('ddp', more)} {flags}", code=2).refusal


WRONG = {  # what is said, and what is wrong
    "mine.py has no function forward": [("def forward(model", "def forwards(model")],
    "mine.py:[0-9]+: main[(][)] runs on import": [("if __name__ ==", "main()\nif __name__ ==")],
    "mine.py:[0-9]+: invalid syntax": [("def main():", "def main(:")],
    "mine.py:[0-9]+: the model branches on the values of a tensor": [
        ("        x = self.first(x) + y", "        if x.sum() > 0:\n            x = self.first(x)")
    ],
    "mine.py:[0-9]+: the shape of a result depends on": [("x = block(x)", "x = x[x > 0]")],
    "mine.py cannot be read .*; save it as UTF-8": [('"""', '# coding: ascii é\n"""')],
    "mine.py ends with: 70 samples": [("BATCH = 64", "BATCH = 1")],
    "mine.py: main[(][)] has no step": [("enumerate(train_loader, start + 1)", "()")],
    "mine.py:[0-9]+: FOLDER tests/none: no such file or folder, and tests is a folder here": [
        ("WIDTH = 512", "from transformers import AutoConfig\nFOLDER = 'tests/none'\nWIDTH = 512"),
        ("return Wide()", "return AutoConfig.from_pretrained(FOLDER)"),
    ],
}


@cases("words", WRONG, lambda words: "branches" in words or "FOLDER" in words)
def test_what_is_wrong_with_a_file_is_one_line(words, mine):
    failed = estimate(f"{mine('ddp', WRONG[words])} --gpus 2", code=2)
    assert re.search(words, failed.refusal) and failed.stderr.count("\n") <= 2  # with the start


def test_an_error_of_ones_own_ends_at_ones_own_line(mine):
    failed = estimate(f"{mine('plain', [('x = block(x)', 'x = x.view(7)')])}", code=1)
    begun, first, *_, last = failed.stderr.splitlines()
    assert begun.startswith("training steps to predict: 1")
    assert first == "Traceback (most recent call last):"
    assert last.startswith("RuntimeError: shape '")
    assert "estimator" not in failed.stderr.partition("RuntimeError")[0].rpartition("mine.py")[2]


CONFIG = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}


def test_a_folder_with_only_a_config_and_no_data(tmp_path):
    """Weights, tokenizer and text have stand-ins, and it is said."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    own = (ROOT / "examples/own/decoder.py").read_text().replace("= 1024", "= 32")
    own = own.replace('"model"', repr(str(tmp_path / "model")))
    (tmp_path / "transformers_mine.py").write_text(compose(EXAMPLES["fsdp"], own, "mine", "fsdp"))
    text = estimate(f"{tmp_path}/transformers_mine.py --gpus 2").stdout
    assert "input_ids [16, 32] int64" in text
    for words in ("weights are not read", "a token for each byte", "text.txt: a text"):
        assert words in text


@pytest.mark.parametrize("there", [True, False])
def test_folders_of_images(there, tmp_path, image_folder):
    """Those that are there are read; the others have stand-ins of as many shapes."""
    own = (ROOT / "examples/own/classifier.py").read_text().replace("/val", "/test")
    own = own.replace('"images"  #', f"{str(image_folder if there else tmp_path)!r}  #")
    (tmp_path / "mine.py").write_text(compose(EXAMPLES["plain"], own, "mine", "plain"))
    text = estimate(f"{tmp_path}/mine.py").stdout
    assert ", 3, 224, 224] float32, labels" in text and there != ("images of 10 classes" in text)


# ------------------------------------------------------------------------------ other examples
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_pretrained_decoder_brings_its_learning_rate(name):
    """In the place of the small model's, which is hundreds of times as high."""
    text = compose(EXAMPLES[name], (ROOT / "examples/own/decoder.py").read_text(), "mine", name)
    assert re.findall(r"^LR = (\S+)", text, re.MULTILINE) == ["2e-5"]


@pytest.mark.parametrize("name", READY)
def test_an_example_without_anything_of_ones_own_is_itself(name):
    assert compose(EXAMPLES[name], "", name, name).split() == EXAMPLES[name].split()


def test_an_example_gets_what_belongs_to_the_functions(tmp_path):
    """Also from another example that has them; what only the example's functions needed goes."""
    (tmp_path / "own.py").write_text(OWN, "utf-8-sig")
    names = [("own", "my_zero"), ("my_zero", "my_fsdp"), ("my_zero", "my_chunked_loss")]
    for given, name in names:
        command = f"init {tmp_path}/{name}.py --from {name[3:]} --own {tmp_path}/{given}.py"
        said = succeed(f"python {ROOT}/estimate.py {command}", forked=True).stdout
        assert f": python {ROOT}/estimate.py {tmp_path}/{name}.py" in said
        assert ("has no head_of" in said) == ("chunked" in name)
        assert "exists; give a new name" in estimate(command, code=2).refusal
    text = (tmp_path / "my_fsdp.py").read_text()
    assert text == compose(EXAMPLES["fsdp"], OWN, "my_fsdp", "fsdp")
    for words in ("import functools\n", "class Wide(", "@functools.cache\ndef samples()"):
        assert text.count(words) == 1
    assert 'OUT = "runs/my_fsdp"' in text and "\nBATCH = 64\n" in text and "64 * " not in text
    assert "nn.Embedding(" not in text and "ZeroRedundancyOptimizer" not in text


@pytest.mark.full
def test_the_other_examples_are_recommended(mine):
    """Those that fit, with the command that writes the file."""
    text = estimate(f"{mine('ddp')} --gpus 2 --memory 24 --recommend").stdout
    names = re.findall(r"^\d+\. (\w+): peak", text, re.M)
    assert {"ddp", "zero", "fsdp", "fsdp_checkpointing", "offload"} <= {*names}
    assert names.index("ddp") < names.index("fsdp_checkpointing") < names.index("offload")
    assert f"init my_fsdp.py --from fsdp --own {mine('ddp')}" in text
    assert "\nchunked_loss: needs head_of(model) in mine.py" in text
