"""Fine-tuning: which tokens of a conversation have labels, ranks that count different numbers of
them, and tokens that are encoded once."""

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, cases, refused, relative_difference
from test_text import settled

import common
from harness import world
from jobs import chat as chat_data
from jobs import conversations, text, text_files, token_files
from libraries import hub

JOB = "--context 32 --batch-size 12 --max-steps 3 --double --lr 0.01 --dataset chat"


def test_answers_have_labels(chat, capsys):
    """All tokens are those of the template; labels are those after the prompt for an answer. This
    template changes earlier answers, so each answer ends a document of its own."""
    flags = f"{JOB} --weights {chat}/hub --data-dir {chat}/chat.jsonl"
    sets = common.make_datasets(settled(flags))
    tokenizer = hub.load_tokenizer(chat / "hub")
    cut = 0
    talks = [json.loads(line)["messages"] for line in (chat / "chat.jsonl").open()]
    parts = [talk[:n] for talk in talks for n in range(2, len(talk) + 1, 2)]
    rows = [dataset.prepare_evaluation((torch.arange(len(dataset)),), "cpu") for dataset in sets]
    for talk, tokens, labels in zip(parts, *map(torch.cat, zip(*rows, strict=True)), strict=True):
        written = tokenizer.apply_chat_template(talk, tokenize=False)
        whole = tokenizer(written, add_special_tokens=False)["input_ids"]
        names = tokenizer.convert_ids_to_tokens(whole)
        last = len(whole) - names[::-1].index("<|assistant|>")
        expected = [-100] * last + whole[last:]
        assert labels.tolist() == (expected[1:] + 32 * [-100])[:32]
        assert tokens.tolist() == (whole[:-1] + 32 * [-1])[:32]
        cut += len(whole) > 33
    data = capsys.readouterr().out
    assert cut == 10 and "56 training documents with" in data and "(9 cut, 0 others" in data


KINDS = [json.loads(line) for line in (ROOT / "tests/chat/kinds.jsonl").open()]
PLAIN = {"reasoning", "tools", "calls"}  # kinds for which a template may have no place
REFUSED = dict.fromkeys(("border", "chatml", "llama3", "phi3"), PLAIN)
REFUSED |= {"mistral": {"systems", "reasoning"}, "qwen2_5": {"reasoning"}, "qwen3": set()}
REFUSED |= {"deepseek_r1_distill": {"systems", "thoughts", *PLAIN}}
TRL = importlib.util.find_spec("trl")  # its templates: `pip install --no-deps trl` is enough


def make_tokenizer(template):
    tokenizer = hub.train_tokenizer(["to be or not to be that is the question"], 280)
    tokenizer.backend_tokenizer.normalizer = None  # keeps upper case
    names = "<|im_start|> <|im_end|> <|eot_id|> <|end|> [INST] [/INST] <think> </think>".split()
    special = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": names}
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = template
    return tokenizer


def split(tokens, counted):
    """Those that count, as a list of each answer."""
    answers = []
    before = False
    for token, counts in zip(tokens, counted, strict=True):
        if counts and not before:
            answers.append([])
        if counts:
            answers[-1].append(token)
        before = counts
    return answers


def learned(number, template):
    """The tokens of the answers that our script learns of a line."""
    path = ROOT / "tests/chat/kinds.jsonl"
    answers = []
    for tokens in chat_data.encode(make_tokenizer(template), path, 99, number, number + 1, None):
        answers += split(tokens[:-1].tolist(), tokens[:-1] >= 0)
    return answers


