"""Models for images and texts, for the field `model` of a workload.

    import offbeat as ob

    workload = ob.workloads.Cifar10(model=ob.models.ResNet18(width=0.5))

`width` of an image model multiplies its channels; `offbeat workloads --counts` prints the number of parameters.
"""

from offbeat.lab.workloads.models import (
    AllCNN,
    CifarCNN,
    LeNet5,
    MnistCNN,
    Model,
    ResNet18,
    WideResNet28x2,
    WideResNet28x5,
)
from offbeat.lab.workloads.transformer import ByteTransformer

__all__ = [
    "AllCNN",
    "ByteTransformer",
    "CifarCNN",
    "LeNet5",
    "MnistCNN",
    "Model",
    "ResNet18",
    "WideResNet28x2",
    "WideResNet28x5",
]
