"""How the valid actions of a rank take effect in virtual time."""

from __future__ import annotations

from collections.abc import Container

from offbeat.core.actions import Compute, Disconnect, Evaluate, Finish, Record, Send
from offbeat.records.schema import Update
from offbeat.simulation.delivery import Delivery
from offbeat.simulation.link_control import LinkControl
from offbeat.simulation.process import Process
from offbeat.simulation.process_table import ProcessTable
from offbeat.simulation.rounds import Rounds
from offbeat.simulation.simulation_records import SimulationRecords


class SimulatedBackend:
    """The `Backend` of one rank: the dispatcher validates an action and calls one of its methods."""

    def __init__(
        self,
        process: Process,
        peers: Container[int],
        table: ProcessTable,
        links: LinkControl,
        delivery: Delivery,
        rounds: Rounds,
        records: SimulationRecords,
    ) -> None:
        """Built once for each rank.

        process: the process of the rank; it has the timers.
        peers: the ranks that it exchanges messages with.
        table: counts the finished processes.
        links: closes the links of a finished process.
        delivery: carries messages.
        rounds: computes gradients and evaluates.
        records: receives the records of the node.
        """
        self.rank = process.rank
        self.computes = process.worker is not None
        self.is_peer = peers.__contains__
        self.set_timer = process.set_timer
        self.clear_timer = process.clear_timer
        self._process = process
        self._table = table
        self._links = links
        self._delivery = delivery
        self._rounds = rounds
        self._records = records

    @property
    def is_computing(self) -> bool:
        return self._process.computation is not None

    def send(self, action: Send) -> None:
        self._delivery.send(self._process, action)

    def disconnect(self, action: Disconnect) -> None:
        self._links.reset(self.rank, action.peer)

    def compute(self, action: Compute) -> None:
        self._rounds.compute(self._process, action)

    def cancel(self) -> None:
        self._rounds.cancel(self._process)

    def evaluate(self, action: Evaluate) -> None:
        self._rounds.evaluate(self._process, action)

    def report(self, record: Record) -> None:
        """Write a record; the rank is busy for the time of an update after a record of one."""
        self._records.write(record)
        if isinstance(record, Update) and self._process.speed.seconds_per_update > 0:
            self._rounds.update(self._process, self._process.speed.seconds_per_update)

    def finish(self, action: Finish) -> None:
        self._table.finish(self._process, action)
        self._links.close_all(self.rank)
