"""The language model: its data, user errors, and identical training in all scripts."""

import dataclasses
import shlex
import shutil
import tracemalloc

import pytest
import torch
from conftest import cases, launcher, read_run, refused, relative_difference, state, succeed
from torch import nn

import common
from harness.settings import read_flags
from jobs import gpt, language_models, sizes, text
from jobs.choice import Settings, resolve

JOB = "--model gpt-2x4x32 --context 16 --dataset synthetic --train-samples 150 --eval-samples 20"
JOB += " --batch-size 24 --epochs 9 --print-freq 1 --clip-grad 0.5"
DDP = "pytorch_torchrun_DDP"


def settled(flags, device="cpu"):
    """A command line, completed as a script would do it."""
    args = read_flags(common.argument_parser(""), Settings, shlex.split(flags))
    return resolve(dataclasses.replace(args, device=device))


TAKEN = [("pytorch_FSDP", 2, 0.5), ("pytorch_SingleGPU", 1, 1), (DDP, 2, 1)]
TAKEN += [("pytorch_FSDP_by_hand", 2, 0.5)]  # whose rows are there while their block computes
TAKEN += [("pytorch_DDP_ZeRO --use_zero", 2, 0.75)]  # of parameters, gradients and optimizer


@cases("script, n, part", TAKEN, lambda *row: row == TAKEN[0])
def test_memory_of_tensors_on_a_cpu(script, n, part, train):
    job = "--model gpt-2x2x256 --batch-size 8 --max-steps 4 --profile-memory"
    whole = sum(train("pytorch_SingleGPU", 1, job)[1]["state_bytes"].values())
    _, result = train(script, n, job)
    allocated = result["peak_memory_gib"]["allocated"] * 2**30
    assert part < allocated / whole < part + 0.45, "with activations, and blocks that are gathered"
    _, short = train("pytorch_SingleGPU", 1, "--max-steps 1 --profile-memory")
    assert short["peak_memory_gib"]["allocated"] is None, "the one step is timed"
    assert short["step_ms"]["p50"] > 0
    speeds = [short[f"{unit}_per_second"] for unit in ("samples", "tokens")]
    assert speeds[1] == pytest.approx(16 * speeds[0])


COMPILED = [("--blocks", "eager"), ("", "eager"), ("", "")]  # flags, and a hook


@cases("flags, hook", COMPILED, lambda flags, _: flags)
def test_a_script_that_compiles_is_equal_without_its_compiler(flags, hook, train):
    """Weights, by their names. And with it, which adds up in another order: of one block, as it is
    slow. pytorch#185539"""
    if not hook and (torch.__version__ < "2.13" or not shutil.which("c++")):
        pytest.skip("needs c++, and PyTorch 2.13")
    job = "--model gpt-1x2x16 --double --max-steps 12 --optimizer sgd"
    expected, _ = train("pytorch_SingleGPU", 1, job)
    weights, result = train("pytorch_compile", 2, f"{flags} {job}".strip(), hook)
    assert relative_difference(weights, expected) < 1e-11
    if not hook:
        assert result["first_step_seconds"] > 100 * result["step_ms"]["p50"] / 1e3


def test_ranks_evaluate_a_text_that_ends_within_a_window(run_once, tmp_path):
    """Labels of -100 count on no rank, and neither do windows that a sampler repeats."""
    (tmp_path / "text.txt").write_text("to be or not to be " * 53)
    flags = f"--dataset text --data-dir {tmp_path}/text.txt --model gpt-1x2x16 --context 16"
    flags += " --batch-size 12 --max-steps 2 --double"
    runs = [run_once(script, n, flags) for script, n in (("pytorch_SingleGPU", 1), (DDP, 3))]
    expected, result = (read_run(output)[1] for _, output in runs)
    assert result["eval_samples"] == 100 and 100 % 16  # of 101 tokens
    assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-12)


def test_windows_are_a_function_of_seed_epoch_and_step():
    data = text.Text(torch.arange(200, dtype=torch.uint8), [chr(i) for i in range(200)], 8)
    batch = (torch.arange(len(data)),)
    first = data.prepare(batch, "cpu", 0, 0, 0)
    assert all(map(torch.equal, first, data.prepare(batch, "cpu", 0, 0, 0)))
    for others in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not torch.equal(first[0], data.prepare(batch, "cpu", *others)[0])
    inputs, labels = first
    assert torch.equal(inputs[:, 1:], labels[:, :-1]), "a label is the next token"
    later = inputs[:, 0] - 8 * torch.arange(len(data))
    assert later[:-1].min() >= 0 and later.max() < 8 and later[:-1].unique().numel() > 3
    assert 0 <= labels.min() and labels.max() < 200, "in training every position has a label"


