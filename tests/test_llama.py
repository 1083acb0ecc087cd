"""Llama, Mistral, Mixtral, Qwen2 and Qwen3: equal to transformers' in both directions, read in
shards, with their own tokenizer."""

import copy
import functools
import json
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    TABLES,
    cases,
    launch,
    launcher,
    read_run,
    refused,
    relative_difference,
    same_bits,
    snapshots,
    succeed,
)  # fmt: skip
from safetensors.torch import load_file, save_file
from test_inference import infer
from test_text import settled

import common
import model_inference
from harness.settings import read_flags
from inference.trained import Trained
from jobs.choice import Settings, check_not_replaced
from jobs.sizes import size_of_name
from libraries import hub, peft_folder, weights

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
huggingface_hub = pytest.importorskip("huggingface_hub")
JOB = "--dataset synthetic --train-samples 96 --eval-samples 20 --batch-size 24 --context 24"
JOB += " --max-steps 3 --double"
ROPE = TABLES["rope"]
MIXED = {"num_local_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
LETTERS = " abcdefghijklmnopqrstuvwxyz"  # of the synthetic text
VOCABULARY = len(LETTERS)
TOKENS = torch.arange(48).view(2, 24) % VOCABULARY


def class_of(kind):
    return getattr(transformers, f"{kind.title().replace('_', '')}ForCausalLM")


def read_in_float64(kind, folder):
    """The model and what is missing in the folder, or superfluous. The default implementation of
    experts has no float64."""
    options = {"experts_implementation": "eager", "output_loading_info": True}
    model, found = class_of(kind).from_pretrained(folder, dtype=torch.float64, **options)
    assert not any(found.values()), found
    return model.eval()


def make_folder(folder, kind="llama", shards="5GB", dtype=torch.float64, **changes):
    """A folder as transformers writes it; returns its model."""
    torch.manual_seed(1)
    make_model = class_of(kind)
    config = dict(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, head_dim=12,
        rms_norm_eps=1e-6, rope_theta=10_000.0, moe_intermediate_size=64,
    )  # fmt: skip
    config |= (MIXED if kind in hub.MIXTURES else {}) | changes
    config = make_model.config_class(**copy.deepcopy(config))  # it adds to rope_scaling
    model = make_model(config).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    model.save_pretrained(folder, max_shard_size=shards)
    return model


@pytest.fixture
def our_model():
    """A function: the model that a script makes of some flags, in float64."""

    def make(flags, dtype=torch.float64):
        torch.set_default_dtype(dtype)
        return common.make_model(settled(flags), list(LETTERS)).eval()

    yield make
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def our_logits(our_model):
    return torch.no_grad()(lambda *how: our_model(*how)(TOKENS))


def normalize(norm, x):
    """transformers' computes in fp32 whatever it is given, ours in float64 there."""
    x = x * (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return norm.weight * x


def route(router, x):
    """The same of a router."""
    logits = F.linear(x.flatten(0, -2), router.weight)
    gates, chosen = logits.softmax(-1).topk(router.top_k)
    if getattr(router, "norm_topk_prob", True):
        gates = gates / gates.sum(-1, keepdim=True)
    return logits, gates, chosen


@torch.no_grad()
def logits_of(model):
    return model(TOKENS).logits


@pytest.fixture
def in_float64(monkeypatch):
    for kind in hub.KINDS:
        theirs = import_module(f"transformers.models.{kind}.modeling_{kind}")
        for name, module in vars(theirs).items():
            for ending, forward in {"RMSNorm": normalize, "TopKRouter": route}.items():
                if name.endswith(ending):
                    monkeypatch.setattr(module, "forward", forward)


@cases("kind, kv, head_dim, rope", map(tuple, TABLES["decoders"]), lambda _, kv, *more: kv != 1)
def test_we_read_what_transformers_writes(kind, kv, head_dim, rope, tmp_path, our_logits, request):
    """The same logits: within 1e-5 in fp32, and 1e-10 where transformers' norms compute in
    float64, too."""
    shape = {"num_key_value_heads": kv, "head_dim": head_dim, "rope_scaling": ROPE[rope]}
    shape |= {"tie_word_embeddings": kv == 4, "norm_topk_prob": kv == 1}
    theirs = make_folder(tmp_path, kind, shards="40KB", **shape)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1  # and an index
    fp32 = our_logits(f"--weights {tmp_path}", torch.float32)
    torch.testing.assert_close(fp32, logits_of(theirs.float()), rtol=0, atol=1e-5)
    theirs = read_in_float64(kind, tmp_path)
    request.getfixturevalue("in_float64")
    ours = our_logits(f"--weights {tmp_path}")
    torch.testing.assert_close(ours, logits_of(theirs), rtol=1e-10, atol=1e-12)


def test_files_of_another_save_are_not_read(tmp_path):
    """Those that the index lists are, or the one file without a number, as in transformers."""
    make_folder(tmp_path, shards="40KB", dtype=torch.float32)
    for path in tmp_path.glob("model-*.safetensors"):
        older = {name: tensor + 1 for name, tensor in load_file(path).items()}
        for place in ("a", "z"):
            save_file(older, path.with_name(f"{place}-{path.name}"), {"format": "pt"})

    def read():
        ours = {name: torch.full_like(tensor, torch.nan) for name, tensor in theirs.items()}
        hub.read_weights(tmp_path, "", ours)
        return ours

    theirs = class_of("llama").from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert same_bits(read(), theirs)
    path.unlink()
    with refused(f"has no {path.name}, which its index lists; copy it again"):
        read()
    newer = {name: tensor + 2 for name, tensor in theirs.items()}
    save_file(newer, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = class_of("llama").from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert same_bits(read(), theirs) and same_bits(theirs, newer)


def test_a_head_that_differs_is_not_lost(tmp_path, our_logits, our_model):
    """A folder that says that the matrices are tied may have both, if they are equal."""
    make_folder(tmp_path, tie_word_embeddings=True)
    expected = our_logits(f"--weights {tmp_path}")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, {"format": "pt"})
    assert torch.equal(our_logits(f"--weights {tmp_path}"), expected)
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, file, {"format": "pt"})
    with refused("its head differs from its embedding", "set tie_word_embeddings to false"):
        our_logits(f"--weights {tmp_path}")
    shape = "--model llama-1x2x8 --context 24"
    torch.save(our_model(shape).state_dict(), tmp_path / "untied.pt")
    with refused("its head differs from its embedding", "leave out --tie"):
        our_logits(f"{shape} --weights {tmp_path}/untied.pt --tie")


def test_all_ranks_refuse_a_head_of_which_another_rank_has_what_differs(monkeypatch):
    """In its shards, or as the only stage of a pipeline that has both matrices."""
    monkeypatch.setattr(hub, "gather_objects", lambda own: [own, True])
    for matrix in (torch.ones(2), None):
        with refused("its head differs from its embedding"):
            hub.check_tied("--weights x", matrix, matrix)


WRITTEN = ["llama", "llama --tie", "mistral", "qwen2 --tie", "qwen3"]
WRITTEN += ["qwen3moe --experts 4 --top-k 3", "mixtral --experts 3"]


@cases("family", WRITTEN, lambda f: f.startswith(("llama --tie", "qwen3moe")))
def test_transformers_reads_what_we_write(family, tmp_path, our_logits, in_float64):
    """All of it and nothing else, and generates the same text."""
    family, _, more = family.partition(" ")
    flags = f"--model {family}-3x4x48 --kv-heads 2 --mlp-width 80 {more}"
    succeed(f"python pytorch_SingleGPU.py {flags} {JOB} --output-dir {tmp_path}", forked=True)
    model = read_in_float64(family.replace("moe", "_moe"), tmp_path)
    ours = our_logits(f"{flags} --context 24 --weights {tmp_path}/model.pt")
    torch.testing.assert_close(logits_of(model), ours, rtol=1e-10, atol=1e-12)
    assert model.config.eos_token_id is None is model.generation_config.eos_token_id  # a character
    say = f"--weights {tmp_path}/model.pt --prompt 'a b' --tokens 40 --temperature 0 --json"
    text, without_cache = (json.loads(infer(say + f).stdout)["text"] for f in ("", " --no-cache"))
    said = model.float().generate(torch.tensor([[1, 0, 2]]), max_new_tokens=20, do_sample=False)
    assert text[:23] == "".join(LETTERS[n] for n in said[0])
    assert text == without_cache and len(text) == 43, "beyond the context, too"


SGD = "--optimizer sgd --lr 0.1 --clip-grad 0.5"  # AdamW forgives gradients of another scale
FSDP = ("pytorch_FSDP", 2)
EP = ("pytorch_EP --ep 2", 4)
TP = ("pytorch_FSDP_TP --sequence-parallel", 4)
PP = ("pytorch_PP", 2)
WAYS = [FSDP, TP, PP, ("pytorch_torchrun_DDP", 2), ("pytorch_TP", 2), ("pytorch_CP", 2)]
WAYS += [(f"pytorch_ND_parallel {mesh}", 4) for mesh in ("--tp 2 --pp 2", "--cp 2 --dp-shard 2")]
RUNS = [("llama", "pytorch_HSDP", 2), *((kind, *way) for kind in hub.KINDS for way in WAYS)]
ON_EP = [EP, ("pytorch_EP", 2), ("pytorch_ND_parallel --tp 2 --ep 2 --dp-shard 2", 4)]
RUNS += [(kind, *way) for kind in hub.MIXTURES for way in ON_EP]
USUAL = [("llama", *FSDP), ("llama", *PP), ("qwen3_moe", *TP)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function: a folder at 16 bits, in several files, and the weights with which one process
    ends that reads it."""

    @functools.cache
    def read(kind):
        folder = tmp_path_factory.mktemp(kind)
        head_dim = 12 if kind == "llama" else 16
        more = {"rope_scaling": ROPE["llama3"], "head_dim": head_dim, "shards": "40KB"}
        make_folder(folder, kind, dtype=torch.bfloat16, **more)
        command = f"{launcher('pytorch_SingleGPU')} {JOB} {SGD} --weights {folder}"
        succeed(f"{command} --output-dir {folder}/run", forked=True)
        return folder, read_run(folder / "run")[0]

    return read


@cases("kind, script, n", RUNS, lambda *row: row in USUAL)
def test_a_folder_is_read_in_shards(kind, script, n, whole, tmp_path):
    """And trained on: it ends as one process does, at 16 bits that become 64."""
    folder, expected = whole(kind)
    command = f"{launcher(script, n)} {JOB} {SGD} --weights {folder} --output-dir {tmp_path}"
    succeed(command, forked=True)
    assert relative_difference(read_run(tmp_path)[0], expected) < 1e-11


def test_a_snapshot_is_read_in_shards(whole, tmp_path):
    """With the shape that the folder gave to its run."""
    folder, expected = whole("llama")
    snapshot = snapshots(folder / "run")[0]
    flags = "--lr 1e-30 --weight-decay 0"
    command = f"{launcher('pytorch_FSDP', 2)} {JOB} {flags} --weights {snapshot}"
    finished = succeed(f"{command} --output-dir {tmp_path}", forked=True)
    assert relative_difference(read_run(tmp_path)[0], expected) < 1e-15
    assert f"--weights {snapshot}: a snapshot of pytorch_SingleGPU.py at step 3" in finished.stderr


ADAPTED = [("llama", "query,value"), ("qwen2", "k_proj,out,gate_proj"), ("qwen3", "up,down,head")]


@cases("kind, targets", ADAPTED, lambda kind, _: kind == "qwen2")
@torch.no_grad()
def test_adapters_in_files_as_peft_has_them(kind, targets, tmp_path, in_float64):
    """By the documented names, W + B @ A * alpha / rank of transformers' layers is what the script
    merges. A run that goes on with them begins there; other weights, another alpha are refused."""
    base, first, again = (tmp_path / name for name in ("base", "first", "again"))
    model = make_folder(base, kind, shards="40KB")
    start = launcher("pytorch_LoRA", 2)
    command = f"{start} {JOB} --merge --lr 0.1 --weights {base} --output-dir {tmp_path}/none"
    flags = f"--rank 3 --alpha 5 --targets {targets}"
    finished = succeed(f"{command} {flags} --output-dir {first}", forked=True)
    assert f", {kind} of 24 characters" in finished.stdout
    config = json.loads((first / "adapter/adapter_config.json").read_text())
    tensors = load_file(first / "adapter/adapter_model.safetensors")
    assert len(tensors) == sum(2 if t == "head" else 8 for t in targets.split(","))
    for name, a in tensors.items():
        layer, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        assert layer.rpartition(".")[2] in config["target_modules"]
        if part == "A.weight":
            b = tensors[name.replace("lora_A", "lora_B")]
            model.get_submodule(layer).weight += config["lora_alpha"] / config["r"] * b @ a
    merged = logits_of(read_in_float64(kind, first))
    torch.testing.assert_close(merged, logits_of(model), rtol=1e-10, atol=1e-12)
    assert (merged - logits_of(read_in_float64(kind, base))).abs().max() > 1e-3
    for path in tmp_path.rglob("*.safetensors"):  # else transformers adds them to the merged model
        beside = path.with_name("adapter_config.json").exists()
        assert beside == path.name.startswith("adapter"), path
    no_step = command.replace("--lr 0.1", "--lr 1e-30")
    succeed(f"{no_step} --adapter {first} --output-dir {again}", forked=True)
    assert relative_difference(read_run(again)[0], read_run(first)[0]) < 1e-15
    resume = f"{flags} --resume {snapshots(first)[0]} --max-steps 5"
    for wrong, words in {
        f"{resume} --weights {first}": "was written with other frozen weights; give its --weights",
        f"{resume} --alpha 7": "is from a run with --alpha 5; use it",
        f"--adapter {first} --rank 4": "--rank 4: the adapter in",
        f"--adapter {first} --targets key": "has its own; leave it out",
        f"--adapter {base}": "adapter_config.json cannot be used",
        f"--weights {snapshots(first)[0]}": "a snapshot of adapters: load them and their base",
    }.items():
        assert words in launch(f"{command} {wrong}", forked=True).refusal


@pytest.mark.parametrize("entries, plain", TABLES["adapters"])
def test_only_a_plain_adapter_is_continued(entries, plain, tmp_path):
    """Of a variant, peft computes something else with the same two matrices."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | entries))
    parser = common.argument_parser("", only_gpt=True)
    peft_folder.add_flags(parser)
    args = read_flags(parser, Settings, ["--adapter", str(tmp_path)])
    if plain:
        assert peft_folder.complete(args).rank == 4
        return
    [name] = entries
    with refused(f"its {name} is {entries[name]}"):
        peft_folder.complete(args)


@torch.no_grad()
def test_peft_reads_the_adapter_and_transformers_the_merged_model(tmp_path):
    peft = pytest.importorskip("peft")
    make_folder(tmp_path / "base", dtype=torch.float32)
    command = f"{launcher('pytorch_LoRA', 2)} {JOB} --merge --lr 0.1 --weights {tmp_path}/base"
    succeed(f"{command} --output-dir {tmp_path}/run", forked=True)
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    base = load(tmp_path / "base")
    merged = load(tmp_path / "run")
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    before = logits_of(base)
    adapted = logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "run/adapter"))
    torch.testing.assert_close(logits_of(merged), adapted, rtol=0, atol=1e-5)
    assert (adapted - before).abs().max() > 1e-2


