"""The one list of techniques: each script, its parent, its place in the course, and its theory.

Whatever enumerates techniques reads this file. It imports nothing of the project but the formulas
of theory.py.

    LESSONS                 every row, in the order of the course
    TECHNIQUES, LIBRARIES   those that train with raw PyTorch, and those that use a library
    technique("HSDP")       one row, also by "pytorch_HSDP" or "pytorch_HSDP.py"

In a row, ``keeps`` and ``sends`` are the bytes per parameter of the model that a rank of n keeps
between two steps, by kind, and sends in a step, by collective, in fp32:

    row.keeps(4, {"shard": 2, "dtype": "float32", "optimizer": "adamw"})
        -> {"parameters": 2.0, "gradients": 2.0, "optimizer": 4.0}
    row.sends(4, ...) -> {"allgather": 4.0, "reduce_scatter": 2.0, "allreduce": 2.0}

Kinds are named as in ``state_bytes`` of a ``result.json``, collectives as in ``estimator/sent.py``.
``options``: the script's flags; ``optimizer``, "sgd" (with momentum) or "adamw"; ``decoder``, as of
``theory.decoder``. ``sends`` returns ``None`` where no formula is exact.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from theory import (
    Bytes,
    Options,
    averaged,
    both,
    by_autograd,
    context_parallel,
    deepspeed,
    gathered,
    half_precision,
    in_half,
    lightning,
    local,
    lora,
    low_bit,
    mesh,
    muon,
    nothing,
    others,
    replicated,
    sharded,
    zero,
    zero_by_hand,
)


class Case(NamedTuple):
    """Flags of a script that are proven, and maybe predicted, separately. Its traits:

    full       proven only for the proof
    branch     computes by a branch of its own: the usual tests prove it beside the first case
    sgd        the usual test trains with SGD, and not with AdamW
    tied       also proven with a token embedding that is the head
    splits     embedding and head are on different ranks, or in shards: tied is proven usually
    llama      also proven with a Llama, by the usual tests unless it is the first case
    rounds     computes in lower precision
    scaled     also proven in float16, with a scaled loss
    stopped    the usual tests stop it, and its weights are those of a run that nobody stopped
    stopped_twice  the same, with two stops in an epoch
    stopped_last   the same, with a stop in the last step
    killed     the same, with a kill while a snapshot may be written
    estimated  in the table of estimate.py
    alone      in this table also on one GPU
    """

    flags: str
    ranks: tuple[int, ...]  # that are proven: the first always, all for the proof
    traits: frozenset[str] = frozenset()


class Technique(NamedTuple):
    """A row. Its traits:

    one_process   one process trains, without a launcher
    needs_gpt     trains language models only
    rounds        computes in lower precision in each case
    differs       ends with other weights than one process by design
    unclipped     refuses --clip-grad
    no_training   is no training script, or does not train on batches of data
    saved_alike   saves and resumes with the same code as another row, whose usual tests suffice
    loaded_alike  loads --weights with the same code as another row, whose usual test suffices
    resumed_alike  resumes to the same bits if another row does: the usual test resumes it only on
                  another number of ranks
    by_parameter  goes through the parameters itself: usual tests freeze some, which it leaves alone
    whole         its ranks compute the same activations, so dropout has one seed for all of them
    images        treats images in a way of its own, in which the usual tests train them, too
    own_files     resumes from files that no other script writes
    """

    script: str  # without .py
    parent: str  # name of the script that it is a diff against; for a library, that it equals
    part: str  # of the course, one of PARTS; or SHELF, or LIBRARY
    keeps: Callable[[int, Options], Bytes]
    sends: Callable[[int, Options], Bytes | None]
    cases: tuple[Case, ...]  # the first is the one that lists show
    traits: frozenset[str] = frozenset()
    shows: tuple[str, ...] = ()  # definitions that its page shows instead of its diff
    unsolved: str = ""  # what the next page of the course answers: one sentence
    unpredicted: str = ""  # why estimate.py has no row for it; otherwise a case is estimated

    @property
    def name(self) -> str:
        return self.script.removeprefix("pytorch_")


def case(flags: str = "", *ranks: int, traits: str = "") -> Case:
    return Case(flags, ranks or (2,), frozenset(traits.split()))


def row(script, parent, part, keeps, sends, *cases, traits="", **more) -> Technique:
    return Technique(script, parent, part, keeps, sends, cases, frozenset(traits.split()), **more)


PARTS = "Before you start", "One GPU", "Data parallelism", "Sharding", "Model parallelism"
START, ONE, DATA, SHARD, MODEL, USE = PARTS = (*PARTS, "In production")
SHELF = "More techniques"
LIBRARY = "Libraries"
SCHEDULE = "--pipeline-schedule {}".format
BFLOAT16 = "--dtype bfloat16"
STAGE = "--deepspeed_config config/zero_stage{}_config.json".format
WHOLE = (replicated, averaged)
FSDP = (sharded, gathered)
HALF = case(BFLOAT16, 2, traits="rounds estimated")
LESSONS = [
    row("pytorch_collectives", "", START, nothing, nothing, case(), traits="no_training",
        unsolved="Before you split the memory of a training step, you have to know what fills it."),
    row("pytorch_SingleGPU", "", ONE, replicated, nothing,
        case("", 1, traits="stopped_twice estimated alone"), traits="one_process loaded_alike",
        unsolved="Every number takes four bytes, and matrix products in float32 are slow."),
    row("pytorch_auto_mixed_precision", "SingleGPU", ONE, replicated, nothing,
        case(BFLOAT16, 1, traits="estimated alone scaled"),
        traits="one_process rounds loaded_alike", unsolved="One GPU computes the whole batch."),
    row("pytorch_half_precision", "SingleGPU", ONE, half_precision, nothing,
        case(BFLOAT16, 1, traits="estimated alone"),
        case(f"{BFLOAT16} --master-weights", 1, traits="branch scaled"),
        traits="one_process rounds by_parameter"),
    row("pytorch_DDP_by_hand", "SingleGPU", DATA, *WHOLE,
        case("", 2, 1, 3, 4, traits="estimated"), traits="saved_alike by_parameter",
        shows=("Bucket",)),
    row("pytorch_DP", "SingleGPU", DATA, replicated, nothing,
        case("", 1, traits="full estimated"), traits="one_process saved_alike"),
    row("pytorch_DDP", "SingleGPU", DATA, *WHOLE,
        case("", 2, traits="full estimated"), traits="saved_alike"),
    row("pytorch_torchrun_DDP", "DDP", DATA, *WHOLE,
        case("", 2, 1, 3, 4, traits="estimated tied llama"), traits="loaded_alike images",
        unsolved="A rank's part of the batch may still be too large for its memory."),
    row("pytorch_DDP_AMP", "torchrun_DDP", DATA, *WHOLE,
        case(BFLOAT16, 2, traits="estimated scaled"), traits="rounds saved_alike"),
    row("pytorch_gradient_accumulation", "torchrun_DDP", DATA, *WHOLE,
        case("--accumulate 4", 4, 2, traits="estimated alone"), traits="saved_alike",
        unsolved="Every rank keeps a whole copy of parameters, gradients and optimizer state."),
    row("pytorch_ZeRO_by_hand", "DDP_by_hand", SHARD, *both(zero_by_hand), case("", 2, 1, 3, 4),
        case("--stage 2", 3, 1, 2, 4, traits="branch estimated"),
        traits="loaded_alike resumed_alike by_parameter", shows=("send", "gather")),
    row("pytorch_DDP_ZeRO", "torchrun_DDP", SHARD, *both(zero),
        case("--use_zero", 3, 1, 2, 4, traits="estimated tied"),
        traits="loaded_alike resumed_alike",
        unsolved="Every rank still keeps all parameters and gradients."),
    row("pytorch_FSDP_by_hand", "ZeRO_by_hand", SHARD, sharded,
        lambda n, o: {"allgather": 8 * others(n), "reduce_scatter": 4 * others(n)},
        case("", 3, 1, 2, 4, traits="stopped_last tied llama estimated"),
        traits="by_parameter", shows=("send", "gather", "free", "after_forward")),
    row("pytorch_FSDP", "torchrun_DDP", SHARD, *FSDP,
        case("", 2, 1, 3, 4, traits="killed estimated tied llama"),
        case(BFLOAT16, 2, traits="branch rounds estimated"),
        unsolved="Most of the memory that is left holds activations, which FSDP does not shard."),
    row("pytorch_activation_checkpointing", "torchrun_DDP", SHARD, *WHOLE,
        case("", 2, 1, traits="estimated alone"), case("--selective", 2),
        case("--offload", 2, traits="estimated alone"), traits="saved_alike",
        unsolved="Between machines the network is slow, and FSDP gathers every block across it."),
    row("pytorch_HSDP", "FSDP", SHARD, *FSDP, case("--shard 2", 4, 2),
        case("--shard 8", 16, traits="full estimated"),
        case(f"{BFLOAT16} --shard 2", 2, traits="rounds"), traits="saved_alike",
        unsolved="The shards may not fit on the GPUs of all machines."),
    row("pytorch_FSDP_offload", "FSDP", SHARD, *FSDP, case("", 2, 1, traits="estimated alone"),
        case(BFLOAT16, 2, traits="rounds"), traits="saved_alike",
        unsolved="A block is gathered whole, and every rank needs a sequence."),
    row("pytorch_TP_by_hand", "torchrun_DDP", MODEL,
        *both(mesh, lambda n, o: {"tp": n, "by_vocabulary": 1}),
        case("", 3, 2, 4, traits="tied llama estimated"),
        traits="needs_gpt saved_alike by_parameter whole", shows=("Copy", "Sum")),
    row("pytorch_TP", "torchrun_DDP", MODEL,
        *both(mesh, lambda n, o: {"tp": n, "size": in_half(o, 3)}),  # gradients' sums are in fp32
        case("", 3, 2, 4, traits="sgd estimated llama"),
        case("--sequence-parallel", 2, 3, 4, traits="tied splits llama"), HALF,
        traits="needs_gpt saved_alike whole",
        unsolved="Every block waits for all-reduces, which slow links delay."),
    row("pytorch_PP", "torchrun_DDP", MODEL, *both(mesh, lambda n, o: {"pp": n, "size": 4}),
        case(SCHEDULE("1f1b"), 3, 1, 2, 4, traits="sgd tied splits estimated"),
        case(SCHEDULE("gpipe"), 2, 1, 3, 4), case(SCHEDULE("interleaved"), 2, 1, 3, 4),
        case(SCHEDULE("zbv"), 2, 1, 3, 4, traits="tied llama"),
        case(SCHEDULE("dualpipev"), 2, 1, 3, 4), HALF,
        traits="needs_gpt resumed_alike by_parameter",
        unsolved="The activations of one long sequence still have to fit on the GPUs of a stage."),
    row("pytorch_PP_by_hand", "PP", MODEL, *both(mesh, lambda n, o: {"pp": n, "size": 4}),
        case("", 3, 1, 2, 4, traits="sgd killed tied estimated"),
        case("--pipeline-schedule gpipe", 2, 3), traits="needs_gpt saved_alike by_parameter",
        shows=("backward", "step")),
    row("pytorch_CP", "torchrun_DDP", MODEL, *both(context_parallel),
        case("--attention ring", 3, 1, 2, 4, traits="sgd llama estimated"),
        case("--attention allgather", 2, 1, 3, 4, traits="branch llama"),
        case("--attention ulysses", 3, 1, 2, 4, traits="branch llama"), HALF,
        traits="needs_gpt saved_alike",
        unsolved="Every token passes through all parameters, so a larger model is a slower one."),
    row("pytorch_EP", "FSDP", MODEL,
        *both(mesh, lambda n, o: {"dp_shard": n, "ep": o.get("ep") or n}),
        case("--experts 6", 3, 2, traits="sgd"),
        case("--ep 2 --experts 8 --top-k 2", 4, traits="estimated"),
        case("--experts 4 --balance 0", 2, 4, traits="llama"),
        case("--ep 2 --experts 4 --balance bias", 4, 2),
        case(f"--experts 4 {BFLOAT16}", 2, traits="rounds"),
        traits="needs_gpt saved_alike",
        unsolved="Each technique splits one dimension, and the links between machines are slower."),
    row("pytorch_FSDP_TP", "TP", MODEL, *both(mesh, lambda n, o: {"dp_shard": n // o["tp"]}),
        case("--tp 2", 4, 2, traits="estimated"), case("--tp 1", 2, traits="full"),
        case("--tp 2 --sequence-parallel", 4, traits="llama"), case("--tp 3", 3, traits="full"),
        case(f"--tp 2 --sequence-parallel {BFLOAT16}", 4, traits="rounds"),
        traits="needs_gpt saved_alike whole", unsolved="Pipelines and experts need more."),
    row("pytorch_ND_parallel", "FSDP_TP", MODEL, *both(mesh), case("--dp-shard 2 --tp 2", 4),
        case("--tp 2 --pp 2", 4), *(case(flags, 4) for flags in (
            "--pp 2 --cp 2", "--dp-replicate 2 --dp-shard 2 --ac full", "--keep-last --prefetch 2",
            "--reshard-after-forward 2 --prefetch 1", "--reshard-after-forward no",
            "--ep 2 --experts 8 --top-k 2", "--ep 2 --tp 2 --experts 4 --balance bias",
            "--ep 2 --pp 2 --experts 4 --balance 0", "--ep 4 --cp 2 --experts 4 --ac full")),
        case("--cp 2 --ac full --offload-activations --loss-chunks 5", 2, traits="llama"),
        case(f"{BFLOAT16} --ac full", 4, traits="rounds estimated"),
        traits="needs_gpt loaded_alike resumed_alike",
        shows=("apply_techniques",), unsolved="So many dimensions are a choice to make."),
    row("pytorch_compile", "torchrun_DDP", USE, *WHOLE, case("--blocks", 2),
        unpredicted="the compiler chooses what is saved for backward",
        unsolved="A run may be interrupted."),
    row("pytorch_checkpoint", "FSDP", USE, *FSDP, case("", 2, 3),
        case("--async-save", 2, traits="stopped"), traits="loaded_alike own_files",
        unpredicted="its step takes what FSDP's takes",
        unsolved="The ranks of a large run are on several machines."),
    row("pytorch_comm_hooks", "torchrun_DDP", SHELF, replicated,
        lambda n, o: None if o["comm_hook"] == "powersgd" else {"allreduce": 4 * others(n)},
        case("--comm-hook bf16", 2, 4, traits="estimated"),
        case("--comm-hook fp16", 2),
        case("--comm-hook powersgd", 2, traits="branch"),  # its size: by each matrix's shape
        traits="rounds saved_alike"),
    row("pytorch_LocalSGD", "torchrun_DDP", SHELF, *both(local), case(traits="estimated"),
        case("--sync-every 3 --outer-momentum 0.9", 2, traits="killed"), traits="differs",
        shows=("CommonWeights",)),
    row("pytorch_fault_tolerance", "FSDP", SHELF, *FSDP, case("", 2, traits="full"),
        traits="needs_gpt saved_alike loaded_alike resumed_alike", shows=("decide", "average"),
        unpredicted="a replica takes what FSDP takes on its ranks, and its gradients twice more"),
    row("pytorch_chunked_loss", "FSDP", SHELF, sharded, partial(gathered, ends=0.5),  # head once
        case("", 2, 1, 3, 4, traits="estimated tied llama"),
        case("--fused", 2, 1, 3, 4, traits="branch"), HALF, traits="needs_gpt saved_alike"),
    row("pytorch_SimpleFSDP_by_hand", "FSDP", SHELF, sharded, by_autograd,
        case("", 2, 1, 3, 4, traits="tied llama"), traits="saved_alike by_parameter",
        shows=("shard_parameters", "gather", "gather_when_read", "keep_shard", "gather_again"),
        unpredicted="it keeps what FSDP keeps, and communicates while nothing computes"),
    row("pytorch_optimizer_in_backward", "FSDP", SHELF,
        lambda n, o: sharded(n, o) | {"gradients": 0}, gathered,
        case("", 2, 1, 3, 4, traits="estimated alone tied llama"), HALF,
        traits="unclipped saved_alike by_parameter"),
    row("pytorch_DeepSpeed", "torchrun_DDP", SHELF, *both(deepspeed),
        *(case(STAGE(stage), 2, 1, 4, traits="estimated alone") for stage in (2, 3)),
        case(STAGE(0), 2, 1, 4), case(STAGE(1), 2, 1, 4)),
    row("pytorch_LoRA", "FSDP", SHELF, *both(lora),
        case("", 2, 1, 3, 4, traits="stopped estimated tied llama"), HALF,
        traits="needs_gpt own_files"),
    row("pytorch_QLoRA", "LoRA", SHELF, *both(lora), case("", 2, 1, 3, 4, traits="tied llama"),
        HALF, traits="needs_gpt saved_alike own_files"),
    row("pytorch_GRPO", "FSDP", SHELF, nothing, nothing, case("", 4),
        traits="needs_gpt no_training", shows=("sync", "exchange", "loss_of")),
    row("pytorch_float8", "FSDP", SHELF, sharded,
        lambda n, o: gathered(n, {**o, "dtype": "bfloat16"}), case(),
        traits="needs_gpt rounds saved_alike",
        unpredicted="without a GPU, float8 is emulated with other tensors"),
    row("pytorch_Muon", "FSDP", SHELF, *both(muon), case("", 2, 1, 3, 4, traits="estimated"), HALF,
        traits="needs_gpt loaded_alike by_parameter"),
    row("pytorch_low_bit_optimizer", "FSDP", SHELF, *both(low_bit),
        case("", 2, 1, 3, 4, traits="estimated"),
        case(f"{BFLOAT16} --bf16-weights", 2, traits="rounds estimated"),
        traits="needs_gpt own_files", shows=("round_to", "pack", "update")),
    row("pytorch_DTensor", "", SHELF, nothing, nothing, case("", 4), traits="no_training"),
    row("accelerate_DDP", "torchrun_DDP", LIBRARY, *WHOLE, case()),
    row("lightning_Fabric", "torchrun_DDP", LIBRARY, *WHOLE, case()),
    row("lightning_Trainer", "torchrun_DDP", LIBRARY, *both(lightning), case(),
        case("--strategy fsdp"), case("--strategy deepspeed_stage_2")),
    row("transformers_Trainer", "torchrun_DDP", LIBRARY, *WHOLE, case()),
    row("accelerate_FSDP", "FSDP", LIBRARY, sharded, partial(gathered, ends=0), case()),
    row("accelerate_DeepSpeed", "DeepSpeed", LIBRARY, *both(deepspeed), case(STAGE(2))),
]  # fmt: skip
LIBRARIES = [one for one in LESSONS if one.part == LIBRARY]
TECHNIQUES = [x for x in LESSONS if x not in LIBRARIES and "no_training" not in x.traits]


def technique(name: str) -> Technique:
    """The row of a script; the name with or without ``pytorch_`` and ``.py``."""
    name = name.removesuffix(".py").removeprefix("pytorch_")
    return next(one for one in LESSONS if one.name == name)
