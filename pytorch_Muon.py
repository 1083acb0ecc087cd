"""Train with Muon where parameters are sharded: one rank orthogonalizes each matrix.

Differs     from pytorch_FSDP.py: Muon (Jordan 2024) updates the matrices of the blocks, and AdamW
            updates embeddings, norms and the last layer. Lines tagged "# Muon:".
Command:    torchrun --nproc_per_node=4 pytorch_Muon.py
            torchrun --nproc_per_node=4 pytorch_Muon.py --normalize rows (NorMuon)
Use it      for transformer blocks, instead of torch.optim.Muon if parameters are sharded: each
            iteration of that all-gathers three matrices, or all-reduces two.
Holds       what pytorch_FSDP.py holds with AdamW, minus 4/N bytes per element of a matrix (Muon has
            one momentum, AdamW has two), plus one full matrix at a time.
Sends       what pytorch_FSDP.py sends and, per step and rank, 2 * 4 * (N - 1) / N**2 bytes per
            element of a matrix in two all-to-alls; on a GPU half of that, in bfloat16.
Computes    5 * (4 * m**2 * n + 2 * m**3) FLOPs for an m x n matrix, m <= n, on one rank.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor  # Muon, option: of each row
from torch.utils.data import DistributedSampler

import common
from jobs.model_parts import blocks_of, units_of


def orthogonalize(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz iterations, in the dtype of the matrix. They bring its singular values
    close to 1. Coefficients: https://kellerjordan.github.io/posts/muon."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix  # Muon: for the smaller x @ x.T
    x = x / x.norm().clamp(min=1e-7)  # Muon: all singular values <= 1
    for _ in range(5):
        gram = x @ x.T
        gram = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, gram, x, beta=3.4445)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.AdamW):
    """Muon for matrices, which fully_shard has sharded by rows; AdamW for all other parameters."""

    def __init__(self, groups: list[dict], matrices: list[Tensor], by_rows=False, **options):
        super().__init__(groups, **options)
        self.matrices = sorted(matrices, key=Tensor.numel, reverse=True)  # Muon: by size
        self.by_rows = by_rows  # Muon, option: --normalize rows

    def update(self, p: Tensor) -> Tensor:
        """This rank's shard of the update to orthogonalize, padded to the largest shard's size."""
        gradient = p.grad.to_local()
        p.grad = None  # Muon: AdamW skips parameters without gradient
        if not self.state[p]:
            # Muon: AdamW expects a step in the state when it loads a snapshot
            self.state[p].update(momentum_buffer=torch.zeros_like(p), step=torch.tensor(0.0))
        momentum = self.state[p]["momentum_buffer"].to_local().lerp_(gradient, 1 - 0.95)
        on_gpu = p.is_cuda and p.dtype == torch.float32  # Muon: bfloat16 is slow on many CPUs
        update = gradient.lerp(momentum, 0.95).to(torch.bfloat16 if on_gpu else p.dtype)
        return F.pad(update, (0, 0, 0, -(-len(p) // dist.get_world_size()) - len(update)))

    def normalize(  # Muon, option: --normalize rows
        self, matrices: list[Tensor], updates: list[Tensor]
    ) -> list[Tensor]:
        """NorMuon (Li et al. 2025, arXiv:2510.05491): divides each row by the root of the mean of
        its squares over past steps. The norm of a whole update stays that of an orthogonal one."""
        found = []
        for p, update in zip(matrices, updates, strict=True):
            rows = update.to(p.dtype)[: len(p.to_local())]  # without padding
            squares = self.state[p].get("row_buffer", rows.new_zeros(len(p), 1))
            if not isinstance(squares, DTensor):  # it is new, or whole from a snapshot
                squares = distribute_tensor(squares, p.device_mesh, p.placements)
                self.state[p]["row_buffer"] = squares
            squares = squares.to_local()
            squares.lerp_(rows.square().mean(1, keepdim=True), 1 - 0.95)
            found.append(rows / (squares.sqrt() + 1e-8))
        norms = torch.stack([rows.square().sum() for rows in found])
        dist.all_reduce(norms)  # each rank has some rows of every matrix
        norms = norms.sqrt().clamp(min=1e-7)
        pairs = zip(matrices, found, norms, strict=True)
        return [rows * (min(p.shape) ** 0.5 / norm) for p, rows, norm in pairs]

    @torch.no_grad()
    def step(self, closure=None):
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        group = self.param_groups[0]
        for first in range(0, len(self.matrices), world_size):
            matrices = self.matrices[first : first + world_size]  # Muon: at most one per rank
            updates = [self.update(p).flatten() for p in matrices]
            sent = [len(update) for update in updates] + [0] * (world_size - len(matrices))
            shards = torch.cat(updates)
            received = [sent[rank]] * world_size
            full = shards.new_empty(sum(received))
            dist.all_to_all_single(full, shards, received, sent)  # Muon: from shards to a matrix
            if rank < len(matrices):
                full = orthogonalize(full.view(-1, matrices[rank].shape[1])).flatten()
            dist.all_to_all_single(shards, full, sent, received)  # Muon: and back to shards
            updates = shards.split(sent)[: len(matrices)]
            updates = [u.view(-1, p.shape[1]) for p, u in zip(matrices, updates, strict=True)]
            if self.by_rows:  # Muon, option: --normalize rows
                updates = self.normalize(matrices, updates)
            for p, update in zip(matrices, updates, strict=True):
                shard = p.to_local().mul_(1 - group["lr"] * group["weight_decay"])
                scale = 0.2 * max(p.shape) ** 0.5  # Muon: for AdamW's lr (arXiv:2502.16982)
                shard.add_(update[: len(shard)], alpha=-group["lr"] * scale)
        return super().step(closure)  # Muon: all other parameters


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    parser = common.argument_parser(__doc__, only_gpt=True)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32",
        help="dtype of compute and of the gathered weights (default: float32)",
    )  # fmt: skip
    parser.add_argument(  # Muon, option: --normalize rows
        "--normalize", choices=["none", "rows"], default="none",
        help="rows: NorMuon, which also adapts the size of the update of each row (default: none)",
    )  # fmt: skip
    args = common.parse_args(parser)
    if args.optimizer != "adamw":
        common.fail(f"--optimizer {args.optimizer}: Muon needs AdamW; leave the flag out")
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
    common.announce(args, device)
    common.seed_everything(args.seed + rank, args.deterministic)  # DDP: dropout differs by rank

    # 2. Data
    train_set, eval_set = common.make_datasets(args)
    batch_size = args.batch_size // world_size  # DDP: this rank's share of the global batch
    # DDP: the same order on all ranks; rank r of N takes every N-th sample, beginning with the r-th
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = common.make_loader(args, train_set, batch_size, sampler, drop_last=True)
    eval_sampler = DistributedSampler(eval_set, shuffle=False)  # DDP: the same, without shuffling
    eval_loader = common.make_loader(args, eval_set, batch_size, eval_sampler)

    # 3. Model
    with torch.device("meta"):  # FSDP: shapes only: no rank holds the whole model
        model = common.make_model(args, train_set.classes, channels_last=False)  # FSDP: shards rows
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy()
    if args.dtype == "bfloat16":  # FSDP: gathers and computes in bfloat16, reduces in fp32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in units_of(model):  # FSDP: blocks, embedding, head: gathered one at a time
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # FSDP: the other parameters
    model.to_empty(device=device)  # FSDP: memory for this rank's shards
    common.init_weights(args, model, train_set.classes)  # FSDP: each rank fills its shards

    # 4. Optimizer and schedule
    of_blocks = [p for block in blocks_of(model) for p in block.parameters()]
    matrices = [p for p in of_blocks if p.ndim == 2 and p.requires_grad]
    options = common.optimizer_class(args)[1]
    groups = common.parameter_groups(args, model)
    optimizer = Muon(groups, matrices, args.normalize == "rows", **options)
    args = common.replace(args, optimizer="muon")  # Muon: AdamW cannot resume its snapshots
    scheduler = common.make_scheduler(args, optimizer, len(train_loader))
    run = common.Run(args, device, train_loader)
    run.resume_or_exit(model, optimizer, scheduler)

    # 5. Train
    for epoch in run.epochs_left():
        sampler.set_epoch(epoch)  # DDP: a new order every epoch, the same on all ranks
        model.train()
        for inputs, labels in run.batches(train_loader, epoch):
            optimizer.zero_grad()  # otherwise gradients would accumulate
            logits = model(inputs).to(torch.get_default_dtype())  # FSDP: all-gathers each block
            loss = train_set.loss(logits, labels)
            loss.backward()  # FSDP: all-gathers again, and reduce-scatters each block's gradients
            if args.clip_grad:
                run.grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            scheduler.step()
            run.log(loss)  # copied from the device only when it is printed
            if run.snapshot_is_due():  # every --snapshot-every steps, or when asked to stop
                run.save_then_exit_if_asked(model, optimizer, scheduler)

        # 6. Evaluate
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)  # DDP: BatchNorm saw different samples on each rank
        run.report(common.evaluate(model, eval_loader, device))  # DDP: on every rank
        run.save_then_exit_if_asked(model, optimizer, scheduler)

    # 7. Save and report
    run.load_best_weights()  # with --eval-every; otherwise the last ones stay
    whole = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = sd.get_model_state_dict(model, options=whole)  # FSDP: gathered on rank 0, on the CPU
    if rank == 0:
        common.save_model(args, weights)
    run.finish(model, optimizer)
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
