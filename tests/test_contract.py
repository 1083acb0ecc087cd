"""The contract of every technique in techniques.py, on a GPT in float64. One run shows that it ends
with the weights of the single process, keeps and sends what the theory says, does not wait for the
GPU between two prints, and leaves the files of every run; others, that it resumes where another
script was, on another number of ranks, and that a stop changes no bit.

A row of techniques.py has all of these tests. Of what it is not asked here: DeepSpeed has an engine
and files of its own (test_deepspeed.py), and test_local_sgd.py plays its ranks one by one."""

import json
import re

import conftest
import pytest
import torch
from conftest import hooked, launch, read_run, relative_difference, succeed, tensors_of
from contract_cases import BLOCK, DATA, IMAGES, PACKED, SAVED, STEPS, TOLERANCE, Try, tries
from safetensors.torch import load_file

import pytorch_QLoRA
from libraries.weights import load
from techniques import TECHNIQUES, Case


def single(one, run_once):
    """The same job in the single process: what it left behind, and its folder."""
    return run_once("pytorch_SingleGPU", 1, f"{one.job} --snapshot-every {SAVED}", one.hooks)[1]


def trained(one, run_once):
    """What a run left behind of which everything is looked at, and its folder."""
    flags = f"{one.case.flags} {one.job} --snapshot-every {SAVED}"
    return run_once(one.technique.script, one.n, flags, "sent waits products")


def is_usual(one):
    """The first case, and each branch, if possible of a Llama."""
    sgd = "sgd" in one.case.traits or one.model == "images" or "differs" in one.technique.traits
    if one.optimizer != ("sgd" if sgd else "adamw") or one.n != one.case.ranks[0]:
        return False
    if one.model == "images":  # SGD in 16 bits did not learn
        return one.is_first and "images" in one.technique.traits
    if "splits" in one.case.traits:
        return one.model == "tied"
    if "branch" in one.case.traits:
        return one.model == ("llama" if "llama" in one.case.traits else "gpt")
    if "scaled" in one.case.traits and "one_process" in one.technique.traits:
        return one.model == "gpt"  # its norm shows how it clips
    return one.model == "gpt" and one.is_first


TRIES = tries(is_usual, tuple(TOLERANCE), ("gpt", "tied", "llama", "images"), more=PACKED)


@pytest.mark.parametrize("one", TRIES)
def test_contract(one, run_once):
    finished, folder = trained(one, run_once)
    weights, result = read_run(folder)
    check_products(one, finished)
    check_files(one, folder, weights, result)
    check_waits(one, folder)
    if one.rounds or "differs" in one.technique.traits:
        check_rounding(one, run_once, weights, result)
    else:
        check_parity(one, run_once, folder, weights, result)
    check_theory(one, weights, result)


def check_files(one, folder, weights, result):
    names = {path.name for path in folder.glob("[!.]*")}
    events = {name for name in names if name.startswith("events.")}
    waits = {f"waits-{rank}.json" for rank in range(one.n)}
    weights_too = set()
    if one.model == "llama" and "--experts" not in one.script:  # transformers has no such Llama
        weights_too = {"model.safetensors", "config.json"}
    weights_too |= {"adapter"} if one.adapts else set()  # not beside a merged model
    theirs = events | waits | weights_too | {"model.pt", "result.json", "snapshots"}
    assert names == theirs, f"it left {names - theirs or 'nothing more'}, but no {theirs - names}"
    expected = {"technique": one.technique.script, "world_size": one.n, "device": "cpu"}
    own = {"Muon": "muon", "low_bit_optimizer": "adamw-8bit"}
    optimizer = own.get(one.technique.name, one.optimizer)
    expected |= {"optimizer": optimizer, "global_batch_size": one.batch}
    assert {name: result[name] for name in expected} == expected
    dtype = torch.float32 if one.rounds else torch.float64
    found = {t.dtype for t in weights.values() if t.is_floating_point()}
    assert found == {dtype}, f"model.pt has weights in {found}, and not in {dtype}"
    newest = max(folder.glob("snapshots/step-*"))
    if one.technique.name != "checkpoint":  # whose are DCP's
        check_ranks(one, folder, newest, result["options"])
    if one.adapts:  # alone, as in their file
        saved = [t for name, t in tensors_of(newest).items() if name.startswith("model.")]
        file = load_file(folder / "adapter/adapter_model.safetensors").values()
        assert bits_of(saved) == bits_of(file), "snapshot and file have other adapters"
        assert len(saved) == 4 * one.layers
        return
    saved = load(newest)  # without the ranks that wrote it
    saved = {name: tensor.to(weights[name].dtype) for name, tensor in saved.items()}
    assert not differing(saved, weights), "the last snapshot has other weights than model.pt"


