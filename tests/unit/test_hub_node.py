"""The arithmetic and the protocol of hub and worker nodes, with events constructed in the test instead of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.core.actions import Action, Cancel, Compute, Evaluate, Finish, Report, Send, SetTimer
from offbeat.core.events import (
    Evaluated,
    GradientReady,
    Leave,
    MessageArrived,
    PeerJoined,
    PeerLost,
    Started,
    TimerFired,
)
from offbeat.core.flat import FlatModule
from offbeat.core.messages import Message, Stop, Stopped
from offbeat.records.schema import Dropped, Update
from offbeat.strategies.evaluations import EVALUATIONS_MAX
from offbeat.strategies.hub.hub_parts import AllWorkers, CollectStatus, Distinct, Every, Messages, Share, TargetBatch
from offbeat.strategies.hub.hub_worker import Gradient, Parameters, Welcome
from offbeat.strategies.hub.work_sizing import Effort, ShareSizing, TargetBatchSizing


def context_for(rank: int, workers: int, until: int = 1000) -> ob.nodes.NodeContext:
    flat = FlatModule(nn.Linear(2, 1, bias=False))
    flat.parameters.zero_()
    return ob.nodes.NodeContext(
        rank=rank,
        members=tuple(range(workers + 1)),
        layout=flat.layout,
        parameters=flat.parameters,
        buffers=(),
        random=np.random.default_rng(0),
        until=ob.Samples(until),
        evaluate=None,
    )


def hub_of(config: ob.Hub, workers: int = 2, until: int = 1000) -> ob.nodes.Node:
    """A hub that all its workers have joined."""
    hub = config.node(context_for(0, workers, until))
    list(hub.handle(Started(0.0)))
    for rank in range(1, workers + 1):
        list(hub.handle(PeerJoined(0.0, rank, 0)))
    return hub


def arrives(source: int, message: Message, at: float = 1.0) -> MessageArrived:
    return MessageArrived(at, source, message, lambda: message)


def gradient(values: list[float], version: int, draws: tuple[int, int]) -> Gradient:
    return Gradient(torch.tensor(values), (), draws[1] - draws[0], 0.0, version, draws, 1.0, True)


def updates(actions: Iterable[Action]) -> list[Update]:
    return [a.record for a in actions if isinstance(a, Report) and isinstance(a.record, Update)]


def sent(actions: Iterable[Action], kind: type[Message]) -> list[int]:
    return [action.to for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


ASYNCHRONOUS = ob.Hub(compute=ob.Samples(4), collect=Messages(1), waits=False, optimizer=ob.SGD(lr=1.0), damping=1.0)


def damped_hub(optimizer: ob.nodes.Optimizer, fresh_updates: int, **settings: object) -> ob.nodes.Node:
    """A hub with one worker that has sent gradients of zero, each at the newest version."""
    config = dataclasses.replace(ASYNCHRONOUS, optimizer=optimizer, **{"staleness_free": 0, **settings})  # type: ignore[arg-type]
    hub = hub_of(config, workers=1)
    hub._parameters.copy_(torch.tensor([1.0, -2.0]))  # type: ignore[attr-defined]
    for number in range(fresh_updates):
        draws = 4 * number, 4 * number + 4
        list(hub.handle(arrives(1, gradient([0.0, 0.0], hub.state()["version"], draws))))
    return hub


def applied(hub: ob.nodes.Node, version: int, values: list[float]) -> tuple[torch.Tensor, float]:
    """How far a gradient of this version moves the parameters, and at which rate."""
    before, first = hub.state()["parameters"].clone(), 100 * (1 + hub.state()["version"])
    (update,) = updates(hub.handle(arrives(1, gradient(values, version, (first, first + 4)))))
    return hub.state()["parameters"] - before, update.learning_rate


def test_a_stale_gradient_is_applied_at_a_damped_rate() -> None:
    hub = damped_hub(ob.SGD(lr=1.0), fresh_updates=2)
    moved, rate = applied(hub, version=1, values=[0.0, 4.0])  # one update old: half the rate
    assert (moved.tolist(), rate) == ([0.0, -0.5], 0.5)


def test_stale_gradients_of_the_initial_parameters_have_a_squared_weight() -> None:
    hub = damped_hub(ob.SGD(lr=1.0), fresh_updates=1)
    assert applied(hub, version=0, values=[0.0, 4.0])[1] == 0.25


def test_with_many_workers_the_rate_is_reduced_before_any_staleness_is_seen() -> None:
    hub = hub_of(dataclasses.replace(ASYNCHRONOUS, staleness_free=1), workers=4)
    assert applied(hub, version=0, values=[0.0, 4.0])[1] == 2 / 4


def test_fresh_and_stale_gradients_of_one_update_share_a_weighted_mean_and_a_rate() -> None:
    hub = damped_hub(ob.SGD(lr=1.0), fresh_updates=4, collect=Messages(2))
    before = hub.state()["parameters"].clone()
    list(hub.handle(arrives(1, gradient([0.0, 6.0], 2, (100, 103)))))  # fresh: weight 1, 3 samples
    (update,) = updates(list(hub.handle(arrives(1, gradient([2.0, 2.0], 1, (103, 105))))))  # one update old: ½
    mean = torch.tensor([0.5 * 2.0, 6.0 + 0.5 * 2.0]) / (3 + 0.5 * 2)
    rate = (3 + 0.5 * 2) / 5
    assert update.learning_rate == pytest.approx(rate)
    torch.testing.assert_close(hub.state()["parameters"], before - rate * mean)


def stale_step(optimizer: ob.nodes.Optimizer, staleness: int, damping: float = 1.0) -> torch.Tensor:
    """How far one gradient of this staleness moves the parameters."""
    hub = damped_hub(optimizer, fresh_updates=staleness + 1, damping=damping)
    return applied(hub, version=1, values=[4.0, -8.0])[0]


@pytest.mark.parametrize(
    "optimizer",
    [
        ob.SGD(lr=0.1),
        ob.SGD(lr=0.1, weight_decay=0.3),
        ob.Adam(lr=0.1, betas=(0.0, 0.999)),
        ob.AdamW(lr=0.1, betas=(0.0, 0.999), weight_decay=0.5),
        ob.AMSGrad(lr=0.1, betas=(0.0, 0.999)),
        ob.RMSprop(lr=0.1),
        ob.TorchOptimizer(lambda groups: torch.optim.Adagrad(groups, lr=0.1)),
    ],
    ids=["sgd", "sgd with decay", "adam", "adamw", "amsgrad", "rmsprop", "adagrad"],
)
def test_without_momentum_a_stale_gradient_makes_a_damped_step(optimizer: ob.nodes.Optimizer) -> None:
    torch.testing.assert_close(stale_step(optimizer, 3), stale_step(optimizer, 3, damping=0.0) / 4)
    torch.testing.assert_close(stale_step(optimizer, 3, damping=0.5), stale_step(optimizer, 3, damping=0.0) / 2)


def test_momentum_is_damped_with_the_rate_so_that_a_stale_gradient_is_not_kept_for_long() -> None:
    hub = damped_hub(ob.SGD(lr=1.0, momentum=0.5), fresh_updates=2)
    # One update old: half the rate and half the momentum. What momentum would have added later is in this step.
    moved, rate = applied(hub, version=1, values=[4.0, 0.0])
    assert (moved.tolist(), rate) == ([-0.5 * (1 - 0.25) / (1 - 0.5), 0.0], 0.5)
    # A fresh gradient of zero: the whole rate, and the whole momentum of what was taken in.
    assert applied(hub, version=3, values=[0.0, 0.0])[0].tolist() == [-0.5, 0.0]


def test_damping_begins_above_the_staleness_that_is_free() -> None:
    for staleness, rate in ((0, 1.0), (1, 1.0), (2, 2 / 3), (3, 0.5)):
        hub = damped_hub(ob.SGD(lr=1.0), fresh_updates=staleness + 1, staleness_free=1)
        assert applied(hub, version=1, values=[4.0, 0.0])[1] == pytest.approx(rate)


def test_the_sum_is_divided_once_by_all_samples() -> None:
    hub = hub_of(ob.Hub(optimizer=ob.SGD(lr=1.0)))
    assert updates(hub.handle(arrives(2, gradient([6.0, 0.0], 0, (0, 6))))) == []
    (update,) = updates(list(hub.handle(arrives(1, gradient([2.0, 4.0], 0, (0, 2))))))
    assert hub.state()["parameters"].tolist() == [-1.0, -0.5]
    assert (update.samples, update.messages, [part.rank for part in update.contributions]) == (8, 2, [1, 2])


def test_weight_decay_acts_once_per_update_however_many_gradients_are_in_it() -> None:
    hub = hub_of(ob.Hub(optimizer=ob.SGD(lr=1.0, weight_decay=0.5)))
    for rank in (1, 2):
        list(hub.handle(arrives(rank, gradient([4.0, 0.0], 0, (0, 4)))))
    for rank in (1, 2):
        list(hub.handle(arrives(rank, gradient([0.0, 0.0], 1, (4, 8)))))
    assert hub.state()["parameters"].tolist() == [-0.5, 0.0]


def test_one_copy_of_a_version_is_shared_by_all_messages() -> None:
    hub = hub_of(ASYNCHRONOUS)
    actions = list(hub.handle(arrives(1, gradient([4.0, 0.0], 0, (0, 4)))))
    payloads = [action.message.parameters for action in actions if isinstance(action, Send)]
    assert len(payloads) == 2
    assert payloads[0] is payloads[1]


def test_ending_is_stop_then_stopped_then_finish() -> None:
    hub = hub_of(ob.Hub(optimizer=ob.SGD(lr=1.0)), until=8)
    list(hub.handle(arrives(1, gradient([1.0, 1.0], 0, (0, 4)))))
    assert sent(list(hub.handle(arrives(2, gradient([1.0, 1.0], 0, (0, 4))))), Stop) == [1, 2]
    assert not any(isinstance(a, Finish) for a in hub.handle(arrives(1, Stopped(4, 4))))
    # Worker 2 had computed up to draw 10 when Stop arrived: those samples are accounted for.
    actions = list(hub.handle(arrives(2, Stopped(10, 10))))
    dropped = [a.record for a in actions if isinstance(a, Report) and isinstance(a.record, Dropped)]
    assert [(d.rank, d.first, d.stop, d.reason) for d in dropped] == [(2, 4, 10, "stopped")]
    assert isinstance(actions[-1], Finish)
    assert actions[-1].version == 1


def test_a_lost_worker_ends_the_wait_for_it() -> None:
    hub = hub_of(ob.Hub(optimizer=ob.SGD(lr=1.0)))
    list(hub.handle(arrives(1, gradient([1.0, 1.0], 0, (0, 4)))))
    actions = list(hub.handle(PeerLost(2.0, 2, 0)))
    assert len(updates(actions)) == 1
    assert sent(actions, Parameters) == [1]


def test_a_worker_that_joins_gets_the_newest_parameters_and_what_it_may_skip() -> None:
    hub = hub_of(ASYNCHRONOUS)
    list(hub.handle(arrives(2, gradient([1.0, 0.0], 0, (0, 4)))))
    list(hub.handle(arrives(2, gradient([1.0, 0.0], 0, (8, 12)))))  # draws 4 to 8 are still in flight
    list(hub.handle(PeerLost(2.0, 2, 0)))
    (welcome,) = [a.message for a in hub.handle(PeerJoined(3.0, 2, 1)) if isinstance(a, Send)]
    assert isinstance(welcome, Welcome)
    assert (welcome.version, welcome.draw, welcome.done) == (2, 4, ((8, 12),))


def test_a_worker_skips_draws_that_the_hub_has_received() -> None:
    worker = ASYNCHRONOUS.node(context_for(2, 2))
    list(worker.handle(Started(0.0)))
    list(worker.handle(PeerJoined(0.0, 0, 0)))
    welcome = Welcome(torch.zeros(2), (), 5, ob.Samples(6), draw=4, done=((8, 12),))
    (first,) = worker.handle(arrives(0, welcome))
    assert isinstance(first, Compute)
    assert (first.draw, first.budget) == (4, ob.Samples(4))
    ready = GradientReady(1.0, torch.zeros(2), 4, 0.0, (), 5, (4, 8), 1.0, 0.0, True)
    _, second = worker.handle(ready)
    assert isinstance(second, Compute)
    assert (second.draw, second.budget) == (12, ob.Samples(6))


def test_an_older_parameter_message_never_replaces_a_newer_one() -> None:
    worker = ASYNCHRONOUS.node(context_for(1, 1))
    list(worker.handle(arrives(0, Welcome(torch.zeros(2), (), 1, ob.Samples(4), 0, ()))))
    list(worker.handle(arrives(0, Parameters(torch.ones(2), (), 7, ob.Samples(4)))))
    list(worker.handle(arrives(0, Parameters(torch.zeros(2), (), 3, ob.Samples(4)))))
    ready = GradientReady(1.0, torch.zeros(2), 4, 0.0, (), 1, (0, 4), 1.0, 0.0, True)
    computes = [action for action in worker.handle(ready) if isinstance(action, Compute)]
    assert [(compute.version, compute.parameters.tolist()) for compute in computes] == [(7, [1.0, 1.0])]


def test_the_hub_begins_without_workers_that_do_not_join_in_time() -> None:
    hub = ob.Hub(optimizer=ob.SGD(lr=1.0), patience_seconds=5.0).node(context_for(0, 2))
    assert SetTimer("gather", 5.0) in list(hub.handle(Started(0.0)))
    assert sent(hub.handle(PeerJoined(0.0, 1, 0)), Welcome) == []
    assert sent(list(hub.handle(TimerFired(5.0, "gather"))), Welcome) == [1]


def test_a_strategy_without_an_optimizer_is_refused_with_what_to_type() -> None:
    with pytest.raises(ob.ConfigurationError, match=r"optimizer=offbeat.SGD"):
        ob.Hub().node(context_for(0, 1))


@pytest.mark.parametrize(
    ("collect", "status", "ready"),
    [
        (AllWorkers(), CollectStatus(live=3, reported=3, messages=3), True),
        (AllWorkers(), CollectStatus(live=3, reported=2, messages=9), False),
        (AllWorkers(), CollectStatus(live=0, reported=0, messages=4), False),
        (Messages(4), CollectStatus(live=2, reported=1, messages=4), True),
        (Messages(), CollectStatus(live=5, reported=5, messages=4), False),
        (Messages(), CollectStatus(live=0, reported=0, messages=1), True),
        (Distinct(3), CollectStatus(live=5, reported=3, messages=3), True),
        (Distinct(3), CollectStatus(live=2, reported=2, messages=2), True),
        (Distinct(3), CollectStatus(live=5, reported=2, messages=7), False),
        (Every(1.0), CollectStatus(live=1, reported=1, messages=9), False),
    ],
)
def test_when_the_hub_updates(collect: ob.Hub, status: CollectStatus, ready: bool) -> None:
    assert collect.ready(status) is ready


def test_a_share_is_split_as_evenly_as_possible_and_never_to_zero() -> None:
    sizing = ShareSizing(Share(7))
    assert [sizing.budget(rank, {1, 2, 3}).count for rank in (1, 2, 3)] == [3, 2, 2]
    assert ShareSizing(Share(2)).budget(9, range(1, 10)) == ob.Samples(1)


def test_the_controller_follows_its_formula() -> None:
    sizing = TargetBatchSizing(TargetBatch(samples=100, first=50, samples_max=400), microbatch=1)
    sizing.members_changed({1, 2})
    assert sizing.budget(1, {1, 2}) == ob.Samples(50)
    sizing.observe({1: Effort(50, 5.0), 2: Effort(50, 10.0)}, {1, 2})  # 10 and 5 samples a second
    assert sizing.limit_seconds == pytest.approx(100 / 15)
    limit = sizing.limit_seconds
    for k, batch in enumerate((110, 80, 500, 90), start=1):
        step = 1 + max(0.1, 1 / k) * (100 - batch) / 100
        limit *= min(2.0, max(0.5, step))
        sizing.observe({1: Effort(batch // 2, limit), 2: Effort(batch // 2, limit)}, {1, 2})
        assert sizing.limit_seconds == pytest.approx(limit)


def test_the_controller_does_not_wind_up_when_all_workers_are_at_samples_max() -> None:
    sizing = TargetBatchSizing(TargetBatch(samples=100, first=10, samples_max=10), microbatch=1)
    for _ in range(50):
        sizing.observe({1: Effort(10, 1.0)}, {1})
    assert sizing.limit_seconds == pytest.approx(10.0)


def test_workers_that_join_after_gathering_ended_are_welcomed_at_once() -> None:
    hub = ob.Hub(optimizer=ob.SGD(lr=1.0), patience_seconds=5.0).node(context_for(0, 2))
    list(hub.handle(Started(0.0)))
    list(hub.handle(PeerJoined(1.0, 1, 0)))
    list(hub.handle(PeerLost(2.0, 1, 0)))
    assert list(hub.handle(TimerFired(5.0, "gather"))) == []
    assert sent(list(hub.handle(PeerJoined(6.0, 1, 1))), Welcome) == [1]


def test_a_hub_restored_in_a_new_process_welcomes_workers_that_join() -> None:
    config = ob.Hub(compute=ob.Samples(4), collect=Every(2.0), waits=False, optimizer=ob.SGD(lr=1.0))
    old = hub_of(config)
    list(old.handle(arrives(1, gradient([4.0, 0.0], 0, (0, 4)))))
    list(old.handle(TimerFired(2.0, "update")))
    new = config.node(context_for(0, 2))
    new.restore(old.state())
    timers = {action.name: action.seconds for action in new.handle(Started(10.0)) if isinstance(action, SetTimer)}
    assert timers == {"workers": 60.0, "update": 2.0}
    (welcome,) = [a.message for a in new.handle(PeerJoined(11.0, 1, 0)) if isinstance(a, Send)]
    assert isinstance(welcome, Welcome)
    assert (welcome.version, welcome.draw, welcome.parameters.tolist()) == (1, 4, [-1.0, 0.0])


def test_a_result_whose_evaluation_was_cut_off_is_evaluated_again_in_a_new_process() -> None:
    context = dataclasses.replace(context_for(0, 1), evaluate=ob.EveryUpdates())
    old = FMB.node(context)
    list(old.handle(Started(0.0)))
    list(old.handle(PeerJoined(0.0, 1, 0)))
    list(old.handle(Leave(1.0)))
    new = FMB.node(context)
    new.restore(old.state())
    (evaluate,) = [action for action in new.handle(Started(2.0)) if isinstance(action, Evaluate)]
    assert any(isinstance(action, Finish) for action in new.handle(Evaluated(3.0, evaluate.version, 1.0, None)))


def test_a_late_gradient_is_late_even_if_it_is_not_finite() -> None:
    hub = hub_of(ob.Hub(collect=Distinct(1), optimizer=ob.SGD(lr=1.0)))
    list(hub.handle(arrives(1, gradient([1.0, 0.0], 0, (0, 4)))))
    nonfinite = Gradient(torch.empty(0), (), 4, 0.0, 0, (0, 4), 1.0, False)
    actions = list(hub.handle(arrives(2, nonfinite)))
    assert [a.record.reason for a in actions if isinstance(a, Report) and isinstance(a.record, Dropped)] == ["late"]
    assert updates(actions) == []
    assert sent(actions, Parameters) == [2]


def test_counters_in_buffers_never_fall() -> None:
    def with_count(count: int, version: int, draws: tuple[int, int]) -> Gradient:
        return Gradient(torch.zeros(2), (torch.tensor([count]),), 4, 0.0, version, draws, 1.0, True)

    hub = hub_of(ASYNCHRONOUS)
    hub._buffers = (torch.tensor([0]),)  # type: ignore[attr-defined]
    list(hub.handle(arrives(1, with_count(7, 0, (0, 4)))))
    list(hub.handle(arrives(2, with_count(2, 0, (0, 4)))))
    assert hub.state()["buffers"][0].tolist() == [7]


def test_amsgrad_inherits_the_fields_that_it_shares_with_the_workloads_optimizer() -> None:
    strategy = ob.AsyncAdaptive().with_default_optimizer(
        ob.SGD(lr=0.05, weight_decay=1e-3, clip_norm=1.0, decay_1d=False)
    )
    assert strategy.optimizer == ob.AMSGrad(lr=0.05, weight_decay=1e-3, clip_norm=1.0, decay_1d=False)


def test_parameters_that_arrive_during_a_round_survive_state_and_restore() -> None:
    config = ob.Hub(compute=ob.Samples(4), optimizer=ob.SGD(lr=1.0))
    worker = config.node(context_for(1, 1))
    list(worker.handle(arrives(0, Welcome(torch.zeros(2), (), 1, ob.Samples(4), 0, ()))))
    list(worker.handle(PeerLost(1.0, 0, 0)))
    list(worker.handle(arrives(0, Welcome(torch.ones(2), (), 2, ob.Samples(4), 0, ()))))
    again = config.node(context_for(1, 1))
    again.restore(worker.state())
    ready = GradientReady(1.0, torch.zeros(2), 4, 0.0, (), 1, (0, 4), 1.0, 0.0, True)
    (compute,) = again.handle(ready)
    assert isinstance(compute, Compute)
    assert (compute.version, compute.draw) == (2, 0), "the round that was under way is discarded, and done again"


# Leaving

FMB = ob.Hub(optimizer=ob.SGD(lr=0.1))


def test_a_worker_that_leaves_cancels_its_round_sends_stopped_and_finishes() -> None:
    worker = FMB.node(context_for(1, 1))
    list(worker.handle(Started(0.0)))
    list(worker.handle(PeerJoined(0.0, 0, 0)))
    welcome = Welcome(torch.zeros(2), (), 0, ob.Samples(8), 0, ())
    assert any(isinstance(action, Compute) for action in worker.handle(arrives(0, welcome)))
    assert [type(action) for action in worker.handle(Leave(1.0))] == [Cancel]
    done = GradientReady(2.0, torch.zeros(2), 0, 0.0, (), 0, (0, 0), 1.0, 0.0, True)
    actions = list(worker.handle(done))
    assert sent(actions, Stopped) == [0]
    assert isinstance(actions[-1], Finish)
    assert actions[-1].failure is None


def test_a_hub_continues_without_a_worker_that_left_and_ends_when_all_have() -> None:
    hub = hub_of(FMB)
    assert list(hub.handle(arrives(1, Stopped(0, 0)))) == []
    assert not any(isinstance(action, Finish) for action in hub.handle(PeerLost(1.0, 1, 0)))
    assert list(hub.handle(arrives(2, Stopped(0, 0)))) == []
    finishes = [action for action in hub.handle(PeerLost(2.0, 2, 0)) if isinstance(action, Finish)]
    assert [finish.failure for finish in finishes] == [None]


def test_a_hub_that_leaves_stops_the_connected_workers() -> None:
    hub = hub_of(FMB)
    list(hub.handle(arrives(1, Stopped(0, 0))))
    assert sent(hub.handle(Leave(1.0)), Stop) == [2]
    assert any(isinstance(action, Finish) for action in hub.handle(arrives(2, Stopped(0, 0))))


def test_a_hub_without_workers_waits_for_one_that_crashed_though_another_left() -> None:
    hub = hub_of(FMB)
    list(hub.handle(PeerLost(1.0, 1, 0)))  # it crashed, and may join again
    list(hub.handle(arrives(2, Stopped(0, 0))))
    actions = list(hub.handle(PeerLost(2.0, 2, 0)))
    assert [action.name for action in actions if isinstance(action, SetTimer)] == ["workers"]


def test_evaluations_that_do_not_keep_up_are_limited() -> None:
    context = context_for(0, 1, until=10_000)
    hub = ob.Hub(optimizer=ob.SGD(lr=0.1)).node(dataclasses.replace(context, evaluate=ob.EveryUpdates(1)))
    list(hub.handle(Started(0.0)))
    requests = [action for action in hub.handle(PeerJoined(0.0, 1, 0)) if isinstance(action, Evaluate)]
    for number in range(20):
        actions = hub.handle(arrives(1, gradient([1.0, 1.0], number, (number, number + 1)), at=float(number)))
        requests += [action for action in actions if isinstance(action, Evaluate)]
    assert len(requests) == EVALUATIONS_MAX


def test_evaluations_every_few_seconds_run_one_at_a_time() -> None:
    context = context_for(0, 1, until=10_000)
    hub = ob.Hub(optimizer=ob.SGD(lr=0.1)).node(dataclasses.replace(context, evaluate=ob.EverySeconds(2.0)))
    list(hub.handle(Started(0.0)))
    requests = [action for action in hub.handle(PeerJoined(0.0, 1, 0)) if isinstance(action, Evaluate)]
    for number in range(20):
        if number == 10:
            list(hub.handle(Evaluated(10.0, requests[-1].version, 1.0, 0.5, 0.9)))
        actions = hub.handle(arrives(1, gradient([1.0, 1.0], number, (number, number + 1)), at=float(number)))
        requests += [action for action in actions if isinstance(action, Evaluate)]
    assert len(requests) == 2
    assert requests[1].version == 11


def test_no_queued_message_supersedes_a_welcome() -> None:
    """A worker that was never welcomed ignores parameters, so it would do nothing for the rest of the run."""
    hub = FMB.node(context_for(0, 1))
    list(hub.handle(Started(0.0)))
    welcomes = [a for a in hub.handle(PeerJoined(0.0, 1, 0)) if isinstance(a, Send) and isinstance(a.message, Welcome)]
    assert [send.supersedes for send in welcomes] == [None]


RESTARTING = ob.Hub(compute=ob.Samples(4), optimizer=ob.SGD(lr=1.0), checkpoint_interval_seconds=10.0)


def test_a_worker_that_leaves_causes_no_restart() -> None:
    hub = hub_of(RESTARTING)
    list(hub.handle(arrives(1, gradient([4.0, 0.0], 0, (0, 4)))))
    list(hub.handle(arrives(2, Stopped(0, 0))))
    assert len(updates(hub.handle(PeerLost(1.0, 2, 0)))) == 1  # the hub waits for no other worker
    assert hub.state()["parameters"].tolist() == [-1.0, 0.0]


def test_a_hub_restored_from_disk_waits_for_all_and_begins_at_its_checkpoint_in_memory() -> None:
    before = hub_of(RESTARTING)
    for rank in (1, 2):
        list(before.handle(arrives(rank, gradient([4.0, 0.0], 0, (0, 4)))))
    assert before.state()["parameters"].tolist() == [-1.0, 0.0]
    hub = RESTARTING.node(context_for(0, 2))
    hub.restore(before.state())
    list(hub.handle(Started(2.0)))
    assert hub.state()["parameters"].tolist() == [0.0, 0.0]
    assert sent(hub.handle(PeerJoined(3.0, 1, 1)), Welcome) == []
    welcomed = [action for action in hub.handle(PeerJoined(4.0, 2, 1)) if isinstance(action, Send)]
    assert [(send.to, send.message.draw) for send in welcomed if isinstance(send.message, Welcome)] == [(1, 0), (2, 0)]


def test_a_gradient_of_an_undone_version_is_ignored() -> None:
    hub = hub_of(RESTARTING)
    list(hub.handle(PeerLost(1.0, 2, 0)))
    assert list(hub.handle(arrives(1, gradient([4.0, 0.0], 0, (0, 4))))) == []
    assert dict(hub.state()["ledgers"])[1] == []


def test_a_welcome_that_was_overtaken_by_a_later_one_is_ignored() -> None:
    worker = RESTARTING.node(context_for(1, 2))
    list(worker.handle(PeerJoined(0.0, 0, 0)))
    list(worker.handle(arrives(0, Welcome(torch.ones(2), (), 7, ob.Samples(4), 8, ()))))
    assert list(worker.handle(arrives(0, Welcome(torch.zeros(2), (), 5, ob.Samples(4), 0, ())))) == []
    assert worker.state()["latest"]["version"] == 7
