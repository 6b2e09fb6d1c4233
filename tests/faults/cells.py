"""The fault matrix: what is done to which process, when, and what has to come of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["goes on", "ends, resumes", "ends"]

MEANINGS: dict[str, str] = {
    "goes on": "the run ends with exit code 0",
    "ends, resumes": "the run ends with one sentence and exit code 1, or is killed; `--resume` finishes it",
    "ends": "the run ends with one sentence, and there is nothing to resume from",
}

START, TRAINING, EVALUATION, CHECKPOINT, END, RESUME = "start", "training", "evaluation", "checkpoint", "end", "resume"


@dataclass(frozen=True)
class Cell:
    """One fault.

    system: hub (fmb), gossip or mpi (async-fmb under mpirun).
    who: the process that it happens to.
    fault: what happens.
    moment: when.
    outcome: what has to come of it.
    failpoints: how, see `offbeat.failpoints`.
    damage: a file of the finished or interrupted run, and what is done to it before it is resumed.
    limits: resource limits of all processes, such as NOFILE.
    out: the directory of the run, if it is a special one.
    quick: whether the cell is part of `make test`.
    """

    system: str
    who: str
    fault: str
    moment: str
    outcome: Outcome
    failpoints: str = ""
    damage: tuple[str, str] | None = None
    limits: tuple[tuple[str, int], ...] = ()
    out: str | None = None
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.system}, {self.who}: {self.fault}, {self.moment}"


PLACES = {
    START: "start:{rank}:1",
    TRAINING: "round:{rank}:20",
    EVALUATION: "evaluation:{rank}:3",
    CHECKPOINT: "checkpoint.write:{rank}:3",
    "checkpoint, complete": "checkpoint.replace:{rank}:3",
    END: "end:{rank}:1",
}

KILL, SHORT, LONG, HANG = "SIGKILL", "SIGSTOP for 1 s", "SIGSTOP for 6 s", "hangs for 4 s"
ACTIONS = {
    KILL: "kill",
    SHORT: "stop 1",
    LONG: "stop 6",
    HANG: "hang 4",
    "full disk": "error ENOSPC",
    "read-only disk": "error EROFS",
    "no descriptors": "error EMFILE",
    "out of memory": "memory",
    "run directory removed": "remove",
}


def placed(system: str, who: str, rank: int, fault: str, moment: str, outcome: Outcome) -> Cell:
    """A fault at one of PLACES."""
    return Cell(system, who, fault, moment, outcome, f"{PLACES[moment].format(rank=rank)}={ACTIONS[fault]}")


def link(system: str, who: str, fault: str, *entries: str, moment: str = TRAINING) -> Cell:
    return Cell(system, who, fault, moment, "goes on", "; ".join(entries))


def _hub() -> list[Cell]:
    worker = [
        (fault, moment, "goes on")
        for fault in (KILL, SHORT, LONG)
        for moment in (START, TRAINING, END)
        if (fault, moment) != (KILL, START)
    ]
    worker += [(KILL, START, "goes on"), (HANG, TRAINING, "goes on"), (HANG, END, "goes on")]
    worker += [("out of memory", TRAINING, "goes on"), ("run directory removed", TRAINING, "ends")]
    hub: list[tuple[str, str, str]] = [(KILL, START, "ends")]
    for moment in (EVALUATION, CHECKPOINT, "checkpoint, complete", END):
        hub += [(KILL, moment, "ends, resumes"), (SHORT, moment, "goes on"), (LONG, moment, "goes on")]
    hub += [
        (HANG, EVALUATION, "goes on"),
        (HANG, CHECKPOINT, "goes on"),
        ("out of memory", EVALUATION, "ends, resumes"),
    ]
    for fault in ("full disk", "read-only disk", "no descriptors", "out of memory"):
        hub.append((fault, CHECKPOINT, "goes on"))
    cells = [placed("hub", "worker", 1, *row) for row in worker]  # type: ignore[arg-type]
    cells += [placed("hub", "hub", 0, *row) for row in hub]  # type: ignore[arg-type]
    cells += [
        link("hub", "worker", "link closed", "link.send:1:60=cut"),
        link("hub", "hub", "link closed", "link.send:0:60=cut"),
        link("hub", "worker", "link cut one way", "link.send:1:60=drop"),
        link("hub", "hub", "link cut one way", "link.send:0:60=drop"),
        link("hub", "worker and hub", "half-open link", "link.send:1:60=drop", "link.send:0:61=drop"),
        link("hub", "worker", "link closed", "link.send:1:2=cut", moment=START),
        link("hub", "worker", "link cut one way", "link.send:1:2=drop", moment=START),
    ]
    for moment, place in ((START, "launch:supervisor:1"), (TRAINING, "tick:supervisor:12")):
        cells.append(
            Cell(
                "hub",
                "supervisor",
                KILL,
                moment,
                "ends" if moment == START else "ends, resumes",
                f"{place}=kill",
            )
        )
        cells.append(Cell("hub", "supervisor", SHORT, moment, "goes on", f"{place}=stop 1"))
        cells.append(Cell("hub", "supervisor", LONG, moment, "goes on", f"{place}=stop 6"))
    stopped = f"{PLACES[END].format(rank=0)}=kill"
    newest, records = "checkpoint-0.offbeat", "records-0.jsonl"
    cells += [
        Cell("hub", "hub", f"newest checkpoint {how}", RESUME, "ends, resumes", stopped, (newest, how))
        for how in ("truncated", "flipped", "empty", "removed")
    ]
    cells += [
        Cell(
            "hub", "hub", "all checkpoints truncated", RESUME, "ends", stopped, ("checkpoint-0*.offbeat", "truncated")
        ),
        Cell("hub", "hub", "records truncated", RESUME, "ends", stopped, (records, "truncated")),
        Cell("hub", "hub", "last record incomplete", RESUME, "ends, resumes", stopped, (records, "incomplete")),
        Cell("hub", "hub", "record flipped", RESUME, "ends", stopped, (records, "flipped")),
    ]
    cells += [
        Cell("hub", "all", "full disk", TRAINING, "ends", limits=(("FSIZE", 10_000),)),
        Cell("hub", "all", "12 descriptors", START, "ends", limits=(("NOFILE", 12),)),
        Cell("hub", "all", "read-only disk", START, "ends", out="/proc/offbeat"),
    ]
    return cells


def _gossip() -> list[Cell]:
    rows: list[tuple[str, int, str, str, str]] = []
    for fault in (KILL, SHORT, LONG):
        rows += [("peer", 1, fault, moment, "goes on") for moment in (START, TRAINING, END)]
        rows += [("rank 0", 0, fault, moment, "goes on") for moment in (TRAINING, CHECKPOINT, END)]
    rows += [("peer", 1, HANG, TRAINING, "goes on"), ("peer", 1, "out of memory", TRAINING, "goes on")]
    rows += [("rank 0", 0, "full disk", CHECKPOINT, "goes on"), ("rank 0", 0, HANG, CHECKPOINT, "goes on")]
    cells = [placed("gossip", who, rank, fault, moment, outcome) for who, rank, fault, moment, outcome in rows]  # type: ignore[arg-type]
    cells += [
        link("gossip", "peer", "link closed", "link.send:1:60=cut"),
        link("gossip", "peer", "link cut one way", "link.send:1:60=drop"),
        link("gossip", "peer and rank 0", "half-open link", "link.send:1:60=drop", "link.send:0:61=drop"),
        Cell("gossip", "supervisor", KILL, TRAINING, "ends, resumes", "tick:supervisor:12=kill"),
    ]
    return cells


def _mpi() -> list[Cell]:
    rows: list[tuple[str, int, str, str, Outcome]] = [
        ("worker", 1, KILL, TRAINING, "goes on"),
        ("worker", 1, SHORT, TRAINING, "goes on"),
        ("worker", 1, HANG, TRAINING, "goes on"),
        ("hub", 0, KILL, EVALUATION, "ends, resumes"),
        ("hub", 0, "full disk", CHECKPOINT, "goes on"),
    ]
    return [placed("mpi", *row) for row in rows]


QUICK = {
    "hub, worker: SIGKILL, training",
    "hub, worker: SIGSTOP for 6 s, training",
    "hub, worker: hangs for 4 s, training",
    "hub, worker: link closed, training",
    "hub, worker and hub: half-open link, training",
    "hub, hub: SIGKILL, checkpoint",
    "hub, hub: full disk, checkpoint",
    "hub, hub: newest checkpoint flipped, resume",
    "hub, hub: records truncated, resume",
    "hub, supervisor: SIGKILL, training",
    "gossip, peer: SIGKILL, training",
    "gossip, peer: link closed, training",
}

CELLS = [dataclasses.replace(cell, quick=cell.name in QUICK) for cell in (*_hub(), *_gossip(), *_mpi())]
