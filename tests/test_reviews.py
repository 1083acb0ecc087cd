"""Reviews: their files, their tokenizer, and the encoder that classifies them."""

import re

import pytest
import torch
from conftest import ROOT, cases, distance, read_run, refused, succeed

transformers = pytest.importorskip("transformers")

from jobs import reviews  # noqa: E402

REVIEWS = "--dataset reviews --data-dir"
TINY = "--model encoder-1x2x16 --context 12 --batch-size 16 --print-freq 1"


@pytest.fixture(scope="module")
def trained(review_folder, tmp_path_factory):
    """The folder it ran in, where runs/ is; on reviews that the tokenizer need not cut off."""
    folder = tmp_path_factory.mktemp("trained")
    flags = f"{REVIEWS} {review_folder} {TINY} --context 40 --epochs 20 --lr 0.01"
    output = folder / "runs/pytorch_SingleGPU"
    succeed(f"python pytorch_SingleGPU.py {flags} --output-dir {output}", forked=True)
    return folder


SPLIT = ["pytorch_FSDP", "pytorch_gradient_accumulation --accumulate 2"]


@cases("script", SPLIT, lambda script: script == "pytorch_FSDP")
def test_techniques_agree(script, review_folder, train):
    """In float64, after eight steps: each review has one label, however long it is, so a mean over
    parts of equal size is right. FSDP makes the model of two ranks without memory."""
    flags = f"{REVIEWS} {review_folder} {TINY} --double --dropout 0 --max-steps 8 --epochs 3"
    both = train("pytorch_SingleGPU", 1, flags)[0], train(script, 2, flags)[0]
    expected, weights = ({k: t for k, t in w.items() if t.is_floating_point()} for w in both)
    assert distance(weights, expected) < 1e-11


def test_what_is_saved_is_all_that_is_needed(trained, review_folder, monkeypatch, capsys):
    """Stock transformers and tokenizers make of model.pt what the run reported, by the lines that
    docs/job.md gives."""
    _, result = read_run(trained / "runs/pytorch_SingleGPU")
    assert result["eval_accuracy"][-1] > 0.9 and result["classes"] == ["negative", "positive"]
    monkeypatch.chdir(trained)
    [lines] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/job.md").read_text(), re.S)
    found = {}
    exec(lines, found)
    [[negative, positive]] = eval(re.search(r"\[\[.*?\]\]", capsys.readouterr().out)[0])
    assert negative + positive == pytest.approx(1, abs=1e-3)
    tokenizer = found["tokenizers"].Tokenizer.from_str(found["tokenizer"])
    losses = []
    for text, label in zip(*reviews.read(review_folder / "test.tsv"), strict=True):
        tokens = torch.tensor([tokenizer.encode(text).ids])
        with torch.no_grad():
            logits = found["model"](tokens).logits
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor([label])).item())
    assert sum(losses) / len(losses) == pytest.approx(result["eval_loss"][-1], rel=1e-3)


@cases("script, ranks", [("pytorch_SingleGPU", 1), ("pytorch_FSDP", 2)], lambda s, n: n == 1)
def test_pretrained_weights(script, ranks, review_folder, pretrained, train):
    """At a rate of nothing, what is evaluated is what was loaded."""
    flags = f"{REVIEWS} {review_folder} --weights {pretrained} --context 12 --batch-size 16"
    flags += " --max-steps 1 --lr 1e-30 --weight-decay 0"
    weights, result = train(script, ranks, flags)
    stock = transformers.BertForSequenceClassification.from_pretrained(pretrained).eval()
    for name, tensor in stock.state_dict().items():
        assert torch.allclose(weights[f"encoder.{name}"], tensor, atol=1e-20)
    assert result["model"] == "encoder"
    texts, labels = reviews.read(review_folder / "test.tsv")
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=12, return_tensors="pt")
    with torch.no_grad():
        logits = stock(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels)).item()
    assert loss == pytest.approx(result["eval_loss"][-1], rel=1e-4)


BROKEN = {
    "two columns": (b"1\tonly two", "line 3 is broken (not enough values to unpack"),
    "four columns": (b"1\t2.0\ta\tb", "line 3 is broken (too many values to unpack"),
    "label": (b"yes\t2.0\tfine", "line 3 is broken ('yes' is not in list"),
    "rating": (b"1\tmuch\tfine", "line 3 is broken (could not convert string to float: 'much'"),
    "no text": (b"1\t2.0\t ", "line 3 is broken (no text"),
    "not UTF-8": (b"1\t2.0\t\xff", "line 3 is broken ('utf-8' codec can't decode"),
}


@pytest.mark.parametrize("line, words", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_told_by_its_number(line, words, tmp_path):
    path = tmp_path / "train.tsv"
    path.write_bytes(b"\xef\xbb\xbflabel\trating\ttext\n0\t-1.0\tfine\n" + line + b"\n")
    with refused(f"{path}, {words}"):
        reviews.read(path)
