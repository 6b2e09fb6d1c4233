"""Models for images, by name."""

from offbeat.lab.workloads.models.model import ImageShape, Model
from offbeat.lab.workloads.models.plain import AllCNN, CifarCNN, LeNet5, MnistCNN
from offbeat.lab.workloads.models.residual import ResNet18, WideResNet28x2, WideResNet28x5

__all__ = [
    "AllCNN",
    "CifarCNN",
    "ImageShape",
    "LeNet5",
    "MnistCNN",
    "Model",
    "ResNet18",
    "WideResNet28x2",
    "WideResNet28x5",
]
