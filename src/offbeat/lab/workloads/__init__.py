"""Model, training data, loss, evaluation."""

from offbeat.core.examples import Examples, Order
from offbeat.core.splits import ByLabel, Dirichlet, Sharded, Shared, Split
from offbeat.core.workload import Measured, NamedWorkload, Size, Target, Workload
from offbeat.lab.workloads.digits import Digits, DigitsCNN, DigitsLogistic
from offbeat.lab.workloads.images import Cifar10, Cinic10, FashionMnist, ImageNet32, Mnist
from offbeat.lab.workloads.synthetic import LinearRegression, Quadratic, ToyConvolutional, ToyDeep, TwoGaussians

__all__ = [
    "ByLabel",
    "Cifar10",
    "Cinic10",
    "Digits",
    "DigitsCNN",
    "DigitsLogistic",
    "Dirichlet",
    "Examples",
    "FashionMnist",
    "ImageNet32",
    "LinearRegression",
    "Measured",
    "Mnist",
    "NamedWorkload",
    "Order",
    "Quadratic",
    "Sharded",
    "Shared",
    "Size",
    "Split",
    "Target",
    "ToyConvolutional",
    "ToyDeep",
    "TwoGaussians",
    "Workload",
]
