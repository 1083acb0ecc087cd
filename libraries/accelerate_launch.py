"""Checks that the file given to `accelerate launch` suits the script that it starts."""

import os

from harness.cli import fail
from harness.world import this_script

KINDS = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED"}
SETTINGS = {  # environment variable of the launcher, its name in the file, and the expected value
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision", "no"),
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", "no"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("gradient_accumulation_steps", "1"),
    "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", "false"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("fsdp_activation_checkpointing", "false"),
}


def check_launch(needed: str | None = None) -> None:
    """Reject a missing file, a file for another kind of training than ``needed`` (FSDP or
    DEEPSPEED), and settings that would change what this script demonstrates."""
    found = [kind for name, kind in KINDS.items() if os.environ.get(name, "").lower() == "true"]
    ours = f"config/{this_script()}.yml"
    if found != ([needed] if needed else []):
        theirs = f"a file with distributed_type {found[0]}" if found else "no file of its kind"
        use = f"accelerate launch --config_file {ours} {this_script()}.py"
        fail(f"{this_script()}.py was started with {theirs}; use {use}")
    settings = SETTINGS | ({"FSDP_VERSION": ("fsdp_version", "2")} if needed == "FSDP" else {})
    for variable, (name, value) in settings.items():
        theirs = os.environ.get(variable, "unset" if name == "fsdp_version" else value)
        if theirs.lower() != value:
            where = f"in the file of accelerate launch, or {variable} in the environment"
            needs = f"{this_script()}.py needs {value}"
            fail(f"{name} is {theirs} {where}, and {needs}; set it as in {ours}")
