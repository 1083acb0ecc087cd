"""Functions for an image classifier of torchvision, to put in place of those of an example."""

import torchvision
from torchvision.transforms import v2

DATA = "images"  # images/train/CLASS/*.jpg and images/val/CLASS/*.jpg
CLASSES = 10
SIZE = 224  # pixels, after cropping


class Images(torchvision.datasets.ImageFolder):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"images": image, "labels": label}


def make_model():  # BatchNorm: on GPUs, nn.SyncBatchNorm.convert_sync_batchnorm(model) for DDP
    torch.manual_seed(0)
    return torchvision.models.resnet50(num_classes=CLASSES)


def layers_of(model):
    return [block for i in range(1, 5) for block in model.get_submodule(f"layer{i}")]


def make_data():
    convert = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])]
    augment = [v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), *convert]
    resize = [v2.Resize(SIZE), v2.CenterCrop(SIZE), *convert]
    train_set = Images(f"{DATA}/train", v2.Compose(augment))
    return train_set, Images(f"{DATA}/val", v2.Compose(resize))


def forward(model, batch):
    return model(batch["images"]).float()


def loss_of(output, batch):  # the third sum is printed after the losses: the accuracy
    labels = batch["labels"]
    loss = nn.functional.cross_entropy(output, labels, reduction="sum")
    return torch.stack([loss, (labels >= 0).sum(), (output.argmax(1) == labels).sum()])
