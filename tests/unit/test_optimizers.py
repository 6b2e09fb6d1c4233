"""Every optimizer equals a plain torch loop, and goes on from its state bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.core.configuration import from_plain, to_plain
from offbeat.core.flat import Layout, layout_of
from offbeat.core.optimizers import SGD, Adam, AdamW, AMSGrad, Optimizer, RMSprop, TorchOptimizer
from offbeat.core.schedules import Linear, WarmUp
from offbeat.errors import ConfigurationError

ALL: list[Optimizer] = [
    SGD(0.1),
    SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    RMSprop(weight_decay=1e-2, momentum=0.5),
    Adam(weight_decay=1e-2),
    AMSGrad(weight_decay=1e-2),
    AdamW(decay_1d=False),
    TorchOptimizer(lambda groups: torch.optim.NAdam(groups, lr=2e-3)),
]


def describe(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def network() -> nn.Module:
    torch.manual_seed(5)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    return module.to(memory_format=torch.channels_last)


def flat_start(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Layout]:
    layout = layout_of(network().to(dtype))
    return random_vector(layout.numel, 0, dtype), layout


def random_vector(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plain_torch_loop(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> Tensor:
    flat, layout = flat_start()
    parameters = [nn.Parameter(view.clone()) for view in layout.shaped(flat)]
    optimizer = make(parameters)
    for step in range(steps):
        for parameter, gradient in zip(parameters, layout.shaped(random_vector(layout.numel, step)), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    result = torch.empty_like(flat)
    for view, parameter in zip(layout.shaped(result), parameters, strict=True):
        view.copy_(parameter.detach())
    return result


def stepped(optimizer: Optimizer, steps: int) -> Tensor:
    flat, layout = flat_start()
    stepper = optimizer.build(flat, layout)
    for step in range(steps):
        stepper.step(random_vector(layout.numel, step), samples=0)
    return flat


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (
            SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
        ),
        (
            RMSprop(0.01, alpha=0.95, momentum=0.5, weight_decay=1e-2),
            lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.95, momentum=0.5, weight_decay=1e-2),
        ),
        (
            Adam(0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=1e-2),
            lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=1e-2),
        ),
        (AdamW(), lambda p: torch.optim.AdamW(p)),
        (AMSGrad(0.01), lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True)),
        (TorchOptimizer(torch.optim.Adagrad, lr=0.03), lambda p: torch.optim.Adagrad(p, lr=0.03)),
    ],
    ids=lambda value: describe(value) if isinstance(value, Optimizer) else "",
)
def test_an_optimizer_equals_a_plain_torch_loop(
    optimizer: Optimizer, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    torch.testing.assert_close(stepped(optimizer, 6), plain_torch_loop(make, 6), rtol=2e-5, atol=2e-6)


def amsgrad_reference(x: Tensor, gradients: list[Tensor], lr: float, decay: float) -> Tensor:
    x, beta1, beta2, epsilon = x.clone(), 0.9, 0.999, 1e-8
    m, v, v_max = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for k, g in enumerate(gradients, start=1):
        g = g + decay * x
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        v_max = torch.maximum(v_max, v)
        x = x - lr * math.sqrt(1 - beta2**k) / (1 - beta1**k) * m / (v_max.sqrt() + epsilon)
    return x


@pytest.mark.parametrize("decay", [0.0, 1e-7])
def test_amsgrad_is_the_form_of_apam_even_for_tiny_gradients(decay: float) -> None:
    flat, layout = flat_start(torch.float64)
    start = flat.mul_(1e-3).clone()  # of the size of what 20 updates move, so that rounding hides nothing
    gradients = [1e-7 * random_vector(layout.numel, seed, torch.float64) for seed in range(1, 21)]
    stepper = AMSGrad(1e-4, weight_decay=decay).build(flat, layout)
    for gradient in gradients:
        stepper.step(gradient, samples=0)
    expected = amsgrad_reference(start, gradients, 1e-4, decay)
    assert float((flat - expected).norm() / (expected - start).norm()) < 1e-15

    plain = nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([plain], lr=1e-4, amsgrad=True, weight_decay=decay)
    for gradient in gradients:
        plain.grad = gradient
        optimizer.step()
    moved, moved_plain = (expected - start).norm(), (plain.detach() - start).norm()
    assert abs(float(moved_plain / moved) - 1) > 0.1


@pytest.mark.parametrize("optimizer", ALL, ids=describe)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_restored_stepper_continues_bit_for_bit(optimizer: Optimizer, dtype: torch.dtype) -> None:
    flat, layout = flat_start(dtype)
    stepper = optimizer.build(flat, layout)
    for step in range(3):
        stepper.step(random_vector(layout.numel, step, dtype), samples=step)
    twin_flat, state = flat.clone(), stepper.state()
    for step in range(3, 6):
        stepper.step(random_vector(layout.numel, step, dtype), samples=step)
    twin = optimizer.build(twin_flat, layout)
    twin.restore(state)
    for step in range(3, 6):
        twin.step(random_vector(layout.numel, step, dtype), samples=step)
    assert torch.equal(flat, twin_flat)
    assert_same_bits(stepper.state(), twin.state())


def assert_same_bits(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_bits(one[key], other[key])
    elif isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


def test_a_stepper_can_be_restored_to_before_its_first_update() -> None:
    flat, layout = flat_start()
    start = flat.clone()
    stepper = SGD(0.1, momentum=0.9).build(flat, layout)
    fresh = stepper.state()
    results = []
    for _ in range(2):
        flat.copy_(start)
        stepper.restore(fresh)
        for step in range(3):
            stepper.step(random_vector(layout.numel, step), samples=0)
        results.append(flat.clone())
    assert torch.equal(*results)


def test_state_is_a_copy_that_later_updates_do_not_touch() -> None:
    flat, layout = flat_start()
    stepper = Adam().build(flat, layout)
    stepper.step(random_vector(layout.numel, 0), samples=0)
    state = stepper.state()
    before = state["slots"]["0.weight"]["exp_avg"].clone()
    stepper.step(random_vector(layout.numel, 1), samples=0)
    assert torch.equal(state["slots"]["0.weight"]["exp_avg"], before)
    assert state["updates"] == 1


def test_the_learning_rate_follows_the_samples_of_the_run_and_is_returned() -> None:
    flat, layout = flat_start()
    start = flat.clone()
    stepper = SGD(Linear(1.0, 0.0, samples=100)).build(flat, layout)
    assert stepper.step(torch.ones(layout.numel), samples=75) == 0.25
    torch.testing.assert_close(flat, start - 0.25)


def test_without_a_rate_a_torch_optimizer_keeps_its_own() -> None:
    flat, layout = flat_start()
    stepper = TorchOptimizer(lambda groups: torch.optim.SGD(groups, lr=0.5)).build(flat, layout)
    assert stepper.step(torch.zeros(layout.numel), samples=0) == 0.5


def test_clipping_shortens_a_long_gradient_and_does_not_change_the_callers_tensor() -> None:
    flat, layout = flat_start()
    start = flat.clone()
    stepper = SGD(1.0, clip_norm=2.0).build(flat, layout)
    gradient = 100 * random_vector(layout.numel, 1)
    untouched = gradient.clone()
    stepper.step(gradient, samples=0)
    assert torch.equal(gradient, untouched)
    torch.testing.assert_close(start - flat, 2.0 * gradient / gradient.norm(), rtol=1e-4, atol=1e-6)


def test_clipping_does_not_change_a_short_gradient() -> None:
    flat, layout = flat_start()
    twin = flat.clone()
    gradient = random_vector(layout.numel, 1)
    gradient /= 2 * gradient.norm()
    SGD(1.0, clip_norm=1.0).build(flat, layout).step(gradient, samples=0)
    SGD(1.0).build(twin, layout).step(gradient, samples=0)
    assert torch.equal(flat, twin)


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(0.1, weight_decay=0.5, decay_1d=False),
        TorchOptimizer(lambda groups: torch.optim.SGD(groups, lr=0.1, weight_decay=0.5), decay_1d=False),
    ],
    ids=describe,
)
def test_weight_decay_can_exclude_parameters_of_one_dimension(optimizer: Optimizer) -> None:
    flat, layout = flat_start()
    start = flat.clone()
    optimizer.build(flat, layout).step(torch.zeros(layout.numel), samples=0)
    for slot, before, after in zip(layout.parameters, layout.shaped(start), layout.shaped(flat), strict=True):
        torch.testing.assert_close(after, before if len(slot.shape) < 2 else 0.95 * before)


def test_weight_decay_can_exclude_all_parameters() -> None:
    layout = layout_of(nn.BatchNorm1d(3))
    flat = torch.ones(6)
    SGD(0.1, weight_decay=0.5, decay_1d=False).build(flat, layout).step(torch.zeros(6), samples=0)
    assert (flat == 1).all()


def test_overwriting_a_gradient_after_its_step_changes_nothing() -> None:
    flat, layout = flat_start()
    stepper = Adam().build(flat, layout)
    gradient = random_vector(layout.numel, 0)
    stepper.step(gradient, samples=0)
    after_one = flat.clone()
    gradient.fill_(float("nan"))
    assert torch.equal(flat, after_one)
    stepper.step(random_vector(layout.numel, 1), samples=0)
    assert flat.isfinite().all()


@pytest.mark.parametrize("optimizer", ALL[:-1], ids=describe)
def test_a_named_optimizer_survives_plain_data(optimizer: Optimizer) -> None:
    assert from_plain(Optimizer, to_plain(optimizer), "optimizer") == optimizer


def test_a_schedule_inside_an_optimizer_survives_plain_data() -> None:
    optimizer = SGD(WarmUp(Linear(0.1, 0.0, 1000), samples=100, scale=4.0), clip_norm=1.0)
    assert from_plain(Optimizer, to_plain(optimizer), "optimizer") == optimizer


def test_a_torch_optimizer_cannot_be_written_to_a_file() -> None:
    with pytest.raises(ConfigurationError, match="cannot be written to a file"):
        to_plain(TorchOptimizer(torch.optim.Adagrad))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SGD(-0.1), "SGD.lr must be 0 or more"),
        (lambda: SGD(None), "SGD.lr must be a number or a schedule"),  # type: ignore[arg-type]
        (lambda: SGD(momentum=1.0), "SGD.momentum must be at least 0 and below 1"),
        (lambda: SGD(nesterov=True), "needs momentum; add momentum=0.9"),
        (lambda: Adam(betas=(0.9, 1.0)), "Adam.betas must be"),
        (lambda: AMSGrad(eps=0.0), "AMSGrad.eps must be greater than 0"),
        (lambda: AdamW(weight_decay=-1.0), "AdamW.weight_decay must be 0 or more"),
        (lambda: RMSprop(clip_norm=0.0), "RMSprop.clip_norm must be greater than 0"),
    ],
)
def test_a_value_that_cannot_work_is_refused_where_it_is_written(make: Callable[[], Optimizer], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        make()


# Damping


@pytest.mark.parametrize(
    "config",
    [
        SGD(0.1),
        SGD(0.1, momentum=0.9),
        SGD(0.1, momentum=0.9, nesterov=True),
        RMSprop(0.01, momentum=0.9),
        Adam(0.01),
        AMSGrad(0.01),
        TorchOptimizer(lambda groups: torch.optim.RAdam(groups, lr=0.01)),
    ],
    ids=["sgd", "momentum", "nesterov", "rmsprop", "adam", "amsgrad", "radam"],
)
def test_with_constant_gradients_a_damped_step_is_shorter_by_the_factor_whatever_the_momentum(
    config: Optimizer,
) -> None:
    gradient = random_vector(flat_start()[1].numel, 1, torch.float64)

    def last_step(damping: float) -> Tensor:
        flat, layout = flat_start(torch.float64)
        stepper = config.build(flat, layout)
        for _ in range(300):
            before = flat.clone()
            stepper.step(gradient, 0, damping)
        return flat - before

    torch.testing.assert_close(last_step(0.2), 0.2 * last_step(1.0))


def test_damped_adam_has_a_damped_first_moment() -> None:
    rate, (first, second), damping = 0.01, (0.9, 0.999), 0.25
    flat, layout = flat_start(torch.float64)
    expected, mean, square = flat.clone(), torch.zeros_like(flat), torch.zeros_like(flat)
    stepper = Adam(rate).build(flat, layout)
    for k in range(1, 9):
        gradient = random_vector(layout.numel, k, torch.float64)
        stepper.step(gradient, 0, damping)
        mean = damping * first * mean + (1 - damping * first) * gradient
        square = second * square + (1 - second) * gradient**2
        corrected = mean / (1 - (damping * first) ** k), square / (1 - second**k)
        expected -= damping * rate * corrected[0] / (corrected[1].sqrt() + 1e-8)
    torch.testing.assert_close(flat, expected)


@pytest.mark.parametrize("config", ALL, ids=describe)
def test_damping_holds_for_one_update(config: Optimizer) -> None:
    flat, layout = flat_start()
    stepper = config.build(flat, layout)
    rate = stepper.step(random_vector(layout.numel, 0), 0)
    before = stepper.state()["groups"]
    assert stepper.step(random_vector(layout.numel, 1), 0, 0.5) == 0.5 * rate
    after = stepper.state()["groups"]
    for group in (*before, *after):
        group.pop("eps", None)  # AMSGrad's follows the number of the update
    assert after == before


def test_momentum_that_torch_does_not_sum_is_left_alone() -> None:
    """In Muon, momentum is a running mean, and the length of a step does not depend on it."""
    matrix = nn.Linear(4, 3, bias=False)
    flat, layout = torch.zeros(12), layout_of(matrix)
    seen: list[float] = []

    class Recording(torch.optim.Muon):
        def step(self, closure: Any = None) -> Any:
            seen.extend([self.param_groups[0]["momentum"], self.param_groups[0]["lr"]])
            return super().step(closure)

    TorchOptimizer(lambda groups: Recording(groups, lr=0.1)).build(flat, layout).step(random_vector(12, 0), 0, 0.5)
    assert seen == [0.95, 0.05]
