"""Image models by name, for the `model` of an image workload."""

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
