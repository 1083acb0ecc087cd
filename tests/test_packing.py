"""Several documents in a sequence: how they get there, and that each is trained as if alone. That
ranks end with the weights of one process is in test_contract.py and test_chat.py."""

import collections
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import cases, refused
from test_text import JOB, settled

from jobs import language_models, text
from parallel import attention_kernels


def documents_of(dataset):
    """Each ends with an empty line, or with the text."""
    written = "".join(dataset.classes[token] for token in dataset.tokens)
    return re.findall(r"(?s).+?(?:\n\n|$)", written)


@pytest.mark.parametrize("model", ["gpt-2x4x32", "llama-2x4x32 --kv-heads 2"])
def test_packed_documents_are_trained_as_if_alone(model):
    """Loss and gradients of rows are those of their documents, each computed by itself. Where they
    end is read from the text; a long one is several."""
    args = settled(f"{JOB} --model {model} --context 32 --packed")
    _, dataset = text.make_datasets(args)
    model = language_models.make_model(args, dataset.classes).double()
    rows, labels = dataset.prepare_evaluation((torch.arange(len(dataset)),), "cpu")
    alone = 0
    parts = 0
    for document in documents_of(dataset):
        codes = torch.tensor([dataset.classes.index(character) for character in document])
        for begin in range(0, len(codes) - 1, 32):
            part = codes[begin : begin + 33]
            logits = model(part[None, :-1])
            alone = alone + F.cross_entropy(logits[0], part[1:], reduction="sum")
            parts += 1
    together = F.cross_entropy(model(rows).flatten(0, 1), labels.flatten(), reduction="sum")
    ours, theirs = (
        [loss, *torch.autograd.grad(loss, list(model.parameters()))] for loss in (together, alone)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert parts > 20


def test_empty_lines_of_windows_separate_documents(tmp_path):
    """Among files of another system as well: the tokens are the same, without carriage returns."""
    flags = f"--model gpt-1x1x8 --context 8 --dataset text --data-dir {tmp_path} --packed"
    words = "ab\ncd\n\n" * 20
    found = []
    for ends in ("\n\n", "\r\n\r\n", "\n\r\n"):
        for name, end in zip("ab", ends.split("\n")[:2], strict=True):
            (tmp_path / name).write_bytes(words.replace("\n", f"{end}\n").encode())
        found.append(text.make_datasets(settled(flags))[0])
    for dataset in found[1:]:
        assert torch.equal(dataset.tokens, found[0].tokens)
        assert (dataset.starts == found[0].starts).all()


def test_the_loss_of_a_batch_is_a_mean_over_its_labels():
    """On one rank, and on two, which have other numbers of them and average their losses."""
    args = settled(f"{JOB} --model gpt-1x1x8 --context 32 --packed")
    dataset, _ = text.make_datasets(args)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(5 + 2))[24:48]
    _, whole = dataset.prepare((order,), "cpu", 5, 2, 1)
    logits = torch.randn(*whole.shape, len(dataset.classes))
    mean = F.cross_entropy(logits.flatten(0, 1), whole.flatten()).item()
    assert dataset.loss(logits, whole).item() == pytest.approx(mean)
    parts = [dataset.prepare((order[r::2],), "cpu", 5, 2, 1, share=(r, 2))[1] for r in (0, 1)]
    counts = [(labels >= 0).sum().item() for labels in parts]
    losses = [dataset.loss(logits[r::2], labels).item() for r, labels in enumerate(parts)]
    assert counts[0] != counts[1] and sum(losses) / 2 == pytest.approx(mean)


def test_no_token_is_lost_in_packing(tmp_path, capsys):
    """Every token has its successor in the document as label, once; a long one is split."""
    (tmp_path / "a").write_text("\n\n".join(("ab", "abcdefghij", "abc") * 20))
    flags = f"--model gpt-1x1x8 --context 8 --dataset text --data-dir {tmp_path} --packed"
    dataset, _ = text.make_datasets(settled(flags))
    rows, labels = dataset.prepare_evaluation((torch.arange(len(dataset)),), "cpu")
    pairs = torch.stack([rows[:, 0], labels], 2)[labels >= 0].tolist()
    found = collections.Counter("".join(dataset.classes[i] for i in pair) for pair in pairs)
    assert found == collections.Counter(
        a + b for document in documents_of(dataset) for a, b in itertools.pairwise(document)
    )
    assert "(18 longer than --context, split)" in capsys.readouterr().out
    assert dataset.count_labels() == len(pairs) and rows[:, 1].max() == 7
    (tmp_path / "a").write_text("ab" * 100)
    with refused("the text has no empty line, which separates documents"):
        text.make_datasets(settled(flags))


@cases("part", ["blocks", "model"], lambda part: part == "blocks")
@torch.no_grad()
def test_packed_rows_do_not_break_what_is_compiled(part, monkeypatch):
    """FlexAttention is part of the graph, and attends as the mask does."""
    args = settled(f"{JOB} --model llama-2x2x32 --kv-heads 1 --context 32 --packed")
    dataset, _ = text.make_datasets(args)
    model = language_models.make_model(args, dataset.classes)
    rows, _ = dataset.prepare_evaluation((torch.arange(3),), "cpu")
    expected = model(rows)
    monkeypatch.setattr(attention_kernels, "has_flex", lambda tensor: True)
    outside = torch.compiler.disable(lambda function: function)  # breaks a graph that has it
    monkeypatch.setattr(attention_kernels, "compiled", outside)
    for module in model.blocks if part == "blocks" else [model]:
        module.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(rows), expected, rtol=1e-4, atol=1e-5)
