from __future__ import annotations

import functools

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat as ob
from offbeat.core.actions import Evaluate
from offbeat.core.flat import FlatModule
from offbeat.core.workload import Measured, Workload
from offbeat.errors import ContractViolation, RunFailed
from offbeat.live.evaluation import ModelMeasure
from offbeat.records.schema import RECORD_DECODER, Evaluation

CROSS_ENTROPY = functools.partial(F.cross_entropy, reduction="none")


class Ranking(nn.Module):
    """Gives class c the output −|c − x|: the classes nearest to the input are the likeliest."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.classes = classes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return -self.scale * (torch.arange(self.classes) - inputs).abs()


def test_top5_accuracy_counts_labels_among_the_five_likeliest() -> None:
    # From 10.1 the five nearest are 10, 11, 9, 12, 8.
    labels = torch.tensor([10, 11, 9, 12, 8, 13, 7, 0])
    workload = Workload(Ranking(20), CROSS_ENTROPY, (torch.full((8, 1), 10.1), labels))
    measured = workload.evaluate(workload.initial_model(0))
    assert measured.accuracy == 1 / 8
    assert measured.accuracy_top5 == 5 / 8


@pytest.mark.parametrize(("classes", "measures"), [(2, False), (5, False), (6, True)])
def test_five_classes_have_no_top5_accuracy(classes: int, measures: bool) -> None:
    workload = Workload(Ranking(classes), CROSS_ENTROPY, (torch.zeros(4, 1), torch.zeros(4, dtype=torch.long)))
    assert (workload.evaluate(workload.initial_model(0)).accuracy_top5 is not None) is measures


def test_top5_accuracy_is_in_records_summary_and_json() -> None:
    run = ob.simulate(ob.workloads.Digits(), ob.FixedMinibatch(), workers=2, until=1024, seed=0)
    evaluations = [record for record in run.records.records if isinstance(record, Evaluation)]
    assert all(record.accuracy < record.accuracy_top5 <= 1 for record in evaluations)
    assert run.summary.accuracy_top5 == evaluations[-1].accuracy_top5
    assert msgspec.to_builtins(run.summary)["accuracy_top5"] == run.summary.accuracy_top5


def test_records_without_top5_accuracy_omit_it_and_can_be_read() -> None:
    old = b'{"record":"evaluation","at":1.0,"rank":0,"version":3,"samples_total":64,"loss":0.5,"accuracy":0.9}'
    record = RECORD_DECODER.decode(old)
    assert record == Evaluation(at=1.0, rank=0, version=3, samples_total=64, loss=0.5, accuracy=0.9)
    assert msgspec.json.encode(record) == old


def test_records_without_accuracy_have_none() -> None:
    record = Evaluation(at=1.0, rank=0, version=3, samples_total=64, loss=0.5, accuracy=None)
    assert b'"accuracy":null' in msgspec.json.encode(record)


@pytest.mark.parametrize(
    ("returned", "measured"),
    [
        (1.5, Measured(1.5)),
        ((1.5, 0.5), Measured(1.5, 0.5)),
        ([1.5, None], Measured(1.5)),
        ((1.5, 0.5, 0.75), Measured(1.5, 0.5, 0.75)),
        ({"loss": 1.5, "accuracy": 0.5}, Measured(1.5, 0.5)),
        ({"loss": 1.5, "accuracy_top5": 0.75}, Measured(1.5, None, 0.75)),
        (torch.tensor(1.5), Measured(1.5)),
    ],
)
def test_an_evaluation_of_the_user_may_omit_accuracies(returned, measured: Measured) -> None:
    model = nn.Linear(1, 1)
    flat = FlatModule(nn.Linear(1, 1))
    assert ModelMeasure(model, lambda _: returned)(Evaluate(flat.parameters, (), 0)) == measured


@pytest.mark.parametrize("returned", ["much", (1.0, 2.0, 3.0, 4.0), (), None, {"accuracy": 0.5}])
def test_an_evaluation_that_returns_something_else_is_refused(returned) -> None:
    flat = FlatModule(nn.Linear(1, 1))
    with pytest.raises(RunFailed, match="evaluate must return a loss"):
        ModelMeasure(nn.Linear(1, 1), lambda _: returned)(Evaluate(flat.parameters, (), 0))


def test_a_score_is_measured_by_the_validation_of_the_user_and_by_nothing_else() -> None:
    parameters = FlatModule(nn.Linear(1, 1)).parameters
    record, score = Evaluate(parameters, (), 0), Evaluate(parameters, (), -1, is_score=True)
    both = ModelMeasure(nn.Linear(1, 1), lambda _: 1.0, lambda _: 2.0)
    assert (both.can_score, both(record).loss, both(score).loss) == (True, 1.0, 2.0)
    alone = ModelMeasure(nn.Linear(1, 1), lambda _: 1.0)
    assert not alone.can_score
    with pytest.raises(ContractViolation, match=r"nothing to score with; pass one: offbeat.join\(.*validate="):
        alone(score)


def test_a_workload_whose_evaluation_returns_a_pair_still_runs() -> None:
    class Paired(Workload):
        def evaluate(self, model: nn.Module):
            return super().evaluate(model)[:2]

    digits = ob.workloads.Digits().build()
    paired = Paired(digits.model, digits.loss, digits.train, digits.test)
    run = ob.simulate(paired, ob.FixedMinibatch(), workers=2, until=256, seed=0)
    assert run.summary.accuracy is not None
    assert run.summary.accuracy_top5 is None
