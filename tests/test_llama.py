"""Llama: equal to transformers' in both directions, read in shards, with its own tokenizer."""

import json
import sys

import pytest
import torch
from conftest import cases, launcher, read_run, refused, relative_difference, snapshots, succeed
from test_inference import infer

import common
from libraries import hub

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
JOB = "--dataset synthetic --train-samples 96 --eval-samples 20 --batch-size 24 --context 24"
JOB += " --max-steps 3 --double"
SCALED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
VOCABULARY = 27  # characters of the synthetic text
TOKENS = torch.arange(48).view(2, 24) % VOCABULARY


def make_folder(
    folder, scaling=None, tie=False, shards="5GB", dtype=torch.float64, vocabulary=VOCABULARY
):
    """A folder as transformers writes it; returns its model."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=48, intermediate_size=80, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        rms_norm_eps=1e-6, tie_word_embeddings=tie, rope_theta=10_000.0, rope_scaling=scaling,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder, max_shard_size=shards)
    return model


@pytest.fixture
def our_logits(monkeypatch):
    """A function: those of the model that a script makes of some flags, in float64."""

    def compute(flags):
        words = f"pytorch_SingleGPU.py {flags} --device cpu --double"
        monkeypatch.setattr(sys, "argv", words.split())
        args = common.parse_args(common.argument_parser(""))
        torch.set_default_dtype(torch.float64)
        model = common.make_model(args, list(" abcdefghijklmnopqrstuvwxyz")).eval()
        with torch.no_grad():
            return model(TOKENS)

    yield compute
    torch.set_default_dtype(torch.float32)


def normalize(norm, x):
    """transformers' computes in fp32 whatever it is given, ours in float64 there."""
    x = x * (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return norm.weight * x


@torch.no_grad()
def logits_of(model):
    return model(TOKENS).logits.transpose(1, 2)


@pytest.fixture(autouse=True)
def norms_in_float64(monkeypatch):
    theirs = transformers.models.llama.modeling_llama.LlamaRMSNorm
    monkeypatch.setattr(theirs, "forward", normalize)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("scaling", [None, SCALED], ids=["", "scaled"])
def test_we_read_what_transformers_writes(scaling, tie, tmp_path, our_logits):
    theirs = make_folder(tmp_path / "theirs", scaling, tie, shards="40KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1  # and an index
    ours = our_logits(f"--weights {tmp_path / 'theirs'}")
    torch.testing.assert_close(ours, logits_of(theirs), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tie", ["", "--tie"])
def test_transformers_reads_what_we_write(tie, tmp_path, our_logits):
    flags = f"--model llama-3x4x48 --kv-heads 2 --mlp-width 80 {tie}"
    succeed(f"python pytorch_SingleGPU.py {flags} {JOB} --output-dir {tmp_path}", forked=True)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    ours = our_logits(f"{flags} --context 24 --weights {tmp_path}/model.pt")
    torch.testing.assert_close(logits_of(model), ours, rtol=1e-10, atol=1e-12)
    assert model.config.eos_token_id is None is model.generation_config.eos_token_id  # a character


SHARDED = [("pytorch_FSDP", 3), ("pytorch_TP", 2), ("pytorch_PP", 2), ("pytorch_torchrun_DDP", 2)]
SHARDED += [("pytorch_FSDP_TP --sequence-parallel", 4), ("pytorch_CP", 2), ("pytorch_HSDP", 2)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder at 16 bits, and the weights with which one process ends that reads it."""
    folder = tmp_path_factory.mktemp("theirs")
    make_folder(folder, SCALED, dtype=torch.bfloat16)
    command = f"{launcher('pytorch_SingleGPU')} {JOB} --weights {folder}"
    succeed(f"{command} --output-dir {folder}/run", forked=True)
    return folder, read_run(folder / "run")[0]


@cases("script, n", SHARDED, lambda *row: row in SHARDED[:3])
def test_a_folder_is_read_in_shards(script, n, whole, tmp_path):
    """And trained on: it ends as one process does, at 16 bits that become 64."""
    folder, expected = whole
    command = f"{launcher(script, n)} {JOB} --weights {folder} --output-dir {tmp_path}"
    succeed(command, forked=True)
    assert relative_difference(read_run(tmp_path)[0], expected) < 1e-11


def test_a_snapshot_is_read_in_shards(whole, tmp_path):
    """With the shape that the folder gave to its run."""
    folder, expected = whole
    snapshot, flags = snapshots(folder / "run")[0], "--lr 1e-30 --weight-decay 0"
    command = f"{launcher('pytorch_FSDP', 2)} {JOB} {flags} --weights {snapshot}"
    finished = succeed(f"{command} --output-dir {tmp_path}", forked=True)
    assert relative_difference(read_run(tmp_path)[0], expected) < 1e-15
    assert f"--weights {snapshot}: a snapshot of pytorch_SingleGPU.py at step 3" in finished.stderr


def test_a_name_on_the_hub_is_found_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "why_unreachable", lambda url: "offline")
    folder = tmp_path / "models--org--tiny" / "snapshots" / "abc"
    make_folder(folder)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("abc")
    assert hub.is_folder("org/tiny") and hub.folder_of("org/tiny") == folder


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
    folder, run = tmp_path / "theirs", tmp_path / "run"
    make_folder(folder, vocabulary=300, dtype=torch.float32)  # more rows than tokens, as is usual
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
    say, places = "--prompt 'to be' --tokens 5 --json", [folder, run, run / "model.pt"]
    finished = succeed(command, forked=True)
    places += snapshots(run)
    assert "llama of 16 tokens" in finished.stdout and "300 different ones" in finished.stdout
    texts = {json.loads(infer(f"--weights {path} {say}").stdout)["text"] for path in places}
    assert len(texts) == 1 and texts.pop().strip().startswith("to be")
    assert infer(f"--weights {places[-1]} --export {tmp_path}/out/model.pt").code == 0
    assert speak(run) == speak(tmp_path / "out") == speak(folder) and len(speak(run)[0][0]) < 15


@pytest.mark.parametrize("model", ["gpt-2x4x32", "llama-2x4x32 --kv-heads 2"])
def test_the_cache_writes_the_same_text(model, tmp_path):
    """Beyond the context, too, where all is computed again."""
    flags = f"--model {model} --context 32 --dataset synthetic --max-steps 9 --batch-size 16"
    succeed(f"python pytorch_SingleGPU.py {flags} --output-dir {tmp_path}", forked=True)
    words = f"--weights {tmp_path}/model.pt --prompt 'a b' --tokens 60 --json"
    with_cache, without = (json.loads(infer(words + f).stdout) for f in ("", " --no-cache"))
    assert with_cache["text"] == without["text"] and len(without["text"]) == 63


WRONG = {  # of a folder's config.json
    "hidden_act": "gelu", "model_type": "mistral", "attention_bias": True, "head_dim": 16,
    "rope_scaling": {"rope_type": "yarn"}, "hidden_size": None,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_known_is_one_line(name, tmp_path):
    config = dict(
        model_type="llama", hidden_size=48, num_attention_heads=4, num_hidden_layers=2,
        max_position_embeddings=64, intermediate_size=80, vocab_size=27, rms_norm_eps=1e-6,
    )  # fmt: skip
    config |= {name: WRONG[name]}
    if WRONG[name] is None:
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused("config.json cannot be used", name.replace("scaling", "type")):
        hub.read_config(tmp_path)
