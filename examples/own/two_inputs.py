"""Functions for a regression with two inputs, to put in place of those of an example."""

LENGTH = 24  # the longest text, in tokens


class Rating(nn.Module):
    """How somebody, known by numbers, rates what a text says."""

    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(100, width, padding_idx=0)
        options = {"batch_first": True, "norm_first": True, "dropout": 0.1}
        layers = [nn.TransformerEncoderLayer(width, 4, 64, **options) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.who = nn.Linear(5, width)
        self.head = nn.Linear(width, 1)

    def forward(self, text, who):
        is_padding = text == 0
        x = self.embedding(text) + self.who(who)[:, None]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=is_padding)
        # A mean that counted padding would depend on the longest text of this rank's batch
        x = x.masked_fill(is_padding[..., None], 0).sum(1) / (~is_padding).sum(1, keepdim=True)
        return self.head(x)[:, 0]


def make_model():
    torch.manual_seed(0)
    return Rating()


def layers_of(model):
    return model.layers


def make_data():  # texts have different lengths
    torch.manual_seed(0)
    rows = []
    for i in range(300):
        text = torch.randint(1, 100, [4 + i % (LENGTH - 4)])
        who = torch.randn(5)
        rows.append({"text": text, "who": who, "rating": who.sum() + text[0] / 50})
    return rows[30:], rows[:30]


def collate(samples):  # pads the texts
    texts = [sample["text"] for sample in samples]
    others = [{"who": sample["who"], "rating": sample["rating"]} for sample in samples]
    padded = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"text": padded, **default_collate(others)}


def order(train_set, start):  # draws samples, with twice the weight for every third one
    weights = torch.ones(len(train_set))
    weights[::3] = 2
    for step in range(start, STEPS):
        generator = torch.Generator().manual_seed(step)
        yield torch.multinomial(weights, BATCH, replacement=True, generator=generator).tolist()


def forward(model, batch):
    return model(batch["text"], batch["who"]).float()


def loss_of(output, batch):  # squares, and as a metric the mean absolute error
    errors = output - batch["rating"]
    count = torch.ones_like(errors).sum()
    return torch.stack([errors.square().sum(), count, errors.detach().abs().sum()])


def groups_of(model):  # embeddings and vectors without weight decay
    decayed = []
    others = []
    for parameter in model.parameters():
        is_matrix = parameter.ndim > 1 and parameter is not model.embedding.weight
        (decayed if is_matrix else others).append(parameter)
    return [{"params": decayed}, {"params": others, "weight_decay": 0.0}]


def is_done(values):  # no better evaluation in the last three
    return len(values) > 3 and min(values[-3:]) > min(values)