def bits_of(tensors):
    return sorted(tensor.numpy().tobytes() for tensor in tensors)


def differing(ours, theirs):
    """Names of tensors that only one state dict has, or that differ in a bit."""
    found = [name for name in theirs if name in ours and not torch.equal(ours[name], theirs[name])]
    return [*found, *(ours.keys() ^ theirs.keys())]


def check_ranks(one, folder, snapshot, options):
    """Their seeds, from which dropout draws: ranks of tensor parallelism have one, unless each has
    positions of its own; all others differ. And the samples of an epoch's first steps."""
    whole = options.get("tp", one.n if "whole" in one.technique.traits else 1)
    alike = 1 if options.get("sequence_parallel") else whole
    state = torch.load(snapshot / "state.pt", weights_only=True)
    seeds = [rank["seed"] for rank in state["run"]["ranks"]]
    expected = [seeds[rank - rank % alike] for rank in range(one.n)]
    assert seeds == expected, f"{alike} ranks that compute the same have other seeds: {seeds}"
    assert len(set(seeds)) == one.n // alike, f"ranks with other inputs have one seed: {seeds}"
    if not one.rounds:  # others have deleted it
        state = torch.load(folder / f"snapshots/step-{SAVED:08}/state.pt", weights_only=True)
        samples = sum(rank["samples"] for rank in state["run"]["ranks"])
        steps = SAVED - state["run"]["history"]["eval_step"][-1]  # in this epoch
        assert steps > 0
        about = f"the ranks of the snapshot have trained on {samples} samples of its epoch"
        assert samples == pytest.approx(steps * one.batch), about


def check_products(one, finished):
    """What each rank multiplies matrices in, in a step: the one dtype that the flags say. Routers
    and Muon's orthogonal matrices are computed in fp32 beside bfloat16."""
    asked = one.script.partition("--dtype ")[2].partition(" ")[0]
    rounded = {"float8": "bfloat16"}.get(one.technique.name, "float32")  # which is emulated here
    expected = asked or (rounded if one.rounds else "float64")
    beside = "--experts" in one.script or one.technique.name == "Muon"
    expected += " float32" if asked and beside else ""
    found = re.findall(r"^products (\d) (.*)$", finished.stdout, re.MULTILINE)
    for rank, dtypes in found:
        assert dtypes == expected, f"rank {rank} multiplies matrices in {dtypes}, not in {expected}"
    assert sorted(rank for rank, _ in found) == [str(rank) for rank in range(one.n)]


def check_waits(one, folder):
    """In a pipeline, the first step exchanges shapes. Experts have to know how many tokens come."""
    for rank in range(one.n):
        found = json.loads((folder / f"waits-{rank}.json").read_text())
        kinds = {int(step): calls for step, calls in found.items() if calls}
        allowed = {*range(3, len(found), 3), len(found)}
        assert kinds.keys() & allowed, "no step fetched a value, not even one that prints"
        if "--experts" in one.case.flags:
            continue
        if "--pp" in one.case.flags or one.technique.name == "PP":
            allowed.add(1)
        check_steps(rank, {step: calls for step, calls in kinds.items() if step not in allowed})


