from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from made_images import TEST, TRAIN, make_data

import offbeat as ob
from offbeat.cli import main
from offbeat.core.configuration import from_plain, to_plain
from offbeat.core.examples import Order
from offbeat.core.splits import Shared
from offbeat.core.workload import NamedWorkload
from offbeat.errors import ConfigurationError
from offbeat.lab.workloads.images import Cifar10, Cinic10, FashionMnist, ImageNet32, ImageWorkload, Mnist, balanced
from offbeat.lab.workloads.models import CifarCNN, LeNet5, MnistCNN, Model
from offbeat.live.batch_sources import indexed_source

NAMED = [Mnist, FashionMnist, Cifar10, Cinic10, ImageNet32]


def narrow(cls: type[ImageWorkload], **fields) -> ImageWorkload:
    return cls(model=dataclasses.replace(cls().model, width=0.1), **fields)


@pytest.mark.parametrize("cls", NAMED)
def test_images_are_bytes_until_they_are_drawn(cls: type[ImageWorkload], monkeypatch, tmp_path: Path) -> None:
    make_data(monkeypatch, tmp_path, cls.name)
    workload = narrow(cls).build()
    assert (len(workload.train), len(workload.test)) == (TRAIN, TEST)
    assert isinstance(workload.train.pixels, np.memmap)
    assert workload.train.pixels.dtype == np.uint8
    shape = cls().shape
    inputs, targets = workload.train.drawn(Order(np.arange(TRAIN), 0, 1), 0, 4)
    assert (inputs.shape, inputs.dtype) == ((4, shape.channels, shape.height, shape.width), torch.float32)
    assert (targets.shape, targets.dtype) == ((4,), torch.int64)
    losses = workload.losses(workload.initial_model(0), (inputs, targets))
    assert losses.shape == (4,)
    measured = workload.evaluate(workload.initial_model(0))
    assert 0 <= measured.accuracy <= measured.accuracy_top5 <= 1


@pytest.mark.parametrize("augment", [True, False])
def test_a_draw_is_the_same_image_for_every_division_into_batches(augment: bool, monkeypatch, tmp_path) -> None:
    make_data(monkeypatch, tmp_path, "cifar10")
    workload = narrow(Cifar10, augment=augment).build()
    order = Order(np.arange(TRAIN), 5, 2)
    whole, labels = workload.train.drawn(order, 0, 3 * TRAIN)
    again = Order(np.arange(TRAIN), 5, 2)
    for first, stop in ((700, 720), (3, 4), (230, 250)):
        inputs, targets = workload.train.drawn(again, first, stop)
        assert torch.equal(inputs, whole[first:stop])
        assert torch.equal(targets, labels[first:stop])
    live = indexed_source(workload.train, Shared(), worker=0, workers=1, rank=2, seed=5)
    assert live is not None
    (inputs, _), _ = live.take(230, 20)
    assert torch.equal(inputs, whole[230:250])
    assert torch.equal(whole, workload.train.take(order.take(0, 3 * TRAIN))[0]) is not augment


def test_a_part_of_the_images_stays_bytes_and_is_augmented_as_the_whole(monkeypatch, tmp_path: Path) -> None:
    make_data(monkeypatch, tmp_path, "cifar10")
    workload = narrow(Cifar10, examples=TRAIN // 2).build()
    split = workload.with_validation
    assert split.train.augment
    assert split.train.pixels is workload.train.pixels
    chosen = [set(data.chosen.tolist()) for data in (split.train, split.validation)]
    assert chosen[0] | chosen[1] == set(workload.train.chosen.tolist())
    assert not chosen[0] & chosen[1]
    whole = {index: position for position, index in enumerate(workload.train.chosen.tolist())}
    positions = [whole[index] for index in split.validation.chosen.tolist()]
    inputs, targets = workload.train.take(torch.tensor(positions))
    torch.testing.assert_close(split.validation.between(0, len(positions))[0], inputs)
    assert torch.equal(split.validation.targets, targets)


def test_evaluation_is_never_augmented(monkeypatch, tmp_path: Path) -> None:
    make_data(monkeypatch, tmp_path, "cifar10")
    workload = narrow(Cifar10).build()
    assert workload.train.augment
    assert not workload.test.augment
    expected = workload.test.normalisation.apply(np.array(workload.test.pixels[10:30]))
    assert torch.equal(workload.test.between(10, 30)[0], expected)
    assert len(workload.test.between(50, 512)[1]) == TEST - 50


@pytest.mark.parametrize(("model", "last"), [(CifarCNN(0.1), True), (CifarCNN(1.0), False)])
def test_batches_and_weights_lie_in_memory_as_suits_the_model(model: Model, last: bool, monkeypatch, tmp_path) -> None:
    make_data(monkeypatch, tmp_path, "cifar10")
    workload = Cifar10(model=model).build()
    inputs, _ = workload.train.drawn(Order(np.arange(TRAIN), 0, 0), 0, 4)
    assert inputs.is_contiguous(memory_format=torch.channels_last) is last
    weights = [parameter for parameter in workload.initial_model(0).parameters() if parameter.dim() == 4]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) is last for weight in weights)


