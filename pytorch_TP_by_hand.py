"""Train on several devices with TP written out: Megatron's f and g, and a loss by vocabulary.

Differs     from pytorch_torchrun_DDP.py: all ranks process the same batch, with a shard of each
            matrix, and communicate in two functions, f and g ("# by hand:"), not by the plan of
            pytorch_TP.py, which it shares other lines with ("# TP:").
Command:    torchrun --nproc_per_node=4 pytorch_TP_by_hand.py
Use it      to learn how it works. To train, take pytorch_TP.py, which has more flags.
Holds       1/N of all matrices, with their gradients and optimizer state, and 1/N of the logits;
            norms and learned positions unsharded. Other activations as in pytorch_TP.py.
Sends       per step and rank, 2 * 4 * (N - 1) / N bytes per element of the activations of the whole
            batch: four times per block, and twice for the ends. The loss: three numbers per token.
"""

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DistributedSampler

import common
from jobs.language_models import check_tensor_parallel


class Copy(torch.autograd.Function):
    """Megatron's f: identity in forward, all-reduce in backward (Shoeybi et al. 2019,
    arXiv:1909.08053). Each rank has the gradient through its columns: the input's is the sum."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return all_reduce(gradient)


class Sum(torch.autograd.Function):
    """Megatron's g: all-reduce in forward, identity in backward, as for each term of a sum."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return all_reduce(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def all_reduce(x: Tensor, op=dist.ReduceOp.SUM) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)  # by hand: autograd may still need x
    dist.all_reduce(x, op)
    return x


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Some of the outputs from all inputs, or a term of all outputs from some of the inputs."""
    return F.linear(x, *(p.to_local() for p in layer.parameters()))


def look_up(layer: nn.Embedding, tokens: Tensor) -> Tensor:
    """Embeddings of the tokens in this rank's shard, zeros for other tokens: a term of all."""
    tokens, here = own(tokens, layer.num_embeddings)
    return F.embedding(tokens, layer.weight.to_local()) * here[..., None]


