"""Model folders in the format of huggingface.co: configuration, weights, their names, tokenizer."""

import contextlib
import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, Replicate

from harness.cli import fail, fetch_input, import_optional
from harness.world import gather_objects
from libraries.download import why_unreachable
from libraries.weights import (
    NAME,
    is_snapshot,
    one_line_errors,
    read_shards,
    read_state,
    say,
    why_missing,
)  # fmt: skip

MIXTURES = "mixtral", "qwen3_moe"
KINDS = "llama", "mistral", "qwen2", "qwen3", *MIXTURES  # values of model_type
# Of transformers, where a config.json does not say and its kind differs from others:
DEFAULTS = {"mixtral": {"rope_theta": 1e6}, "qwen3": {"head_dim": 128}}
NAMES = {  # of modules, ours and theirs
    "token": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj", "attention.out": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
}  # fmt: skip
EXPERT = {f"mlp.experts.{n}": f"mlp.experts.{{}}.{n}_proj" for n in ("gate", "up", "down")}
MIXTRAL = {"mlp.router": "block_sparse_moe.gate"} | {
    f"mlp.experts.{ours}": f"block_sparse_moe.experts.{{}}.{theirs}"
    for ours, theirs in {"gate": "w1", "up": "w3", "down": "w2"}.items()
}
BESIDE = [  # what else generate() and apply_chat_template() read, beside weights and config.json
    "tokenizer*", "*.model", "vocab.*", "merges.txt", "added_tokens.json", "*.tiktoken",
    "special_tokens_map.json", "*chat_template*", "generation_config.json",
]  # fmt: skip


def is_name(weights: str) -> bool:
    """Whether ``--weights`` has the form OWNER/NAME of a name on the hub, and can be no path here:
    there is no folder OWNER either, in which a user would expect NAME."""
    is_path = weights.endswith((".pt", ".pth", ".bin", ".onnx")) or Path(weights).exists()
    return bool(NAME.fullmatch(weights)) and not is_path and not Path(weights).parent.is_dir()


def folder_of(weights: Path | str) -> Path:
    """The folder of ``--weights`` with configuration and tokenizer: itself, or that of the file;
    of a name on the hub where it was downloaded; of a snapshot that from which its run started."""
    if is_name(str(weights)):
        return download(str(weights))
    path = Path(fetch_input(weights, "--weights"))
    if is_snapshot(weights) and (source := read_state(weights).get("source")):
        if not Path(source, "config.json").is_file():
            why = f"its run started from {source}, which is not there"
            fail(f"--weights {weights}: {why}; copy that folder, with config.json, to this path")
        return Path(source)
    return path.parent if path.is_file() else path


@functools.cache
def download(name: str) -> Path:
    """A folder with a model's files, downloaded or cached. The library's locks make ranks wait."""
    library = import_optional("huggingface_hub")
    offline = look_for("--weights", name)
    options = {"allow_patterns": ["*.json", "*.safetensors", *BESIDE]}
    options["ignore_patterns"] = ["consolidated*", "*/*.safetensors"]  # the weights once more
    try:
        return Path(library.snapshot_download(name, local_files_only=bool(offline), **options))
    except Exception as error:  # of the library, of the network
        why = f"{offline}, and it is not in the cache" if offline else str(error)
        give = "give the path of a folder with its config.json, *.safetensors and tokenizer"
        fail(f"--weights {name}: no such file or folder, nor on the hub ({why[:300]}); {give}")


def look_for(given: str, name: str) -> str:
    """Print that the hub is asked for a name. Returns why it does not answer, empty if it does: the
    libraries would retry for a minute. A path that is no folder here, and no name, is refused."""
    if not (is_name(name) or re.fullmatch(r"[\w.-]+", name)):
        fail(f"{given} {name}: {why_missing(name)}; give a folder, or a name on the hub")
    server = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    say(f"{given} {name}: no such folder here; looking for it on {server}")
    why = why_unreachable(server)
    return f"{server}: {why}" if why else ""


def check_name(given: str, name: str) -> None:
    """Refuse a name whose ``config.json`` is not in the cache, if the hub does not answer."""
    offline = look_for(given, name)
    cached = import_optional("huggingface_hub").try_to_load_from_cache(name, "config.json")
    if offline and not cached:
        fail(f"{given} {name}: {offline}, and it is not in the cache; give the path of a folder")


