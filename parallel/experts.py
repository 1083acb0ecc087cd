"""Tensor parallelism of a mixture of experts."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


class SplitExperts(ParallelStyle):
    """For ``parallelize_module``: each rank has some of the inner width of every expert, and their
    outputs are summed. ``between``: the layout of a block's activations ``[batch, time, width]``
    outside."""

    def __init__(self, between: Replicate | Shard):
        self.between = between

    def _apply(self, mixture: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Split a :class:`jobs.experts.MixtureOfExperts`."""
        experts = mixture.experts
        mixture.copies = mesh.size()
        router = mixture.router.weight
        replicas = distribute_tensor(router, mesh, [Replicate()])
        mixture.router.weight = nn.Parameter(replicas, router.requires_grad)
        for name, stack in list(experts.named_parameters(recurse=False)):
            if not isinstance(stack, DTensor):  # --ep has divided them, by both
                part = distribute_tensor(stack, mesh, [Shard(1 if name == "down" else 2)])
                setattr(experts, name, nn.Parameter(part, stack.requires_grad))

        def gather(_, inputs: tuple) -> Tensor:
            x = inputs[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, [self.between])
            return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        def add_up(outputs: Tensor) -> Tensor:
            outputs = DTensor.from_local(outputs, mesh, [Partial()])
            return outputs.redistribute(placements=[self.between]).to_local()

        mixture.register_forward_pre_hook(gather)
        mixture.add_up = add_up
        return mixture
