"""Functions for DPO (direct preference optimization), in place of those of distillation.py."""

BETA = 0.1  # how strongly the model is held to the reference


def make_teacher():  # the reference: the model before its first step, also in a resumed run
    return make_model()


def make_data():  # a prompt of 8 tokens, and two answers of 8, of which the first is preferred
    rows = []
    for i in range(600):
        prompt = (torch.arange(8) * 7 + 37 * i) % 64
        count = torch.arange(1, 9)
        chosen = (prompt[-1] + 7 * count) % 64  # goes on in steps of 7, as the prompt does
        rejected = (prompt[-1] + (8 + i % 5) * count) % 64
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows[:540], rows[540:]


def forward(model, batch):  # log-probabilities of both answers: [samples, 2]
    prompt = batch["prompt"]
    answers = torch.cat([batch["chosen"], batch["rejected"]])
    tokens = torch.cat([prompt.repeat(2, 1), answers], 1)  # one call of the model for both
    logits = model(tokens[:, :-1]).float()[:, prompt.shape[1] - 1 :]
    each = logits.log_softmax(-1).gather(-1, answers[..., None])
    return each.sum([1, 2]).view(2, -1).T


def loss_of(output, batch):  # over pairs; then how many of them the model orders as people did
    gained = output - batch["frozen"]
    margin = BETA * (gained[:, 0] - gained[:, 1])
    loss = -nn.functional.logsigmoid(margin).sum()
    count = torch.ones_like(margin).sum()
    return torch.stack([loss, count, (margin.detach() > 0).sum()])
