"""Stand-ins for what the user's file reads and writes: other ranks' objects, checkpoints, folders
of the Hub of which only config.json is there, and data sets that are not there yet."""

import builtins
import contextlib
import inspect
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from estimator import fakes
from estimator.live_bytes import storages_of

CLASSES = 10  # of images, if the file has no constant CLASSES
WORDS = "To be, or not to be, that is the question. "
TALK = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": WORDS}]
CONVERSATION = json.dumps({"messages": TALK}) + "\n"
STATE = ("parameters", "gradients", "optimizer", "update")  # on the host with CPUOffloadPolicy


def install(run) -> None:
    """Replace the functions that a :class:`estimator.own_file.Rehearsal` must not call."""
    replaced = stand_in_for_objects(run.is_fake) | stand_in_for_files(run)
    for name, value in vars(run.module).items():  # by `from ... import`
        with contextlib.suppress(TypeError):
            vars(run.module)[name] = replaced.get(value, value)
    run.module.open = opener(run)
    stand_in_for_memory(run)
    if "torchvision" in sys.modules:
        stand_in_for_images(run)
    if "transformers" in sys.modules:
        stand_in_for_the_hub(run)


def stand_in_for_objects(is_fake: bool) -> dict:
    """Every rank sends the object that this one sends."""

    def all_gather_object(found, value, group=None):
        found[:] = [value] * len(found)

    def gather_object(value, found=None, *_, **__):
        if found is not None:
            found[:] = [value] * len(found)

    def broadcast_object_list(values, src=0, *_, **__):
        # Of an example, it is the number of sums that loss_of() returns, known to the last stage.
        if dist.get_rank() != src:
            values[:] = [2 if value is None else value for value in values]

    replaced = {"all_gather_object": all_gather_object, "gather_object": gather_object}
    replaced |= {"broadcast_object_list": broadcast_object_list, "barrier": lambda *_, **__: None}
    if not is_fake:
        return swap(dist, **replaced)
    make_group = dist.new_group

    def new_group(ranks=None, timeout=None, backend=None, **kwargs):
        return make_group(ranks, timeout, "fake", **kwargs)

    return swap(dist, new_group=new_group, **replaced)


