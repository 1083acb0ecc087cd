"""The commands of estimate.py for a user's file: predict, recommend, init."""

import sys
from functools import partial
from pathlib import Path

from estimator import compose, fit, own_file, own_recommend, tables, techniques
from harness import flops
from harness.cli import fail, make_parser
from harness.world import count_cores

WITHOUT_BFLOAT16 = ("T4",)
INIT = """Write a file of examples/ with your functions.

Command:    python estimate.py init my_fsdp.py --from fsdp --own examples/own/decoder.py
            python estimate.py init my_tp.py --from tp --own my_fsdp.py
"""


def has_half(memory: float | None) -> bool:
    """Whether the GPU with this memory, in GiB, has bfloat16."""
    return memory not in [flops.GPUS[name]["gib"] for name in WITHOUT_BFLOAT16]


def predict(args, path: Path, gpus_are_given: bool) -> None:
    """Predict the file, or with ``--fit`` the largest BATCH of it."""
    module = own_file.load(path)
    own_file.check_folders(module)
    ranks = args.gpus
    if not own_file.is_launched(module):
        if gpus_are_given and ranks > 1:
            fail(f"{path} trains on one GPU, not on --gpus {ranks}; write a file of several: "
                 f"python {sys.argv[0]} init my_ddp.py --from ddp --own {path}")  # fmt: skip
        ranks = 0
    one = partial(own_file.predict, module, ranks, has_half(args.memory))
    some = own_file.ranks_of(module, ranks)
    if args.fit:
        found = fit.search_batch(args, max(1, ranks), one, some)
    else:
        tasks = [partial(one, rank=rank) for rank in some]
        found = own_file.fullest(techniques.side_by_side(tasks, count_cores()))
    if found.error:
        print(found.error, end="", file=sys.stderr)
        if "OSError: " in found.mistake or "FileNotFoundError: " in found.mistake:
            print(f"its relative paths are looked up in {Path.cwd()}", file=sys.stderr)
        raise SystemExit(1)
    if found.mistake:
        fail(found.mistake)
    (tables.print_file_json if args.json else tables.print_file)(args, found)
    tables.say_whether_it_fits(args, found)


def recommend(args, path: Path, examples: Path) -> None:
    """Predict the files of ``examples`` with the functions of this file."""
    own_file.check_folders(own_file.load(path))
    tasks = own_recommend.tasks_of(path, examples, args.gpus, has_half(args.memory))
    found = [*techniques.side_by_side(tasks, count_cores())]
    good, others = own_recommend.rank(found, tables.room_of(args))
    tables.print_files(args, path, good, others)
    if not good:
        room = f"{args.memory:g} GiB with {args.spare:g} GiB reserved"
        fail(f"nothing fits {room}; use a smaller BATCH, or more --gpus")


def init(words: list[str], examples: Path) -> None:
    """Write a file of ``examples`` with the functions of another file."""
    names = sorted(path.stem for path in examples.glob("*.py"))
    parser = make_parser(INIT)
    flag = parser.add_argument_group("files").add_argument
    flag("file", type=Path, metavar="FILE.py", help="the file to write, which must not exist")
    listed = ", ".join(names)
    flag("--from", dest="example", required=True, metavar="NAME", help=f"the technique: {listed}")
    flag("--own", type=Path, metavar="FILE.py", help="your file, whose functions it gets")
    flag("-h", "--help", action="help", help="print this help and exit")
    args = parser.parse_args(words)
    if args.example not in names:
        fail(f"--from {args.example}: no such file of examples/; use one of {listed}")
    notes = compose.init(args.file, examples / f"{args.example}.py", args.own)
    print(f"wrote {args.file}; predict its memory: python {sys.argv[0]} {args.file} --gpus 8")
    for note in notes:
        print(note)
