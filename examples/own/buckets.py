"""Functions for sequences of different lengths, to put in place of those of an example."""

WINDOW = 16  # batches among which samples of similar length are brought together


def make_data():
    torch.manual_seed(0)
    rows = []
    for i in range(600):
        length = 3 + int(40 * torch.rand(1) ** 3)  # most are short
        tokens = (torch.arange(length) * 7 + 37 * i) % 64
        rows.append({"input_ids": tokens[:-1], "labels": tokens[1:]})
    return rows[:540], rows[540:]


def order(train_set, start):  # each batch has samples of similar length
    # Reads all samples once: of a large data set, keep the lengths in a file
    lengths = torch.tensor([len(sample["labels"]) for sample in train_set])
    batches = max(1, len(train_set) // BATCH)
    for step in range(start, STEPS):
        epoch, i = divmod(step, batches)
        generator = torch.Generator().manual_seed(epoch)
        permutation = torch.randperm(len(train_set), generator=generator)[: batches * BATCH]
        windows = permutation.split(WINDOW * BATCH)
        by_length = [window[lengths[window].argsort(stable=True)] for window in windows]
        turns = torch.randperm(batches, generator=generator)  # or the steps would become longer
        yield torch.cat(by_length).split(BATCH)[turns[i]].tolist()


def collate(samples):  # pads at the end, to the longest sample of this rank
    inputs = [sample["input_ids"] for sample in samples]
    labels = [sample["labels"] for sample in samples]
    return {
        "input_ids": nn.utils.rnn.pad_sequence(inputs, batch_first=True),
        "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
    }
