"""The solution of exercises/recompute.py."""

import torch


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block = block
        ctx.generator = torch.get_rng_state()
        ctx.save_for_backward(x, *parameters)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.random.fork_rng(), torch.enable_grad():
            torch.set_rng_state(ctx.generator)
            output = ctx.block(x)
        return None, *torch.autograd.grad(output, [x, *parameters], gradient)
