"""harness/state.py: tensors of all kinds come back from a snapshot as they were."""

import pytest
import torch
from conftest import refused
from torch import nn

from harness import state


def small_model(value):
    """Tied weights, channels_last, frozen, without gradient, of no dimension, of many dtypes."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 5)).to(memory_format=torch.channels_last)
    model.append(nn.Linear(5, 5, dtype=torch.bfloat16)).append(nn.Linear(5, 5, dtype=torch.double))
    model.append(nn.Linear(5, 5)).append(nn.Linear(2, 2).requires_grad_(False))
    model[4].weight = model[1].weight
    model.scale, model.unused = (nn.Parameter(torch.tensor(2.0)) for _ in range(2))
    model.register_buffer("steps", torch.tensor(3))
    model.register_buffer("mask", torch.tensor([True, False]))
    for tensor in model.state_dict().values():
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) * value)
    return model, torch.optim.AdamW(model.parameters(), 0.1)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """What a model and its optimizer have after a step, and their groups; saved in several files,
    as those of a large model are."""
    monkeypatch.setattr(state, "FILE_SIZE", 200)
    model, optimizer = small_model(1)
    sum(p.double().square().sum() for p in model.parameters() if p is not model.unused).backward()
    optimizer.step()
    tensors, groups = state.gather(model, optimizer)
    state.save(tensors, tmp_path)
    assert len(list((tmp_path / state.TENSORS).iterdir())) > 3
    return tensors, {"param_groups": groups}


def test_all_kinds_come_back(saved, tmp_path):
    tensors, snapshot = saved
    model, optimizer = small_model(0)
    optimizer.param_groups[0]["fused"] = True  # which the snapshot's steps were not
    state.load(tmp_path, snapshot, model, optimizer)
    assert optimizer.param_groups[0]["fused"] is True, "it is the script's to say"
    found, _ = state.gather(model, optimizer)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].stride() == tensor.stride()
        assert torch.equal(found[name], tensor), name
    assert optimizer.state[model.scale] and not optimizer.state[model.unused]


@pytest.mark.parametrize("damage", ["a file", "a layer of the model", "a tensor"])
def test_nothing_is_left_out_silently(damage, saved, tmp_path):
    """Neither what the snapshot has and the model has not, nor the other way around."""
    _, snapshot = saved
    model, optimizer = small_model(0)
    if damage == "a file":
        next((tmp_path / state.TENSORS).iterdir()).unlink()
    elif damage == "a tensor":
        model.register_buffer("more", torch.zeros(1))
    else:
        del model[5]
    with refused(f"--resume {tmp_path} cannot be loaded"):
        state.load(tmp_path, snapshot, model, optimizer)


def test_what_is_no_tensor_is_not_lost(tmp_path):
    model, optimizer = small_model(1)
    optimizer.state[model.scale]["note"] = "text"
    with pytest.raises(TypeError, match=r"optimizer.scale.note is a str"):
        state.gather(model, optimizer)
