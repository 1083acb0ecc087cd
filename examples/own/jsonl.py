"""Functions for stream.py, to put in place of its own: each shard is a file of JSON lines."""

import json

# Files *.jsonl, and their numbers of lines: wc -l data/*.jsonl > data/counts
# wc counts ends of lines, so the last line of a file needs one, too.
DATA = "data"


class Lines:
    """A shard. It yields text: collate() parses what belongs to this rank, and nothing else."""

    def __init__(self, path, length):
        self.path = path
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        with open(self.path, encoding="utf-8") as file:
            yield from file

    def __repr__(self):
        return self.path


def make_data():  # the last file is for evaluation
    if not os.path.exists(f"{DATA}/counts"):
        raise SystemExit(f"no {DATA}/counts: run wc -l {DATA}/*.jsonl > {DATA}/counts")
    shards = []
    with open(f"{DATA}/counts", encoding="utf-8") as file:
        for line in file:
            length, path = line.strip().split(maxsplit=1)
            if path != "total":
                shards.append(Lines(path, int(length)))
    return shards[:-1], list(shards[-1])


def collate(samples):  # pads at the end
    rows = [torch.tensor(json.loads(line)["tokens"]) for line in samples]
    inputs = [row[:-1] for row in rows]
    labels = [row[1:] for row in rows]
    return {
        "input_ids": nn.utils.rnn.pad_sequence(inputs, batch_first=True),
        "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
    }
