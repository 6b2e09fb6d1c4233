"""Incremental SGD on a ring: one set of parameters goes from machine to machine, and each takes a step on it."""

from dataclasses import dataclass

from torch import Tensor

import offbeat as ob
from offbeat import nodes


@dataclass(frozen=True)
class Token(nodes.Message):
    parameters: Tensor
    buffers: nodes.Buffers
    version: int = 0
    samples: int = 0
    is_last: bool = False


@dataclass(frozen=True)
class TokenRing(ob.Strategy, name="token-ring"):
    batch: int = 64
    """samples per step"""
    step_size: float = 0.1
    """factor of the mean gradient"""

    def processes(self, workers):
        return workers

    def computes(self, rank):
        return True

    def peers(self, rank, processes):
        return {(rank + 1) % processes, (rank - 1) % processes} - {rank}

    def node(self, context):
        return RingNode(self, context)


class RingNode(nodes.Node):
    def __init__(self, config, context):
        self.config, self.context, self.draw = config, context, 0
        self.next = (context.rank + 1) % len(context.members)
        self.token = Token(context.parameters, context.buffers)

    def handle(self, event):
        if isinstance(event, nodes.MessageArrived):
            self.token = event.keep()
        if isinstance(event, nodes.MessageArrived) or (isinstance(event, nodes.Started) and self.context.rank == 0):
            yield from self.proceed(computes=True)
        elif isinstance(event, nodes.GradientReady):
            old, self.draw, lr = self.token, event.draws[1], self.config.step_size
            x, samples, until = old.parameters, old.samples + event.samples, self.context.until
            is_last = samples >= until.count if isinstance(until, ob.Samples) else event.at >= until.seconds
            buffers = tuple(buffer.clone() for buffer in event.buffers)  # lent with the event, so copied
            new = Token(x - lr / event.samples * event.gradient, buffers, old.version + 1, samples, is_last)
            self.token, part = new, nodes.Contribution(self.context.rank, *event.draws, staleness=0)
            yield nodes.Report(nodes.Update(event.at, 0, new.version, 1, event.samples, samples, lr, (part,)))
            yield nodes.Evaluate(new.parameters, buffers, new.version)
        elif isinstance(event, nodes.Evaluated):
            evaluation = nodes.Evaluation(event.at, 0, event.version, self.token.samples, event.loss, event.accuracy)
            yield nodes.Report(evaluation)
            yield from self.proceed(computes=self.next == self.context.rank)

    def proceed(self, computes):
        x, budget = self.token, ob.Samples(self.config.batch)
        if computes and not x.is_last:
            yield nodes.Compute(x.parameters, x.buffers, x.version, self.draw, budget, microbatch=16)
        elif self.next != self.context.rank:
            yield nodes.Send(self.next, x)
        if x.is_last:
            yield nodes.Finish(x.parameters, x.buffers, x.version)

    def state(self):
        return {"draw": self.draw, "token": dict(vars(self.token))}

    def restore(self, state):
        self.draw, buffers = state["draw"], tuple(state["token"]["buffers"])
        self.token = Token(**{**state["token"], "buffers": buffers})