def masked(number, template, name, **options):
    """Those of the assistant mask of transformers, in a template with marks, as TRL takes them. It
    knows no weights. Our rules differ in two templates."""
    tokenizer = make_tokenizer(template)
    line = json.dumps(KINDS[number])
    messages, _, tools = conversations.parse(re.sub('"(weight|train)"', '"id"', line), template)
    options |= tools | {"return_dict": True, "return_assistant_tokens_mask": True}
    found = tokenizer.apply_chat_template(messages, **options)
    answers = split(found["input_ids"], found["assistant_masks"])
    if KINDS[number]["id"] == "weights":
        answers = [answers[1]]
    if name == "qwen2_5":  # the line break in the prompt for an answer
        return [answer[1:] for answer in answers]
    if name == "phi3":  # each answer ends a document
        end = tokenizer.eos_token_id
        return [answer + [end] * (answer[-1] != end) for answer in answers]
    return answers


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("of", ["here", "trl"])
def test_labels_are_those_of_trl(of, name, capsys):
    """For short templates that do what those of these models do, and for TRL's own."""
    marked = (ROOT / f"tests/chat/templates/{name}.jinja").read_text()
    template = re.sub(r"\{%- (end)?generation %\}", "", marked)
    if of == "trl":
        folder = Path(TRL.origin).parent / "chat_templates" if TRL else Path()
        if not (folder / f"{name}.jinja").is_file():
            pytest.skip("needs TRL, with a template of this name")
        template = (folder / f"{name}.jinja").read_text()
        marked = (folder / f"{name}_training.jinja").read_text()
    refused = set()
    for number, kind in enumerate(KINDS):
        try:
            found = learned(number, template)
        except SystemExit:
            refused.add(kind["id"])
            continue
        assert found == masked(number, marked, name, whole=True), kind["id"]
    assert refused == REFUSED[name]
    assert capsys.readouterr().err.count("correct or remove it") == len(refused)


LOSES = {
    "{{ m.content }}": "adds no end to message 2",
    "{% for part in m.content %}{{ part.text }}{% endfor %}</s>": "drops the content of message 1",
    "{{ m.content if loop.first }}</s>": "drops the content of message 2",
    "{{ m.content if loop.index < 3 }}</s>": "drops the content of message 3",
    "{{ m.content if loop.last }}</s>": "drops the content of message 1",
    "{{ loop.length }} {{ m.content }}</s>": "does not add message 2 to those before",
}


@pytest.mark.parametrize("template", LOSES)
def test_templates_that_lose_something(template):
    """Or that write no end, so that a model would not learn to stop. Such data has to bring it."""
    said = [("user", "rain?"), ("assistant", "look"), ("tool", "wet"), ("assistant", "yes")]
    messages = [{"role": role, "content": content} for role, content in said]
    loop = f"{{% for m in messages %}}{{{{ m.role }}}} {template}{{% endfor %}}"
    tokenizer = make_tokenizer(loop)
    with pytest.raises(ValueError, match=LOSES[template]):
        conversations.documents_of(json.dumps({"messages": messages}), tokenizer)
    if "end" in LOSES[template]:
        ended = [message | {"content": f"{message['content']}</s>"} for message in messages]
        assert conversations.documents_of(json.dumps({"messages": ended}), tokenizer)


SCRIPTS = [("pytorch_torchrun_DDP", 3), ("pytorch_gradient_accumulation --accumulate 3", 2)]
SCRIPTS += [("pytorch_FSDP", 2), ("pytorch_TP --sequence-parallel", 2), ("lightning_Trainer", 2)]
SCRIPTS += [("pytorch_PP --microbatches 3", 2), ("pytorch_ND_parallel --pp 2 --accumulate 2", 4)]
SCRIPTS += [("pytorch_PP_by_hand --microbatches 3", 2)]
SCRIPTS += [(f"pytorch_chunked_loss --chunks 5{how}", 2) for how in ("", " --fused")]
SCRIPTS += [("transformers_Trainer", 2), ("accelerate_DDP", 2), ("pytorch_DDP_by_hand", 2)]
SCRIPTS += [("pytorch_TP_by_hand", 2), ("pytorch_CP", 4), ("pytorch_ND_parallel --cp 2", 4)]
SCRIPTS += [
    (f"{name} --packed", 2) for name in ("pytorch_FSDP", "pytorch_CP --attention allgather")
]


@cases("script, n", SCRIPTS, lambda *row: row == SCRIPTS[1])
def test_every_answer_token_counts_the_same(script, n, chat, train):
    """However many of them a rank or a micro-batch has."""
    flags = f"--weights {chat}/hub --data-dir {chat}/chat.jsonl"
    if "--packed" in script:
        flags += " --packed"
    expected, one = train("pytorch_SingleGPU", 1, flags)
    weights, result = train(script, n, flags)
    assert relative_difference(weights, expected) < 1e-11
    for name in ("train_loss", "eval_loss", "eval_samples"):
        assert result[name] == pytest.approx(one[name], rel=1e-11)


