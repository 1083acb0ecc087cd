"""One's own data on several ranks: docs/data.md. That training with it equals that of one process:
test_examples.py."""

import itertools
import random
import re

import pytest
import torch
from conftest import ROOT
from torch.utils.data import DataLoader

from measure.count_padding import functions_of, padding_of

SIZES = [5, 9, 4, 11, 7, 3, 8]  # of shards
STEPS = 17
BATCH = 5
LANES = 3
BLOCK = 4


class Shard(list):
    """Its samples, and how often they were read."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


@pytest.fixture
def stream():
    """A function that makes the stream of a rank; and the shards, of numbered samples."""
    numbers = itertools.count()
    shards = [Shard(itertools.islice(numbers, size)) for size in SIZES]
    names = functions_of("stream.py", STEPS=STEPS, BATCH=BATCH, LANES=LANES, BLOCK=BLOCK)

    def make(start=0, rank=0, world=1, **constants):
        names.update(constants)
        return names["Stream"](shards, start, rank, world)

    return make, shards


def merged(make, start, world, workers=0):
    """The batches of all ranks together, each in the order of one process."""
    loaders = [
        DataLoader(make(start, rank, world), None, num_workers=workers, collate_fn=list)
        for rank in range(world)
    ]
    for parts in zip(*loaders, strict=True):  # all ranks have equally many
        batch = [None] * sum(map(len, parts))
        for rank, part in enumerate(parts):
            batch[rank::world] = part
        yield batch


def expected(shards):
    """Batches, by a program that has all samples at hand."""
    epochs = itertools.count()
    while True:
        epoch = next(epochs)
        lanes = []
        for lane in range(LANES):
            mine = shards[lane::LANES]
            random.Random(f"{epoch} {lane}").shuffle(mine)
            samples = [sample for shard in mine for sample in shard]
            blocks = [samples[i : i + BLOCK] for i in range(0, len(samples), BLOCK)]
            for i, block in enumerate(blocks):
                random.Random(f"{epoch} {lane} {i}").shuffle(block)
            lanes.append([sample for block in blocks for sample in block][::-1])
        while all(len(lane) >= len(range(k, BATCH, LANES)) for k, lane in enumerate(lanes)):
            yield [lanes[i % LANES].pop() for i in range(BATCH)]


@pytest.mark.parametrize("world, workers", [(1, 0), (2, 0), (3, 0), (5, 0), (2, 2)])
def test_a_stream_is_the_same_on_any_number_of_ranks_and_workers(world, workers, stream):
    """From its beginning, and from any step on, as it is resumed."""
    make, shards = stream
    batches = [*itertools.islice(expected(shards), STEPS)]
    an_epoch = make().batches
    assert an_epoch == 7
    for start in (0, 3, an_epoch, STEPS - 1) if workers else range(STEPS + 1):
        assert [*merged(make, start, world, workers)] == batches[start:], start
    for i in range(0, STEPS - an_epoch, an_epoch):
        seen = [sample for batch in batches[i : i + an_epoch] for sample in batch]
        assert len(seen) == len({*seen}) == an_epoch * BATCH
    assert batches[:an_epoch] != batches[an_epoch : 2 * an_epoch]


def test_a_rank_opens_the_shards_of_its_lanes(stream):
    """And a resumed one skips those that were read, unopened."""
    make, shards = stream
    [*make(0, 1, 3, BATCH=6)]
    opened = [shard.reads > 0 for shard in shards]
    assert opened == [i % LANES == 1 for i in range(len(shards))]
    for shard in shards:
        shard.reads = 0
    last = make(0).batches - 1
    next(iter(make(last)))
    assert sum(shard.reads for shard in shards) < len(shards)


def test_shards_that_no_stream_can_have(stream):
    make, shards = stream
    for wrong in ({"world": 6}, {"BATCH": 40}):
        with pytest.raises(SystemExit, match="47 samples in 7 shards.* too few for BATCH .* ranks"):
            make(**{"BATCH": BATCH} | wrong)
    shards[0].__class__ = type("Longer", (Shard,), {"__len__": lambda shard: 6})
    with pytest.raises(ValueError, match="has 5 samples, but its length is 6"):
        [*make(BATCH=BATCH)]


def test_what_the_page_shows_is_tested():
    """By test_docs.py, as a remedy."""
    source = (ROOT / "examples/troubles/data.py").read_text()
    [waits] = re.findall(r"^def prepared.*?(?=\n\n\n)", source, re.M | re.S)
    assert f"```python\n{waits}\n```" in (ROOT / "docs/data.md").read_text()


def test_buckets():
    """Each sample once an epoch, in batches of similar length, from any step on."""
    order = functions_of("own/buckets.py", BATCH=8, STEPS=150, WINDOW=8)
    train_set, _ = order["make_data"]()
    batches = [*order["order"](train_set, 0)]
    first, second = ([*itertools.chain(*batches[i : i + 67])] for i in (0, 67))
    assert len({*first}) == len({*second}) == len(first) == 67 * 8 and first != second
    assert all([*order["order"](train_set, start)] == batches[start:] for start in (1, 66, 67, 149))
    saved = [padding_of(name, train_set) for name in ("plain.py", "own/buckets.py")]
    assert saved[1] < saved[0] / 3
    order["nn"] = torch.nn
    labels = [train_set[i]["labels"] for i in batches[3]]
    batch = order["collate"]([train_set[i] for i in batches[3]])
    assert batch["labels"].shape == batch["input_ids"].shape == (8, max(map(len, labels)))
    assert (batch["labels"] >= 0).sum() == sum(map(len, labels))
