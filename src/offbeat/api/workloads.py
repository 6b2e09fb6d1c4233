"""Named workloads, the data of a workload of your own, and how data is split among workers.

    import offbeat as ob

    run = ob.simulate(ob.workloads.Digits(split=ob.workloads.Dirichlet(0.3)), ob.AsyncTimed())

A workload of your own is `ob.Workload`; `offbeat workloads` lists the named ones.
"""

from offbeat.core.examples import Examples
from offbeat.core.splits import ByGroup, ByLabel, Dirichlet, Sharded, Shared, Split
from offbeat.core.workload import NamedWorkload
from offbeat.lab.workloads.digits import Digits, DigitsCNN, DigitsLogistic
from offbeat.lab.workloads.images import Cifar10, Cinic10, FashionMnist, ImageNet32, Mnist
from offbeat.lab.workloads.synthetic import LinearRegression, Quadratic, ToyConvolutional, ToyDeep, TwoGaussians
from offbeat.lab.workloads.text import Enwik8, Shakespeare, Sotu

__all__ = [
    "ByGroup",
    "ByLabel",
    "Cifar10",
    "Cinic10",
    "Digits",
    "DigitsCNN",
    "DigitsLogistic",
    "Dirichlet",
    "Enwik8",
    "Examples",
    "FashionMnist",
    "ImageNet32",
    "LinearRegression",
    "Mnist",
    "NamedWorkload",
    "Quadratic",
    "Shakespeare",
    "Sharded",
    "Shared",
    "Sotu",
    "Split",
    "ToyConvolutional",
    "ToyDeep",
    "TwoGaussians",
]
