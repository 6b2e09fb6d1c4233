"""Training that restarts at its last checkpoint when a worker is lost: what is undone, and how long workers wait."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from scenes import Scene, play

import offbeat as ob
from offbeat.core.actions import Budget, Report
from offbeat.core.sample_ledger import SampleLedger
from offbeat.records.curves import samples_curve
from offbeat.records.files import MemoryWriter
from offbeat.records.schema import Round, Undone, Update
from offbeat.simulation.simulator import Simulation
from offbeat.strategies.hub.restart_server import RestartServer
from offbeat.testing import Violation, check_strategy, draw_case

# A step takes 1 s and has 30 samples; checkpoints after 5 s and 10 s; rank 2 is lost 2.5 s after the second.
OPTIMIZER = ob.SGD(lr=0.05, momentum=0.9)
STRATEGY = ob.RestartFromCheckpoint(batch=10, checkpoint_interval_seconds=5.0, optimizer=OPTIMIZER)
LOSS = ob.faults.Crash(2, 12.5, back_after_seconds=4.0)


def cluster(*faults: ob.faults.Crash) -> ob.Cluster:
    return ob.Cluster(seconds_per_sample=0.1, crash_seen_seconds=0.0, faults=faults)


def trained(*faults: ob.faults.Crash, until: Budget, strategy: ob.Strategy = STRATEGY) -> Scene:
    return play(strategy, cluster=cluster(*faults), until=until)


def samples_of(scene: Scene) -> int:
    return [record.samples_total for record in scene.records if isinstance(record, Update | Undone)][-1]


def test_a_loss_costs_the_steps_since_the_checkpoint_and_the_recovery() -> None:
    scene = trained(LOSS, until=ob.Seconds(30.0))
    (undone,) = scene.of(Undone)
    assert (undone.at, undone.version, undone.to_version) == (12.5, 13, 10)
    assert (undone.samples, undone.samples_total) == (60, 300)
    later = [update.at for update in scene.of(Update) if update.at > 12.5]
    assert later == pytest.approx([16.5 + step for step in range(1, 14)])
    assert samples_of(scene) == 30 * (10 + 13)


def test_a_second_loss_during_the_recovery_prolongs_it() -> None:
    scene = trained(LOSS, ob.faults.Crash(3, 14.5, back_after_seconds=4.0), until=ob.Seconds(30.0))
    assert len(scene.of(Undone)) == 1
    later = [update.at for update in scene.of(Update) if update.at > 12.5]
    assert later == pytest.approx([18.5 + step for step in range(1, 12)])
    assert samples_of(scene) == 30 * (10 + 11)


def test_no_step_begins_while_a_worker_is_missing() -> None:
    scene = trained(LOSS, until=ob.Seconds(30.0))
    assert [round for round in scene.of(Round) if 12.5 < round.start < 16.5] == []


def test_parameters_are_reset_to_the_checkpoint_bit_for_bit() -> None:
    waiting = trained(LOSS, until=ob.Seconds(14.0))
    undisturbed = trained(until=ob.Samples(300))
    assert torch.equal(waiting.outcome.finishes[0].parameters, undisturbed.outcome.finishes[0].parameters)


def test_a_run_with_losses_has_the_same_result_as_one_without_only_later() -> None:
    disturbed = trained(LOSS, ob.faults.Crash(1, 25.2, back_after_seconds=1.0), until=ob.Samples(900))
    undisturbed = trained(until=ob.Samples(900))
    assert torch.equal(disturbed.outcome.finishes[0].parameters, undisturbed.outcome.finishes[0].parameters)
    assert disturbed.outcome.seconds > undisturbed.outcome.seconds + 5.0


def test_without_losses_it_is_fixed_minibatch() -> None:
    plain = ob.FixedMinibatch(batch=10, optimizer=OPTIMIZER)
    assert trained(until=ob.Samples(900)).records == trained(until=ob.Samples(900), strategy=plain).records


def test_checkpoints_are_made_at_their_interval_though_sums_of_times_are_rounded() -> None:
    crashes = [ob.faults.Crash(1, at, back_after_seconds=0.1) for at in (0.3, 7.7, 16.1, 24.9)]
    undone = trained(*crashes, until=ob.Seconds(40.0)).of(Undone)
    assert [record.samples_total // 30 for record in undone] == [0, 5, 10, 15]


def test_after_patience_seconds_training_continues_without_lost_workers() -> None:
    patient = ob.RestartFromCheckpoint(batch=10, checkpoint_interval_seconds=5.0, patience_seconds=6.0)
    scene = trained(ob.faults.Crash(2, 12.5), until=ob.Seconds(30.0), strategy=patient)
    later = [update for update in scene.of(Update) if update.at > 12.5]
    assert later[0].at == pytest.approx(12.5 + 6.0 + 1.0)
    assert {tuple(part.rank for part in update.contributions) for update in later} == {(1, 3)}


def test_workers_that_are_lost_together_restart_together() -> None:
    crashes = [ob.faults.Crash(rank, 12.5, back_after_seconds=4.0) for rank in (1, 2, 3)]
    scene = trained(*crashes, until=ob.Seconds(30.0))
    assert samples_of(scene) == 30 * (10 + 13)


def test_the_summary_subtracts_undone_samples_and_the_curve_falls() -> None:
    workload = ob.workloads.Quadratic(dimension=8, examples=256)
    run = ob.simulate(workload, STRATEGY, cluster(LOSS), workers=3, until=ob.Seconds(30.0))
    assert (run.summary.samples, run.summary.updates, run.summary.undone) == (690, 23, 60)
    assert "60 undone samples" in str(run.summary)
    falls = [later - sooner for sooner, later in itertools.pairwise(samples_curve(run.records).values)]
    assert [fall for fall in falls if fall < 0] == [-60.0]


# The checks must be able to fail


def forgets_to_undo_an_update(hub: RestartServer) -> None:
    hub._since = hub._since[: len(hub._since) // 2]


class KeptDraws(SampleLedger):
    def remove(self, first: int, stop: int) -> None: ...


def does_not_draw_them_again(hub: RestartServer) -> None:
    hub._ledgers = {rank: KeptDraws(ledger.ranges) for rank, ledger in hub._ledgers.items()}


def miscounts(hub: RestartServer) -> None:
    hub._checkpoint.samples += 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", [forgets_to_undo_an_update, does_not_draw_them_again, miscounts])
def test_a_hub_that_restarts_wrongly_is_detected(
    fault: Callable[[RestartServer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = RestartServer._go_back

    def broken(hub: RestartServer, at: float) -> Report:
        fault(hub)
        return sound(hub, at)

    monkeypatch.setattr(RestartServer, "_go_back", broken)
    with pytest.raises(Violation):
        check_strategy(ob.RestartFromCheckpoint(), seeds=range(60))


def test_random_cases_undo_updates() -> None:
    samples = 0
    for seed in range(20):
        writer = MemoryWriter()
        case = draw_case(ob.RestartFromCheckpoint(), seed)
        Simulation(case.experiment, writer, notice_seconds=case.notice_seconds).run()
        samples += sum(record.samples for record in writer.records if isinstance(record, Undone))
    assert samples > 0
