"""Context parallelism beyond the contract: what a layer computes and keeps, and PyTorch's own ring.
Which mistakes in sharding are silent is in test_silent.py."""

import torch
from conftest import cases, read_run, run_program

JOB = "--model gpt-2x12x48 --context 24 --dataset synthetic --train-samples 150 --eval-samples 20"
JOB += " --batch-size 24 --epochs 9 --print-freq 1 --clip-grad 0.5"


IMPORTED = """
import sys
sys.argv[0] = "pytorch_CP.py"
import jobs.gpt
import pytorch_CP as script
"""
# Calls an attention as a layer does, and counts.
ONE_LAYER = """
from torch.utils._python_dispatch import TorchDispatchMode
from estimator.live_bytes import LiveBytes

class Count(TorchDispatchMode):
    pairs = 0  # of queries and keys that are multiplied
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func.__name__:
            causal = len(args) > 4 and args[4]
            self.pairs += args[0].shape[2] * args[1].shape[2] / (1 + causal)
        return func(*args, **(kwargs or {}))

def keep(tensor):
    if tensor.is_floating_point():
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
    return tensor

n = dist.get_world_size()
for name in ("ring", "allgather", "ulysses"):
    own = [torch.randn(3, 12, 24 // n, 5, requires_grad=True) for _ in range(3)]
    attend, storages = script.ATTENTIONS[name](), {}
    with Count() as count, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend(*own)
    kept = sum(storage.nbytes() for storage in storages.values()) / own[0].nbytes / n
    long = [torch.randn(1, 12, 768 // n, 4, requires_grad=True) for _ in range(3)]
    with LiveBytes(block=1) as live:
        torch.autograd.grad(attend(*long).sum(), long)
    peak = sum(live.peak().values()) / long[0].nbytes
    print(json.dumps([name, kept, count.pairs, peak]) + "\\n", end="", flush=True)
"""


@cases("n", [1, 2, 3, 4], lambda n: n == 3)
def test_a_layer(n, tmp_path):
    """Each attention has all ranks compute as much, and keeps for backward what belongs to 1/N of
    the positions; allgather all keys and values."""
    lines = run_program(IMPORTED + ONE_LAYER, n, tmp_path).lists
    assert len(lines) == 3 * n
    kept = {"ring": 4 / n, "allgather": 2 + 2 / n, "ulysses": 4 / n}
    for name in kept:
        of_ranks = [pairs for its_name, _, pairs, _ in lines if its_name == name]
        heads = 1 / n if name == "ulysses" else 1
        # The first chunk alone is a whole causal block, of which half is computed: 162 and 180 of 2
        assert max(of_ranks) < 1.12 * min(of_ranks), f"{name}: {sorted(of_ranks)}"
        assert sum(of_ranks) * heads < (1 + 0.51 / n) * 24**2 / 2, "and hardly what none sees"
    for name, bytes_kept, _, peak in lines:
        # In units of a shard. Allgather has all keys and values, and their gradients. Scores of a
        # shard's queries alone would be 192, and of one chunk of keys 192 / n.
        assert peak < (20 + 5 * n if name == "allgather" else 20), name
        # and sums of scores, one where a query has five numbers; of allgather, its mask
        assert kept[name] <= bytes_kept < kept[name] + 0.4 / n


PYTORCH = """
from torch.nn import functional
ours = script.attention_kernels
ours.has_kernel = lambda q: False

def forward(q, k, v, bias, with_sums, dropout=0.0, is_causal=False, *, scale=None):
    nothing = torch.zeros((), dtype=torch.int64)
    return *ours.forward(q, k, v, is_causal), nothing, nothing

def backward(g, q, k, v, bias, out, sums, seed, offset, dropout, mask, is_causal=False, **_):
    return *ours.backward(g, q, k, v, out, sums, is_causal), None

kernels = torch.library.Library("aten", "IMPL")
kernels.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
kernels.impl("_scaled_dot_product_efficient_attention_backward", backward, "CPU")
from torch.distributed.device_mesh import DeviceMesh
make_mesh = DeviceMesh.from_group
DeviceMesh.from_group = lambda group, device: make_mesh(group, "cpu")
rank, n = dist.get_rank(), dist.get_world_size()
attend = ours.pytorch_ring()
torch.manual_seed(0)
whole = [torch.randn(2, 4, 24, 8, requires_grad=True) for _ in range(3)]
expected = jobs.gpt.attend(*whole)
gradient = torch.randn_like(expected)
gradients = torch.autograd.grad(expected, whole, gradient)
kernel = torch.ops.aten._scaled_dot_product_efficient_attention
functional.scaled_dot_product_attention = lambda q, k, v, is_causal: kernel(
    q, k, v, None, True, 0.0, is_causal
)[0]
own = [script.attention.shard(t.detach(), 2).clone().requires_grad_() for t in whole]
found = attend(*own)
backward = torch.autograd.grad(found, own, script.attention.shard(gradient, 2))
for ours, theirs in [(found, expected), *zip(backward, gradients)]:
    torch.testing.assert_close(ours, script.attention.shard(theirs, 2))
"""


def test_pytorchs_own_ring(tmp_path):
    """All but its kernels, for which there are others here: a CPU has none."""
    run_program(IMPORTED + PYTORCH, 3, tmp_path)


def test_fewer_texts_than_ranks(run_once):
    """A batch of one is enough, however many work on it."""
    job = "--dataset synthetic --train-samples 20 --eval-samples 3 --max-steps 2 --batch-size 1"
    finished, output = run_once("pytorch_CP", 4, f"{job} --context 32")
    assert "global batch 1 = 1 x 1 for 4 ranks together" in finished.lines[0]
    assert torch.isfinite(torch.tensor(read_run(output)[1]["train_loss"])).all()
