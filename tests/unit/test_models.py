from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from offbeat.core.configuration import from_plain, to_plain
from offbeat.core.flat import FlatModule
from offbeat.errors import ConfigurationError
from offbeat.lab.workloads.models import (
    AllCNN,
    CifarCNN,
    ImageShape,
    LeNet5,
    MnistCNN,
    Model,
    ResNet18,
    WideResNet28x2,
    WideResNet28x5,
)

MNIST = ImageShape(1, 28, 28, 10)
CIFAR = ImageShape(3, 32, 32, 10)
IMAGENET = ImageShape(3, 32, 32, 1000)


@pytest.mark.parametrize(
    ("model", "shape", "count"),
    [
        (MnistCNN(), MNIST, 3_274_634),
        (CifarCNN(), CIFAR, 4_607_178),
        (AllCNN(), CIFAR, 1_681_268),
        (ResNet18(), CIFAR, 11_173_962),
        (WideResNet28x5(), IMAGENET, 9_450_424),
        (WideResNet28x2(), IMAGENET, 1_595_320),
        (LeNet5(), MNIST, 44_426),
    ],
)
def test_models_have_as_many_parameters_as_published(model: Model, shape: ImageShape, count: int) -> None:
    assert model.parameters(shape) == count
    assert sum(parameter.numel() for parameter in model.build(shape).parameters()) == count


def small(cls: type[Model]) -> Model:
    return cls(width=0.25)


@pytest.mark.parametrize("shape", [MNIST, CIFAR, IMAGENET], ids=["mnist", "cifar", "imagenet"])
@pytest.mark.parametrize("cls", Model.members.values(), ids=Model.members)
def test_every_model_is_differentiated_on_every_kind_of_image(cls: type[Model], shape: ImageShape) -> None:
    module = small(cls).build(shape)
    flat = FlatModule(module)
    outputs = module(torch.randn(2, shape.channels, shape.height, shape.width))
    assert outputs.shape == (2, shape.classes)
    F.cross_entropy(outputs, torch.tensor([0, 1])).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert float(flat.gradients.abs().sum()) > 0


@pytest.mark.parametrize("cls", Model.members.values(), ids=Model.members)
def test_outputs_do_not_depend_on_the_memory_format(cls: type[Model]) -> None:
    module = small(cls).build(CIFAR).eval()
    images = torch.randn(3, 3, 32, 32)
    expected = module(images)
    flat = FlatModule(module.to(memory_format=torch.channels_last))
    assert flat.module is module
    torch.testing.assert_close(module(images.to(memory_format=torch.channels_last)), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cls", Model.members.values(), ids=Model.members)
def test_models_are_written_and_read_as_tables_and_as_one_word(cls: type[Model]) -> None:
    assert from_plain(Model, to_plain(small(cls)), "model") == small(cls)
    assert from_plain(Model, f"{cls.name}:0.25", "model") == small(cls)


def test_half_the_width_is_about_a_quarter_of_the_parameters() -> None:
    for cls in Model.members.values():
        assert 0.2 < cls(width=0.5).parameters(CIFAR) / cls().parameters(CIFAR) < 0.35


def test_only_the_wide_cifar_cnn_uses_channels_first() -> None:
    assert not CifarCNN().channels_last
    assert CifarCNN(0.5).channels_last
    assert all(cls().channels_last for cls in Model.members.values() if cls is not CifarCNN)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: LeNet5(0.05), "lenet5 with width 0.05 has a layer of 6 that becomes one of 0"),
        (lambda: MnistCNN(0), "MnistCNN.width must be greater than 0, but is 0"),
        (lambda: CifarCNN(dropout=1.0), "CifarCNN.dropout must be at least 0 and below 1"),
        (lambda: CifarCNN().build(ImageShape(1, 8, 8, 10)), "needs images of at least 16×16 pixels, but these are 8×8"),
        (lambda: LeNet5().build(ImageShape(1, 8, 8, 10)), "needs images of at least 16×16 pixels"),
    ],
)
def test_wrong_settings_are_refused_in_a_sentence(make, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_the_outputs_of_all_cnn_are_an_eighth_of_a_mean() -> None:
    module = AllCNN(0.1).build(CIFAR).eval()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(module(images), module[:-3](images).mean((2, 3)) / 8)


def test_wrn_28_2_has_the_initial_values_of_he_and_a_larger_eps() -> None:
    torch.manual_seed(0)
    module = WideResNet28x2().build(IMAGENET)
    for part in module.modules():
        if isinstance(part, torch.nn.Conv2d):
            outputs = part.out_channels * part.kernel_size[0] * part.kernel_size[1]
            weight = part.weight.detach() / (2 / outputs) ** 0.5
            assert float(weight.std()) == pytest.approx(1.0, abs=0.1)
            assert float(weight.abs().max()) > 2  # normal, not uniform
        if isinstance(part, torch.nn.BatchNorm2d):
            assert part.eps == 1e-4


def test_all_cnn_without_running_statistics_normalises_by_the_batch_in_evaluation_too() -> None:
    module = AllCNN(0.1, track_running_stats=False).build(CIFAR)
    assert not list(module.buffers())
    images = torch.randn(4, 3, 32, 32)
    in_training = module.train()(images)
    torch.testing.assert_close(module.eval()(images), in_training)
    assert not torch.allclose(module(images[:2]), in_training[:2], atol=1e-3)  # other examples of the batch matter
    tracked = AllCNN(0.1).build(CIFAR).eval()
    torch.testing.assert_close(tracked(images)[:2], tracked(images[:2]))


def test_batch_norm_without_running_statistics_is_chosen_in_a_file() -> None:
    plain = {"name": "all-cnn", "width": 0.125, "track_running_stats": False}
    assert from_plain(Model, plain, "model") == AllCNN(0.125, track_running_stats=False)