def is_folder(weights: Path | str) -> bool:
    """Whether ``--weights`` has a folder with a configuration: see :func:`folder_of`."""
    if str(weights) in ("none", "imagenet") or str(weights).endswith((".pt", ".pth")):
        return False
    return (folder_of(weights) / "config.json").is_file()


def read_config(folder: Path) -> dict:
    """The fields of a :class:`jobs.sizes.LlamaSize` that ``config.json`` describes."""
    try:
        return parse_config(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        use = "give another model's, or copy a file of examples/ (docs/your_own_model.md)"
        fail(f"--weights {folder}: config.json cannot be used ({why}); {use}")


def parse_config(config: dict) -> dict:
    """The same from the file's content. A ``ValueError`` says what our Llama does not support."""
    kind = config["model_type"]
    if kind not in KINDS:
        raise ValueError(f"its model_type is {kind}, and only {', '.join(KINDS)} are supported")
    config = {"rope_theta": 10_000.0, **DEFAULTS.get(kind, {}), **config}
    rope = {**(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    rope |= config.get("rope_parameters") or {}  # transformers 5
    needed = {
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "router_jitter_noise": 0.0, "partial_rotary_factor": 1.0,
    }  # fmt: skip
    if kind == "qwen2":
        del needed["attention_bias"]  # it always has one
    for name, value in needed.items():
        if (own := rope.get(name, config.get(name, value))) not in (value, None):
            raise ValueError(f"its {name} is {own}, and only {value} is supported")
    if config.get("quantization_config"):
        raise ValueError("its weights are quantized, which is not supported")
    heads = config["num_attention_heads"]
    width = config["hidden_size"]
    context = config["max_position_embeddings"]
    window = window_of(config)
    mlp_width = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
    size = {
        "kind": kind, "layers": config["num_hidden_layers"], "heads": heads, "width": width,
        "context": min(context, window or context), "window": window,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or width // heads,
        "mlp_width": config[mlp_width], "vocabulary": config["vocab_size"],
        "base": rope["rope_theta"], "eps": config["rms_norm_eps"],
        "scaling": scaling_of(rope, config), "tie": config.get("tie_word_embeddings", False),
    }  # fmt: skip
    if kind in MIXTURES:
        experts = config.get("num_experts") or config["num_local_experts"]
        normalize = kind == "mixtral" or config.get("norm_topk_prob", False)
        size |= {"experts": experts, "top_k": config["num_experts_per_tok"], "normalize": normalize}
    return size


def window_of(config: dict) -> int:
    """The tokens to which a token attends in layers with a sliding window; 0 if there are none."""
    kind = config["model_type"]
    if kind == "llama" or (kind.startswith("qwen") and not config.get("use_sliding_window")):
        return 0
    if kind in ("qwen2", "qwen3"):  # layers from max_window_layers on have one, or those listed
        first = config.get("max_window_layers", 28)
        slides = config["num_hidden_layers"] > first
        if config.get("layer_types"):
            slides = "sliding_attention" in config["layer_types"]
        if not slides:
            return 0
    usual = 0 if kind == "mixtral" else 4096  # of transformers, where config.json does not say
    return config.get("sliding_window", usual) or 0


def scaling_of(rope: dict, config: dict) -> tuple[tuple[str, str | float], ...]:
    """The items of ``rope_scaling``, complete; empty if frequencies are not scaled."""
    kind = rope.get("rope_type") or rope.get("type")
    context = config["max_position_embeddings"]
    if kind in ("default", None):
        return ()
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"its rope_type is {kind}; supported: default, linear, llama3, yarn")
    items = {name: value for name, value in rope.items() if name not in ("type", "rope_theta")}
    items = {"original_max_position_embeddings": context, **items, "rope_type": kind}
    if old := config.get("original_max_position_embeddings"):
        items["original_max_position_embeddings"] = old
    if items["factor"] is None:
        items["factor"] = context / items["original_max_position_embeddings"]
    for name, value in items.items():
        if name != "rope_type" and not isinstance(value, (int, float, type(None))):
            raise ValueError(f"its {name} is {value}, which is not a number")
    return tuple(items.items())


def make_config(size, context: int, vocabulary: int, tie: bool) -> dict:
    """The content of ``config.json`` for a :class:`jobs.sizes.LlamaSize`, without special tokens:
    where the file has none, transformers takes 1 and 2 for the begin and the end of a text."""
    name = size.kind.title().replace("_", "")
    config = {
        "architectures": [f"{name}ForCausalLM"], "model_type": size.kind, "hidden_act": "silu",
        "hidden_size": size.width, "intermediate_size": size.mlp_width,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "head_dim": size.head_width,
        "max_position_embeddings": context, "sliding_window": None,  # not below the context
        "rms_norm_eps": size.eps, "rope_theta": size.base,
        "rope_scaling": dict(size.scaling) or None,
        "vocab_size": vocabulary, "tie_word_embeddings": tie,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if not size.experts:
        return config
    count = "num_experts" if size.kind == "qwen3_moe" else "num_local_experts"
    config |= {count: size.experts, "num_experts_per_tok": size.top_k}
    return config | {"norm_topk_prob": size.normalize, "moe_intermediate_size": size.mlp_width}


def their_names(kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors by their names on huggingface.co, where each expert has its own."""
    names = NAMES | (MIXTRAL if kind == "mixtral" else EXPERT)
    found = {}
    for name, tensor in tensors.items():
        number, module = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)", name).groups()
        before = f"model.layers.{number}." if number else ""
        if module in names:  # of stacked experts
            for expert, matrix in unstack(tensor):
                found[f"{before}{names[module].format(expert)}.weight"] = matrix
        else:
            module, _, what = module.rpartition(".")
            found[f"{before}{names[module]}.{what}"] = tensor
    return found


def unstack(stack: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The number and the matrix ``[out, in]``, a view, of each expert that this rank has."""
    if not isinstance(stack, DTensor):
        yield from enumerate(stack.mT)
        return

    def transpose(layout):
        if layout.is_replicate() or layout.dim == 0:  # no rank with other experts reads this one
            return Replicate()
        strided = {} if layout.is_shard() else {"split_factor": layout.split_factor}  # FSDP, TP
        return type(layout)(2 - layout.dim, **strided)

    layouts = [transpose(layout) for layout in stack.placements]
    [own] = stack.__create_chunk_list__()
    shape = stack.shape[2], stack.shape[1]
    for expert, matrix in enumerate(stack.to_local(), own.offsets[0]):
        options = {"run_check": False, "shape": shape, "stride": (shape[1], 1)}
        yield expert, DTensor.from_local(matrix.mT, stack.device_mesh, layouts, **options)


def weight_files(folder: Path, flag: str) -> list[str]:
    """The files with a model's weights, as transformers chooses them: ``model.safetensors``, else
    those that the index lists. The folder may also have the files of another save."""
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        why = "has neither model.safetensors nor its index"
        fail(f"{flag} {folder} {why}; save the model with transformers' save_pretrained")
    with one_line_errors(index, flag):
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))


@contextlib.contextmanager
def reader_of(folder: Path, names: Iterable[str], flag: str) -> Iterator[HuggingFaceStorageReader]:
    """A reader of these files. Since it reads every file of a folder, it gets one of links."""
    with tempfile.TemporaryDirectory() as links:
        for name in names:
            if not (folder / name).is_file():
                fail(f"{flag} {folder} has no {name}, which its index lists; copy it again")
            Path(links, Path(name).name).symlink_to((folder / name).absolute())
        yield HuggingFaceStorageReader(links)


def read_weights(
    folder: Path, kind: str, tensors: dict[str, Tensor], flag="--weights", names=(), tie=False
) -> None:
    """Fill the parameters of a model, tensors or DTensors by name, from the folder's file, or
    several with an index. For a DTensor, only this rank's shard is read; the dtype may differ.

    Args:
        kind: that of :class:`jobs.sizes.LlamaSize`, or empty if tensors have the files' names.
        names: of the files, if they are no model's.
        tie: the embedding is also the head; the folder's head, if it has one, must not differ.
    """
    tensors = their_names(kind, tensors) if kind else tensors
    import_optional("safetensors")
    with reader_of(folder, names or weight_files(folder, flag), flag) as reader:
        with one_line_errors(folder, flag):
            found = reader.read_metadata().state_dict_metadata
        token = tensors.get(f"{NAMES['token']}.weight")
        head = f"{NAMES['head']}.weight"
        if twin := tie and token is not None and head in found:
            tensors = tensors | {head: torch.empty_like(token)}
        for name, tensor in tensors.items():
            theirs = tuple(found[name].size) if name in found else None
            if theirs != tuple(tensor.shape):
                has = f"has {name} of {theirs}" if theirs else f"has no {name}"
                why = "give the folder's own --model, text and tokenizer"
                if theirs and "embed_tokens" in name and theirs[0] < len(tensor):
                    why = "its tokenizer has more tokens; save both after resize_token_embeddings()"
                fail(f"{flag} {folder} {has}, and this model needs {tuple(tensor.shape)}; {why}")
        read_shards(folder, tensors, reader, flag)
    if tie:
        check_tied(f"{flag} {folder}", token, tensors[head] if twin else None)


def check_tied(given: str, token: Tensor | None, head: Tensor | None) -> None:
    """Refuse a head that differs from the embedding, if the model has one matrix for both: it would
    be lost. transformers then unties them. All ranks call it, and refuse if the shards of any rank
    differ; a rank that lacks one of the two, such as a stage of a pipeline, passes ``None``."""
    differs = False
    if token is not None and head is not None:
        ours, theirs = (t.to_local() if isinstance(t, DTensor) else t for t in (token, head))
        differs = not torch.equal(ours, theirs)
    if any(gather_objects(differs)):
        why = "its head differs from its embedding, so they cannot be one matrix"
        fail(f"{given}: {why}; leave out --tie, or set tie_word_embeddings to false in config.json")


def write_folder(folder: Path, config: dict, weights: dict[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors``, for ``from_pretrained`` of transformers."""
    from safetensors.torch import save_file

    entry = "torch_dtype" if "torch_dtype" in config else "dtype"  # before transformers 4.56
    config = config | {entry: str(next(iter(weights.values())).dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    part = folder / ".model.safetensors.part"
    tensors = their_names(config["model_type"], weights)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}  # experts: a copy
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / "model.safetensors")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / f"tokenizer.{end}").is_file() for end in ("json", "model"))


def load_tokenizer(weights: Path | str):
    """The tokenizer in the folder of ``--weights``, loaded by transformers."""
    return from_pretrained(folder_of(weights), "AutoTokenizer", local_files_only=True)


def token_names(weights: Path | str, size) -> list[str]:
    """The tokens by number, as many as the matrix of a :class:`jobs.sizes.LlamaSize` has rows."""
    tokenizer = load_tokenizer(weights)
    n = max(size.vocabulary, len(tokenizer))
    return [token or "" for token in tokenizer.convert_ids_to_tokens(range(n))]


def copy_files_beside(source: Path, folder: Path) -> None:
    """Copy tokenizer, chat template and generation config."""
    if source.resolve() == folder.resolve():
        return
    for path in {path for pattern in BESIDE for path in source.glob(pattern)}:
        if path.is_dir():  # additional_chat_templates
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, folder / path.name)


def train_tokenizer(texts: list[str], vocabulary: int):
    """Train byte-level, lower-case byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) with
    [CLS] and [SEP] around a sequence: a ``PreTrainedTokenizerFast`` of ``vocabulary`` tokens."""
    transformers = import_optional("transformers")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    options |= {"special_tokens": [*special.values()], "vocab_size": vocabulary}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(**options))
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def from_pretrained(weights: Path | str, kind: str, **options):
    """``transformers.KIND.from_pretrained``, with one-line errors."""
    given = str(weights)
    weights = str(fetch_input(weights, "--weights"))  # a name on the hub stays as it is
    if not Path(weights).is_dir() and look_for("--weights", given):
        options["local_files_only"] = True
    transformers = import_optional("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    give = "give a folder with config.json, model.safetensors and a tokenizer, or a name on the hub"
    with one_line_errors(weights, give=give):
        return getattr(transformers, kind).from_pretrained(weights, **options)
