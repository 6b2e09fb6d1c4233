"""The ranks of one process: their nodes, runners, transports, records and checkpoints.

A process without a launcher holds every rank that the strategy needs for one worker, linked by loopback. Otherwise it
holds one rank, or the hub and a worker, linked to all others by TCP or MPI. Resuming resets node, records and clock to
the same moment.
"""

from __future__ import annotations

import functools
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from offbeat.core.device_transfer import state_to_device
from offbeat.core.flat import FlatModule
from offbeat.core.randomness import stream
from offbeat.core.run_identity import RunIdentity
from offbeat.core.splits import Shared
from offbeat.core.strategy import Node, NodeContext, State, Strategy
from offbeat.core.validation import require
from offbeat.launch.rank_info import RankInfo
from offbeat.live.checkpoints import Checkpoint, CheckpointWriter, checkpoint_path, read_checkpoint
from offbeat.live.clock import Clock
from offbeat.live.evaluation import ModelMeasure
from offbeat.live.injected_delay import InjectedDelay
from offbeat.live.node_runner import NodeRunner
from offbeat.live.rank_allocator import RankAllocator
from offbeat.live.runner_options import RunnerOptions
from offbeat.live.session_options import SessionOptions
from offbeat.records.files import HEADER, MemoryWriter, RankWriter, Writer, write_header
from offbeat.records.schema import AnyRecord, RunHeader
from offbeat.strategies.compressed_node import build_node
from offbeat.transports.link import LinkOptions
from offbeat.transports.listener import Listener
from offbeat.transports.loopback import Loopback
from offbeat.transports.remote_records import RemoteRecordWriter
from offbeat.transports.tcp import Admission, TcpTransport
from offbeat.transports.transport import QueuedTransport

LIVE_SECONDS_PER_SAMPLE = 2.5e-4
"""Compute time of a small model on one core; the default times of time-based strategies are derived from it."""