@pytest.mark.parametrize("more, lr, top", [("", 2e-5, 3), ("--lr 1 --warmup-steps 7", 1, 7)])
def test_defaults(more, lr, top, chat):
    args = settled(f"--weights {chat}/hub --dataset synthetic --context 8 {more}")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = common.make_scheduler(args, optimizer, 20).lr_lambdas[0]  # of five epochs
    peak = max(range(100), key=schedule)
    assert (args.lr, args.weight_decay, peak) == (lr, 0, top)


def test_text_is_encoded_once(chat, tmp_path, monkeypatch):
    """Files end with the end of a sequence; no more than the samples need is encoded."""
    monkeypatch.setattr(text_files, "PART", 2**10)
    said = "the question is öü, "
    folder = tmp_path / "text"
    new = tmp_path / "new" / "tokens"
    folder.mkdir()
    (folder / "a").write_text("to be ", encoding="utf-8-sig")
    (folder / "b").write_text(said * 5_000)
    flags = f"--weights {chat}/hub --dataset text --data-dir {folder} --context 16"
    train_set, eval_set = text.make_datasets(settled(flags))
    tokens = torch.cat([train_set.tokens, eval_set.tokens])
    tokenizer = train_set.classes
    words = "".join(tokenizer[token] for token in tokens.tolist() if token >= 3)
    assert words.count("<|end|>") == 2 and words.endswith("<|end|>") and "b" in words
    assert words.count("question") >= 4_999 <= words.count("Ã¶Ã¼")  # one may be split in two
    few, _ = text.make_datasets(settled(f"{flags} --train-samples 9"))
    assert torch.equal(few.tokens, train_set.tokens[: 9 * 16 + 1])
    sizes = sorted(path.stat().st_size for path in folder.glob(".tokens-*.int32"))
    assert len(sizes) == 3 and 4 * 145 < sizes[0] < 2 * len(train_set.tokens)
    monkeypatch.setattr(token_files, "tokenize", None)  # is not needed any more
    assert torch.equal(text.make_datasets(settled(flags))[0].tokens, train_set.tokens)
    os.utime(folder / "a")
    with pytest.raises(TypeError, match="NoneType"):
        text.make_datasets(settled(flags))

    def encode():
        yield [1]
        token_files.write([new], lambda: [[1], [2, 3]])  # of another machine with the same disk
        yield [2, 3]

    token_files.write([folder / "a" / "x", new], encode)
    assert new.stat().st_size == 12 and len([*folder.iterdir(), *new.parent.iterdir()]) == 6


def test_ranks_that_wait_for_tokens_do_not_time_out(monkeypatch):
    """The one that encodes takes part in collectives, which the others begin one after another."""
    sent = []
    rounds = [[None, (None, 1)], [None, (None, 1)], [(None, 2), (None, 1)]]
    monkeypatch.setattr(token_files, "MEET", -1)
    monkeypatch.setattr(token_files, "gather_objects", sent.append)
    assert [*token_files.meet(lambda: iter("abc"))] == ["a", "b", "c"] and sent == [None] * 3
    monkeypatch.setattr(world, "gather_objects", lambda value: rounds.pop(0))
    assert world.together(lambda: 2) == [2, 1] and not rounds


def test_a_tokenizer_with_more_tokens_than_the_embedding(chat, tmp_path):
    """As after add_tokens() without resize_token_embeddings()."""
    folder = shutil.copytree(chat / "hub", tmp_path / "hub")
    config = json.loads((folder / "config.json").read_text())
    tokenizer = hub.load_tokenizer(folder)
    tokenizer.add_tokens([f"<{i}>" for i in range(config["vocab_size"])])
    tokenizer.save_pretrained(folder)
    args = settled(f"{JOB} --weights {folder} --data-dir {chat}/chat.jsonl")
    train_set, _ = common.make_datasets(args)
    with refused("its tokenizer has more tokens; save both after resize_token_embeddings()"):
        common.make_model(args, train_set.classes)
