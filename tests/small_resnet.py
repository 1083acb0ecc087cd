"""Two more models for --model: small_resnet, a ResNet-18 with half of the blocks and a quarter of
the channels, which takes a thirtieth of its time in float64; and small_resnet_dropout, which has
dropout before its last layer."""

from torch import nn
from torchvision.models._api import register_model
from torchvision.models.resnet import BasicBlock, ResNet


class SmallResNet(ResNet):
    def __init__(self, num_classes: int):
        super().__init__(BasicBlock, [1, 1, 1, 1])
        self.conv1 = nn.Conv2d(3, 16, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(128, num_classes)

    def _make_layer(self, block, planes, *args, **options):
        self.inplanes = min(self.inplanes, planes // 4)
        return super()._make_layer(block, planes // 4, *args, **options)


def small_resnet(*, num_classes: int) -> SmallResNet:
    return SmallResNet(num_classes)


def small_resnet_dropout(*, num_classes: int) -> SmallResNet:
    model = SmallResNet(num_classes)
    model.fc = nn.Sequential(nn.Dropout(), model.fc)
    return model


for model in (small_resnet, small_resnet_dropout):
    model.__module__ = ResNet.__module__  # or our scripts would not take it for theirs
    register_model()(model)
