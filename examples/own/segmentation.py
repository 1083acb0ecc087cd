"""Functions for a U-Net that segments images, to put in place of those of an example."""

CLASSES = 3
SIZE = 64  # pixels


class Block(nn.Sequential):
    def __init__(self, inputs, outputs):
        norm = nn.GroupNorm(4, outputs)
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1), norm, nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width=16, depth=3):
        super().__init__()
        widths = [width * 2**i for i in range(depth)]
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        inputs = 3
        for outputs in widths:
            self.down.append(Block(inputs, outputs))
            inputs = outputs
        for outputs in widths[-2::-1]:
            self.up.append(Block(inputs + outputs, outputs))
            inputs = outputs
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x):
        kept = []
        for i, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if i else x)
            kept.append(x)
        kept.pop()
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, kept.pop()], 1))
        return self.head(x)


def make_model():
    torch.manual_seed(0)
    return UNet()


def layers_of(model):
    return [*model.down, *model.up]


def make_data():  # squares of three grey values on noise: each pixel has a class
    torch.manual_seed(0)
    rows = []
    for i in range(200):
        classes = torch.zeros(SIZE, SIZE, dtype=torch.int64)
        classes[i % 32 :, : 20 + i % 40] = 1 + i % 2
        images = 0.3 * torch.randn(3, SIZE, SIZE) + classes
        rows.append({"images": images, "classes": classes})
    return rows[20:], rows[:20]


def forward(model, batch):
    return model(batch["images"]).float()


def loss_of(output, batch):  # over pixels; the third sum is printed after the losses
    classes = batch["classes"]
    loss = nn.functional.cross_entropy(output, classes, reduction="sum")
    pixels = torch.ones_like(classes).sum()
    return torch.stack([loss, pixels, (output.argmax(1) == classes).sum()])
