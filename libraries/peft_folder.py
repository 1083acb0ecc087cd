"""LoRA: which layers of a model have an adapter, and the files in which the library peft has them,
in the folder adapter/ of a run: beside a merged model, transformers would add them once more.

    adapter_config.json         rank, alpha, and the last part of the names of the layers
    adapter_model.safetensors   base_model.model.LAYER.lora_A.weight [rank, in], lora_B.weight

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import itertools
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from harness.cli import fail, import_optional, number
from harness.measure import whole
from harness.settings import fill, replace
from harness.snapshots import delivery
from harness.storage import local_folder
from harness.world import print0
from libraries.hub import read_weights, their_names
from libraries.weights import one_line_errors

FOLDER = "adapter"
CONFIG = "adapter_config.json"
FILE = "adapter_model.safetensors"
USUAL = {"rank": 8, "alpha": 16.0, "targets": "query,value"}
PLAIN = {"peft_type": "LORA", "bias": "none", "fan_in_fan_out": False, "modules_to_save": None}
PLAIN |= {"use_dora": False, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
# Entries that do not change what an adapter computes. Any other one has to be empty: peft has more
# variants with each version, and one that is taken for a plain adapter gives another model.
FREE = """auto_mapping base_model_name_or_path corda_config eva_config exclude_modules
inference_mode layers_pattern layers_to_transform loftq_config lora_alpha lora_dropout
lora_ga_config megatron_config megatron_core peft_version qalora_group_size r revision
target_modules task_type""".split()
STARTS = True, False, "gaussian", "eva", "orthogonal"  # others take their start out of the base


def add_flags(parser) -> None:
    parser.set_defaults(lr=2e-4)  # QLoRA's (arXiv:2305.14314), ten times that of all weights
    for name, kind, said in (
        ("rank", number(int, 1), "width between the two matrices of an adapter"),
        ("alpha", number(float, 0, above=0), "an adapter's output is multiplied by alpha / rank"),
        ("targets", str, "adapted layers, by the last part of their names, comma-separated"),
    ):
        said += f" (default: {USUAL[name]}, or that of --adapter)"
        parser.add_argument(f"--{name}", type=kind, metavar="X", help=said)
    parser.add_argument("--adapter", metavar="FOLDER", help="continue with it: peft's, or a run's")
    parser.add_argument("--merge", action="store_true", help="also write model.pt, with both added")


def complete(args):
    """Rank, alpha and targets that were not given: those of ``--adapter``, or the usual ones."""
    if not args.adapter:
        return fill(args, **USUAL)
    if (Path(args.adapter) / FOLDER).is_dir():
        args = replace(args, adapter=str(Path(args.adapter) / FOLDER))
    folder = Path(args.adapter)
    given = f"--adapter {args.adapter}"
    if folder.resolve() == (local_folder(args.output_dir) / FOLDER).resolve():
        fail(f"{given} would be overwritten; give another --output-dir")
    try:
        config = PLAIN | json.loads((folder / CONFIG).read_text())
        found = {"rank": int(config["r"]), "alpha": float(config["lora_alpha"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{given}: {CONFIG} cannot be used ({error!r}); give a folder of peft")
    if (start := config.pop("init_lora_weights", True)) not in STARTS:
        use = "convert it by path_initial_model_for_weight_conversion of peft's save_pretrained"
        fail(f"{given}: its init_lora_weights is {start}, for which peft changes the base; {use}")
    for name in config.keys() - FREE:
        if (config[name] or None) != (PLAIN.get(name) or None):
            fail(f"{given}: its {name} is {config[name]}, which is not supported here")
    for name in USUAL:
        own = getattr(args, name)
        theirs = found.get(name)
        if own not in (None, theirs):
            fail(f"--{name} {own}: the adapter in {folder} has {theirs or 'its own'}; leave it out")
    return fill(args, **found)


def entries(args, layers: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Each tensor's name in the file, for a Llama as in transformers; its layer, and name in it."""
    size = args.task.models.size_of(args)
    for layer, part in itertools.product(layers, ("lora_A.weight", "lora_B.weight")):
        theirs = f"{layer}.weight"
        if size.on_the_hub:
            [theirs] = their_names(size.kind, {theirs: None})
        yield f"base_model.model.{theirs.removesuffix('weight')}{part}", layer, part


