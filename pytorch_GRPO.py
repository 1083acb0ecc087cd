"""Reinforcement learning (GRPO): some ranks train with FSDP, others generate what they learn from.

Differs     from pytorch_FSDP.py: the last --generators ranks have whole copies of the model, and no
            optimizer. They get the trainers' weights, one unit of FSDP at a time, and return
            completions with their log-probabilities. Lines tagged "# GRPO:".
Command:    torchrun --nproc_per_node=4 pytorch_GRPO.py
            torchrun --nproc_per_node=4 pytorch_GRPO.py --generators 2 --sync-every 2
Use it      to see how weights and completions travel, and which log-probabilities are compared. The
            reward is a toy: the share of letters that follow the letter before in the alphabet. No
            snapshots are written: a run that is interrupted starts from scratch.
Holds       a trainer, what a rank of FSDP holds, and one whole unit while weights are sent; a
            generator 4 bytes per parameter, or 2 with bfloat16.
Sends       with each --sync-every, 4 or 2 bytes per parameter, from rank 0 to the generators, after
            an all-gather of the trainers; per step the completions: 12 bytes per token.
"""

import os
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import common
from jobs.model_parts import units_of

LETTERS = list("abcdefghijklmnop")
PROMPT = 4  # letters
FLAGS = "max_steps optimizer lr weight_decay clip_grad model kv_heads mlp_width tie print_freq"
FLAGS += " output_dir device timeout seed double"  # GRPO: the shared ones that have a meaning here


# ------------------------------------------------------------------------- completions and loss
def draw_prompts(args, step: int) -> Tensor:
    """The prompts of a step, ``[prompts * group_size, PROMPT]``, each as often as its group has
    completions. Every rank draws them, so that nobody has to send them."""
    rng = torch.Generator().manual_seed(zlib.crc32(f"{args.seed} {step}".encode()))
    prompts = torch.randint(len(LETTERS), (args.prompts, PROMPT), generator=rng)
    return prompts.repeat_interleave(args.group_size, 0)


def draw_uniform(args, step: int, samples: range) -> Tensor:
    """A number between 0 and 1 for each token that is sampled, ``[samples, length]``."""
    rows = []
    for sample in samples:  # GRPO: a seed per sample: the number of generators changes no token
        rng = torch.Generator().manual_seed(zlib.crc32(f"{args.seed} {step} {sample}".encode()))
        rows.append(torch.rand(args.length, dtype=torch.float64, generator=rng))
    return torch.stack(rows)


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """GRPO: one function for generators and trainers, so that they mean the same probabilities."""
    return (logits.to(torch.get_default_dtype()) / temperature).log_softmax(-1)


@torch.no_grad()
def generate(model: nn.Module, prompts: Tensor, uniform: Tensor, temperature: float):
    """The completions of prompts, ``[samples, length]``, and the log-probability of each token.
    For brevity without a cache of keys and values."""
    rows = prompts
    found = []
    for drawn in uniform.unbind(1):
        logprobs = log_softmax(model(rows)[:, -1], temperature)
        below = logprobs.exp().cumsum(-1) <= drawn[:, None].to(logprobs)
        tokens = below.sum(-1, keepdim=True).clamp(max=len(LETTERS) - 1)
        found.append(logprobs.gather(-1, tokens))
        rows = torch.cat([rows, tokens], 1)
    return rows[:, prompts.shape[1] :].contiguous(), torch.cat(found, 1)


