"""The raw scripts and their parents."""

PARENTS = {  # each script, and the one that it is a diff against
    "DDP_by_hand": "SingleGPU",
    "ZeRO_by_hand": "DDP_by_hand",
    "FSDP_by_hand": "ZeRO_by_hand",
    "half_precision": "SingleGPU",
    "auto_mixed_precision": "SingleGPU",
    "DP": "SingleGPU",
    "DDP": "SingleGPU",
    "torchrun_DDP": "DDP",
    "FSDP": "torchrun_DDP",
    "DDP_ZeRO": "torchrun_DDP",
    "DeepSpeed": "torchrun_DDP",
    "DDP_AMP": "torchrun_DDP",
    "gradient_accumulation": "torchrun_DDP",
    "comm_hooks": "torchrun_DDP",
    "activation_checkpointing": "torchrun_DDP",
    "compile": "torchrun_DDP",
    "HSDP": "FSDP",
    "FSDP_offload": "FSDP",
    "checkpoint": "FSDP",
    "Muon": "FSDP",
    "float8": "FSDP",
    "TP": "torchrun_DDP",
    "FSDP_TP": "TP",
    "PP": "torchrun_DDP",
    "CP": "torchrun_DDP",
    "ND_parallel": "FSDP_TP",
    "EP": "torchrun_DDP",
    "LocalSGD": "torchrun_DDP",
}
DEFINITIONS = {  # that a page shows instead of tagged lines
    "DDP_by_hand": ("Bucket",),
    "ZeRO_by_hand": ("send", "gather"),
    "FSDP_by_hand": ("gather", "free", "after_forward"),
}
# On docs/model_parallelism.md and docs/parallelism.md
BEYOND = ("TP", "FSDP_TP", "PP", "CP", "EP", "LocalSGD", "ND_parallel")
