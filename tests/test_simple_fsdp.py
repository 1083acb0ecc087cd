"""pytorch_SimpleFSDP_by_hand.py: between forward and backward a rank has shards only."""

from conftest import run_program

PROGRAM = """
import time
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
import pytorch_SimpleFSDP_by_hand as script

def watched(shard):
    whole = gather(shard)
    storages.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
    most[-1] = max(most[-1], held())
    return whole

def held():
    time.sleep(0.05)  # gloo's thread lets go of what it gathered after the waiting thread went on
    return sum(size for storage, size in storages if not storage.expired())

layers = nn.Embedding(11, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 11)
model = nn.Sequential(*layers)
script.shard_parameters(model, init_device_mesh("cpu", (2,)))
gather, script.gather, storages = script.gather, watched, []
script.gather_when_read(model)
gradients = []
for keep in (lambda tensor: tensor, script.keep_shard):
    most = [0]
    with saved_tensors_hooks(keep, script.gather_again):
        loss = model(torch.arange(11)).square().mean()
    between = held()
    most.append(0)
    loss.backward()
    gradients.append([p.grad.full_tensor() for p in model.parameters()])
    model.zero_grad()
    print(json.dumps([between, *most, held()]) + "\\n", end="", flush=True)
assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
"""


def test_between_forward_and_backward_no_parameter_is_whole(tmp_path):
    """What is gathered in bytes: after forward, at most in forward and in backward, at the end.
    Autograd alone keeps the linear layers' matrices, and the norm."""
    found = sorted(run_program(PROGRAM, 2, tmp_path).lists)
    assert len(found) == 4
    matrices = 4 * (8 * 16 + 16 * 11)
    assert [row[0] for row in found] == [0, 0, *2 * [matrices + 4 * 2 * 16]]
    for _, forward, backward, end in found[:2]:  # a matrix and its bias; a matrix
        assert (forward, backward, end) == (4 * 17 * 11, 4 * 16 * 11, 0)