def check_steps(rank, waited):
    """None of them has waited for the device between two prints."""
    steps = ", ".join(map(str, sorted(waited)))
    assert not waited, f"on rank {rank}, steps {steps} waited for the device, by {waited}"


def check_parity(one, run_once, folder, weights, result):
    reference = single(one, run_once)
    expected, expected_result = read_run(reference)
    assert list(weights) == list(expected), "other names than the single process, or another order"
    difference = relative_difference(weights, expected)
    check_weights(one, difference)
    norm = ["gradient_norm"] * ("--clip-grad" in one.job)
    for name in ("train_loss", "eval_loss", "eval_accuracy", *norm):
        about = f"its {name} is not that of the single process"
        assert result[name] == pytest.approx(expected_result[name], rel=1e-9), about
    assert result["steps"] == STEPS
    if "own_files" in one.technique.traits or one.technique.name == "Muon":  # with other tensors
        return
    snapshot = f"snapshots/step-{SAVED:08}"
    ours, theirs = (tensors_of(place / snapshot) for place in (folder, reference))
    difference = relative_difference(ours, theirs)
    assert difference < 1e-9, f"its snapshot is {difference:.1e} off that of the single process"


def check_weights(one, difference):
    most = TOLERANCE[one.optimizer] * one.slack
    about = f"its weights are {difference:.1e} off those of the single process; {most:.0e} is"
    assert difference < most, f"{about} the most that rounding in float64 explains"


def check_rounding(one, run_once, weights, result):
    """It learns as well as in fp32: images over all epochs, as rounding alone changes the last."""
    expected, expected_result = read_run(single(one, run_once))
    assert list(weights) == list(expected), "other names than the single process, or another order"
    assert differing(weights, expected), "it did not round"
    name, first = ("train_loss", 0) if one.model == "images" else ("eval_loss", -1)
    loss, fp32 = (torch.tensor(r[name][first:]).mean().item() for r in (result, expected_result))
    far = "differs" in one.technique.traits or "--dtype float16" in one.script  # skips steps
    assert loss == pytest.approx(fp32, rel=0.1 if far else 0.02), f"its {name} is not that of fp32"
    if "--clip-grad" in one.job:
        norm, fp32_norm = (r["gradient_norm"] for r in (result, expected_result))
        close = 0.5 if "differs" in one.technique.traits else 0.3  # of this rank's samples
        assert norm == pytest.approx(fp32_norm, rel=close), "its gradient norm is not that of fp32"
    assert "--dtype" not in one.script or f"--dtype {result['precision']}" in one.script


def check_theory(one, weights, result):
    """What a rank keeps, and sends in a step, in bytes of fp32 per parameter."""
    unit = 1 if one.rounds else 2
    numbers = sum(p.numel() for name, p in weights.items() if name != "vocabulary")
    options = result["options"] | {"optimizer": one.optimizer}
    options["double"] = not one.rounds
    if one.model != "images":
        options["decoder"] = one.decoder(len(weights["token.weight"]))
        numbers = options["decoder"].whole
    uneven = one.technique.name.startswith("PP") and one.layers % one.n
    split = "--sequence-parallel" in one.script or one.technique.name == "TP_by_hand"
    uneven |= split and len(weights["vocabulary"]) % options.get("tp", one.n) > 1
    uneven |= one.adapts and one.n == 3  # its rank is 8
    if uneven:  # some ranks have more
        return
    kept = {kind: size / numbers / unit for kind, size in result["state_bytes"].items()}
    sent = {kind: size / numbers / unit for kind, size in result["sent"].items()}
    kept_theory = one.technique.keeps(one.n, options)
    sent_theory = one.technique.sends(one.n, options)
    tensors = one.technique.name == "DDP_ZeRO" and one.n > 2  # whole, up to 47% of small_resnet
    close = 0.02 if one.technique.name == "ND_parallel" else 0.05
    kept_theory_of = pytest.approx(kept_theory, rel=0.9 if tensors else close, abs=0.01)
    assert kept == kept_theory_of, "a rank keeps other bytes per parameter than techniques.py says"
    if sent_theory is not None and "differs" not in one.technique.traits:
        theory = dict.fromkeys(sent, 0) | sent_theory  # 0: norms of clipping, sums of the loss
        sent = dict.fromkeys(theory, 0) | sent  # a single rank sends nothing
        total = max(sum(theory.values()), 1)
        few = one.adapts or one.technique.name == "FSDP_TP"  # gradients: half of them is still seen
        # The formulas leave out the three numbers per token that loss_parallel() sends.
        besides = total * (0.015 if few else close)
        sent_theory_of = pytest.approx(theory, rel=close, abs=besides)
        about = "a rank sends other bytes per parameter and step than techniques.py says"
        assert sent == sent_theory_of, about


