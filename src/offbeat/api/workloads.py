"""Named workloads, the data of a workload of your own, and how data is split among workers."""

from offbeat.core.examples import Examples
from offbeat.core.splits import ByLabel, Dirichlet, Sharded, Shared, Split
from offbeat.core.workload import NamedWorkload
from offbeat.lab.workloads import (
    Cifar10,
    Cinic10,
    Digits,
    DigitsCNN,
    DigitsLogistic,
    FashionMnist,
    ImageNet32,
    LinearRegression,
    Mnist,
    Quadratic,
    ToyConvolutional,
    ToyDeep,
    TwoGaussians,
)

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
    "Mnist",
    "NamedWorkload",
    "Quadratic",
    "Sharded",
    "Shared",
    "Split",
    "ToyConvolutional",
    "ToyDeep",
    "TwoGaussians",
]
