"""The recipe for large batches: linear scaling, warm-up, milestones, no decay of 1-D parameters, clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.core.configuration import from_plain, to_plain
from offbeat.core.flat import layout_of
from offbeat.core.optimizers import CIFAR_MILESTONES, IMAGENET_MILESTONES
from offbeat.core.schedules import rate_at

CIFAR: dict[str, Any] = {"epoch_samples": 50_000, "until_samples": 50_000 * 100, "batch": 128, "workers": 16}
"""16 workers of 128 samples: 2048 samples in an update, 8 times the 256 that the base rate is for."""


def rates(optimizer: ob.nodes.Optimizer, *samples: int) -> list[float]:
    assert isinstance(optimizer.lr, ob.schedules.Schedule)
    return [rate_at(optimizer.lr, count) for count in samples]


def test_the_rate_starts_at_its_base_and_rises_to_eight_times_that_in_five_epochs() -> None:
    recipe = ob.schedules.large_batch(ob.SGD(0.1, momentum=0.9), **CIFAR)
    assert rates(recipe, 0, 50_000, 125_000, 250_000, 300_000) == pytest.approx([0.1, 0.24, 0.45, 0.8, 0.8])


def test_the_rate_drops_tenfold_at_half_and_at_three_quarters_of_the_samples() -> None:
    recipe = ob.schedules.large_batch(ob.SGD(0.1), **CIFAR)
    around = (2_499_999, 2_500_000, 3_749_999, 3_750_000, 5_000_000)
    assert rates(recipe, *around) == pytest.approx([0.8, 0.08, 0.08, 0.008, 0.008])
    assert CIFAR_MILESTONES == (0.5, 0.75)


def test_the_milestones_of_imagenet_are_at_30_60_and_80_percent() -> None:
    recipe = ob.schedules.large_batch(
        ob.SGD(0.1), epoch_samples=1000, until_samples=90_000, batch=64, workers=8, milestones=IMAGENET_MILESTONES
    )
    around = (26_999, 27_000, 53_999, 54_000, 71_999, 72_000)
    assert rates(recipe, *around) == pytest.approx([0.2, 0.02, 0.02, 0.002, 0.002, 0.0002])


def test_the_warm_up_the_factor_and_the_milestones_can_be_chosen() -> None:
    recipe = ob.schedules.large_batch(
        ob.Adam(0.01), epoch_samples=100, until_samples=1000, batch=512, workers=1, warmup_epochs=0.5, milestones=(),
        factor=0.5,
    )  # fmt: skip
    assert rates(recipe, 0, 25, 50, 999) == pytest.approx([0.01, 0.015, 0.02, 0.02])
    halved = ob.schedules.large_batch(ob.Adam(0.01), **{**CIFAR, "workers": 2}, milestones=(0.9,), factor=0.5)
    assert rates(halved, 4_499_999, 4_500_000) == pytest.approx([0.01, 0.005])


def test_everything_else_of_the_optimizer_stays() -> None:
    given = ob.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, clip_norm=2.0)
    recipe = ob.schedules.large_batch(given, **CIFAR)
    assert (recipe.momentum, recipe.nesterov, recipe.weight_decay, recipe.clip_norm) == (0.9, True, 5e-4, 2.0)
    assert ob.schedules.large_batch(given, **CIFAR, clip_norm=1.0).clip_norm == 1.0
    assert given.decay_1d
    assert not recipe.decay_1d
    assert from_plain(ob.nodes.Optimizer, to_plain(recipe), "optimizer") == recipe


def test_one_update_by_hand() -> None:
    """Weights shrink, biases do not; the gradient is clipped to length 1; the rate is that of the whole batch."""
    module = nn.Linear(1, 1)
    layout = layout_of(module)
    parameters = torch.tensor([1.0, 1.0])
    recipe = ob.schedules.large_batch(ob.SGD(0.1, weight_decay=0.5), **CIFAR, clip_norm=1.0)
    rate = recipe.build(parameters, layout).step(torch.tensor([3.0, 4.0]), samples=250_000)
    assert rate == pytest.approx(0.8)
    assert parameters.tolist() == pytest.approx([1.0 - 0.8 * (0.6 + 0.5), 1.0 - 0.8 * 0.8])


@pytest.mark.parametrize(
    ("optimizer", "change", "sentence"),
    [
        (ob.SGD(ob.schedules.Linear(0.1, 0.0, 100)), {}, "large_batch makes the schedule"),
        (ob.TorchOptimizer(torch.optim.SGD), {}, "the rate for 256 samples, but is None"),
        (ob.SGD(0.1), {"workers": 0}, "workers must be 1 or more, but is 0"),
        (ob.SGD(0.1), {"epoch_samples": -1}, "epoch_samples must be 1 or more, but is -1"),
        (ob.SGD(0.1), {"warmup_epochs": 0}, "warmup_epochs must be greater than 0, but is 0"),
        (ob.SGD(0.1), {"until_samples": 400_000}, "the warm-up takes 250000 samples, more than there are before"),
        (ob.SGD(0.1), {"milestones": (50, 75)}, "milestones are fractions of the samples"),
        (ob.SGD(0.1), {"milestones": (0.75, 0.5)}, "in rising order"),
        (ob.SGD(0.1), {"clip_norm": 0.0}, "clip_norm must be greater than 0"),
    ],
)
def test_what_cannot_work_is_refused(optimizer: ob.nodes.Optimizer, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ob.ConfigurationError, match=sentence):
        ob.schedules.large_batch(optimizer, **{**CIFAR, **change})
