"""Functions for a decoder that reads text and images, to put in place of those of an example."""

import functools

SIZE = 16  # pixels of a side
PATCH = 8  # pixels of a side of a patch, which takes the place of one token
PATCHES = (SIZE // PATCH) ** 2
IMAGE = 0  # the token whose embedding is replaced by a patch


class Block(nn.TransformerEncoderLayer):
    def __init__(self, width):
        options = {"batch_first": True, "norm_first": True, "dropout": 0.0}
        super().__init__(width, 4, 2 * width, **options)


class VisionDecoder(nn.Module):
    """A decoder whose samples have an image, or none: a rank may get a batch of text alone."""

    def __init__(self, width=32):
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.encoder = nn.ModuleList([Block(width) for _ in range(2)])
        self.embedding = nn.Embedding(64, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 64, bias=False)

    def encode(self, images):  # [samples, 3, SIZE, SIZE] -> [samples, PATCHES, width]
        x = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.encoder:
            x = layer(x)
        return x

    def forward(self, tokens, images=None):
        x = self.embedding(tokens)
        if images is not None:
            is_image = (tokens == IMAGE)[..., None]
            which = (is_image.cumsum(1) - 1).clamp(min=0).expand_as(x)
            x = torch.where(is_image, self.encode(images).gather(1, which), x)
        else:  # every rank runs the encoder as often as the others, or they wait for its shards
            nothing = x.new_zeros(1, 3, SIZE, SIZE)
            x = x + 0.0 * self.encode(nothing).sum()  # in the graph, so backward runs it, too
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def make_model():
    torch.manual_seed(0)
    return VisionDecoder()


def layers_of(model):  # FSDP gathers one at a time, so every rank has to run all of them
    return [*model.encoder, *model.layers]
    # From PyTorch 2.13 on, fsdp.py also runs `return model.layers` without the `else` above: a unit
    # of the root is gathered in any case, and ranks without an image send zeros for the encoder


def make_data():  # the grey of an image says from which number the text counts
    torch.manual_seed(0)
    rows = []
    for i in range(300):
        text = 1 + (torch.arange(13) + 5 * i) % 63
        row = {"input_ids": text[:-1], "labels": text[1:]}
        if i % 3 == 0:
            row["image"] = text[0] / 63 + 0.1 * torch.randn(3, SIZE, SIZE)
            row["input_ids"] = torch.cat([torch.full([PATCHES], IMAGE), text[:-1]])
            row["labels"] = torch.cat([torch.full([PATCHES - 1], -100), text])
        rows.append(row)
    return rows[30:], rows[:30]


def collate(samples):  # a batch of text alone has no images; else those of text are zeros
    pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
    batch = {
        "input_ids": pad([sample["input_ids"] for sample in samples], padding_value=1),
        "labels": pad([sample["labels"] for sample in samples], padding_value=-100),
    }
    if any("image" in sample for sample in samples):
        nothing = torch.zeros(3, SIZE, SIZE)
        batch["images"] = torch.stack([sample.get("image", nothing) for sample in samples])
    return batch


def forward(model, batch):
    return model(batch["input_ids"], batch.get("images")).float()