def swap(owner, **functions) -> dict:
    """Replace attributes, and return the new ones by the old ones."""
    old = {name: getattr(owner, name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    return {old[name]: function for name, function in functions.items()}


# ------------------------------------------------------------------- checkpoints, exports, memory


def stand_in_for_files(run) -> dict:
    """Nothing but names is written. What is copied to the host counts there."""
    live = run.live
    gathered = sd.get_model_state_dict

    def on_host(tensor):
        with live.of_kind("offloaded"):
            return torch.empty_like(tensor) if run.is_fake else tensor.clone()

    def save(_, path, *args, **kwargs):
        if isinstance(path, (str, os.PathLike)):
            Path(path).touch()

    def save_file(tensors, path, *args, **kwargs):
        numbers = {id(t): live.count(s) for t in tensors.values() for s in storages_of(t)}
        copies = [t for t in tensors.values() if live.kinds[numbers[id(t)]] != "offloaded"]
        copies = [on_host(tensor) for tensor in copies]  # all at once
        Path(path).touch()

    def save_folder(*args, checkpoint_id=None, **kwargs):
        os.makedirs(checkpoint_id, exist_ok=True)
        Path(checkpoint_id, ".metadata").touch()

    def save_folder_later(state, *args, **kwargs):
        copies = [on_host(tensor) for tensor in tree_leaves(state) if torch.is_tensor(tensor)]
        save_folder(**kwargs)
        return SimpleNamespace(result=copies.clear, done=lambda: not copies)

    def consolidate_state_dict(optimizer, to=0):  # whole, on rank 0
        if dist.get_rank() != to:
            return
        copies = []
        for parameter, state in optimizer.optim.state.items():
            kinds = [value for value in state.values() if value.shape == parameter.shape]
        for parameter in optimizer._all_params:
            copies += [on_host(torch.empty_like(parameter, dtype=one.dtype)) for one in kinds]
        optimizer.consolidated = copies  # until the next time

    def get_model_state_dict(model, *, options=None, **others):
        whole = options and options.full_state_dict and options.cpu_offload
        if not whole:
            return gathered(model, options=options, **others)
        found = {}
        for name, tensor in gathered(model, **others).items():  # gathers one at a time
            found[name] = on_host(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        return found

    import safetensors.torch

    replaced = swap(torch, save=save)
    replaced |= swap(dcp, save=save_folder, async_save=save_folder_later)
    ZeroRedundancyOptimizer.consolidate_state_dict = consolidate_state_dict
    ZeroRedundancyOptimizer.state_dict = lambda optimizer: optimizer.optim.state_dict()
    replaced |= swap(safetensors.torch, save_file=save_file)
    return replaced | swap(sd, get_model_state_dict=get_model_state_dict)


def stand_in_for_memory(run) -> None:
    """Know what a tensor is for, and whether it is on the host."""
    if any(isinstance(value, CPUOffloadPolicy) for value in vars(run.module).values()):
        run.on_host = (*STATE, "offloaded")
    live = run.live
    wrap = DistributedDataParallel.__init__
    offload = CPUOffloadPolicy.__init__

    def wrap_with_buckets(*args, **kwargs):
        with live.of_kind("gradients"):
            wrap(*args, **kwargs)

    def offload_state(*args, **kwargs):
        run.on_host = (*STATE, "offloaded")
        offload(*args, **kwargs)

    def cpu(tensor, *_, **__):
        with live.of_kind("offloaded"):
            return tensor.clone()

    DistributedDataParallel.__init__ = wrap_with_buckets
    CPUOffloadPolicy.__init__ = offload_state
    torch.Tensor.cpu = cpu
    fakes.FakeTensor.__format__ = lambda tensor, how: format(tensor.item() if how else "", how)


# --------------------------------------------------------------------------------- data sets


def opener(run):
    """``open`` of the user's file: a text that is not there gets a stand-in."""

    def open_or_make(path, mode="r", *args, **kwargs):
        there = not isinstance(path, (str, os.PathLike)) or Path(path).exists()
        if there or set(mode) & set("wax+"):
            return builtins.open(path, mode, *args, **kwargs)
        run.stand_ins[f"{path}: a text"] = True
        rows = 4 * run.module.BATCH + 4
        text = WORDS * (4 * getattr(run.module, "LENGTH", 1024) * rows // len(WORDS))
        if Path(path).suffix == ".jsonl":
            text = CONVERSATION * rows
        return io.BytesIO(text.encode()) if "b" in mode else io.StringIO(text)

    return open_or_make


def stand_in_for_images(run) -> None:
    from PIL import Image
    from torchvision.datasets import folder

    begin = folder.DatasetFolder.__init__
    signature = inspect.signature(begin)

    def make(data, root, *args, **kwargs):
        if Path(root).is_dir():
            return begin(data, root, *args, **kwargs)
        given = signature.bind(data, root, *args, **kwargs).arguments
        n = getattr(run.module, "CLASSES", CLASSES)
        run.stand_ins[f"{root}: images of {n} classes"] = True
        transforms = {name: given.get(name) for name in ("transform", "target_transform")}
        folder.VisionDataset.__init__(data, root, **transforms)
        data.loader = lambda path: Image.new("RGB", (500, 400))
        data.classes = [f"class{i}" for i in range(n)]
        data.class_to_idx = {name: i for i, name in enumerate(data.classes)}
        data.samples = [(f"{root}/{i}.jpg", i % n) for i in range(4 * run.module.BATCH)]
        data.targets = [label for _, label in data.samples]

    folder.DatasetFolder.__init__ = make  # ImageFolder calls it


# --------------------------------------------------------------------------------- the Hub


def stand_in_for_the_hub(run) -> None:
    """A model is made from config.json, as no weight is read; a tokenizer that is missing has one
    token for each byte."""
    import transformers

    made = transformers.AutoTokenizer.from_pretrained

    def from_config(kind, folder, *args, config=None, **kwargs):
        dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", "auto"))
        if config is None:
            given = {"return_unused_kwargs": True, **kwargs}
            config, _ = kind.config_class.from_pretrained(folder, **given)
        if dtype == "auto":
            dtype = config.dtype or torch.float32
        model = kind._from_config(config, dtype=dtype)
        run.stand_ins[f"{folder}: weights are not read"] = True
        return model.eval()

    def tokenizer(folder, *args, **kwargs):
        with fakes.with_numbers():
            with contextlib.suppress(OSError, ValueError):
                found = made(folder, *args, **kwargs)
                if found(WORDS)["input_ids"]:  # not so of a Qwen without its files
                    return found
            run.stand_ins[f"{folder}: a tokenizer with a token for each byte"] = True
            return make_tokenizer()

    transformers.PreTrainedModel.from_pretrained = classmethod(from_config)
    transformers.PreTrainedModel.save_pretrained = lambda *_, **__: None
    transformers.AutoTokenizer.from_pretrained = tokenizer


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate([*letters, "<end>"])}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = dict.fromkeys(("eos_token", "bos_token", "pad_token", "unk_token"), "<end>")
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)