def loads_by_itself(one):
    return one.is_first and one.traits.isdisjoint({"saved_alike", "loaded_alike"})


def loads_what_is_frozen(one):
    """One run shows both, to the precision of float64."""
    return loads_by_itself(one._replace(n=one.case.ranks[0])) and not one.rounds


def freezes(one):
    """On two ranks, if it can; of ZeRO images, as a GPT has groups of parameters of its own."""
    cases = one.technique.cases
    case = cases[1] if one.technique.name == "half_precision" else cases[0]
    model = "images" if one.technique.name == "ZeRO_by_hand" else "gpt"
    ranks = min(case.ranks, key=lambda n: abs(n - 2))
    usual = "by_parameter" in one.technique.traits
    return usual and (one.case, one.n, one.model) == (case, ranks, model)


FROZEN = tries(freezes, models=("gpt", "images"), but=("LoRA", "QLoRA", "differs"))


@pytest.mark.parametrize("one", FROZEN)
def test_what_is_frozen_is_left_alone(one, run_once):
    """By hooks, reductions, norms and optimizers, on every rank: as in the single process."""
    if one.model == "images" and torch.__version__ < "2.14":
        pytest.skip("backward of a GroupNorm on a CPU crashes, if its input needs no gradient")
    job = one.short(2)
    if loads_what_is_frozen(one):
        job += f" --weights {single(one, run_once)}/model.pt"
    _, reference = run_once("pytorch_SingleGPU", 1, job, f"frozen {one.hooks}".strip())
    _, folder = run_once(one.technique.script, one.n, f"{one.case.flags} {job}", "frozen")
    weights, result = read_run(folder)
    expected, expected_result = read_run(reference)
    assert result["train_loss"] == pytest.approx(expected_result["train_loss"], rel=0.01)
    if not one.rounds:
        assert relative_difference(weights, expected) < TOLERANCE["adamw"] * one.slack


def test_an_optimizer_in_backward_takes_a_step_per_block(run_once):
    """Not per parameter: with a balancing bias, each step of an optimizer is an all-reduce."""
    flags = f"{DATA} --model gpt-2x2x8 --context 8 --experts 4 --balance bias --max-steps 2"
    _, folder = run_once("pytorch_optimizer_in_backward", 2, flags, "sent")
    ends = 3  # embedding, head, and what is in neither
    assert read_run(folder)[1]["calls"]["allreduce"] == 2 + ends


@pytest.mark.full
def test_an_optimizer_in_backward_steps_batch_norm_once(run_once):
    """Its parameters are in a block, but not in the step of that block: the next one takes them."""
    job = f"{DATA} {IMAGES} --max-steps 3 --double --optimizer sgd".replace("group", "batch")
    scripts = "pytorch_FSDP", "pytorch_optimizer_in_backward"
    expected, found = (read_run(run_once(script, 2, job)[1])[0] for script in scripts)
    assert relative_difference(found, expected) < TOLERANCE["sgd"] * 100


