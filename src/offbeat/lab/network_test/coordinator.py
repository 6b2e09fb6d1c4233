"""What rank 0 of a probe does besides: it calls the steps, one after the other, and gathers what was measured."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from offbeat.core.messages import Message
from offbeat.errors import ConfigurationError, OffbeatError, RunFailed
from offbeat.lab.network_test.blocks import BYTES
from offbeat.lab.network_test.mail import Mail, Silence
from offbeat.lab.network_test.member import Member, present
from offbeat.lab.network_test.messages import (
    ProbeGo,
    ProbeOver,
    ProbePing,
    ProbePinged,
    ProbePrepare,
    ProbePrepared,
    ProbePresent,
    ProbeTimed,
    ProbeTrouble,
    ProbeVerified,
    ProbeVerify,
)
from offbeat.lab.network_test.plan import (
    ALL_TO_ALL,
    BOTH_WAYS,
    INTO_HUB,
    LATENCY,
    OUT_OF_HUB,
    PAIR,
    RING,
    WARM_UP,
    Probe,
    Step,
    elements_that_fit,
    pairs_of,
    steps_of,
)
from offbeat.lab.network_test.result import Network, Star, Taken

Progress = Callable[[float, str], None]
"""Is told what share is done, and what is done next."""

PATIENCE_SECONDS = 60.0
"""How long nobody may say anything while nothing large is on its way."""
LOSS_SECONDS = 2.0
"""In so long every transport reports a connection that was closed."""
SLOWEST_BYTES_PER_SECOND = 1e5
"""A network that carries less than this from a rank is given up."""

Answer = TypeVar("Answer", bound=Message)


def check_memory(probe: Probe, members: Iterable[ProbePresent], ranks: int) -> None:
    """Refuse blocks that do not fit where these members are."""
    here = Counter((member.host, member.memory_bytes) for member in members)
    for (host, memory_bytes), count in here.items():
        fitting = elements_that_fit(memory_bytes, count, ranks)
        if probe.elements > fitting:
            raise ConfigurationError(
                f"blocks of {probe.elements} elements do not fit into the memory of {host}, where {count} of "
                f"{ranks} ranks are; type --elements {fitting} or less"
            )


class Coordinator:
    """Rank 0. It is a member as well, and gets its orders like everybody else."""

    def __init__(self, mail: Mail, probe: Probe, progress: Progress) -> None:
        self._mail, self._probe, self._progress = mail, probe, progress
        self._member = Member(mail)
        self._taken = Taken()
        self._corrupt = probe.corrupt_flow(mail.ranks)
        whole = probe.elements * BYTES * mail.ranks * 2
        self._patience_seconds = PATIENCE_SECONDS + whole / SLOWEST_BYTES_PER_SECOND

    def run(self, transport: str) -> Network:
        """All steps; whatever goes wrong, everybody is told."""
        began = time.perf_counter()
        try:
            hosts = self._gather_members()
            steps = steps_of(self._probe, self._mail.ranks)
            whole, done = sum(step.weight for step in steps), 0.0
            for step in steps:
                self._progress(done / whole, step.kind)
                self._measure(step)
                done += step.weight
        except OffbeatError as error:
            self._tell_all(ProbeOver(str(error)))
            raise
        self._tell_all(ProbeOver(""))
        return self._result(transport, hosts, time.perf_counter() - began)

    def _gather_members(self) -> list[str]:
        """Who is there, and that what they share is enough for all of them."""
        others = range(1, self._mail.ranks)
        members = {0: present(), **self._answers(ProbePresent, others, PATIENCE_SECONDS)}
        check_memory(self._probe, members.values(), self._mail.ranks)
        return [members[rank].host for rank in range(self._mail.ranks)]

    # One step

    def _measure(self, step: Step) -> None:
        if step.kind == LATENCY:
            ((source, destination),) = step.flows
            self._mail.send(source, ProbePing(step.number, destination))
            answer = self._answers(ProbePinged, [source])[source]
            self._taken.latency[source, destination] = answer.seconds / 2
            return
        sources = sorted({source for source, _ in step.flows})
        destinations = sorted({destination for _, destination in step.flows})
        ranks = sorted({*sources, *destinations})
        for rank in ranks:
            self._mail.send(rank, self._preparation(step, rank))
        self._answers(ProbePrepared, ranks)
        for rank in sorted(ranks, reverse=True):  # to itself last: what it sends must not delay the word to others
            self._mail.send(rank, ProbeGo(step.number))
        self._keep_times(step, self._answers(ProbeTimed, ranks))
        for rank in destinations:
            self._mail.send(rank, ProbeVerify(step.number))
        self._keep_flaws(step, self._answers(ProbeVerified, destinations))

    def _preparation(self, step: Step, rank: int) -> ProbePrepare:
        corrupt = None
        if (
            self._corrupt is not None
            and step.kind == PAIR
            and step.flows == (self._corrupt,)
            and rank == self._corrupt[0]
        ):
            corrupt, self._corrupt = self._corrupt[1], None
        return ProbePrepare(step.number, step.elements, _to(step, rank), _from(step, rank), corrupt)

    def _keep_times(self, step: Step, answers: Mapping[int, ProbeTimed]) -> None:
        times = {
            (source, destination): seconds
            for source, answer in answers.items()
            for destination, seconds in zip(_to(step, source), answer.seconds, strict=True)
        }
        taken = [self._taken.less_the_receipt(flow, times[flow]) for flow in step.flows]
        if step.kind == PAIR:
            self._taken.alone.setdefault(step.flows[0], []).extend(taken)
        elif step.kind != WARM_UP:
            self._taken.together.setdefault(step.kind, []).append(taken)

    def _keep_flaws(self, step: Step, answers: Mapping[int, ProbeVerified]) -> None:
        for destination, answer in answers.items():
            for source, flaw in zip(_from(step, destination), answer.flaws, strict=True):
                flow = source, destination
                self._taken.blocks[flow] = self._taken.blocks.get(flow, 0) + 1
                if flaw:
                    self._taken.flaws.setdefault(flow, []).append(flaw)

    def _answers(
        self, kind: type[Answer], ranks: Iterable[int], patience_seconds: float | None = None
    ) -> dict[int, Answer]:
        """One answer of this kind from each; meanwhile this rank does its own part."""
        answers: dict[int, Answer] = {}
        awaited = set(ranks)
        while awaited:
            source, message = self._mail.next(patience_seconds or self._patience_seconds)
            if isinstance(message, ProbeTrouble):
                self._expect_loss()
                raise RunFailed(f"rank {source} lost its link to rank {message.peer} ({message.why})")
            if isinstance(message, kind):
                answers[source] = message
                awaited.discard(source)
            else:
                self._member.handle(source, message)
        return answers

    def _expect_loss(self) -> None:
        """Who loses a peer may hear of it before we do; if it is dead, so do we, and that says more."""
        until = time.monotonic() + LOSS_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(Silence):
                self._mail.next(until - time.monotonic())

    def _tell_all(self, message: Message) -> None:
        for rank in range(1, self._mail.ranks):
            if rank not in self._mail.missing:
                self._mail.send(rank, message)

    # What came of it

    def _result(self, transport: str, hosts: list[str], seconds: float) -> Network:
        taken, probe, ranks = self._taken, self._probe, self._mail.ranks
        nbytes = probe.elements * BYTES
        pairs = [taken.pair(flow, probe.pair_elements * BYTES) for flow in pairs_of(ranks)]
        both = taken.at_once(BOTH_WAYS, nbytes)
        star = Star(
            into=taken.at_once(INTO_HUB, nbytes),
            out=taken.at_once(OUT_OF_HUB, nbytes),
            both=both,
            message_bytes=probe.message_bytes,
            updates_per_second=both.bytes_per_second / 2 / probe.message_bytes,
            alone_bytes_per_second=statistics.median(pair.bytes_per_second for pair in pairs if pair.destination == 0),
        )
        return Network(
            transport=transport,
            ranks=ranks,
            hosts=hosts,
            elements=probe.elements,
            pair_elements=probe.pair_elements,
            seconds=seconds,
            blocks=sum(taken.blocks.values()),
            corrupted=sum(map(len, taken.flaws.values())),
            pairs=pairs,
            ring=taken.at_once(RING, nbytes),
            all_to_all=taken.at_once(ALL_TO_ALL, nbytes),
            star=star,
            flaws=taken.sentences(),
        )


def _to(step: Step, rank: int) -> list[int]:
    return [destination for source, destination in step.flows if source == rank]


def _from(step: Step, rank: int) -> list[int]:
    return [source for source, destination in step.flows if destination == rank]
