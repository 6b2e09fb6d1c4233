"""Image models, for the field `model` of an image workload.

    import offbeat as ob

    workload = ob.workloads.Cifar10(model=ob.models.ResNet18(width=0.5))

`width` multiplies the number of channels; `offbeat workloads --counts` prints the number of parameters.
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

__all__ = ["AllCNN", "CifarCNN", "LeNet5", "MnistCNN", "Model", "ResNet18", "WideResNet28x2", "WideResNet28x5"]
