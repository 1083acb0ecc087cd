"""The state of an optimizer of flat shards, by parameter, as snapshots contain it.

For scripts that flatten parameters into buckets themselves: every script can resume from their
snapshots, at any number of ranks. A bucket is a flat buffer. It has ``parameters``, their
``sizes`` with padding, and this rank's ``shard``, which the optimizer updates instead.
``flatten(tensors)`` copies tensors into one buffer with padding, and ``own(flat)`` returns this
rank's shard of a flat buffer.
"""

import torch
import torch.distributed as dist


class WholeState:
    """What a plain optimizer of ``groups`` would have. See :func:`harness.state.gather`."""

    def __init__(self, optimizer: torch.optim.Optimizer, buckets: list, groups: list[dict]):
        self.optimizer = optimizer
        self.buckets = buckets
        self.groups = groups

    @property
    def param_groups(self) -> list[dict]:
        pairs = zip(self.optimizer.param_groups, self.groups, strict=True)
        return [own | {"params": whole["params"]} for own, whole in pairs]

    @property
    def state(self) -> dict:
        """The gathered state, on the CPU of rank 0; empty on other ranks. All ranks call it."""
        state = {}
        for bucket in self.buckets:
            for name, value in self.optimizer.state[bucket.shard].items():
                for p, part in zip(bucket.parameters, gather_value(bucket, value), strict=False):
                    state.setdefault(p, {})[name] = part
        return state

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a plain optimizer's state. All ranks have the same, and each keeps its shards."""
        every = [p for group in self.groups for p in group["params"]]
        index = {p: i for i, p in enumerate(every)}
        places = {}
        state = {}
        for group in self.optimizer.param_groups:
            places |= {shard: len(places) + i for i, shard in enumerate(group["params"])}
        for bucket in self.buckets:
            of_each = [state_dict["state"][index[p]] for p in bucket.parameters]
            entries = {}
            for name, value in of_each[0].items():
                if value.shape == bucket.parameters[0].shape:  # else a step count
                    flat = bucket.flatten([values[name] for values in of_each])
                    value = bucket.own(flat).clone()
                entries[name] = value
            state[places[bucket.shard]] = entries
        groups = []
        pairs = zip(state_dict["param_groups"], self.optimizer.param_groups, strict=True)
        for saved, own in pairs:
            numbers = [places[p] for p in own["params"]]
            groups.append(saved | {"params": numbers})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def gather_value(bucket, value: torch.Tensor) -> list[torch.Tensor]:
    """An entry of a shard's state, split by parameter of the bucket. Only rank 0 gets it."""
    if value.shape != bucket.shard.shape:  # a step count
        return [value] * len(bucket.parameters) if dist.get_rank() == 0 else []
    flat = value.new_empty(len(value) * dist.get_world_size())
    dist.all_gather_into_tensor(flat, value)
    if dist.get_rank() != 0:
        return []
    parts = zip(flat.cpu().split(bucket.sizes), bucket.parameters, strict=True)
    return [part[: p.numel()].view_as(p) for part, p in parts]
