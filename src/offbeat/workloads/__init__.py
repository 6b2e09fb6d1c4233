"""Model, training data, loss, evaluation."""

from offbeat.workloads.digits import Digits, DigitsCNN, DigitsLogistic
from offbeat.workloads.examples import Examples, Order
from offbeat.workloads.splits import ByLabel, Sharded, Shared, Split
from offbeat.workloads.synthetic import LinearRegression, Quadratic, TwoGaussians
from offbeat.workloads.workload import NamedWorkload, Target, Workload

__all__ = [
    "ByLabel",
    "Digits",
    "DigitsCNN",
    "DigitsLogistic",
    "Examples",
    "LinearRegression",
    "NamedWorkload",
    "Order",
    "Quadratic",
    "Sharded",
    "Shared",
    "Split",
    "Target",
    "TwoGaussians",
    "Workload",
]
