"""Torch optimizers of a user's own on the views of a flat vector: functions, built ones, mixes, schedulers."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR

import offbeat as ob
from offbeat.core.flat import FlatModule, Layout
from offbeat.core.optimizers import Optimizer, Stepper, TorchOptimizer
from offbeat.errors import ConfigurationError

MUON_MIX = {
    "0.weight": functools.partial(torch.optim.Muon, lr=0.02),
    "*": functools.partial(torch.optim.AdamW, lr=3e-3),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def random_gradient(layout: Layout, seed: int) -> Tensor:
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed))


def plain_loop(model: nn.Module, optimizers: list[Any], schedulers: list[Any], steps: int) -> Tensor:
    """The usual PyTorch loop on the same gradients; the parameters at the end."""
    layout = FlatModule(copy.deepcopy(model)).layout
    for step in range(steps):
        for parameter, gradient in zip(model.parameters(), layout.shaped(random_gradient(layout, step)), strict=True):
            parameter.grad = gradient.clone()
        for part in (*optimizers, *schedulers):
            part.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def stepped(config: Optimizer, steps: int, model: nn.Module | None = None) -> tuple[Tensor, list[float], Stepper]:
    """The parameters after some updates on a flat vector, the rates, and the stepper."""
    flat = FlatModule(model or net())
    stepper = config.build(flat.parameters, flat.layout)
    rates = [stepper.step(random_gradient(flat.layout, step), 10 * step) for step in range(steps)]
    return flat.parameters, rates, stepper


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        torch.optim.Adagrad,
        functools.partial(torch.optim.NAdam, lr=1e-2),
        lambda parameters: torch.optim.RAdam(parameters, lr=1e-2),
    ],
)
def test_a_function_steps_as_in_a_plain_loop(make: Any) -> None:
    reference = net()
    expected = plain_loop(reference, [make(reference.parameters())], [], 5)
    assert torch.allclose(stepped(TorchOptimizer(make), 5)[0], expected, atol=1e-7)


def test_fused_kernels_are_used_where_a_class_has_them_and_nothing_else_is_asked_for() -> None:
    seen: list[Any] = []

    class Watched(torch.optim.Adam):
        def __init__(self, params: Any, lr: float = 1e-3, *, foreach: Any = None, fused: Any = None) -> None:
            seen.append(fused)
            super().__init__(params, lr=lr, foreach=foreach, fused=fused)

    for make in (Watched, functools.partial(Watched, lr=0.1), functools.partial(Watched, foreach=True)):
        stepped(TorchOptimizer(make), 1)
    assert seen == [True, True, None]


def test_an_optimizer_that_is_built_keeps_its_groups() -> None:
    def built(model: Any) -> torch.optim.Optimizer:
        groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2].parameters()}]
        return torch.optim.AdamW(groups, lr=1e-3)

    reference = net()
    expected = plain_loop(reference, [built(reference)], [], 4)
    model = net()
    config = TorchOptimizer(built(model)).for_module(model)
    got, rates, _ = stepped(config, 4, model)
    assert torch.allclose(got, expected, atol=1e-7)
    assert rates == [1e-2] * 4  # that of the first group


def test_an_optimizer_that_is_built_keeps_its_state_and_is_not_changed() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain_loop(model, [optimizer], [], 3)
    reference = copy.deepcopy(model)
    twin = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = copy.deepcopy(optimizer.state_dict())
    expected = plain_loop(reference, [twin], [], 2)
    got, _, _ = stepped(TorchOptimizer(optimizer).for_module(model), 2, model)
    assert torch.allclose(got, expected, atol=1e-7)
    for slot, kept in zip(optimizer.state_dict()["state"].values(), before["state"].values(), strict=True):
        assert torch.equal(slot["momentum_buffer"], kept["momentum_buffer"])


def test_frozen_parameters_in_the_groups_are_left_out() -> None:
    model: Any = net()
    model[0].weight.requires_grad_(False)
    got, _, _ = stepped(TorchOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)).for_module(model), 1, model)
    assert len(got) == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_muon_for_a_matrix_and_adamw_for_the_rest_equal_a_plain_loop() -> None:
    reference: Any = net()
    others = [parameter for name, parameter in reference.named_parameters() if name != "0.weight"]
    optimizers = [torch.optim.Muon([reference[0].weight], lr=0.02), torch.optim.AdamW(others, lr=3e-3)]
    expected = plain_loop(reference, optimizers, [], 6)
    assert torch.allclose(stepped(TorchOptimizer(MUON_MIX), 6)[0], expected, atol=1e-6)


def test_several_optimizers_that_are_built_step_together() -> None:
    def both(model: Any) -> list[torch.optim.Optimizer]:
        others = [parameter for name, parameter in model.named_parameters() if name != "0.weight"]
        return [torch.optim.Muon([model[0].weight], lr=0.02), torch.optim.AdamW(others, lr=3e-3)]

    reference, model = net(), net()
    expected = plain_loop(reference, both(reference), [], 6)
    got, _, _ = stepped(TorchOptimizer(both(model)).for_module(model), 6, model)
    assert torch.allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(
    "make_scheduler",
    [
        functools.partial(CosineAnnealingLR, T_max=5),
        functools.partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
        lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 4)], milestones=[2]
        ),
    ],
)
@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # torch's SequentialLR uses it itself
def test_a_scheduler_steps_once_per_update(make_scheduler: Any, is_built: bool) -> None:
    reference, model = net(), net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.5)
    expected = plain_loop(reference, [optimizer], [make_scheduler(optimizer)], 6)
    if is_built:
        own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        config = TorchOptimizer(own, make_scheduler(own)).for_module(model)
    else:
        config = TorchOptimizer(functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5), make_scheduler)
    assert torch.allclose(stepped(config, 6, model)[0], expected, atol=1e-7)


def test_a_scheduler_can_go_by_samples() -> None:
    make = functools.partial(torch.optim.SGD, lr=1.0)
    halved = functools.partial(LambdaLR, lr_lambda=lambda step: 0.5**step)
    config = TorchOptimizer(make, halved, scheduler_samples=20)  # each update has 10 samples
    assert stepped(config, 6)[1] == pytest.approx([1, 1, 0.5, 0.5, 0.25, 0.25])


def test_damping_is_for_one_update_and_does_not_reach_the_scheduler() -> None:
    flat = FlatModule(net())
    config = TorchOptimizer(functools.partial(torch.optim.SGD, lr=1.0), functools.partial(LinearLR, start_factor=1.0))
    stepper = config.build(flat.parameters, flat.layout)
    gradient = random_gradient(flat.layout, 0)
    assert [stepper.step(gradient, 0, damping) for damping in (1.0, 0.25, 1.0)] == pytest.approx([1, 0.25, 1])


@pytest.mark.parametrize(
    "config",
    [
        TorchOptimizer(functools.partial(torch.optim.AdamW, lr=1e-2), functools.partial(CosineAnnealingLR, T_max=9)),
        TorchOptimizer(MUON_MIX, functools.partial(LinearLR, total_iters=7), scheduler_samples=20),
    ],
)
def test_a_restored_stepper_continues_bit_for_bit(config: TorchOptimizer) -> None:
    model = net()
    parameters, _, stepper = stepped(config, 4, model)
    saved, flat = stepper.state(), FlatModule(net())
    flat.parameters.copy_(parameters)
    again = config.build(flat.parameters, flat.layout)
    again.restore(saved)
    for step in range(4, 8):
        gradient = random_gradient(flat.layout, step)
        assert stepper.step(gradient, 10 * step) == again.step(gradient, 10 * step)
    assert torch.equal(parameters, flat.parameters)


@pytest.mark.parametrize("strategy", [ob.FixedMinibatch, ob.AsyncFixed, ob.LocalSGD, ob.Gossip, ob.Serial])
def test_strategies_take_what_a_pytorch_user_has(strategy: Any) -> None:
    config = strategy(optimizer=functools.partial(torch.optim.AdamW, lr=3e-4)).optimizer
    assert isinstance(config, TorchOptimizer)
    assert config.describe() == "torch.optim.AdamW(lr=0.0003)"


def test_a_simulated_run_with_a_mix_equals_a_plain_loop_and_is_described() -> None:
    data = torch.randn(64, 5, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3
    loss = functools.partial(nn.functional.cross_entropy, reduction="none")
    workload = ob.Workload(net(), loss, data, data)
    strategy = ob.FixedMinibatch(batch=64, microbatch=64, optimizer=MUON_MIX)
    run = ob.simulate(workload, strategy, until=ob.Samples(64 * 6), workers=1, evaluate=None)
    reference: Any = net()
    others = [parameter for name, parameter in reference.named_parameters() if name != "0.weight"]
    optimizers = [torch.optim.Muon([reference[0].weight], lr=0.02), torch.optim.AdamW(others, lr=3e-3)]
    for _ in range(6):
        reference.zero_grad()
        loss(reference(data[0]), data[1]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for ours, plain in zip(run.model().parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, plain, atol=1e-5)
    described = run.records.header.optimizers["optimizer"]
    assert "torch.optim.Muon(lr=0.02)" in described
    assert "torch.optim.AdamW(lr=0.003)" in described


def test_a_simulated_run_takes_an_optimizer_that_is_built_on_the_model_of_its_workload() -> None:
    model = net()
    optimizer = torch.optim.AdamW([{"params": [parameter]} for parameter in model.parameters()], lr=1e-2)
    data = torch.randn(64, 5), torch.arange(64) % 3
    workload = ob.Workload(model, functools.partial(nn.functional.cross_entropy, reduction="none"), data, data)
    strategy = ob.FixedMinibatch(batch=32, optimizer=TorchOptimizer(optimizer, CosineAnnealingLR(optimizer, 10)))
    run = ob.simulate(workload, strategy, until=ob.Samples(640), workers=2)
    assert run.summary.failure is None
    assert run.records.header.optimizers["optimizer"].startswith("torch.optim.AdamW(lr=0.01")


def refusals() -> list[tuple[Any, str]]:
    model, other = net(), net()
    built = torch.optim.SGD(model.parameters(), lr=0.1)
    foreign = CosineAnnealingLR(torch.optim.SGD(other.parameters(), lr=0.1), 5)
    partial = functools.partial(torch.optim.SGD, lr=0.1)
    return [
        (lambda: TorchOptimizer(built, foreign), "CosineAnnealingLR belongs to another optimizer"),
        (lambda: TorchOptimizer(partial, foreign), "CosineAnnealingLR belongs to another optimizer"),
        (lambda: TorchOptimizer(built, ReduceLROnPlateau(built)), "ReduceLROnPlateau goes by a metric"),
        (lambda: TorchOptimizer(partial, ReduceLROnPlateau), "ReduceLROnPlateau goes by a metric"),
        (lambda: stepped(TorchOptimizer(functools.partial(torch.optim.Muon, lr=0.1)), 1), "Muon.*does not take these"),
        (lambda: stepped(TorchOptimizer(built), 1), "goes with a model that is built already"),
        (lambda: stepped(TorchOptimizer(built).for_module(other), 1, other), "not one of the model's"),
        (lambda: stepped(TorchOptimizer({"0.*": partial}), 1), r"no optimizer is given for the parameter 2\.weight"),
        (lambda: stepped(TorchOptimizer({"*": partial, "0.*": partial}), 1), r"no parameter is left for '0\.\*'"),
        (lambda: stepped(TorchOptimizer([built, built]).for_module(model), 1, model), "two optimizers have the same"),
        (lambda: TorchOptimizer(3), "takes what makes a torch optimizer"),
        (lambda: TorchOptimizer(lambda groups: 3).build(*_flat()), "must make a torch.optim.Optimizer, but made int"),
        (lambda: TorchOptimizer(built, decay_1d=False), "set weight_decay=0 in theirs"),
        (lambda: TorchOptimizer(partial, functools.partial(LinearLR), lr=0.1), "leave out one of them"),
        (lambda: ob.FixedMinibatch(optimizer="muon"), "must be an Optimizer or None"),
    ]


def _flat() -> tuple[Tensor, Layout]:
    flat = FlatModule(net())
    return flat.parameters, flat.layout


@pytest.mark.parametrize("number", range(len(refusals())))
def test_what_cannot_work_is_refused_in_one_sentence(number: int) -> None:
    attempt, sentence = refusals()[number]
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        attempt()
    assert "\n" not in str(caught.value)
