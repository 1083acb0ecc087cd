"""Model folders in the format of huggingface.co: config.json, safetensors, tokenizer."""

import contextlib
import json
import shutil
import warnings
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor

from harness.cli import fail, import_optional

TOKENIZER = ["tokenizer.json", "tokenizer.model"]  # one of these, and related files:
SETTINGS = ["tokenizer_config.json", "special_tokens_map.json"]


def read_weights(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors or DTensors by their names in the folder's files. For a DTensor, only this
    rank's shard is read; the dtype may differ.

    Args:
        folder: one file, or several with an index.
    """
    import_optional("safetensors")
    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        found = reader.read_metadata().state_dict_metadata
    except Exception as error:  # a damaged file, safetensors' own exception
        fail(f"--weights {folder}: its safetensors cannot be read ({error}); copy them again")
    for name, tensor in tensors.items():
        theirs = tuple(found[name].size) if name in found else None
        if theirs != tuple(tensor.shape):
            has = f"has {name} of {theirs}" if theirs else f"has no {name}"
            why = "give the folder's own --model llama, text and tokenizer"
            fail(f"--weights {folder} {has}, and this model needs {tuple(tensor.shape)}; {why}")
    with quiet():
        dcp.load(dict(tensors), storage_reader=reader, no_dist=True)  # each rank its own


@contextlib.contextmanager
def quiet():
    """Hide DCP's warning that each rank plans for itself, which is fine for reading."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write_folder(folder: Path, config: dict, tensors: dict[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors``, for ``from_pretrained`` of transformers."""
    from safetensors.torch import save_file

    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=1) + "\n")
    part = folder / ".model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / "model.safetensors")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER)


def load_tokenizer(folder: Path):
    """The tokenizer in the folder, loaded by transformers."""
    transformers = import_optional("transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged file raises several types
        why = str(error).strip().splitlines()[0]
        fail(f"{folder}: its tokenizer cannot be read ({why}); use --tokenizer chars or bytes")


def copy_tokenizer(source: Path, folder: Path) -> None:
    for name in TOKENIZER + SETTINGS:
        if (source / name).is_file() and source.resolve() != folder.resolve():
            shutil.copyfile(source / name, folder / name)
