"""The three scripts written by hand: what their buckets send and when, and user errors.

That they compute the same as the single process, and as the library, with as much memory and
communication, and that they resume, is in test_contract.py.
"""

import importlib

import pytest
import torch
from conftest import HOOKED, cases, launch, launcher, read_run, succeed
from torch import nn

from pytorch_DDP_by_hand import Bucket as DDPBucket
from pytorch_FSDP_by_hand import Bucket as FSDPBucket

JOB = "--dataset synthetic --train-samples 24 --eval-samples 8 --batch-size 8 --max-steps 3"
GPT = f"{JOB} --model gpt-2x2x64 --context 16"
ALL = ["pytorch_DDP_by_hand", "pytorch_ZeRO_by_hand", "pytorch_FSDP_by_hand"]


@cases("script", ALL, lambda script: "ZeRO" in script)
def test_plain_python_is_a_world_of_one(script, tmp_path):
    command = f"python {script}.py {GPT} --output-dir {tmp_path}"
    finished = succeed(command, forked=True)
    assert f"{script}: 1 x cpu (gloo)" in finished.lines[0] and not finished.our_warnings
    assert "a single rank sends nothing" in finished.stdout
    assert read_run(tmp_path)[1]["command"] == command


@cases("average, n", [("each", 62), ("buckets", 7), ("overlap", 7)], lambda *row: "overlap" in row)
def test_messages_of_a_step(average, n, run_once):
    """Of ResNet-18: 62 tensors, which take 45 MB."""
    flags = f"{JOB} --model resnet18 --average {average}"
    _, output = run_once("pytorch_DDP_by_hand", 2, flags, "sent")
    assert read_run(output)[1]["calls"] == {"allreduce": n}


@pytest.mark.parametrize("script", ALL[:2])
def test_buckets_are_filled_in_the_order_of_backward(script, alone):
    script = importlib.import_module(script)
    parameters = [nn.Parameter(torch.zeros(n)) for n in (10, 20, 30, 40, 50)]
    FSDPBucket(parameters, nn.Identity())  # where DDP leaves them
    for size, filled in [(0, [1, 1, 1, 1, 1]), (130, [1, 1, 2, 1]), (390, [3, 2]), (600, [5])]:
        buckets = script.make_buckets(parameters, size)
        assert [len(bucket.parameters) for bucket in buckets] == filled
        ordered = [p for bucket in buckets for p in bucket.parameters]
        assert all(p is own for p, own in zip(ordered, reversed(parameters), strict=True))
        assert not any(p.data_ptr() % 16 for p in parameters)  # which GPUs read at once


def test_a_bucket_is_sent_with_its_last_gradient(alone):
    """While backward has others to compute: so with the last layer's gradient, not the first's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    buckets = [DDPBucket(list(layer.parameters())) for layer in model]
    sent = []  # at each gradient, from the last to the first
    for bucket in buckets:
        for p in bucket.parameters:
            p.register_post_accumulate_grad_hook(bucket.send_when_full)
            p.register_post_accumulate_grad_hook(
                lambda _: sent.append([len(b.sent) for b in buckets])
            )
    model(torch.ones(2, 4)).sum().backward()
    assert sent == [[0, 0], [0, 1], [0, 1], [1, 1]]
    for bucket in buckets:
        bucket.sent.pop().wait()
        with pytest.raises(IndexError):
            bucket.sent.pop()  # as where a parameter had no gradient, and nothing was sent


@cases("script", ALL, lambda script: "ZeRO" not in script)
def test_a_parameter_without_a_gradient_is_no_silent_error(script, tmp_path):
    """Half of its bucket would not be averaged. A bug keeps its traceback."""
    command = f"{launcher(script, 2, HOOKED)} {GPT} --output-dir {tmp_path}"
    finished = launch(command, forked=True, HOOKS="no_gradient")
    assert finished.code == 1 and not (tmp_path / "model.pt").exists(), str(finished)
    said = "IndexError: pop from empty list" if "DDP" in script else "a parameter has no gradient"
    assert said in finished.stderr
