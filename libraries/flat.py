"""Gather the state of an optimizer of shards as a plain optimizer's state, and shard it again.

For scripts that flatten parameters into buckets themselves: every script can resume from their
snapshots, at any number of ranks. A bucket is a flat buffer. It has ``parameters``, their
``sizes``, and this rank's ``shard``, which the optimizer updates instead. ``in_a_row(tensors)``
flattens tensors, padded to equal shards, and ``own(row)`` returns this rank's shard.
"""

import copy
from functools import partial

import torch
import torch.distributed as dist


def index_parameters(groups: list[dict]) -> dict:
    """The index of each parameter in an optimizer of these groups."""
    return {p: i for i, p in enumerate(p for group in groups for p in group["params"])}


def gather_state(optimizer: torch.optim.Optimizer, buckets: list, groups: list[dict]) -> dict:
    """The state dict of a plain optimizer of ``groups``, on the CPU of rank 0; empty on other
    ranks. All ranks call it."""
    numbers, state = index_parameters(groups), {}
    for bucket in buckets:
        for name, value in optimizer.state[bucket.shard].items():
            for p, part in zip(bucket.parameters, gather_value(bucket, value), strict=False):
                state.setdefault(numbers[p], {})[name] = part
    if dist.get_rank() != 0:
        return {}
    own = optimizer.state_dict()["param_groups"]
    places = [[numbers[p] for p in group["params"]] for group in groups]
    own = [group | {"params": params} for group, params in zip(own, places, strict=True)]
    return {"state": state, "param_groups": own}


def gather_value(bucket, value) -> list:
    """An entry of a shard's state, split by parameter of the bucket. Only rank 0 gets it."""
    if not torch.is_tensor(value) or value.shape != bucket.shard.shape:
        # such as a step count: one per parameter, as a shared one would be incremented by each.
        return [copy.deepcopy(value) for _ in bucket.parameters]
    row = value.new_empty(len(value) * dist.get_world_size())
    dist.all_gather_into_tensor(row, value)
    if dist.get_rank() != 0:
        return []
    parts = row[: sum(bucket.sizes)].cpu().split(bucket.sizes)
    return [part.view_as(p) for part, p in zip(parts, bucket.parameters, strict=True)]


def shard_state_on_load(optimizer, buckets: list, groups: list[dict]) -> None:
    """Let ``load_state_dict()`` accept the state of a plain optimizer of ``groups``."""
    optimizer.register_load_state_dict_pre_hook(partial(shard_state, buckets, groups))


def shard_state(buckets: list, groups: list[dict], optimizer, state_dict: dict) -> dict:
    """Shard the state dict of a plain optimizer of ``groups`` for this rank's optimizer."""
    numbers, places = index_parameters(groups), index_parameters(optimizer.param_groups)
    state = {}
    for bucket in buckets:
        of_each = [state_dict["state"][numbers[p]] for p in bucket.parameters]
        state[places[bucket.shard]] = {
            name: bucket.own(bucket.in_a_row([values[name] for values in of_each]))
            if torch.is_tensor(value) and value.shape == bucket.parameters[0].shape
            else value
            for name, value in of_each[0].items()
        }
    own = [[places[shard] for shard in group["params"]] for group in optimizer.param_groups]
    saved = zip(state_dict["param_groups"], own, strict=True)
    return {"state": state, "param_groups": [g | {"params": params} for g, params in saved]}
