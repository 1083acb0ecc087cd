"""How much of what ranks compute is padding: python measure/count_padding.py"""

from pathlib import Path

import torch

RANKS = 4
BATCH = 32
EXAMPLES = Path(__file__).parents[1] / "examples"


def functions_of(name, **constants):
    """Of a file of examples/, with these constants."""
    found = {"torch": torch}
    exec((EXAMPLES / name).read_text().partition("\n\n\ndef main")[0], found)
    found.update(constants)
    return found


def padding_of(name, train_set):
    """The share of padding in an epoch, with the order of this file."""
    order = functions_of(name, BATCH=BATCH, STEPS=len(train_set) // BATCH)["order"]
    tokens = 0
    computed = 0
    for batch in order(train_set, 0):
        for rank in range(RANKS):
            lengths = [len(train_set[i]["labels"]) for i in batch[rank::RANKS]]
            tokens += sum(lengths)
            computed += max(lengths) * len(lengths)
    return 1 - tokens / computed


if __name__ == "__main__":
    train_set, _ = functions_of("own/buckets.py")["make_data"]()
    for name in ("plain.py", "own/buckets.py"):
        print(f"order of {name}: {padding_of(name, train_set):.0%} padding on {RANKS} ranks")