def test_a_name_on_the_hub_is_found_in_the_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "why_unreachable", lambda url: "offline")
    folder = tmp_path / "models--org--tiny" / "snapshots" / "abc"
    make_folder(folder)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("abc")
    assert hub.is_folder("org/tiny") and hub.folder_of("org/tiny") == folder
    assert Settings(model="llama", weights="org/tiny").checksum == weights.checksum(folder) > 0
    with refused("--output-dir org/tuned is in a folder with which org/tiny would be a path"):
        check_not_replaced(Settings(model="llama", weights="org/tiny", output_dir="org/tuned"))
    given = model_inference.locate_weights(Trained(weights=Path("org/tiny")))
    assert given.weights == folder
    asked = "--weights org/tiny: no such folder here; looking for it on https://huggingface.co"
    assert capsys.readouterr().err.splitlines()[-1] == asked  # once
    monkeypatch.setattr(hub, "say", print)
    hub.check_name("FOLDER", "org/tiny")
    with refused("FOLDER org/none: ", "offline, and it is not in the cache"):
        hub.check_name("FOLDER", "org/none")
    once = ["config.json", "model.safetensors", "tokenizer.json"]
    called = mock.Mock(return_value=folder)
    monkeypatch.setattr("huggingface_hub.snapshot_download", called)
    twice = ["consolidated.safetensors", "original/model.safetensors"]
    hub.download.__wrapped__("org/tiny")
    patterns = called.call_args.kwargs
    del patterns["local_files_only"]
    assert [*huggingface_hub.utils.filter_repo_objects(once + twice, **patterns)] == once