def find_layers(args, model: nn.Module) -> dict[str, nn.Linear]:
    """The layers with an adapter, by name: those of ``--targets``, in our names or transformers',
    or those of ``--adapter``."""
    own = f"--model {args.model}"
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    found = {}
    if args.adapter:
        layers = {name: layer for name, layer, _ in entries(args, linears)}
        with one_line_errors(args.adapter, "--adapter", "give a folder of peft"):
            theirs = import_optional("safetensors.torch").load_file(Path(args.adapter) / FILE)
        if unknown := sorted(theirs.keys() - layers.keys()):
            fail(f"--adapter {args.adapter} has {unknown[0]}, and {own} has not; give its model")
        found = {layers[name]: linears[layers[name]] for name in theirs}
    names = {name.removesuffix(".lora_A.weight"): n for name, n, _ in entries(args, linears)}
    names |= {n: n for n in linears}
    for target in () if args.adapter else args.targets.split(","):
        some = [n for name, n in names.items() if target and f".{name}".endswith(f".{target}")]
        if not some:
            lasts = ", ".join(sorted({name.rpartition(".")[2] for name in linears})) or "none"
            fail(f"--targets {target}: {own} has no such nn.Linear; it has {lasts}")
        found |= {name: linears[name] for name in some}
    uses = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
    for name, layer in found.items():
        if uses[layer.weight] > 1:
            fail(f"--targets {name}: another layer has the same matrix; leave it out")
    return found


@torch.no_grad()
def init(args, layers: dict[str, nn.Linear]) -> None:
    """Fill adapters, each rank its shards. A is uniform as in peft: a function of seed and name."""
    n = sum(layer.lora_A.weight.numel() + layer.lora_B.weight.numel() for layer in layers.values())
    print0(f"adapters: {n:,} parameters of {len(layers)} layers are trained")
    if args.adapter:
        found = {name: layers[n].get_parameter(part) for name, n, part in entries(args, layers)}
        return read_weights(Path(args.adapter), "", found, "--adapter", [FILE])
    for name, layer in layers.items():
        a = layer.lora_A.weight
        seed = zlib.crc32(f"{name}.lora_A".encode(), args.seed)  # of 32 bits: see draw()
        random = torch.Generator().manual_seed(seed)
        drawn = nn.init.kaiming_uniform_(torch.empty(a.shape), math.sqrt(5), generator=random)
        drawn = drawn.to(a.device)
        a.copy_(distribute_tensor(drawn, a.device_mesh, a.placements, src_data_rank=None))
        layer.lora_B.weight.zero_()


class Base:
    """The frozen weights. The state dict of the model has only adapters, unless ``included``. A
    snapshot has one number about them, so that no run resumes it with others."""

    def __init__(self, args, model: nn.Module):
        self.args = args
        self.model = model
        self.included = False
        model.register_state_dict_post_hook(lambda _, state, *about: self.leave_out(state))
        model.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())

    def leave_out(self, state: dict[str, Tensor]) -> None:
        for name in [name for name in state if ".lora_" not in name and not self.included]:
            del state[name]

    @cached_property
    def total(self) -> float:
        """The sum of the absolute values over all ranks. All of them call it. What the root unit
        has is still gathered after an evaluation, and is then no DTensor."""
        frozen = (p for p in self.model.parameters() if not p.requires_grad)
        return sum(whole(p.abs().sum(dtype=torch.float64)).item() for p in frozen)

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total, "alpha": self.args.alpha}

    def load_state_dict(self, saved: dict[str, float]) -> None:
        given = f"--resume {self.args.resume}"
        if not math.isclose(saved.get("total", -1), self.total, rel_tol=1e-9):
            give = "give its --weights, --seed, --dtype and --block"
            fail(f"{given} was written with other frozen weights; {give}")
        if saved["alpha"] != self.args.alpha:
            fail(f"{given} is from a run with --alpha {saved['alpha']:g}; use it")


def save(args, layers: dict[str, nn.Linear], weights: dict[str, Tensor]) -> None:
    """Write the adapters in a state dict to ``--output-dir/adapter``, as peft reads them."""
    tensors = {name: weights[f"{n}.{part}"].contiguous() for name, n, part in entries(args, layers)}
    config = PLAIN | {"r": args.rank, "lora_alpha": args.alpha, "lora_dropout": 0.0}
    config |= {"target_modules": sorted({name.split(".")[-3] for name in tensors})}
    config |= {"base_model_name_or_path": None if args.weights == "none" else str(args.weights)}
    config |= {"inference_mode": True, "task_type": "CAUSAL_LM"}
    folder = local_folder(args.output_dir) / FOLDER
    with delivery(folder):
        folder.mkdir(exist_ok=True)
        import_optional("safetensors.torch").save_file(tensors, folder / FILE, {"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    for name in (CONFIG, FILE):  # of a run that began when they were written beside the model
        (folder.parent / name).unlink(missing_ok=True)
