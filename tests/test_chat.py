"""Fine-tuning: which tokens of a conversation have labels, ranks that count different numbers of
them, and tokens that are encoded once."""

import json
import os

import pytest
import torch
from conftest import cases, relative_difference
from test_text import settled

import common
from jobs import text, token_files
from libraries import hub

JOB = "--context 32 --batch-size 12 --max-steps 3 --double --lr 0.01 --dataset chat"


def test_answers_have_labels(chat, capsys):
    """All tokens are those of the template; labels are those after the prompt for an answer."""
    flags = f"{JOB} --weights {chat}/hub --data-dir {chat}/chat.jsonl"
    sets = common.make_datasets(settled(flags))
    tokenizer, cut = hub.load_tokenizer(chat / "hub"), 0
    talks = [json.loads(line)["messages"] for line in (chat / "chat.jsonl").open()]
    rows = [dataset.prepare_evaluation((torch.arange(len(dataset)),), "cpu") for dataset in sets]
    for talk, tokens, labels in zip(talks, *map(torch.cat, zip(*rows, strict=True)), strict=True):
        written, expected, answer = tokenizer.apply_chat_template(talk, tokenize=False), [], False
        whole = tokenizer(written, add_special_tokens=False)["input_ids"]
        for token, name in zip(whole, tokenizer.convert_ids_to_tokens(whole), strict=True):
            expected.append(token if answer else -100)
            answer = name == "<|assistant|>" or answer and name != "<|end|>"
        assert labels.tolist() == (expected[1:] + 32 * [-100])[:32]
        assert tokens.tolist() == (whole[:-1] + 32 * [0])[:32]
        cut += len(whole) > 33
    data = capsys.readouterr().out
    assert cut == 10 and "45 training conversations with" in data and "(9 cut, 0" in data


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


@cases("script, n", SCRIPTS, lambda *row: row in SCRIPTS[:2])
def test_every_answer_token_counts_the_same(script, n, chat, train):
    """However many of them a rank or a micro-batch has."""
    flags = f"--weights {chat}/hub --data-dir {chat}/chat.jsonl"
    flags += " --packed" * ("--packed" in script)
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
    monkeypatch.setattr(token_files, "PART", 2**10)
    said, folder, new = "the question is öü, ", tmp_path / "text", tmp_path / "new" / "tokens"
    folder.mkdir()
    (folder / "a").write_text("to be ", encoding="utf-8-sig")
    (folder / "b").write_text(said * 5_000)
    flags = f"--weights {chat}/hub --dataset text --data-dir {folder} --context 16"
    train_set, eval_set = text.make_datasets(settled(flags))
    tokens, tokenizer = torch.cat([train_set.tokens, eval_set.tokens]), train_set.classes
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