def own(tokens: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Indices of tokens in this rank's shard of the vocabulary, 0 for others; which are in it."""
    size = -(-vocabulary // dist.get_world_size())  # by hand: rounded up, as DTensor does
    tokens = tokens - dist.get_rank() * size
    here = (tokens >= 0) & (tokens < size)
    return tokens * here, here


def cross_entropy(logits: DTensor, labels: Tensor) -> Tensor:
    """The sum of the losses of ``[batch, time, vocabulary]``. For each label, ranks exchange three
    numbers instead of logits: the largest logit, the sum of exponentials, and the label's logit."""
    unmasked = labels >= 0  # chat: other labels do not count
    labels, here = own(labels, logits.shape[2])
    logits = logits.to_local()
    largest = all_reduce(logits.detach().amax(2), dist.ReduceOp.MAX)  # by hand: cancels in the loss
    logits = logits - largest[..., None]
    total = Sum.apply(logits.exp().sum(2))  # by hand: g, so backward sends nothing
    of_label = Sum.apply(logits.gather(2, labels[..., None])[..., 0] * here)
    return ((total.log() - of_label) * unmasked).sum()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard all matrices. A DTensor only says which shard a rank has, to initialize, save and clip
    it; ranks compute with plain tensors."""
    for name, layer in model.named_modules():
        name = name.rpartition(".")[2]
        if name in ("attention", "mlp", "head"):  # by hand: f, once for query, key and value
            layer.register_forward_pre_hook(lambda _, inputs: Copy.apply(*inputs))
        if name in ("out", "down", "token"):  # by hand: g
            layer.register_forward_hook(lambda _, inputs, output: Sum.apply(output))
        if name in ("query_norm", "key_norm"):  # by hand: of a Qwen, for this rank's heads only
            layer.forward = lambda x, norm=layer: F.rms_norm(
                x, norm.normalized_shape, Copy.apply(norm.weight), norm.eps
            )
        if isinstance(layer, nn.Linear) or name == "token":
            shard = Shard(1 if name in ("out", "down") else 0)  # by hand: of [outputs, inputs]
            for kind, p in layer.named_parameters(recurse=False):
                sharded = nn.Parameter(distribute_tensor(p, mesh, [shard]), p.requires_grad)
                setattr(layer, kind, sharded)
            layer.forward = partial(look_up if name == "token" else linear, layer)

    def as_dtensor(model: nn.Module, inputs: tuple, logits: Tensor) -> DTensor:
        like = torch.empty(*logits.shape[:2], len(model.vocabulary), device="meta")
        return DTensor.from_local(logits, mesh, [Shard(2)], shape=like.shape, stride=like.stride())

    model.register_forward_hook(as_dtensor)  # by hand: evaluation gathers it


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """``nn.utils.clip_grad_norm_`` by the global norm, for sharded and unsharded parameters."""
    by_mesh = {}
    for p in model.parameters():
        if p.grad is not None:
            by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
    norms = []
    for group in by_mesh.values():
        gradients = [p.grad for p in group]
        norms.append(common.whole(nn.utils.get_total_norm(gradients)))
    total_norm = torch.stack(norms).norm()
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total_norm)
    return total_norm


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True)
    args = common.parse_args(parser)
    common.prepare_process(args)
    if "RANK" not in os.environ:  # torchrun: sets these; without it, there is one process
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = common.get_device(args, local_rank)  # DDP: one device per local rank
    if device.type == "cuda":
        torch.cuda.set_device(device)  # DDP: otherwise every rank also allocates memory on GPU 0
    dist.init_process_group(  # DDP: returns once all ranks have joined
        backend="nccl" if device.type == "cuda" else "gloo",
        store=common.make_store(args),  # torchrun: a restart must not find dead ranks' addresses
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=args.timeout),  # DDP: how long ranks wait for each other
        device_id=device if device.type == "cuda" else None,
    )
    rank = dist.get_rank()  # DDP: from 0 to world_size - 1
    world_size = dist.get_world_size()
    common.announce(args, device, readers=1)  # TP: all ranks work on the same batch
    common.seed_everything(args.seed, args.deterministic)  # TP: identical dropout on every rank

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    check_tensor_parallel(args, world_size, f"{world_size} ranks", train_set.classes)
    batch_size = args.batch_size  # TP: the whole global batch
    replica = {"num_replicas": 1, "rank": 0}  # TP: every rank reads every sample
    sampler = DistributedSampler(train_set, **replica, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, **replica, shuffle=False)
    eval_loader = common.make_loader(args, eval_set, batch_size, eval_sampler)

    # 3. Model
    with torch.device("meta"):  # TP: shapes only: no rank holds the whole model
        model = common.make_model(args, train_set.classes, channels_last=False)
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("tp",))
    parallelize(model, mesh["tp"])  # TP: each rank gets a shard
    model.to_empty(device=device)  # TP: memory for this rank's shards
    common.init_weights(args, model, train_set.classes)  # TP: each rank fills its shards

    # 4. Optimizer and schedule
    optimizer = common.make_optimizer(args, model)
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)
    run.resume_or_exit(model, optimizer, scheduler)

    # 5. Train
    for epoch in run.epochs_left():
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for inputs, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # otherwise gradients would accumulate
            logits = model(inputs)
            # by hand: train_set.loss(), of logits that no rank has all of
            loss = cross_entropy(logits, labels) / labels.numel() / train_set.density
            loss.backward()  # TP: gradients of this rank's shards are complete
            if args.clip_grad:
                run.grad_norm = clip_grad_norm(model, args.clip_grad)
            optimizer.step()
            scheduler.step()
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save_then_exit_if_asked(model, optimizer, scheduler)

        # 6. Evaluate
        run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
        run.save_then_exit_if_asked(model, optimizer, scheduler)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    whole = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = sd.get_model_state_dict(model, options=whole)  # TP: gathered on rank 0, on the CPU
    if rank == 0:
        common.save_model(args, weights)
    run.finish(model, optimizer)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
