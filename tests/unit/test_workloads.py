from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from made_images import make_data
from made_texts import make_text
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from offbeat.core.actions import Samples
from offbeat.core.configuration import from_plain, to_plain
from offbeat.core.examples import Examples, Order
from offbeat.core.splits import ByLabel, Sharded
from offbeat.core.workload import NamedWorkload, Target, Workload
from offbeat.errors import ConfigurationError, ContractViolation, MissingDependency
from offbeat.lab.workloads import digits
from offbeat.lab.workloads.digits import Digits, DigitsCNN, DigitsLogistic
from offbeat.lab.workloads.images import ImageWorkload
from offbeat.lab.workloads.synthetic import LinearRegression, Quadratic, ToyConvolutional, ToyDeep, TwoGaussians
from offbeat.lab.workloads.text import TextWorkload

CROSS_ENTROPY = functools.partial(F.cross_entropy, reduction="none")


def train(workload: Workload, samples: int, batch: int = 256, lr: float = 3e-3) -> nn.Module:
    """Plain Adam on one machine."""
    model = workload.initial_model(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    order = Order(workload.split.indices(workload.train.targets, 0, 1, 0), 0, 0)
    for first in range(0, samples, batch):
        optimizer.zero_grad()
        workload.losses(model, workload.train.take(order.take(first, first + batch))).mean().backward()
        optimizer.step()
    return model


def separable(count: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(count) % 2
    return torch.stack([labels * 2.0 - 1, torch.ones(count)], 1), labels


def test_a_workload_of_ones_own_model_and_data_trains() -> None:
    workload = Workload(lambda: nn.Linear(2, 2), CROSS_ENTROPY, separable())
    loss, accuracy, _ = workload.evaluate(train(workload, 10_000, lr=0.1))
    assert accuracy == 1.0
    assert loss < 0.1


def test_a_module_is_copied_and_never_trained_itself() -> None:
    module = nn.Linear(2, 2)
    before = module.weight.clone()
    workload = Workload(module, CROSS_ENTROPY, separable())
    train(workload, 512)
    assert torch.equal(module.weight, before)


def test_the_initial_model_depends_on_the_seed_alone() -> None:
    workload = Workload(lambda: nn.Linear(2, 2), CROSS_ENTROPY, separable())
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = workload.initial_model(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(first.weight, workload.initial_model(1).weight)
    assert not torch.equal(first.weight, workload.initial_model(2).weight)


class Squares(Dataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int):
        return torch.full((3,), float(index)), index % 2


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1), 0


class Ragged(Squares):
    def __getitem__(self, index: int):
        return torch.zeros(index + 1), 0


@pytest.mark.parametrize(
    "data",
    [
        Squares(),
        TensorDataset(torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)),
        (np.zeros((5, 3)), np.zeros(5, dtype=np.uint8)),
        [np.zeros((5, 3), dtype=np.float32), np.zeros(5, dtype=np.int32)],
        (np.zeros((5, 3))[::-1], np.zeros(5, dtype=np.int64)[::-1]),
        [(torch.zeros(3), 1)] * 5,
        Examples(torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)),
    ],
)
def test_examples_come_from_tensors_arrays_and_datasets(data) -> None:
    examples = Examples.of(data)
    inputs, targets = examples.take(torch.tensor([0, 4, 4]))
    assert len(examples) == 5
    assert (inputs.shape, inputs.dtype) == ((3, 3), torch.float32)
    assert (targets.shape, targets.dtype) == ((3,), torch.int64)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ((torch.zeros(3), torch.zeros(4)), "one row per example, but have the shapes"),
        ((torch.zeros(3, 2), torch.zeros(3), torch.zeros(3)), "must be a pair of tensors or arrays"),
        (("a", "b"), "must be a pair of tensors or arrays"),
        ((torch.zeros(0, 2), torch.zeros(0)), "there are no examples"),
        ([], "there are no examples"),
        (Endless(), "an iterable dataset has no fixed order"),
        (Ragged(), "cannot be stacked into two tensors"),
        (7, "must be a pair"),
        ((np.array(["a", "b"]), np.zeros(2)), "give numbers"),
    ],
)
def test_data_that_cannot_be_used_is_refused_in_a_sentence(data, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        Workload(lambda: nn.Linear(2, 2), CROSS_ENTROPY, data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (F.cross_entropy, r"shape \(4,\), but returned shape \(\); type: loss=functools.partial"),
        (lambda outputs, targets: outputs**2, r"returned shape \(4, 2\); average what belongs to one sample"),
        (lambda outputs, targets: 1.0, r"must return a tensor with one loss per sample, not 1.0"),
    ],
)
def test_a_loss_of_the_wrong_shape_is_refused_in_a_sentence(loss, sentence: str) -> None:
    workload = Workload(lambda: nn.Linear(2, 2), loss, separable())
    with pytest.raises(ConfigurationError, match=sentence):
        workload.losses(workload.initial_model(0), workload.train.take(torch.arange(4)))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: "net", "must make a torch.nn.Module, but made str"),
        (nn.ReLU, "the model ReLU has no parameters to train"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_in_a_sentence(model, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        Workload(model, CROSS_ENTROPY, separable()).initial_model(0)
    with pytest.raises(ConfigurationError, match="a module or a function that makes one, but is str"):
        Workload("net", CROSS_ENTROPY, separable())


def test_evaluation_is_in_chunks_and_leaves_the_model_as_it_was() -> None:
    inputs, labels = separable(1300)
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    workload = Workload(model, CROSS_ENTROPY, (inputs, labels))
    model = workload.initial_model(0)
    model[1].eval()
    before = [buffer.clone() for buffer in model.buffers()]
    loss, accuracy, top5 = workload.evaluate(model)
    assert [module.training for module in model] == [True, False, True, True]
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    outputs = model.eval()(inputs)
    assert loss == pytest.approx(F.cross_entropy(outputs, labels).item(), rel=1e-5)
    assert accuracy == pytest.approx((outputs.argmax(1) == labels).float().mean().item())
    assert top5 is None


def test_without_test_data_at_most_2048_training_examples_are_evaluated() -> None:
    workload = Workload(nn.Linear(2, 2), CROSS_ENTROPY, separable(5000))
    assert len(workload.evaluation_examples) == 2048
    assert workload.evaluation_examples.targets.float().mean() == pytest.approx(0.5, abs=0.05)
    assert len(Workload(nn.Linear(2, 2), CROSS_ENTROPY, separable(50)).evaluation_examples) == 50


def test_regression_has_a_loss_and_no_accuracy() -> None:
    workload = LinearRegression(examples=100).build()
    loss, accuracy, top5 = workload.evaluate(workload.initial_model(0))
    assert loss > 0
    assert accuracy is None
    assert top5 is None


def test_a_target_is_reached_from_the_right_side() -> None:
    assert Target("accuracy", 0.9).reached(5.0, 0.9)
    assert not Target("accuracy", 0.9).reached(0.0, 0.89)
    assert not Target("accuracy", 0.9).reached(0.0, None)
    assert Target("loss", 0.5).reached(0.5, None)
    assert not Target("loss", 0.5).reached(0.6, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "named",
    [
        Digits(),
        DigitsCNN(),
        DigitsLogistic(),
        TwoGaussians(),
        pytest.param(ToyDeep(), marks=pytest.mark.slow),
        pytest.param(ToyConvolutional(), marks=pytest.mark.slow),
    ],
)
def test_plain_adam_reaches_the_target_within_the_default_samples(named: NamedWorkload) -> None:
    workload = named.build()
    lr = workload.optimizer.lr
    measured = workload.evaluate(train(workload, min(workload.until.count, 60_000), lr=lr))
    assert workload.target.reached(*measured[:2])


@pytest.mark.parametrize("named", [Quadratic(), LinearRegression()])
def test_the_default_sgd_reaches_the_target_within_the_default_samples(named: NamedWorkload) -> None:
    workload = named.build()
    model = workload.initial_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.optimizer.lr)
    order = Order(np.arange(len(workload.train)), 0, 0)
    for first in range(0, workload.until.count, 256):
        optimizer.zero_grad()
        workload.losses(model, workload.train.take(order.take(first, first + 256))).mean().backward()
        optimizer.step()
    assert workload.target.reached(*workload.evaluate(model)[:2])


@pytest.mark.parametrize(
    ("named", "count"),
    [(Digits(), 4810), (DigitsCNN(), 9930), (DigitsLogistic(), 650), (ToyConvolutional(), 57_866)],
)
def test_small_models_have_as_many_parameters_as_documented(named: NamedWorkload, count: int) -> None:
    model = named.build().initial_model(0)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_digits_hold_out_a_fifth_of_every_class_and_nothing_twice() -> None:
    workload = Digits().build()
    assert len(workload.train) + len(workload.test) == 1797
    for label in range(10):
        held_out = int((workload.test.targets == label).sum())
        assert held_out / (held_out + int((workload.train.targets == label).sum())) == pytest.approx(0.2, abs=0.01)
    assert float(workload.train.inputs.max()) == 1.0
    assert Digits().build().train is workload.train


def rows(data: Examples) -> set[bytes]:
    return {row.numpy().tobytes() for row in data.inputs}


def test_validation_data_is_a_tenth_of_the_training_data_that_is_not_trained_on() -> None:
    workload = Digits().build()
    split = workload.with_validation
    assert len(split.validation) == len(workload.train) // 10
    assert len(split.train) == len(workload.train) - len(split.validation)
    assert rows(split.train) | rows(split.validation) == rows(workload.train)
    assert not rows(split.train) & rows(split.validation)
    assert split.test is workload.test
    assert split.with_validation is split
    assert rows(Digits().build().with_validation.validation) == rows(split.validation)


def test_a_large_data_set_gives_up_no_more_than_2000_examples_for_validation() -> None:
    workload = Workload(nn.Linear(1, 2), F.cross_entropy, (torch.arange(50_000.0)[:, None], torch.zeros(50_000).long()))
    assert len(workload.with_validation.validation) == 2000


def test_validation_data_of_your_own_is_used_and_one_example_is_too_few_to_split() -> None:
    loss, data = functools.partial(F.cross_entropy, reduction="none"), (torch.zeros(4, 1), torch.tensor([0, 1, 0, 1]))
    other = torch.ones(2, 1), torch.tensor([1, 1])
    workload = Workload(nn.Linear(1, 2), loss, data, validation=other)
    assert workload.with_validation is workload
    model = workload.initial_model(0)
    expected = float(loss(model(other[0]), other[1]).detach().mean())
    assert workload.validate(model).loss == pytest.approx(expected)
    assert workload.evaluate(model).loss != pytest.approx(expected)
    with pytest.raises(ContractViolation, match="has no validation data"):
        Workload(nn.Linear(1, 2), loss, data).validate(model)
    with pytest.raises(ConfigurationError, match="there is 1 training example, so none is left"):
        _ = Workload(nn.Linear(1, 2), loss, (torch.zeros(1, 1), torch.tensor([0]))).with_validation


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    digits._load.cache_clear()
    with pytest.raises(MissingDependency, match=r"pip install 'offbeat\[digits\]'"):
        Digits().build()


def test_digits_are_those_that_scikit_learn_returns_wherever_it_keeps_them(monkeypatch) -> None:
    read = digits._read_table()
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    assert np.array_equal(digits._read_table(), read)


def test_the_quadratic_is_smallest_at_its_optimum() -> None:
    named = Quadratic(dimension=30, noise=2.0, examples=500)
    workload = named.build()
    model = workload.initial_model(0)
    assert workload.evaluate(model)[0] == pytest.approx(0.5 * float((named.curvature * named.optimum**2).sum()))
    model.point.data.copy_(named.optimum)
    assert workload.evaluate(model) == (0.0, None, None)
    losses = workload.losses(model, workload.train.take(torch.arange(500)))
    losses.mean().backward()
    assert model.point.grad.abs().max() < 1e-6


def test_the_quadratic_has_the_configured_curvature_and_noise() -> None:
    named = Quadratic(dimension=50, condition=100.0, noise=3.0)
    workload = named.build()
    assert float(named.curvature.max() / named.curvature.min()) == pytest.approx(100.0, rel=1e-5)
    model = workload.initial_model(0)
    at_one_sample = workload.losses(model, workload.train.take(torch.tensor([3])))
    (gradient,) = torch.autograd.grad(at_one_sample.sum(), [model.point])
    torch.testing.assert_close(gradient, workload.train.targets[3] - named.curvature * named.optimum)
    assert float(workload.train.targets.std()) == pytest.approx(3.0, rel=0.02)


def test_linear_regression_is_smallest_at_its_optimum() -> None:
    named = LinearRegression()
    workload = named.build()
    model = workload.initial_model(0)
    model[0].weight.data.copy_(named.optimum[None, :-1])
    model[0].bias.data.copy_(named.optimum[-1:])
    assert workload.evaluate(model)[0] == pytest.approx(named.optimal_loss, rel=1e-4)
    assert named.optimal_loss == pytest.approx(0.5 * 0.1**2, rel=0.05)
    workload.losses(model, (workload.train.inputs, workload.train.targets)).mean().backward()
    assert model[0].weight.grad.abs().max() < 1e-5


@pytest.mark.parametrize("named", [Quadratic(), LinearRegression(), TwoGaussians(), Digits()])
def test_data_is_the_same_whatever_the_global_randomness(named: NamedWorkload) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    first = named.build()
    torch.manual_seed(2)
    np.random.seed(2)
    second = named.build()
    assert torch.equal(first.train.targets, second.train.targets)
    assert torch.equal(first.test.inputs, second.test.inputs)


@pytest.mark.parametrize("cls", NamedWorkload.members.values(), ids=NamedWorkload.members)
def test_every_named_workload_can_be_written_read_and_described(
    cls: type[NamedWorkload], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if issubclass(cls, ImageWorkload):
        make_data(monkeypatch, tmp_path, cls.name)
    if issubclass(cls, TextWorkload):
        make_text(monkeypatch, tmp_path, cls.name)
    named = cls(split=ByLabel(3))
    assert from_plain(NamedWorkload, to_plain(named), "workload") == named
    assert from_plain(NamedWorkload, cls.name, "workload") == cls()
    assert cls.summary
    assert cls.paper
    workload = cls(split=Sharded()).build()
    assert workload.label == cls.name
    assert workload.split == Sharded()
    assert isinstance(workload.until, Samples)


def test_a_workload_takes_its_first_field_by_position() -> None:
    assert Digits(32).hidden == 32
    assert Quadratic(7).dimension == 7
