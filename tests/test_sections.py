"""Sections of the pages that answer a question: their code is tried."""

import re
import subprocess

import torch.distributed as dist
from conftest import ROOT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DEBUGGED = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for step in range(3):
    loss = torch.tensor(10.0 * dist.get_rank() + step)
    if step:
        dist.breakpoint(rank=1, skip=1)
    dist.all_reduce(loss)
    print(f"sum {loss.item()}", flush=True)
dist.destroy_process_group()
"""


def code_of(page, heading):
    """The blocks of Python in a section of a page."""
    _, _, section = (ROOT / "docs" / f"{page}.md").read_text().partition(f"# {heading}")
    section = re.split(r"^##", section, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


# ------------------------------------------------------------------------------------ a debugger
def test_a_debugger_on_one_rank(tmp_path):
    """It reads the terminal of torchrun, and the other rank waits until it continues."""
    (tmp_path / "script.py").write_text(DEBUGGED)
    command = ["torchrun", "--standalone", "--nproc_per_node=2", tmp_path / "script.py"]
    options = {"capture_output": True, "text": True, "timeout": 100}
    ended = subprocess.run(command, input="up\np loss\nc\n", **options)
    assert ended.returncode == 0, ended.stderr
    assert "(Pdb) tensor(12.)" in ended.stdout  # of rank 1, in its last step
    assert ended.stdout.count("sum 14.0") == 2


def test_shapes_of_a_rank_in_one_process():
    [_, fake] = code_of("troubleshooting", "A debugger on one rank")
    exec(fake, {"dist": dist})
    mesh = init_device_mesh("cpu", (8,))
    weight = fully_shard(nn.Linear(4, 24), mesh=mesh).weight.to_local()
    dist.all_reduce(weight.detach())
    assert dist.get_rank() == 3 and weight.shape == (3, 4)
    dist.destroy_process_group()
