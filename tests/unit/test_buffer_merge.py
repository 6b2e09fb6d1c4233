"""Running statistics of batch norm that several ranks train at once follow the data as in serial training."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import offbeat as ob
from offbeat.core.buffer_merge import BufferMerge, mean_buffers
from offbeat.core.flat import FlatModule
from offbeat.core.messages import Buffers
from offbeat.errors import ContractViolation

MOMENTA = [0.1, 0.3, None]


class Normalised(nn.Module):
    """Batch norm of the inputs, and a loss that does not depend on them."""

    def __init__(self, momentum: float | None = 0.1, track_running_stats: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, momentum=momentum, track_running_stats=track_running_stats)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.norm(inputs)
        return outputs.sum(1)


def copied(flat: FlatModule) -> Buffers:
    return tuple(buffer.clone() for buffer in flat.buffers)


def after_batches(flat: FlatModule, start: Buffers, batches: list[Tensor]) -> Buffers:
    """The buffers after training on these batches, beginning with `start`."""
    flat.load(flat.parameters, start)
    for batch in batches:
        flat.module(batch)
    return copied(flat)


def random_batches(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [3.0 + torch.randn(8, 2, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("momentum", MOMENTA)
def test_the_contributions_of_one_worker_merge_to_what_serial_training_gives(momentum: float | None) -> None:
    flat = FlatModule(Normalised(momentum))
    merge, start, batches = BufferMerge(flat.layout.statistics), copied(flat), random_batches(7, seed=1)
    serial = after_batches(flat, start, batches)
    merged = start
    for part in (batches[:3], batches[3:4], batches[4:]):
        after = after_batches(flat, start, part)  # all begin at the oldest values, however stale
        merged = merge.merge(merged, [(merge.contribution(start, after), 1)])
    torch.testing.assert_close(merged, serial)


@pytest.mark.parametrize("momentum", MOMENTA)
def test_equal_workers_of_a_synchronous_update_merge_to_what_one_of_them_computed(momentum: float | None) -> None:
    flat = FlatModule(Normalised(momentum))
    merge, start = BufferMerge(flat.layout.statistics), copied(flat)
    after = after_batches(flat, start, random_batches(4, seed=2))
    contribution = merge.contribution(start, after)
    merged = merge.merge(start, [(contribution, 32)] * 5)
    torch.testing.assert_close(merged[0], after[0])
    assert merged[1].tolist() == [5 * 4]  # counters add


def test_parts_weigh_as_much_as_their_samples() -> None:
    flat = FlatModule(Normalised())
    merge, start = BufferMerge(flat.layout.statistics), copied(flat)
    parts = [after_batches(flat, start, random_batches(1, seed)) for seed in (3, 4)]
    merged = merge.merge(
        start, [(merge.contribution(start, after), weight) for after, weight in zip(parts, (3, 1), strict=True)]
    )
    torch.testing.assert_close(merged[0], 0.75 * parts[0][0] + 0.25 * parts[1][0])


@pytest.mark.parametrize("momentum", MOMENTA)
@given(counts=st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), seed=st.integers(0, 100))
def test_what_was_learned_is_moved_to_other_values_and_joined_without_loss(
    momentum: float | None, counts: tuple[int, int, int], seed: int
) -> None:
    flat = FlatModule(Normalised(momentum))
    merge, fresh = BufferMerge(flat.layout.statistics), copied(flat)
    first, second, third = (random_batches(count, seed + i) for i, count in enumerate(counts))
    start = after_batches(flat, fresh, first)
    middle = after_batches(flat, start, second)
    end = after_batches(flat, middle, third)
    joined = merge.chain(merge.contribution(start, middle), merge.contribution(middle, end))
    torch.testing.assert_close(merge.merge(start, [(joined, 1)]), end, rtol=1e-4, atol=1e-5)
    other = after_batches(flat, fresh, random_batches(2, seed + 7))
    expected = after_batches(flat, other, [*second, *third])
    torch.testing.assert_close(merge.rebase(start, end, other), expected, rtol=1e-4, atol=1e-5)
    assert bool((merge.rebase(start, end, other)[0][2:] > 0).all())


def test_a_layer_that_was_not_called_stays_as_it_is() -> None:
    flat = FlatModule(Normalised())
    merge = BufferMerge(flat.layout.statistics)
    old = after_batches(flat, copied(flat), random_batches(2, seed=5))
    unchanged = merge.contribution(old, old)
    new = after_batches(flat, old, random_batches(3, seed=6))
    assert all(map(torch.equal, merge.merge(new, [(unchanged, 4)]), new))


def test_buffers_that_are_no_statistics_of_batch_norm_are_averaged_and_counters_never_fall() -> None:
    merge = BufferMerge(())
    current = (torch.tensor([0.0, 0.0]), torch.tensor([5]), torch.tensor([False]))
    first = (torch.tensor([1.0, 2.0]), torch.tensor([7]), torch.tensor([False]))
    second = (torch.tensor([4.0, 8.0]), torch.tensor([3]), torch.tensor([True]))
    means, counts, flags = merge.merge(current, [(first, 2), (second, 1), ((), 9)])
    torch.testing.assert_close(means, torch.tensor([2.0, 4.0]))
    assert (counts.tolist(), flags.tolist(), first[0].tolist()) == ([7], [True], [1.0, 2.0])
    assert merge.merge(current, [((), 3)]) is current
    assert merge.merge(current, [(second, 1)])[1].tolist() == [5]


def test_the_mean_of_equal_buffers_changes_no_bit() -> None:
    part = (torch.randn(100, generator=torch.Generator().manual_seed(0)),)
    (merged,) = mean_buffers([(part, 3), (part, 7), (part, 11)])
    assert torch.equal(merged, part[0])
    assert merged.data_ptr() != part[0].data_ptr()
    broken = (torch.tensor([float("nan")]),)
    with pytest.raises(ContractViolation, match="no part has a weight"):
        mean_buffers([(broken, 0)])


# Whole runs


def constant_workload(**norm: float | bool | None) -> ob.Workload:
    """Every micro-batch has mean 3 and variance 0."""
    inputs = torch.full((1024, 2), 3.0)
    return ob.Workload(
        lambda: Normalised(**norm),  # type: ignore[arg-type]
        lambda outputs, targets: (outputs - targets).square(),
        (inputs, torch.zeros(len(inputs))),
        optimizer=ob.SGD(lr=0.0),
    )


def trained(strategy: ob.Strategy, workers: int, samples: int, **norm: float | bool | None) -> nn.BatchNorm1d:
    """The batch norm of the result of a run."""
    run = ob.simulate(constant_workload(**norm), strategy, workers=workers, until=ob.Samples(samples))
    layer = run.model().norm
    assert isinstance(layer, nn.BatchNorm1d)
    return layer


@pytest.mark.parametrize("workers", [1, 2, 10])
def test_statistics_at_a_hub_follow_the_data_at_the_same_pace_for_any_number_of_workers(workers: int) -> None:
    layer = trained(ob.AsyncFixed(batch=16, microbatch=16, messages=1), workers, 40 * 16)
    assert int(layer.num_batches_tracked) == 40
    torch.testing.assert_close(3.0 - layer.running_mean, torch.full((2,), 3.0 * 0.9**40))


@pytest.mark.parametrize(
    "strategy",
    [
        ob.FixedMinibatch(batch=32, microbatch=16),
        ob.LocalSGD(batch=16, microbatch=16, every=4),
        ob.DiLoCo(batch=16, microbatch=16, every=5),
        ob.DelayedExchange(batch=16, microbatch=16),
        ob.DecoupledDiLoCo(batch=16, microbatch=16, every=4, fragments=2),
        ob.Gossip(batch=16, microbatch=16),
        ob.Population(batch=16, microbatch=16, every=4),
    ],
    ids=lambda strategy: strategy.name,
)
def test_no_strategy_follows_the_data_more_slowly_than_one_of_its_workers(strategy: ob.Strategy) -> None:
    layer = trained(strategy, 4, 4 * 40 * 16)
    # 40 micro-batches on each worker; the last ones may not have been exchanged before the run ended.
    assert 2.9 <= 3.0 * (1 - 0.9**33) <= float(layer.running_mean.min())
    assert float(layer.running_mean.max()) <= 3.0
    assert float(layer.running_var.min()) > 0
    assert float(layer.running_var.max()) <= 0.9**33


@pytest.mark.parametrize(
    "strategy", [ob.AsyncFixed(batch=32, microbatch=16), ob.LocalSGD(batch=16, microbatch=16, every=4)]
)
def test_a_cumulative_average_is_that_of_all_micro_batches(strategy: ob.Strategy) -> None:
    layer = trained(strategy, 4, 64 * 16, momentum=None)
    torch.testing.assert_close(layer.running_mean, torch.full((2,), 3.0))
    torch.testing.assert_close(layer.running_var, torch.zeros(2))
    assert int(layer.num_batches_tracked) == 64


def test_batch_norm_without_running_statistics_has_nothing_to_merge() -> None:
    layer = trained(ob.AsyncFixed(batch=16, microbatch=16), 2, 320, track_running_stats=False)
    assert layer.running_mean is None


# Recalibration


def test_recalibration_replaces_the_statistics_by_those_of_the_data() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.BatchNorm1d(2, momentum=0.3))
    model[1].eval()
    batches = random_batches(5, seed=8)
    assert ob.recalibrate(model, ((batch, None) for batch in batches)) == 5
    stacked = torch.stack(batches)
    torch.testing.assert_close(model[0].running_mean, stacked.mean((0, 1)))
    torch.testing.assert_close(model[0].running_var, stacked.var(1).mean(0))
    assert (model[0].momentum, model[2].momentum) == (0.1, 0.3)
    assert [module.training for module in model] == [True, False, True]


def test_recalibration_without_batches_or_without_tensors_is_refused() -> None:
    with pytest.raises(ob.ConfigurationError, match="no batches"):
        ob.recalibrate(nn.BatchNorm1d(2), [])
    for wrong in (("text", 1), (), {}, torch.zeros(())):
        with pytest.raises(ob.ConfigurationError, match="batches that are tensors"):
            ob.recalibrate(nn.BatchNorm1d(2), [wrong])
    with pytest.raises(ob.ConfigurationError, match="batches to iterate over, but got NoneType"):
        ob.recalibrate(nn.BatchNorm1d(2), None)  # type: ignore[arg-type]
    with pytest.raises(ob.ConfigurationError, match="a batch of a single sample"):
        ob.recalibrate(nn.BatchNorm1d(2), [torch.zeros(1, 2)])
    assert ob.recalibrate(nn.Linear(2, 2), []) == 0


def test_a_workload_that_asks_for_it_is_evaluated_with_recalibrated_statistics() -> None:
    data = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)) * 5 + 7
    losses = {}
    for recalibrated in (0, 64):
        workload = ob.Workload(
            Normalised, lambda outputs, targets: outputs.square(), (data, torch.zeros(64)), recalibrate=recalibrated
        )
        losses[recalibrated] = workload.evaluate(workload.initial_model(0)).loss
    assert losses[0] > 20  # the initial statistics are 0 and 1
    assert losses[64] == pytest.approx(2.0, abs=0.6)  # the sum of two normalised numbers, squared
    with pytest.raises(ob.ConfigurationError, match=r"Workload.recalibrate must be 0, or 2"):
        ob.Workload(Normalised, torch.mul, (data, data), recalibrate=1)
