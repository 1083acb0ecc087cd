"""The functions of examples/chat.py: which answers it learns, in which rows, and which lines of a
file it refuses. That it ends as the plain loop: test_examples.py."""

import json
import re
from types import SimpleNamespace

import jinja2
import pytest
import test_chat
import torch
from conftest import ROOT, TABLES, name_of
from example_runs import DECODERS, read, talk

import jobs.chat
from measure.count_padding import functions_of

transformers = pytest.importorskip("transformers")


def test_data_that_is_not_there_is_named(tmp_path):
    chat = functions_of("chat.py", DATA=str(tmp_path / "none.jsonl"))
    with pytest.raises(SystemExit, match=r"none.jsonl: .*No such file.*; set it to your .jsonl"):
        chat["make_data"]()


BAD = TABLES["wrong_conversations"]


def pack(chat, lengths):
    """Rows of 50 tokens with random documents of these lengths; and the documents."""
    documents = [(torch.randperm(200)[:n].tolist(),) * 2 for n in lengths]
    return chat["pack"](documents), documents


@pytest.mark.parametrize("path", sorted((ROOT / "tests/chat/templates").iterdir()), ids=name_of)
def test_answers_alone_are_learned(path):
    """By the same functions as in our script, so with the same tokens and labels."""
    tokenizer = test_chat.make_tokenizer(re.sub(r"\{%- (end)?generation %\}", "", path.read_text()))
    ours = (ROOT / "jobs/conversations.py").read_text()
    found = functions_of("chat.py")
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


def test_a_conversation_without_an_answer_is_skipped(conversations, tmp_path, capsys):
    question = json.dumps({"messages": [{"role": "user", "content": "to be"}]})
    late = talk("to be" * 50, "or not")
    (tmp_path / "chat").write_text("\n".join([question, "", talk("a", "b"), late, talk("c", "d")]))
    chat = functions_of("chat.py", **conversations | {"DATA": str(tmp_path / "chat")})
    train_set, eval_set = chat["make_data"]()
    assert len(train_set) == len(eval_set) == 1
    assert "2 conversations; 2 without an answer in 64 tokens skipped" in capsys.readouterr().out
    (tmp_path / "chat").write_text(question)
    with pytest.raises(SystemExit, match="no conversation has an answer within 64 tokens"):
        chat["make_data"]()


@pytest.mark.parametrize("kind", DECODERS)
def test_documents_of_a_row_do_not_see_each_other(kind, hub):
    """The loss of rows is the sum over their documents alone. With a cache, it would not be."""
    chat = functions_of("chat.py", LENGTH=50)
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(hub(kind), **options)
    packed, documents = pack(chat, (20, 9, 2, 30, 10))
    rows = torch.utils.data.default_collate(packed)
    assert rows["labels"].shape == (2, 50)
    logits = [model(torch.tensor([tokens[:-1]])).logits[0] for tokens, _ in documents]
    labels = torch.tensor([label for _, labels in documents for label in labels[1:]])
    expected = torch.nn.functional.cross_entropy(torch.cat(logits), labels, reduction="sum")
    loss, count = chat["loss_of"](chat["forward"](model, rows), rows)
    assert loss.item() == pytest.approx(expected.item(), 1e-6) and count == len(labels)
    weight = model.get_input_embeddings().weight
    ours, theirs = (torch.autograd.grad(one, weight) for one in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma2", "Mistral", "GptOss", "OPT", "Lfm2"])
def test_packed_documents_that_see_each_other_are_refused(kind, hub):
    chat = functions_of("chat.py", LENGTH=50)
    reduce = {"all_reduce": lambda *args: None, "ReduceOp": torch.distributed.ReduceOp}
    chat["dist"] = SimpleNamespace(**reduce)  # of one rank
    model = transformers.AutoModelForCausalLM.from_pretrained(hub(kind), dtype=torch.float32)
    rows, _ = pack(chat, (20, 9))
    if kind in DECODERS or kind == "Gemma2":
        chat["check_packing"](model, rows, "cpu")
        return
    with pytest.raises(SystemExit, match="PACKED = False"):
        chat["check_packing"](model, rows, "cpu")


def test_a_row_has_one_document_unless_they_are_packed():
    chat = functions_of("chat.py", PACKED=False, LENGTH=50)
    assert len(chat["pack"]([((1, 2, 3),) * 2] * 2)) == 2


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named(line, conversations, tmp_path):
    both = zip(("Q", "A"), json.loads(talk("a", "b"))["messages"], strict=True)
    written = line
    for name, message in both:
        written = re.sub(rf"\b{name}\b", json.dumps(message), written)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f"{talk('a', 'b')}\n{written}\n")
    said = rf"bad.jsonl, line 2: .*{re.escape(BAD[line])}.*; correct or remove it"
    with pytest.raises(SystemExit, match=said):
        functions_of("chat.py", **conversations | {"DATA": str(bad)})["make_data"]()
