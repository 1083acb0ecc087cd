"""pytorch_Muon.py beyond the contract: its iteration against PyTorch's, matrices that the ranks do
not divide, fewer matrices than ranks, and what it saves against PyTorch's Muon on sharded ones."""

import re

import pytest
import torch
from conftest import cases, launcher, read_run, relative_difference, succeed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import _muon

from pytorch_Muon import Muon, orthogonalize

HOOKS = "sent muon"
JOB = "--dataset synthetic --train-samples 150 --eval-samples 20 --batch-size 12 --epochs 9"
JOB += " --print-freq 1 --double --warmup-steps 20 --context 16"
UNEVEN = "--model gpt-1x2x20"  # six matrices; 20 rows are 7, 7 and 6, or 80 are 27, 27 and 26
EVEN = "--model gpt-4x4x48"


@pytest.mark.parametrize("shape", [(48, 48), (20, 80), (80, 20), (1, 5)])
def test_orthogonalize(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    theirs = _muon._zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(orthogonalize(matrix.bfloat16()), theirs)
    padded = torch.cat([matrix, torch.zeros_like(matrix)])
    found = orthogonalize(padded)
    assert not found[len(matrix) :].any()
    torch.testing.assert_close(found[: len(matrix)], orthogonalize(matrix), atol=1e-13, rtol=0)
    values = torch.linalg.svdvals(orthogonalize(matrix / 100))  # of a random one, however small
    assert values.min() > 0.3 and values.max() < 1.3


WHOLE = {"": "pytorch_SingleGPU", "--normalize rows": "pytorch_Muon"}  # flags, and what is right


@cases("flags", WHOLE, lambda flags: not flags)
def test_uneven(flags, train, tmp_path):
    """On four ranks, and then on three, as on one: PyTorch's, but for normalized rows."""
    expected, _ = train(WHOLE[flags], 1, f"{UNEVEN} {flags} --max-steps 12")
    for n, steps in [(4, 5), (3, 12)]:
        command = f"{launcher('pytorch_Muon', n)} {JOB} {UNEVEN} {flags} --max-steps {steps}"
        succeed(f"{command} --resume auto --output-dir {tmp_path}", forked=True)
    assert relative_difference(read_run(tmp_path)[0], expected) < 1e-11


def test_rows_are_normalized(become, alone):
    """As NorMuon is defined, for one matrix on one rank."""
    become(size=1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1,))
    weight = distribute_tensor(torch.randn(6, 4, dtype=torch.float64), mesh, [Shard(0)])
    weight.requires_grad_()
    optimizer = Muon([{"params": [weight]}], [weight], by_rows=True, lr=0.1, weight_decay=0)
    momentum = 0
    mean = 0
    for _ in range(3):
        before = weight.to_local().detach().clone()
        gradient = torch.randn(6, 4, dtype=torch.float64)
        weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        update = orthogonalize(0.05 * gradient + 0.95 * momentum)
        mean = 0.95 * mean + 0.05 * update.square().mean(1, keepdim=True)
        update = update / (mean.sqrt() + 1e-8)
        update = update * (0.2 * 24**0.5 / update.norm())
        torch.testing.assert_close(weight.to_local().detach(), before - 0.1 * update)


@pytest.mark.full
@pytest.mark.parametrize("n", [2, 4])
def test_cost(n, run_once):
    """Of the optimizers alone: all else of the two scripts is the same."""
    matrices = 4 * [(48, 48)] * 4 + 4 * [(192, 48), (48, 192)]
    theory = sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in matrices) / n
    size = 8 * sum(a * b for a, b in matrices)  # in bytes
    weights = []
    costs = []
    for script in ("pytorch_Muon", "pytorch_FSDP"):
        finished, output = run_once(script, n, f"{JOB} {EVEN} --max-steps 3", HOOKS)
        flops = re.findall(r"^flops \d+ (\d+)", finished.stdout, re.MULTILINE)
        state, result = read_run(output)
        weights.append(state)
        sent, calls = (sum(result[kind].values()) for kind in ("sent", "calls"))
        if script == "pytorch_Muon":  # what training sends without it
            others = sent - result["sent"]["alltoall"], calls - result["calls"]["alltoall"]
        most = max(map(int, flops))  # of all ranks
        own = {"sent": (sent - others[0]) / size, "calls": calls - others[1]}
        costs.append(own | {"flops": most / theory})
    assert relative_difference(*weights) < 1e-11
    muon, fsdp = costs
    assert muon == {"sent": 2 * (n - 1) / n**2, "calls": 2 * len(matrices) / n, "flops": 1}
    assert fsdp["sent"] > 5 * muon["sent"]