def test_a_folder_is_written_without_changing_what_it_is_written_from(tmp_path):
    config = {"model_type": "llama"}
    hub.write_folder(tmp_path, config, {"token.weight": torch.ones(2, 2)})
    assert config == {"model_type": "llama"}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


def make_tokenizer(folder, size):
    """Of pairs of letters and words, as many as there are; with a chat template."""
    text = ["to be or not to be that is the question"] * 9
    tokenizer = hub.train_tokenizer(text, size)
    tokenizer.backend_tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)


def speak(folder):
    """What transformers generates from a folder, where it stops, and a chat in its template."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "to be"}], tokenize=False)
    said = model.generate(**tokenizer("to be", return_tensors="pt"))
    return said.tolist(), chat, model.config.eos_token_id, model.config.vocab_size


def test_its_own_tokenizer(tmp_path):
    """That of the folder, for training and for writing; which takes it along, with the two tokens
    at which generate() stops. At a rate of nothing, the folder says what it said before."""
    folder = tmp_path / "theirs"
    run = tmp_path / "run"
    make_folder(folder, vocab_size=300, dtype=torch.float32)  # more rows than tokens, as is usual
    make_tokenizer(folder, 290)
    transformers.GenerationConfig(do_sample=False, max_new_tokens=20).save_pretrained(folder)
    end = speak(folder)[0][0][10]
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text()) | {"eos_token_id": [299, end]}
        (folder / name).write_text(json.dumps(config))
    (tmp_path / "text").write_text("to be or not to be that is the question. " * 200)
    flags = f"--weights {folder} --dataset text --data-dir {tmp_path}/text --context 16"
    flags += " --batch-size 8 --max-steps 2 --lr 1e-30 --weight-decay 0"
    command = f"{launcher('pytorch_FSDP', 2)} {flags} --output-dir {run}"
    say = "--prompt 'to be' --tokens 5 --json"
    places = [folder, run, run / "model.pt"]
    finished = succeed(command, forked=True)
    places += snapshots(run)
    assert "llama of 16 tokens" in finished.stdout and "300 different ones" in finished.stdout
    texts = {json.loads(infer(f"--weights {path} {say}").stdout)["text"] for path in places}
    assert len(texts) == 1 and texts.pop().strip().startswith("to be")
    assert infer(f"--weights {places[-1]} --export {tmp_path}/out/model.pt").code == 0
    assert speak(run) == speak(tmp_path / "out") == speak(folder) and len(speak(run)[0][0]) < 15


def test_a_tied_folder_says_what_it_says_in_transformers(tmp_path):
    """As those of Llama 3.2 and the small Qwens are."""
    theirs = make_folder(tmp_path, vocab_size=300, dtype=torch.float32, tie_word_embeddings=True)
    make_tokenizer(tmp_path, 290)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    asked = tokenizer("to be", add_special_tokens=False, return_tensors="pt").input_ids
    theirs.generation_config.eos_token_id = None  # nor does ours stop there
    said = theirs.generate(asked, do_sample=False, max_new_tokens=9)
    flags = f"--weights {tmp_path} --prompt 'to be' --tokens 9 --temperature 0 --json"
    assert json.loads(infer(flags).stdout)["text"] == tokenizer.decode(said[0])


WRONG = TABLES["unknown_in_config"]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_known_is_one_line(name, tmp_path):
    config = hub.make_config(size_of_name("llama-2x4x48", None, None), 64, 27, False)
    config |= {name: WRONG[name]}
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = {"rope_scaling": "rope_type", "quantization_config": "quantized"}
    with refused("config.json cannot be used", named.get(name, name)):
        hub.read_config(tmp_path)
