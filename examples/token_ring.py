"""Incremental SGD on a ring: one set of parameters goes from machine to machine, and each takes a step on it."""

from dataclasses import dataclass

from torch import Tensor

import offbeat as ob
from offbeat.core.actions import Compute, Evaluate, Finish, Report, Send
from offbeat.core.configuration import option
from offbeat.core.events import Evaluated, GradientReady, MessageArrived, Started
from offbeat.core.messages import Buffers, Message
from offbeat.records.schema import Contribution, Evaluation, Update


@dataclass(frozen=True)
class Token(Message):
    parameters: Tensor
    buffers: Buffers
    version: int = 0
    samples: int = 0
    over: bool = False


@dataclass(frozen=True)
class TokenRing(ob.Strategy, name="token-ring"):
    batch: int = option(64, "samples per step")
    lr: float = option(0.1, "learning rate")

    def processes(self, workers):
        return workers

    def computes(self, rank):
        return True

    def peers(self, rank, processes):
        return {(rank + 1) % processes, (rank - 1) % processes} - {rank}

    def node(self, context):
        return Member(self, context)


class Member(ob.nodes.Node):
    def __init__(self, config, context):
        self.config, self.context, self.draw, self.next = config, context, 0, (context.rank + 1) % len(context.members)
        self.token = Token(context.parameters, context.buffers)

    def handle(self, event):
        if isinstance(event, MessageArrived):
            self.token = event.keep()
        if isinstance(event, MessageArrived) or (isinstance(event, Started) and self.context.rank == 0):
            yield from self.go_on(here=True)
        elif isinstance(event, GradientReady):
            old, self.draw, lr = self.token, event.draws[1], self.config.lr
            x, samples, until = old.parameters, old.samples + event.samples, self.context.until
            over = samples >= until.count if isinstance(until, ob.Samples) else event.at >= until.seconds
            buffers = tuple(buffer.clone() for buffer in event.buffers)  # lent with the event, so copied
            new = Token(x - lr / event.samples * event.gradient, buffers, old.version + 1, samples, over)
            self.token, part = new, Contribution(self.context.rank, *event.draws, staleness=0)
            yield Report(Update(event.at, 0, new.version, 1, event.samples, samples, lr, (part,)))
            yield Evaluate(new.parameters, buffers, new.version)
        elif isinstance(event, Evaluated):
            yield Report(Evaluation(event.at, 0, event.version, self.token.samples, event.loss, event.accuracy))
            yield from self.go_on(here=self.next == self.context.rank)

    def go_on(self, here):
        x, budget = self.token, ob.Samples(self.config.batch)
        if here and not x.over:
            yield Compute(x.parameters, x.buffers, x.version, self.draw, budget, microbatch=16)
        elif self.next != self.context.rank:
            yield Send(self.next, x)
        if x.over:
            yield Finish(x.parameters, x.buffers, x.version)

    def state(self):
        return {"draw": self.draw, "token": dict(vars(self.token))}

    def restore(self, state):
        self.draw, buffers = state["draw"], tuple(state["token"]["buffers"])
        self.token = Token(**{**state["token"], "buffers": buffers})
