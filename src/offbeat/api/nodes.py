"""What a strategy of your own is written with: the contract, events, actions, messages and records.

    import offbeat as ob


    class Worker(ob.nodes.Node):
        def __init__(self, context):
            self.context = context

        def handle(self, event):
            match event:
                case ob.nodes.GradientReady():
                    yield ob.nodes.Send(0, MyGradient(event.gradient, event.draws))
                case ob.nodes.PeerLost(peer=0):
                    yield ob.nodes.Finish(self.context.parameters, self.context.buffers, version=0)

docs/writing_a_strategy.md explains a complete strategy; `ob.testing.check_strategy` tests one.
"""

from offbeat.core.actions import Action, Cancel, ClearTimer, Compute, Evaluate, Finish, Report, Send, SetTimer
from offbeat.core.configuration import option
from offbeat.core.events import (
    Evaluated,
    Event,
    GradientReady,
    MessageArrived,
    PeerJoined,
    PeerLost,
    Sent,
    Started,
    StepReady,
    TimerFired,
)
from offbeat.core.messages import Buffers, Message, Stop, Stopped
from offbeat.core.optimizers import Optimizer
from offbeat.core.strategy import Node, NodeContext, State, Strategy
from offbeat.records.schema import Contribution, Dropped, Evaluation, Exchange, Notice, Round, Update

__all__ = [
    "Action",
    "Buffers",
    "Cancel",
    "ClearTimer",
    "Compute",
    "Contribution",
    "Dropped",
    "Evaluate",
    "Evaluated",
    "Evaluation",
    "Event",
    "Exchange",
    "Finish",
    "GradientReady",
    "Message",
    "MessageArrived",
    "Node",
    "NodeContext",
    "Notice",
    "Optimizer",
    "PeerJoined",
    "PeerLost",
    "Report",
    "Round",
    "Send",
    "Sent",
    "SetTimer",
    "Started",
    "State",
    "StepReady",
    "Stop",
    "Stopped",
    "Strategy",
    "TimerFired",
    "Update",
    "option",
]