class LocalRanks:
    """The node runners of this process. `own_runner` is the one whose rounds the calling thread computes."""

    def __init__(
        self,
        flat: FlatModule,
        options: SessionOptions,
        rank_info: RankInfo,
        measure: ModelMeasure | None,
        label: str,
    ) -> None:
        self.experiment, self.options, self.rank_info = options.experiment, options, rank_info
        self.strategy = strategy = options.experiment.strategy
        self._flat, self._measure, self._label = flat, measure, label
        self.identity = RunIdentity.of(flat.layout, strategy)
        self._initial = flat.initial_values()
        placement = Placement.of(strategy, rank_info, options.hub_beside_worker)
        self.processes, self.rank = placement.processes, placement.own
        self.workers = {rank: worker for worker, rank in enumerate(placement.computing)}
        """rank → its index among the ranks that compute"""
        self.checkpoint = self._load_checkpoint()
        self.memory = MemoryWriter()
        self._files: list[RankWriter] = []
        self.checkpoint_writer: CheckpointWriter | None = None
        nodes = {rank: self._make_node(rank) for rank in placement.local}  # takes seconds when it imports torch.optim
        self._nodes = nodes
        if self.checkpoint is not None:  # before the records are truncated to it
            self.checkpoint.restore(nodes[0], flat.parameters.device)
        self.clock = Clock(self._elapsed_seconds())
        if rank_info.alone:
            loopback = Loopback({rank: strategy.peers(rank, self.processes) for rank in range(self.processes)})
            links = {rank: loopback.transport(rank) for rank in range(self.processes)}
            self.runners = {rank: self._make_runner(rank, link) for rank, link in links.items()}
        else:
            rank_allocator = self._rank_allocator()
            links = {rank: self._connect(rank, rank_allocator) for rank in placement.local}
            self.runners = {rank: self._make_runner(rank, link) for rank, link in links.items()}
            rank_allocator.linked = self.runners[min(self.runners)].linked
        self.own_runner = self.runners[self.rank]
        for runner in self.runners.values():
            runner.on_failure = self._fail_all

    def start(self) -> None:
        for runner in self.runners.values():
            runner.start()
        if self.checkpoint_writer is not None:
            self.checkpoint_writer.start()

    @property
    def is_main(self) -> bool:
        """Whether this process holds rank 0 or, in a decentralized run, the lowest rank left when it finished."""
        if 0 in self.runners:
            return True
        if self.own_runner.finish is None or not self.strategy.is_decentralized:
            return False
        if self.rank_info.transport == "mpi":  # a lost link does not mean a dead process
            from offbeat.transports.mpi import dead_ranks

            return dead_ranks() >= set(range(self.rank))
        return not any(rank < self.rank for rank in self.own_runner.linked_at_end)

    @property
    def hub_runner(self) -> NodeRunner | None:
        """The runner of the hub, if there is one in this process."""
        return None if self.strategy.computes(0) else self.runners.get(0)

    def restore_hub(self, state: State) -> None:
        """Let the hub of this process continue from a state of its node; the workers begin again, from its values."""
        assert self.hub_runner is not None
        node = self._make_node(0)
        node.restore(state_to_device(state, self._flat.parameters.device))
        self.hub_runner.replace_node(node)

    def close_files(self) -> None:
        for file in self._files:
            file.close()

    def header(self) -> RunHeader:
        return self.options.header or self.experiment.header("live", self._label, self._flat.layout.numel)

    def _fail_all(self, error: BaseException) -> None:
        """Ranks of one process fail together, since they would wait for each other."""
        for runner in self.runners.values():
            if not runner.ended:  # in another thread: the caller may hold a runner's lock
                threading.Thread(target=runner.fail, args=(error,), daemon=True).start()

    # Transports

    def _rank_allocator(self) -> RankAllocator:
        return RankAllocator(
            processes=self.processes,
            computing=tuple(self.workers),
            reserved=frozenset(self.options.live.local_ranks(self.strategy, self.processes)),
            now=self.clock.now,
            experiment=self.options.description(),
            is_elastic=isinstance(self.experiment.split, Shared) and self.strategy.is_elastic,
            full=self._rejection_when_full(),
        )

    def _rejection_when_full(self) -> str:
        """The answer to a worker that cannot be assigned a rank."""
        workers = len(self.workers)
        if self.strategy.is_elastic:
            return (
                f"the data is split among {workers} workers and all of them are connected; start it with more --workers"
            )
        return f"this run has {workers} peers and all of them are connected; start it with more --workers"

    def _connect(self, rank: int, rank_allocator: RankAllocator) -> QueuedTransport:
        rank_info, live = self.rank_info, self.options.live
        common: dict[str, Any] = {
            "rank": rank,
            "processes": self.processes,
            "peers": self._peers(rank),
            "identity": self.identity,
            "options": LinkOptions(
                silence_seconds=self.experiment.cluster.silence_seconds,
                checksum=live.checksum,
                shared_memory=live.shared_memory,
                first_incarnation=rank_info.incarnation if self.checkpoint is None else self.checkpoint.resumes + 1,
            ),
        }
        if rank_info.transport == "mpi":
            from offbeat.transports.mpi import MpiTransport

            return MpiTransport(elapsed=self.clock.now, **common)
        assert rank_info.address is not None
        assert rank_info.credentials is not None
        common["credentials"] = rank_info.credentials
        if rank != 0:
            admission = Admission(member=rank_info.member or uuid.uuid4().hex)
            return TcpTransport(rendezvous=rank_info.address, admission=admission, **common)
        listener = Listener(rank_info.address, rank_info.credentials, rank_info.listener)
        admission = Admission(assign=rank_allocator, is_peer=lambda other: rank in self._peers(other))
        return TcpTransport(rendezvous=listener, admission=admission, **common)

    def _peers(self, rank: int) -> list[int]:
        return list(self.strategy.peers(rank, max(self.processes, rank + 1)))

    def _is_peer(self, rank: int, other: int) -> bool:
        """Whether two ranks exchange messages; either may have joined beyond the initial size."""
        return other in self.strategy.peers(rank, max(self.processes, rank + 1, other + 1))

    # Nodes and runners

    def _evaluates(self, rank: int) -> bool:
        return self._measure is not None and (rank == 0 or self.strategy.computes(0))

    def _make_node(self, rank: int) -> Node:
        assert self.experiment.until is not None  # it is resolved
        return build_node(
            self.strategy,
            NodeContext(
                rank=rank,
                members=self._members(),
                layout=self._flat.layout,
                parameters=self._initial[0],
                buffers=self._initial[1],
                random=stream(self.experiment.seed, "node", rank, 0),
                until=self.experiment.until,
                evaluate=self.experiment.evaluate if self._evaluates(rank) else None,
                has_validation=self._measure is not None and self._measure.can_score,
            ),
        )

    def _elapsed_seconds(self) -> float:
        """How long the run has lasted so far, as far as this process knows; others synchronize with rank 0 later."""
        if self.checkpoint is not None:
            return self.checkpoint.elapsed_seconds
        return 0.0 if self.rank_info.began is None else time.monotonic() - self.rank_info.began

    def _irreplaceable(self, rank: int) -> Iterable[int]:
        """The peers that a rank cannot continue without: MPI processes do not come back; a decentralized peer can."""
        if self.rank_info.transport != "mpi" or self.strategy.is_decentralized:
            return ()
        return self._peers(rank)

    def _members(self) -> tuple[int, ...]:
        """The ranks of the run; under MPI without those lost in an earlier run of the same processes."""
        if self.rank_info.transport != "mpi":
            return tuple(range(self.processes))
        from offbeat.transports.mpi import lost_ranks

        return tuple(rank for rank in range(self.processes) if rank == self.rank or rank not in lost_ranks())

    def _make_runner(self, rank: int, transport: QueuedTransport) -> NodeRunner:
        experiment, node = self.experiment, self._nodes[rank]
        writer = self._make_writer(rank)
        runner = NodeRunner(
            node,
            transport,
            RunnerOptions(
                rank=rank,
                clock=self.clock,
                writer=writer,
                is_peer=functools.cache(functools.partial(self._is_peer, rank)),
                load=self._flat.load if rank == self.rank and self.strategy.computes(rank) else None,
                measure=self._measure if self._evaluates(rank) else None,
                injected_delay=InjectedDelay.of(
                    experiment.cluster, self.workers, rank, self._peers(rank), experiment.seed
                ),
                on_remote_records=self._write_remote_records if rank == 0 or self.strategy.is_decentralized else None,
                irreplaceable=frozenset(self._irreplaceable(rank)),
                hub=None if rank == 0 or self.strategy.is_decentralized else 0,
                is_rejoining=self.rank_info.incarnation > 0 and self.strategy.is_decentralized,
                device=self._flat.parameters.device,
                bytes_per_second=experiment.bytes_per_second,
                records_max_bytes=self.options.live.records_max_bytes,
            ),
        )
        seconds = self.options.live.checkpoint_seconds
        if rank == 0 and isinstance(writer, RankWriter) and seconds is not None:
            self.checkpoint_writer = CheckpointWriter(
                checkpoint_path(writer.directory),
                runner,
                writer,
                seconds=seconds,
                identity=self.identity,
                resumes=0 if self.checkpoint is None else self.checkpoint.resumes + 1,
            )
        return runner

    def _make_writer(self, rank: int) -> Writer:
        """The writer of a rank's records. Rank 0 creates the run directory, or truncates it to the checkpoint."""
        directory = self.rank_info.directory
        if self.options.sends_records or (self.rank_info.member and directory is None):
            return RemoteRecordWriter(self.memory, whole=not self.rank_info.member)
        if directory is None:
            return self.memory
        is_new = self.options.header is None and self.checkpoint is None and self.rank_info.incarnation == 0
        writes_header = rank == 0 and is_new
        require(
            not writes_header or not (directory / HEADER).exists(),
            f"{directory} holds a run already; name another directory, or continue that one: resume=True",
        )
        writer = RankWriter(directory, rank)
        self._files.append(writer)
        if writes_header:
            write_header(directory, self.header())
        if rank == 0 and self.checkpoint is not None:
            writer.truncate(self.checkpoint.records_position)
        return writer

    def _write_remote_records(self, rank: int, records: list[AnyRecord]) -> None:
        if self.rank_info.directory is not None:
            with RankWriter(self.rank_info.directory, rank) as writer:
                for record in records:
                    writer.write(record)
        elif self.rank:  # rank 0 is lost, so this rank summarizes the run
            for record in records:
                self.memory.write(record)

    def _load_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to resume from; only rank 0 reads it, and the others get its state in messages."""
        holds_rank_0 = self.rank_info.alone or self.rank_info.rank == 0
        if not self.rank_info.resume or self.rank_info.directory is None or not holds_rank_0:
            return None
        checkpoint = read_checkpoint(self.rank_info.directory)
        checkpoint.check_fits(self.identity)
        return checkpoint


@dataclass(frozen=True)
class Placement:
    """Which ranks of a run this process holds."""

    processes: int
    """The number of ranks."""
    local: tuple[int, ...]
    """Those of this process."""
    own: int
    """The one whose rounds the calling thread computes."""
    computing: tuple[int, ...]
    """All that compute, up to `own`."""

    @classmethod
    def of(cls, strategy: Strategy, rank_info: RankInfo, hub_beside_worker: bool = False) -> Placement:
        """The ranks of this process; raises `ConfigurationError` if none would compute.

        hub_beside_worker: every process computes, and the first one holds the hub as well, if there is one. Otherwise
            every process holds one rank, unless there is a single process.
        """
        least = strategy.processes(1)
        if rank_info.alone:
            computing = tuple(rank for rank in range(least) if strategy.computes(rank))
            return cls(least, tuple(range(least)), computing[0], computing)
        shift = least - 1 if hub_beside_worker else 0
        require(
            not shift or rank_info.transport != "mpi",
            f"{type(strategy).__name__} has a hub beside the worker of rank 0, which MPI does not connect; start the "
            "script with 'offbeat launch -n N' or torchrun, or choose offbeat.Gossip()",
        )
        processes, own = rank_info.processes + shift, rank_info.rank + shift
        computing = tuple(rank for rank in range(max(processes, own + 1)) if strategy.computes(rank))
        require(
            any(rank < processes for rank in computing),
            f"with {processes} process{'es' if processes > 1 else ''} no rank would compute; start {least} "
            f"or more, for example: offbeat launch -n {least} script.py",
        )
        return cls(processes, tuple(range(own + 1)) if rank_info.rank == 0 else (own,), own, computing)
