"""All processes of a simulation."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.cluster.stragglers import Speed
from offbeat.core.actions import Finish
from offbeat.core.events import Event
from offbeat.core.flat import FlatModule
from offbeat.core.randomness import stream
from offbeat.core.strategy import Node, NodeContext
from offbeat.engine.experiment import Experiment
from offbeat.simulation.event_queue import EventQueue
from offbeat.simulation.process import Process, RankSpeed
from offbeat.strategies.compressed_node import build_node


class ProcessTable:
    """Builds the processes of a run and their nodes, and counts the active ones.

    experiment: what is simulated.
    flat: the model, whose present values are the initial ones of every node.
    queue: the clock.
    on_event: is called for each event at the time when a node handles it.
    """

    def __init__(
        self,
        experiment: Experiment,
        flat: FlatModule,
        queue: EventQueue,
        on_event: Callable[[Process, Event], None],
    ) -> None:
        assert experiment.until is not None
        self._experiment = experiment
        self._until = experiment.until
        self._layout = flat.layout
        self.initial, self._initial_buffers = flat.initial_values()
        """The initial parameters and buffers, shared by all nodes, which do not change them."""
        size = experiment.strategy.processes(experiment.worker_count)
        self._members = tuple(range(size))
        self.computing_ranks = [rank for rank in self._members if experiment.strategy.computes(rank)]
        workers = {rank: worker for worker, rank in enumerate(self.computing_ranks)}
        self.processes = [
            Process(rank, worker, self.new_node(rank), self._speed(rank, worker), queue, on_event)
            for rank, worker in ((rank, workers.get(rank)) for rank in self._members)
        ]
        self.active = size
        """How many processes have neither crashed nor finished."""

    def _speed(self, rank: int, worker: int | None) -> RankSpeed:
        cluster = self._experiment.cluster
        speed = cluster.speed(worker) if worker is not None else Speed(seconds_per_update=cluster.seconds_per_update)
        natural_speed = speed if worker is None else cluster.natural_speed(worker)
        return RankSpeed(speed, natural_speed, self._experiment.seed, rank)

    def new_node(self, rank: int, life: int = 0) -> Node:
        """A node of this rank as it is after `life` restarts."""
        context = NodeContext(
            rank=rank,
            members=self._members,
            layout=self._layout,
            parameters=self.initial,
            buffers=self._initial_buffers,
            random=stream(self._experiment.seed, "node", rank, life),
            until=self._until,
            evaluate=self._experiment.evaluate,
        )
        return build_node(self._experiment.strategy, context)

    def finish(self, process: Process, action: Finish) -> None:
        """An active process has finished."""
        self.active -= 1
        process.end(action)

    def crash(self, process: Process) -> None:
        """An active process loses its state."""
        self.active -= 1
        process.crash()

    def restart(self, process: Process) -> None:
        """A crashed process continues with a new node."""
        self.active += 1
        process.restart(self.new_node(process.rank, process.life + 1))
