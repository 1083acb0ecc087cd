"""examples/own/vision.py: in some steps one rank has no image, in others no rank has. Each example
ends in the weights of one process, with the encoder run on zeros, or in the root's FSDP unit."""

import pytest
import torch
from conftest import cases
from example_runs import ROWS, check_end, read, run

ORDER = """


def order(train_set, start):  # ranks with an image: some, rank 0 alone, none, rank 1 alone
    seen = [i for i, row in enumerate(train_set) if "image" in row]
    unseen = [i for i, row in enumerate(train_set) if "image" not in row]
    for step in range(start, STEPS):
        kind = step % 4
        some = [(step * BATCH + i) % len(train_set) for i in range(BATCH)]
        apart = [(seen if kind == 1 + 2 * (i % 2) else unseen)[j % 80] for i, j in enumerate(some)]
        yield apart if kind else some
"""
OWN = read("own/vision")
INSTEAD = "        else:  # every rank"
SKIPS = OWN.replace(INSTEAD, "        elif False:  # every rank")  # the encoder
IN_ROOT = SKIPS.replace("return [*model.encoder, *model.layers]", "return model.layers")
FIND = {"gradient_as_bucket_view=True": "find_unused_parameters=True"}
WAYS = {  # the example; its functions, and those of one process; edits
    "ddp": ("ddp", OWN, OWN, {}),
    "accumulation": ("accumulation", OWN, OWN, {}),
    "zero": ("zero", OWN, OWN, {}),
    "fsdp": ("fsdp", OWN, OWN, {}),
    "fsdp_accumulation": ("fsdp_accumulation", OWN, OWN, {}),
    "fsdp_checkpointing": ("fsdp_checkpointing", OWN, OWN, {}),
    "hsdp": ("hsdp", OWN, OWN, {}),
    "offload": ("offload", OWN, OWN, {}),
    # An encoder that no rank has used has gradients of zeros, as in a process that runs it on zeros
    "fsdp, in the root": ("fsdp", IN_ROOT, OWN, {}),
    "fsdp_accumulation, in the root": ("fsdp_accumulation", IN_ROOT, OWN, {}),
    "hsdp, in the root": ("hsdp", IN_ROOT, OWN, {}),
    # With DDP it has none, as in a process that skips it
    "ddp, find_unused_parameters": ("ddp", SKIPS, SKIPS, FIND),
}


@cases("way", WAYS, lambda way: way == "fsdp")
def test_some_ranks_have_no_image(way, plain, tmp_path):
    name, own, alone, edits = WAYS[way]
    sends_zeros = hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params")
    if own is IN_ROOT and not sends_zeros:
        pytest.skip("needs PyTorch 2.13")
    code = "BATCH, LR = 8, 1e-3"
    expected = plain(alone + ORDER, code)
    ranks = ROWS[name].ranks // 2 * 2
    options = {"own": own + ORDER, "changes": edits}
    found = run(name, ranks, tmp_path, f"{ROWS[name].code}\n{code}", **options)
    check_end(found, tmp_path, expected)


def test_what_is_edited_is_there():
    assert INSTEAD in OWN and OWN != SKIPS != IN_ROOT
    assert [*FIND][0] in read("ddp")
