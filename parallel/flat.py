"""The state of an optimizer of flat shards, by parameter, as snapshots contain it.

For scripts that flatten parameters into buckets themselves: every script can resume from their
snapshots, at any number of ranks. A bucket is a flat buffer. It has ``parameters``, their
``sizes`` with padding, and this rank's ``shard``, which the optimizer updates instead.
``in_a_row(tensors)`` flattens and pads tensors, and ``own(row)`` returns this rank's shard.
"""

import torch
import torch.distributed as dist


class WholeState:
    """What a plain optimizer of ``groups`` would have. See :func:`harness.state.gather`."""

    def __init__(self, optimizer: torch.optim.Optimizer, buckets: list, groups: list[dict]):
        self.optimizer, self.buckets, self.groups = optimizer, buckets, groups

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
        index = {p: i for i, p in enumerate(p for group in self.groups for p in group["params"])}
        places, state = {}, {}
        for group in self.optimizer.param_groups:
            places |= {shard: len(places) + i for i, shard in enumerate(group["params"])}
        for bucket in self.buckets:
            of_each = [state_dict["state"][index[p]] for p in bucket.parameters]
            state[places[bucket.shard]] = {
                name: bucket.own(bucket.in_a_row([values[name] for values in of_each])).clone()
                if value.shape == bucket.parameters[0].shape
                else value
                for name, value in of_each[0].items()
            }
        pairs = zip(state_dict["param_groups"], self.optimizer.param_groups, strict=True)
        groups = [saved | {"params": [places[p] for p in own["params"]]} for saved, own in pairs]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def gather_value(bucket, value: torch.Tensor) -> list[torch.Tensor]:
    """An entry of a shard's state, split by parameter of the bucket. Only rank 0 gets it."""
    if value.shape != bucket.shard.shape:  # a step count
        return [value] * len(bucket.parameters) if dist.get_rank() == 0 else []
    row = value.new_empty(len(value) * dist.get_world_size())
    dist.all_gather_into_tensor(row, value)
    if dist.get_rank() != 0:
        return []
    parts = zip(row.cpu().split(bucket.sizes), bucket.parameters, strict=True)
    return [part[: p.numel()].view_as(p) for part, p in parts]
