"""What `accelerate launch` was told by its file: whether it suits the script that it starts."""

import os

from harness.command_line import fail
from harness.ranks import SCRIPT

KINDS = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED"}


def check_launch(needed: str | None = None) -> None:
    """Report a file of another kind of training, or none where one is needed; and settings that
    this script would not obey.

    Args:
        needed: FSDP or DEEPSPEED.
    """
    found = [kind for name, kind in KINDS.items() if os.environ.get(name, "").lower() == "true"]
    ours = f"config/{SCRIPT}.yml"
    if found != ([needed] if needed else []):
        theirs = f"a file with distributed_type {found[0]}" if found else "no file of its kind"
        fail(
            f"{SCRIPT}.py was started with {theirs}; use accelerate launch --config_file {ours} "
            f"{SCRIPT}.py"
        )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no" and needed != "DEEPSPEED":  # which has its own file for that
        fail(
            f"mixed_precision is {precision} in the file of accelerate launch, and this script "
            f"computes in float32; use mixed_precision: 'no', as in {ours}"
        )
    version = os.environ.get("FSDP_VERSION", "1")
    if needed == "FSDP" and version != "2":
        fail(f"fsdp_version is {version} in the file of accelerate launch; use 2, as in {ours}")