def test_another_order_on_one_rank_is_seen(tmp_path):
    """By the hook that counts what is sent: the numbers of both ranks are the same, and right."""
    flags = f"{DATA} --model gpt-1x2x8 --context 8 --max-steps 2 --output-dir {tmp_path}"
    finished = launch(hooked("pytorch_FSDP", 2, flags), forked=True, HOOKS="sent swapped")
    assert "ranks 0 and 1 send in another order" in finished.stderr and finished.code == 1


def loads_alone(one):
    shown = "by_parameter" in one.traits and loads_what_is_frozen(one)
    return loads_by_itself(one) and not shown


@pytest.mark.parametrize("one", tries(loads_alone, but=("differs",)))
def test_it_starts_with_the_weights_of_the_single_process(one, run_once, tmp_path):
    """At this rate no weight changes, and what was loaded is written again."""
    path = single(one, run_once) / "model.pt"
    job = f"{one.short(1)} --weights {path} --lr 1e-30 --weight-decay 0 --output-dir {tmp_path}"
    succeed(hooked(one.script, one.n, job), forked=True)
    expected = torch.load(path, weights_only=True)
    weights = read_run(tmp_path)[0]
    packed = rounded(expected) if one.technique.name == "QLoRA" else {}
    stores_half = one.adapts or one.technique.name in ("half_precision", "low_bit_optimizer")
    if stores_half and "--dtype" in one.script:
        dtype = torch.float32 if "--master-weights" in one.script else torch.bfloat16
        expected = {name: t.to(dtype).to(t.dtype) for name, t in expected.items()}
    expected |= packed
    assert weights.keys() == expected.keys()
    for name in expected:  # what was exactly 0 is now a rate of 1e-30 away from it, or a bias' step
        atol = 0.0011 if name.endswith("mlp.bias") else 1e-20
        assert torch.allclose(weights[name], expected[name], rtol=0, atol=atol), name


def rounded(weights):
    """The matrices in blocks, as they are after they were stored in 4 bits."""
    found = {}
    for name, weight in weights.items():
        if name.startswith("blocks.") and weight.ndim == 2:
            packed = pytorch_QLoRA.quantize(weight, BLOCK)
            found[name] = pytorch_QLoRA.dequantize(packed, BLOCK, weight.dtype)
    return found


def resumes(one):
    """DDP of images, and FSDP of packed documents, as a GPT resumes no more than these do."""
    if one.model == "images":
        return one.is_first and one.technique.name == "torchrun_DDP"
    if one.technique.name in ("torchrun_DDP", "FSDP"):
        return one.script == "pytorch_FSDP --packed"
    return one.is_first and "saved_alike" not in one.technique.traits


