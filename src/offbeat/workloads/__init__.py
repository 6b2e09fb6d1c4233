"""Model, training data, loss, evaluation."""

from offbeat.workloads.digits import Digits, DigitsCNN, DigitsLogistic
from offbeat.workloads.examples import Examples, Order
from offbeat.workloads.images import Cifar10, Cinic10, FashionMnist, ImageNet32, Mnist
from offbeat.workloads.splits import ByLabel, Dirichlet, Sharded, Shared, Split
from offbeat.workloads.synthetic import LinearRegression, Quadratic, TwoGaussians
from offbeat.workloads.toys import ToyConvolutional, ToyDeep
from offbeat.workloads.workload import Measured, NamedWorkload, Size, Target, Workload

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