@pytest.mark.parametrize("tokenizer, vocabulary", [("chars", 7), ("bytes", 256)])
def test_files_of_ones_own(tokenizer, vocabulary, tmp_path):
    """Every rank encodes them: characters may need several bytes of memory, but not 13."""
    (tmp_path / "b.txt").write_text("süß€" * 10_000)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("ab" * 10, encoding="utf-8-sig")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    flags = f"--model gpt-1x1x8 --context 4 --dataset text --data-dir {tmp_path}"
    args = settled(f"{flags} --tokenizer {tokenizer}")
    tracemalloc.start()
    train_set, eval_set = text.make_datasets(args)
    assert tracemalloc.get_traced_memory()[1] < 12 * 40_021
    tracemalloc.stop()
    assert train_set.classes == eval_set.classes and len(train_set.classes) == vocabulary
    codes = torch.cat([train_set.tokens, eval_set.tokens]).tolist()
    found = "".join(train_set.classes[code] for code in codes)
    if tokenizer == "bytes":
        found = found.encode("latin-1").decode()
    assert found == "süß€" * 10_000 + "\n" + "ab" * 10


def test_characters_beyond_256(tmp_path):
    """Only the tokens of the samples stay in memory."""
    (tmp_path / "a").write_text("".join(chr(0x4E00 + i) for i in range(400)))
    flags = f"--context 4 --train-samples 80 --dataset text --data-dir {tmp_path}"
    train_set, _ = text.make_datasets(settled(f"--model gpt-1x1x8 {flags}"))
    assert train_set.tokens.tolist() == list(range(321)) and len(train_set.classes) == 400
    assert train_set.tokens.untyped_storage().nbytes() == 4 * 321


def test_synthetic_text_is_drawn_from_the_seed():
    first, again, other = (text.made_up(seed, "eval") for seed in (0, 0, 1))
    assert first == again != other and len(first) > 50_000
    train = text.made_up(0, "train")
    assert first[:1000] not in train, "what evaluates is not what was trained on"
    assert {*first.split()} == {*train.split()}, "but of the same words"


@pytest.mark.parametrize("experts", [{}, {"experts": 2}])
def test_where_a_gpt_drops(experts):
    """As GPT-2: the sum of the embeddings, and what each attention and MLP add to it."""
    model = gpt.GPT(list(range(11)), sizes.Size(2, 2, 16), 12, dropout=0.25, **experts)
    names = {layer: n for n, layer in model.named_modules() if isinstance(layer, nn.Dropout)}
    dropped = []
    for layer in names:
        assert layer.p == 0.25
        layer.register_forward_hook(lambda layer, inputs, output: dropped.append(names[layer]))
    model(torch.zeros(1, 12, dtype=torch.int64))
    of_blocks = [f"blocks.{n}.{part}.dropout" for n in (0, 1) for part in ("attention", "mlp")]
    assert dropped == ["dropout", *of_blocks]


def test_norms_and_embeddings_do_not_decay():
    model = gpt.GPT(list(range(11)), sizes.Size(2, 2, 16), 12)
    decayed, others = language_models.parameter_groups(model)
    assert others["weight_decay"] == 0
    names = {id(p): name for name, p in model.named_parameters()}
    kept = ("attention_norm", "mlp_norm", "norm", "token", "position")
    assert {names[id(p)].split(".")[-2] for p in others["params"]} == set(kept)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_plateau_goes_on_after_a_resume(tmp_path):
    """Decided from what all ranks have lost, kept in the snapshot: the third evaluation was the
    second without improvement, and the fourth the first of the next two."""
    command = f"{launcher(DDP, 2)} {JOB} --schedule plateau --optimizer sgd "
    command += f"--lr 1e-6 --output-dir {tmp_path} --epochs "
    succeed(f"{command}2", forked=True)
    succeed(f"{command}4 --resume auto", forked=True)
    scheduler = state(tmp_path)["scheduler"]
    assert scheduler["_last_lr"][0] == pytest.approx(1e-7) and scheduler["num_bad_epochs"] == 1


def test_weights_know_their_characters(tmp_path):
    """Another text has other characters, or as many, which shapes would not tell."""
    flags = "--model gpt-1x1x8 --context 8 --dataset synthetic"
    model = language_models.make_model(settled(flags), ["a", "b"])
    torch.save(model.state_dict(), tmp_path / "model.pt")
    args = settled(f"{flags} --weights {tmp_path}/model.pt")
    language_models.make_model(args, ["a", "b"])
    with refused("was trained on other characters"):
        language_models.make_model(args, ["c", "d"])