@pytest.mark.parametrize(
    "one",
    tries(resumes, models=("gpt", "images"), but=("rounds", "differs", "Muon"), more=PACKED[1:2]),
)
def test_it_resumes_where_the_single_process_was(one, run_once, tmp_path):
    """Within an epoch, at another number of ranks, in another script: as if all were one run. Files
    that no other script writes are its own, of a run on another number of ranks."""
    reference = folder = single(one, run_once)
    ranks = one.n
    if "own_files" in one.technique.traits:
        _, folder = trained(one, run_once)
        ranks = 5 - one.n
    [snapshot] = folder.glob(f"snapshots/step-{SAVED:08}")
    flags = f"{one.job} --resume {snapshot} --output-dir {tmp_path}"
    finished = succeed(hooked(one.script, ranks, flags), forked=True)
    assert f"resumed from {snapshot} at epoch 2, step {SAVED + 1}" in finished.stdout
    weights, result = read_run(tmp_path)
    expected, theirs = read_run(reference)
    check_weights(one, relative_difference(weights, expected))
    about = "the losses of the steps before are not in its mean"
    assert result["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-9), about


WAYS = {  # hooks of the run that ends early, its code, and what it says
    "stopped": ("stop_at:3", 143, "stopped by SIGTERM after step 3 of 5"),
    "stopped_twice": ("stop_at:3", 143, "stopped by SIGTERM after step 3 of 5"),
    "stopped_last": ("stop_at:5", 143, "stopped by SIGTERM after step 5 of 5"),
    "killed": ("send:SIGKILL,all,5", -9, ""),  # with a checkpoint that is written meanwhile
}


ENDS = [
    pytest.param(way, *p.values, id=f"{p.id} {way}", marks=p.marks)
    for way in WAYS
    for p in tries(lambda one, way=way: way in one.case.traits)
    if p.values[0].n == p.values[0].case.ranks[0]
]


def undisturbed(one, run_once):
    """The folder of a run that nobody ended."""
    flags = f"{one.case.flags} {one.dropping} --resume none"
    return run_once(one.technique.script, one.n, flags)[1]


def check_same_bits(one, run_once, folder):
    """Whether a folder has the weights and losses of a run that was left alone."""
    expected, theirs = read_run(undisturbed(one, run_once))
    found, result = read_run(folder)
    assert not differing(found, expected), "other bits than those of a run that nobody ended"
    for name in ("train_loss", "eval_loss", "eval_accuracy", "eval_step", "model_step", "steps"):
        assert result[name] == theirs[name], f"{name} is not that of a run that nobody ended"


@pytest.mark.parametrize("way, one", ENDS)
def test_ended_early_it_goes_on_with_the_same_bits(way, one, run_once, tmp_path):
    hooks, code, said = WAYS[way]
    flags = f"{one.dropping} --snapshot-every 1 --output-dir {tmp_path} --resume auto"
    command = hooked(one.script, one.n, flags)
    finished = launch(command, forked=True, HOOKS=hooks)
    assert finished.code == code and said in finished.stdout, str(finished)
    assert not (tmp_path / "model.pt").exists()
    if way == "stopped_twice":  # in an epoch
        assert launch(command, forked=True, HOOKS="stop_at:4").code == code
    assert "resumed from" in succeed(command, forked=True).stdout
    check_same_bits(one, run_once, tmp_path)


def is_resumed(one):
    """What no test above does. DDP on three ranks sorts its buckets after the first step, which
    changes such sums."""
    if one.technique.name == "torchrun_DDP":
        return one.n == 3
    if "--dtype float16" in one.script:  # with a scaler
        return True
    ended = any(case.traits & set(WAYS) for case in one.technique.cases)
    scaled = any("scaled" in case.traits for case in one.technique.cases)
    alike = one.technique.traits & {"saved_alike", "resumed_alike"}
    return one.is_first and not (ended or scaled or alike)


@pytest.mark.parametrize("one", tries(is_resumed))
def test_resumed_from_its_own_snapshot_it_has_the_same_bits(one, run_once, tmp_path):
    whole = undisturbed(one, run_once)
    [snapshot] = whole.glob("snapshots/step-00000004")
    flags = f"{one.dropping} --resume {snapshot} --output-dir {tmp_path}"
    finished = succeed(hooked(one.script, one.n, flags), forked=True)
    assert "at epoch 1, step 5" in finished.stdout
    check_same_bits(one, run_once, tmp_path)
    ours = conftest.state(tmp_path)
    theirs = conftest.state(whole)
    assert ours["scheduler"]["last_epoch"] == theirs["scheduler"]["last_epoch"]
    # In so few steps a scale does not change, but a new scaler would not have counted four of them.
    assert ours.get("scaler") == theirs.get("scaler")
    scaled = "--dtype float16" in one.script and one.technique.name != "half_precision"
    assert bool(ours.get("scaler")) == scaled


def test_a_new_row_is_tried_in_all_ways():
    new = TECHNIQUES[0]._replace(script="pytorch_new", cases=(Case("", (2,)),), traits=frozenset())
    one = Try(new, new.cases[0], 2)
    assert all(usual(one) for usual in (is_usual, loads_alone, resumes, is_resumed))