def test_fewer_examples_are_of_all_classes_alike_and_part_of_more(monkeypatch, tmp_path: Path) -> None:
    make_data(monkeypatch, tmp_path, "mnist")
    some, more = (Mnist(examples=count, test_examples=20).build() for count in (33, 100))
    assert some.train.targets.bincount().tolist() == [4, 4, 4, 3, 3, 3, 3, 3, 3, 3]
    assert set(some.train.chosen) < set(more.train.chosen)
    assert some.test.targets.bincount().tolist() == [2] * 10
    whole = Mnist().build()
    inputs, targets = some.train.take(torch.arange(33))
    expected, labels = whole.train.take(torch.from_numpy(some.train.chosen))
    assert torch.equal(inputs, expected)
    assert torch.equal(targets, labels)
    assert Mnist(examples=TRAIN).build().train.chosen is None


def test_a_selection_is_balanced_as_far_as_there_are_examples() -> None:
    labels = np.array([0] * 50 + [1] * 3 + [2] * 50)
    chosen = balanced(labels, 40)
    assert np.bincount(labels[chosen]).tolist() == [19, 3, 18]
    assert len(np.unique(chosen)) == 40


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"examples": 500}, "mnist has 240 training examples, but 500 were asked for; leave that out"),
        ({"test_examples": 61}, "mnist has 60 test examples, but 61 were asked for"),
        ({"examples": 0}, "Mnist.examples must be greater than 0, but is 0"),
    ],
)
def test_more_examples_than_there_are_are_refused_in_a_sentence(fields, sentence, monkeypatch, tmp_path) -> None:
    make_data(monkeypatch, tmp_path, "mnist")
    with pytest.raises(ConfigurationError, match=sentence):
        Mnist(**fields).build()


def test_without_its_data_a_workload_says_what_to_type(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path))
    with pytest.raises(ConfigurationError, match="offbeat data get cinic10"):
        Cinic10().build()


@pytest.mark.parametrize("cls", NAMED)
def test_image_workloads_are_written_and_read(cls: type[ImageWorkload]) -> None:
    named = cls(model=LeNet5(2.0), examples=77, split=ob.workloads.Sharded())
    assert from_plain(NamedWorkload, to_plain(named), "workload") == named


@pytest.mark.parametrize("strategy", [ob.AsyncFixed(batch=8, microbatch=4), ob.FixedMinibatch(batch=8, microbatch=4)])
def test_dropout_batch_norm_and_augmentation_are_the_same_in_every_simulation(strategy, monkeypatch, tmp_path) -> None:
    make_data(monkeypatch, tmp_path, "cifar10")
    named = Cifar10(model=CifarCNN(0.05), test_examples=20)
    runs = [ob.simulate(named, strategy, workers=3, until=96, seed=seed) for seed in (1, 1, 2)]
    values = [torch.cat([p.detach().flatten() for p in run.model().parameters()]) for run in runs]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert runs[0].records.records == runs[1].records.records
    assert runs[0].summary.accuracy_top5 >= runs[0].summary.accuracy


def test_training_on_made_up_images_learns_them(monkeypatch, tmp_path: Path) -> None:
    make_data(monkeypatch, tmp_path, "mnist")
    strategy = ob.FixedMinibatch(batch=16, optimizer=ob.Adam(lr=3e-3))
    run = ob.simulate(Mnist(model=MnistCNN(0.25)), strategy, workers=2, until=2400, seed=0)
    assert run.summary.accuracy > 0.8


def counted(capsys, *words: str) -> list[dict]:
    assert main(["workloads", *words, "--counts", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["counts"]


def test_counts_of_every_workload_and_model_need_no_data(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path))
    rows = counted(capsys)
    assert {row["workload"] for row in rows} == set(NamedWorkload.members)
    assert set(Model.members) <= {row["model"] for row in rows}
    found = {(row["workload"], row["model"]): row for row in rows}
    assert found["imagenet32", "wrn-28-5"] == {
        "workload": "imagenet32",
        "model": "wrn-28-5",
        "parameters": 9_450_424,
        "train": 1_281_167,
        "test": 50_000,
        "classes": 1000,
    }
    assert found["linear", "linear regression"]["classes"] is None
    assert [row["model"] for row in counted(capsys, "mnist")] == ["mnist-cnn", "lenet5"]


@pytest.mark.parametrize("name", ["digits", "digits-cnn", "digits-logistic"])
def test_counts_of_the_digits_are_those_of_the_data(name: str) -> None:
    named = NamedWorkload.members[name]()
    size, workload = named.size(), named.build()
    assert (size.train, size.test) == (len(workload.train), len(workload.test))
    assert size.classes == len(workload.train.targets.unique())
    assert size.parameters == sum(parameter.numel() for parameter in workload.initial_model(0).parameters())


def test_counts_are_a_table_for_people(capsys) -> None:
    assert main(["workloads", "--counts"]) == 0
    shown = capsys.readouterr().out
    assert "3,274,634" in shown
    assert "training examples" in shown