def logprobs_of(model: nn.Module, prompts: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """The log-probability of each token of the completions, ``[samples, length]``."""
    logits = model(torch.cat([prompts, tokens[:, :-1]], 1))
    logprobs = log_softmax(logits[:, -tokens.shape[1] :], temperature)
    return logprobs.gather(-1, tokens[..., None]).squeeze(-1)


def rewards_of(prompts: Tensor, tokens: Tensor) -> Tensor:
    """The share of letters that follow the letter before in the alphabet, ``[samples]``."""
    before = torch.cat([prompts[:, -1:], tokens[:, :-1]], 1)
    return (tokens == (before + 1) % len(LETTERS)).to(torch.get_default_dtype()).mean(1)


def advantages_of(rewards: Tensor, group_size: int) -> Tensor:
    """How much better a completion is than the others of its prompt, in standard deviations."""
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def loss_of(new: Tensor, old: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """The clipped loss of GRPO (Shao et al. 2024, arXiv:2402.03300), of completions of one length.

    Args:
        new: log-probabilities by the weights that are trained, ``[samples, length]``.
        old: by the weights that generated the tokens; they may be older.
        advantages: ``[samples]``.
    """
    ratio = (new - old).exp()  # GRPO: 1, unless the weights are older or compute differently
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.min(ratio * advantages[:, None], clipped * advantages[:, None]).mean()


# ---------------------------------------------------------------------- from rank to rank
def list_units(model: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """The units of FSDP, the root at last, each with the names of its own parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    units = []
    for unit in (*units_of(model), model):
        units.append((unit, [names.pop(p) for p in unit.parameters() if p in names]))
    return units


class Link:
    """Between trainers and generators: ``wire``, a group of rank 0 and the generators, and the
    group of all ranks. All ranks make it, and call its methods in the same order.

    Args:
        model: before ``fully_shard``, which does not change the names of its parameters.
    """

    def __init__(self, args, model: nn.Module, trainers: int, device: torch.device):
        world_size = dist.get_world_size()
        self.model = model
        self.units = list_units(model)
        self.on_wire = dist.get_rank() in (0, *range(trainers, world_size))
        # GRPO: every rank makes the group, also one that is not in it
        self.wire = dist.new_group([0, *range(trainers, world_size)])
        self.order = torch.zeros(2, dtype=torch.int64, device=device)
        every = args.generators
        self.shares = {trainers + i: slice(i, None, every) for i in range(every)}
        zeros = torch.zeros(args.prompts * args.group_size, args.length, device=device)
        self.batch = zeros.long(), zeros, zeros[:, 0].long()  # tokens, log-probabilities, versions

    def send(self, tensor: Tensor) -> None:
        """Copy a tensor of rank 0 to the generators."""
        if self.on_wire:
            dist.broadcast(tensor, src=0, group=self.wire)

    def sync(self, version: int = 0, batches: int = 0) -> tuple[int, int]:
        """Copy the trainers' weights to the generators, which make so many batches with them; if
        none, they end. Returns what the trainers have passed: generators pass nothing. The
        version is the number of steps that made the weights."""
        self.order.copy_(torch.tensor([version, batches]))
        self.send(self.order)  # GRPO: so generators need not know when the trainers are done
        version, batches = self.order.tolist()
        for unit, names in self.units if batches else ():
            if isinstance(unit, FSDPModule):
                unit.unshard()  # GRPO: an all-gather of this unit, among the trainers
            for name in names:  # GRPO: both sides have it in the dtype of --dtype
                self.send(self.model.get_parameter(name).detach())
            if isinstance(unit, FSDPModule):
                unit.reshard()  # GRPO: so that no trainer ever has the whole model
        for buffer in self.model.buffers() if batches else ():  # GRPO: which FSDP leaves whole
            self.send(buffer)
        return version, batches

    def exchange(self, made: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        """A batch of all generators: tokens and log-probabilities ``[samples, length]``, and the
        version of the weights of each completion. A generator passes what it has made."""
        for source, share in self.shares.items():
            for index, rows in enumerate(self.batch):
                part = made[index] if source == dist.get_rank() else rows[share].contiguous()
                dist.broadcast(part, src=source)  # GRPO: no sends, of which the order would matter
                rows[share] = part
        return self.batch


def generate_until_told(args, model: nn.Module, link: Link, device: torch.device) -> None:
    """What a generator does."""
    share = link.shares[dist.get_rank()]
    while True:
        version, batches = link.sync()
        if not batches:
            return
        for step in range(version, version + batches):  # GRPO: also while the trainers train
            prompts = draw_prompts(args, step)[share].to(device)
            uniform = draw_uniform(args, step, range(args.prompts * args.group_size)[share])
            tokens, logprobs = generate(model, prompts, uniform.to(device), args.temperature)
            link.exchange((tokens, logprobs, torch.full_like(tokens[:, 0], version)))


def train(args, model: nn.Module, link: Link, group: dist.ProcessGroup, device) -> None:
    """What a trainer does; ``group`` is that of all trainers."""
    optimizer = common.make_optimizer(args, model)
    mine = slice(group.rank(), None, group.size())  # DDP: rank r of N takes every N-th sample
    version = 0
    model.train()
    for step in range(args.max_steps):
        if step % args.sync_every == 0:
            version, _ = link.sync(step, min(args.sync_every, args.max_steps - step))
        tokens, old, versions = link.exchange()
        if (versions != version).any():  # GRPO: stale weights would be a silent mistake
            raise RuntimeError(f"completions of versions {versions.unique()}, not of {version}")
        prompts = draw_prompts(args, step).to(device)
        rewards = rewards_of(prompts, tokens)
        advantages = advantages_of(rewards, args.group_size)
        optimizer.zero_grad()  # otherwise gradients would accumulate
        new = logprobs_of(model, prompts[mine], tokens[mine], args.temperature)
        share = len(new) * group.size() / len(old)  # GRPO: of two trainers, one may have one more
        loss = loss_of(new, old[mine], advantages[mine], args.clip) * share
        loss.backward()  # FSDP: all-gathers again, and reduce-scatters each block's gradients
        if args.clip_grad:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        if (step + 1) % args.print_freq == 0 or step + 1 == args.max_steps:
            ratio = (new.detach() - old[mine]).exp()
            mean = ratio.sum() / old.numel()
            most = (ratio - 1).abs().max()
            dist.all_reduce(mean, group=group)
            dist.all_reduce(most, dist.ReduceOp.MAX, group)
            age = step - version
            common.print0(
                f"step {step + 1}: reward {rewards.mean():.4f}, completions {age} steps "
                f"off-policy, mean ratio {mean:.4f}, at most {most:.2g} from 1"
            )
    link.sync()  # GRPO: no more batches, so the generators end


def check_ranks(args, ranks: int) -> int:
    """The number of trainers, or a one-line error if the ranks cannot share the work."""
    samples = args.prompts * args.group_size
    trainers = ranks - args.generators
    if trainers < 1:
        why = f"--generators {args.generators} leaves no trainer of {ranks} ranks"
        common.fail(f"{why}; use --nproc_per_node={args.generators + 1} or more")
    if samples < max(trainers, args.generators):
        what = f"--prompts {args.prompts} x --group-size {args.group_size} = {samples} completions"
        common.fail(f"{what} are too few for {ranks} ranks; use more of them, or fewer ranks")
    return trainers


def read_flags() -> common.Settings:
    """The settings, of which this script has only ``FLAGS`` and its own."""
    parser = common.argument_parser(__doc__, only_gpt=True, only=FLAGS.split())
    parser.add_argument("--local-rank", "--local_rank")  # FSDP: torch.distributed.launch passes it
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32",
        help="dtype of compute and of the weights that are sent (default: float32)",
    )  # fmt: skip
    # fmt: off
    flag = parser.add_argument
    number = common.number
    flag("--generators", type=number(int, 1), default=1, metavar="N",
         help="ranks that generate, the last ones (default: 1)")
    flag("--sync-every", type=number(int, 1), default=1, metavar="K",
         help="send the weights every K steps; completions are up to K - 1 steps old (default: 1)")
    flag("--prompts", type=number(int, 1), default=8, metavar="N",
         help="prompts of a step (default: 8)")
    flag("--group-size", type=number(int, 2), default=8, metavar="N",
         help="completions of each prompt (default: 8)")
    flag("--length", type=number(int, 1), default=12, metavar="N",
         help="tokens of a completion (default: 12)")
    flag("--temperature", type=number(float, 0, above=0), default=1.0, metavar="X",
         help="divides the logits, of generators and trainers (default: 1)")
    flag("--clip", type=number(float, 0, above=0), default=0.2, metavar="X",
         help="limit of the ratio of probabilities: from 1 - X to 1 + X (default: 0.2)")
    # fmt: on
    parser.set_defaults(dataset="synthetic", dropout=0.0, schedule="none", max_steps=60)
    args = common.parse_args(parser)
    return common.replace(args, context=PROMPT + args.length)


@record  # torchrun: shows the traceback of the rank that failed first
def main():
    # 1. Process and device
    args = read_flags()
    common.prepare_process(args)
    if "RANK" not in os.environ:  # torchrun: sets these; without it, there is one process
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = common.get_device(args, local_rank)  # DDP: one device per local rank
    if device.type == "cuda":
        torch.cuda.set_device(device)  # DDP: otherwise every rank also allocates memory on GPU 0
    trainers = check_ranks(args, int(os.environ["WORLD_SIZE"]))
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
    common.compare_flags(args)  # GRPO: as announce() does, which is about a data set
    common.seed_everything(args.seed + rank, args.deterministic)  # DDP: dropout differs by rank
    trains = rank < trainers  # GRPO: the first ranks; the others generate

    # 2. Model
    with torch.device("meta"):  # FSDP: shapes only: no rank holds the whole model
        model = common.make_model(args, LETTERS)
    # GRPO: all ranks make both groups, in this order
    train_group = dist.new_group(range(trainers))
    link = Link(args, model, trainers, device)
    common.hangs.listen(args.timeout)  # GRPO: sets the timeout of these groups, too
    half = args.dtype == "bfloat16"
    size = sum(p.numel() * (2 if half else p.itemsize) for p in model.parameters()) / 1e6
    common.print0(
        f"pytorch_GRPO: {world_size} x {common.device_name(device)} ({dist.get_backend()}), "
        f"{args.model}: {trainers} train, {args.generators} generate; per step "
        f"{args.prompts} x {args.group_size} completions; {size:,.1f} MB of weights per sync"
    )
    if trains:
        mesh = DeviceMesh.from_group(train_group, device.type)  # GRPO: FSDP among the trainers
        policy = MixedPrecisionPolicy()
        if half:  # FSDP: gathers and computes in bfloat16, reduces in fp32
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for unit in units_of(model):  # FSDP: blocks, embedding, head: gathered one at a time
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)  # FSDP: the other parameters
        model.to_empty(device=device)  # FSDP: memory for this rank's shards
        common.init_weights(args, model, LETTERS)  # FSDP: each rank fills its shards
    else:
        for weight in model.parameters() if half else ():  # GRPO: as FSDP gathers them
            weight.data = weight.to(torch.bfloat16)
        model.to_empty(device=device)  # GRPO: the trainers send the weights
        if args.tie:
            model.head.weight = model.token.weight  # GRPO: to_empty() has separated them

    # 3. Train and generate
    if trains:
        train(args, model, link, train_group, device)
    else:
        generate_until_told(args, model, link, device)

    # 4. Save
    if trains:
        whole = sd.StateDictOptions(full_state_dict=True, cpu_offload=True)
        # FSDP: gathered on rank 0, on the CPU
        weights = sd.get_model_state_dict(model, options=whole)
        if rank == 0:
            common.save_model(args, weights)
    common.wait_for_gloo()
    # DDP: leave together. Not in a finally block: after an error on one rank, nccl would wait for
    # the others, which are in the middle of a collective, and the error would stay hidden.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
