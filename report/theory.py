"""State bytes per parameter of a rank, in theory (docs/proof.md) and as counted in a run."""

import itertools
import json
import re
import shlex
from pathlib import Path

from report.results import ROOT

RAW = {  # a library's script, and the equivalent raw script
    "accelerate_DDP": "pytorch_torchrun_DDP",
    "lightning_Fabric": "pytorch_torchrun_DDP",
    "lightning_Trainer": "pytorch_torchrun_DDP",
    "transformers_Trainer": "pytorch_torchrun_DDP",
    "accelerate_FSDP": "pytorch_FSDP",
    "accelerate_DeepSpeed": "pytorch_DeepSpeed",
}


def theory(words: list[str], ranks: int, optimizer: str) -> dict[str, float]:
    """State bytes per parameter of a rank after a step of a command.

    DeepSpeed's copies are included if its script counts them, in addition to parameters, gradients
    and optimizer.
    """
    script = next(Path(word).stem for word in words if word.endswith(".py"))
    script = RAW.get(script, script)
    k = {"sgd": 4, "adamw": 8}[optimizer]
    kept = {"parameters": 4, "gradients": 4, "optimizer": k}
    if script == "pytorch_half_precision":
        kept = {"parameters": 2, "gradients": 2, "optimizer": k / 2}
        if "--master-weights" in words:
            kept |= {"optimizer": k, "master_weights": 4}
    if script in ("pytorch_FSDP", "pytorch_FSDP_by_hand", "pytorch_FSDP_offload", "pytorch_HSDP"):
        shards = int(words[words.index("--shard") + 1]) if "--shard" in words else ranks
        kept = {name: value / shards for name, value in kept.items()}
    if script == "pytorch_DDP_ZeRO" and {"--use_zero", "--use-zero"} & set(words):
        kept["optimizer"] /= ranks
    if script == "pytorch_ZeRO_by_hand":
        kept["optimizer"] /= ranks
        if "--stage 2" in " ".join(words):
            kept["gradients"] /= ranks
    if script == "pytorch_DeepSpeed":
        config = ROOT / words[words.index("--deepspeed_config") + 1]
        stage = json.loads(config.read_text())["zero_optimization"]["stage"]
        if stage >= 1:
            kept["optimizer"] /= ranks
            kept["gradients"] /= ranks
            kept["fp32_copy"] = 4 / ranks
        if stage == 3:
            kept["parameters"] /= ranks
            kept["gradient_buffer"] = 4 / ranks
    return kept


GPTS = {"gpt-nano": (4, 128), "gpt-mini": (6, 384), "gpt2": (12, 768)}  # layers, width


def share_of_gpt(words: list[str], run: dict) -> float:
    """The largest share of a GPT's parameters on any rank, where the split is uneven."""
    shape = re.search(r"(\d+)x\d+x(\d+)", run["model"])
    layers, width = map(int, shape.groups()) if shape else GPTS[run["model"]]
    script = next(Path(word).stem for word in words if word.endswith(".py"))
    n, whole = run["world_size"], run["parameters"]
    ends = whole - layers * (12 * width**2 + 4 * width)  # embeddings; norm and head
    flags, matrices = dict(itertools.pairwise(words)), 12 * layers * width**2
    if script == "pytorch_TP":
        if "--sequence-parallel" in words:
            matrices += ends - 2 * width
        return (matrices / n + whole - matrices) / whole
    if script == "pytorch_FSDP_TP":
        rows = n // int(flags.get("--tp", 2))
        return (matrices / n + (whole - matrices) / rows) / whole
    if script == "pytorch_PP":
        apart = abs(run["context"] - 2) * width  # difference between the first and the last rank
        held = ends if n == 1 or {"zbv", "dualpipev"} & set(words) else (ends + apart) / 2
        return ((whole - ends) / n + held) / whole
    if script == "pytorch_EP":
        experts = 8 * layers * width**2 * int(flags.get("--experts", 8))
        return (experts / n + whole - experts) / whole
    return 1.0


def kept_bytes(run: dict) -> tuple[float, float]:
    """State bytes per parameter of a rank: measured, and by theory."""
    words = shlex.split(run["command"])
    expected = sum(theory(words, run["world_size"], run["optimizer"]).values())
    if run["model"].startswith("gpt"):
        expected *= share_of_gpt(words, run)
    if "--outer-momentum" in words or "--outer-lr" in words:
        expected += 8  # the last common weights, and their momentum
    return sum(run["state_bytes"].values()) / run["parameters"], expected
