"""A member, which has the token, sends what it was not asked for: its link is closed, and the run goes on."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.core.events import LossReason, MessageArrived, PeerJoined, PeerLost, Started
from offbeat.core.flat import FlatModule
from offbeat.core.messages import Message, Stopped
from offbeat.core.run_identity import RunIdentity
from offbeat.errors import InvalidMessage, RunFailed
from offbeat.lab.experiment_plan import decode_experiment
from offbeat.launch.token_files import listener_name, shared_token
from offbeat.live.session_options import RunDescription
from offbeat.strategies.gossip.gossip_messages import Answer, CopyReply, Offer, Paired, PartialSum, ReduceStart
from offbeat.strategies.hub.hub_worker import Gradient, Parameters, Welcome
from offbeat.strategies.local_training import LocalDelta
from offbeat.transports.address import Address
from offbeat.transports.remote_records import RecordLines
from offbeat.transports.rendezvous import request_assignment
from offbeat.transports.tcp import Admission, TcpTransport
from offbeat.transports.tls import Credentials

BATCH = 4
HONEST = Gradient(torch.ones(3), (), BATCH, 1.0, 0, (0, BATCH), 0.1, True)
LOADER = torch.tensor([1, 2, 3], dtype=torch.uint8)
EXCHANGE = LocalDelta(torch.ones(3), (), 0, 0, BATCH, ((0, BATCH, 0),), (), 0, 1.0)


def context() -> ob.nodes.NodeContext:
    flat = FlatModule(nn.Linear(3, 1, bias=False))
    return ob.nodes.NodeContext(
        rank=0,
        members=(0, 1, 2),
        layout=flat.layout,
        parameters=flat.parameters,
        buffers=(),
        random=np.random.default_rng(0),
        until=ob.Samples(1000),
        evaluate=None,
    )


def hub_of(strategy: ob.nodes.Strategy) -> ob.nodes.Node:
    hub = strategy.node(context())
    list(hub.handle(Started(0.0)))
    for rank in (1, 2):
        list(hub.handle(PeerJoined(0.0, rank, 0)))
    return hub


def arrives(message: Message, source: int = 1) -> MessageArrived:
    return MessageArrived(1.0, source, message, lambda: message)


LIES: dict[str, Message] = {
    "a longer gradient": dataclasses.replace(HONEST, gradient=torch.ones(4)),
    "an empty gradient": dataclasses.replace(HONEST, gradient=torch.ones(0)),
    "a gradient of another shape": dataclasses.replace(HONEST, gradient=torch.ones(3, 1)),
    "a gradient of another type": dataclasses.replace(HONEST, gradient=torch.ones(3, dtype=torch.float64)),
    "a gradient that is NaN": dataclasses.replace(HONEST, gradient=torch.tensor([1.0, math.nan, 1.0])),
    "a gradient that is infinite": dataclasses.replace(HONEST, gradient=torch.tensor([1.0, math.inf, 1.0])),
    "two infinities": dataclasses.replace(HONEST, gradient=torch.tensor([math.inf, -math.inf, 1.0])),
    "a loss that is NaN": dataclasses.replace(HONEST, loss=math.nan),
    "buffers of no model": dataclasses.replace(HONEST, buffers=(torch.ones(2),)),
    "a version to come": dataclasses.replace(HONEST, version=7),
    "a version before the first": dataclasses.replace(HONEST, version=-1),
    "many samples": dataclasses.replace(HONEST, samples=10**12, draws=(0, 10**12)),
    "more samples than draws": dataclasses.replace(HONEST, samples=10**12),
    "negative samples": dataclasses.replace(HONEST, samples=-4, draws=(8, 4)),
    "negative draws": dataclasses.replace(HONEST, draws=(-4, 0)),
    "draws of the far future": dataclasses.replace(HONEST, draws=(10**15, 10**15 + BATCH)),
    "a weight of zero": dataclasses.replace(HONEST, weight=0.0),
    "a negative weight": dataclasses.replace(HONEST, weight=-2.0),
    "a weight that is NaN": dataclasses.replace(HONEST, weight=math.nan),
    "an infinite weight": dataclasses.replace(HONEST, weight=math.inf),
    "a negative time": dataclasses.replace(HONEST, seconds=-1.0),
    "a time that is NaN": dataclasses.replace(HONEST, seconds=math.nan),
    "two states of a loader": dataclasses.replace(HONEST, loader=(LOADER, LOADER)),
    "a loader's state that is no bytes": dataclasses.replace(HONEST, loader=(torch.ones(3),)),
    "a huge state of a loader": dataclasses.replace(HONEST, loader=(torch.zeros(1 << 21, dtype=torch.uint8),)),
    "a loader in the far future": dataclasses.replace(HONEST, loader=(LOADER,), loader_draw=10**15),
    "a loader before the beginning": dataclasses.replace(HONEST, loader=(LOADER,), loader_draw=-1),
    "a message of the hub": Parameters(torch.ones(3), (), 1, ob.Samples(4)),
    "a message of another family": EXCHANGE,
    "an end in the far future": Stopped(10**15, 0),
    "an end before the beginning": Stopped(-1, 0),
}


@pytest.mark.parametrize("waits", [True, False], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_to_a_hub_changes_nothing(lie: str, waits: bool) -> None:
    kind = ob.FixedMinibatch if waits else ob.AsyncFixed
    batch = 2 * BATCH if waits else BATCH  # of all workers, or of each
    hub = hub_of(kind(batch=batch, optimizer=ob.SGD(lr=0.1)))
    before = repr(hub.state())
    with pytest.raises(InvalidMessage, match=f"rank 1 sent {type(LIES[lie]).__name__} to rank 0"):
        list(hub.handle(arrives(LIES[lie])))
    assert repr(hub.state()) == before
    list(hub.handle(arrives(HONEST)))
    list(hub.handle(arrives(HONEST, source=2)))
    assert hub.state()["version"] >= 1


def test_draws_that_were_sent_before_are_refused() -> None:
    hub = hub_of(ob.AsyncFixed(batch=BATCH, optimizer=ob.SGD(lr=0.1)))
    list(hub.handle(arrives(HONEST)))
    for draws in ((0, 4), (1, 5)):
        with pytest.raises(InvalidMessage, match="which it sent before"):
            list(hub.handle(arrives(dataclasses.replace(HONEST, draws=draws))))


def test_the_state_of_a_loader_is_kept_with_an_honest_message_and_handed_out_when_its_worker_joins_again() -> None:
    hub = hub_of(ob.AsyncFixed(batch=BATCH, optimizer=ob.SGD(lr=0.1)))
    sent = LOADER.clone()
    for first in (0, BATCH):
        draws = (first, first + BATCH)
        list(hub.handle(arrives(dataclasses.replace(HONEST, draws=draws, loader=(sent,), loader_draw=first + 2))))
    sent.zero_()  # the memory of a message is used again
    restored = hub_of(ob.AsyncFixed(batch=BATCH, optimizer=ob.SGD(lr=0.1)))
    restored.restore(hub.state())
    actions = list(restored.handle(PeerJoined(2.0, 1, 1)))
    [welcome] = [action.message for action in actions if isinstance(action, ob.nodes.Send) and action.to == 1]
    assert isinstance(welcome, Welcome)
    assert (welcome.draw, welcome.loader_draw) == (8, 6)
    assert torch.equal(welcome.loader[0], LOADER)
    [other] = [action.message for action in restored.handle(PeerJoined(2.0, 2, 1)) if isinstance(action, ob.nodes.Send)]
    assert isinstance(other, Welcome)
    assert other.loader == ()


EXCHANGE_LIES: dict[str, Message] = {
    "a longer change": dataclasses.replace(EXCHANGE, change=torch.ones(4)),
    "a change of another type": dataclasses.replace(EXCHANGE, change=torch.ones(3, dtype=torch.float16)),
    "no change": dataclasses.replace(EXCHANGE, change=torch.ones(0)),
    "an unknown fragment": dataclasses.replace(EXCHANGE, fragment=1),
    "a negative fragment": dataclasses.replace(EXCHANGE, fragment=-1),
    "an exchange to come": dataclasses.replace(EXCHANGE, exchange=1000),
    "an exchange of the past": dataclasses.replace(EXCHANGE, exchange=-1),
    "many samples": dataclasses.replace(EXCHANGE, samples=10**12),
    "negative samples": dataclasses.replace(EXCHANGE, samples=-1),
    "draws of the far future": dataclasses.replace(EXCHANGE, complete=((10**15, 10**15 + 4, 0),)),
    "draws twice": dataclasses.replace(EXCHANGE, complete=((0, 4, 0), (2, 6, 0))),
    "negative draws": dataclasses.replace(EXCHANGE, nonfinite=((-5, 0),)),
    "a version to come": dataclasses.replace(EXCHANGE, complete=((0, 4, 9),)),
    "a gradient": HONEST,
}


@pytest.mark.parametrize("lie", EXCHANGE_LIES)
def test_a_lie_in_an_exchange_changes_nothing(lie: str) -> None:
    hub = hub_of(ob.DiLoCo(batch=BATCH, every=2, inner=ob.SGD(lr=0.1)))
    before = repr(hub.state())
    with pytest.raises(InvalidMessage, match=f"rank 1 sent {type(EXCHANGE_LIES[lie]).__name__} to rank 0"):
        list(hub.handle(arrives(EXCHANGE_LIES[lie])))
    assert repr(hub.state()) == before
    list(hub.handle(arrives(EXCHANGE)))
    list(hub.handle(arrives(EXCHANGE, source=2)))
    assert hub.state()["version"] == 1


OFFER = Offer(torch.ones(3), (), 0, 0, (0, 4, 0))
ANSWER = Answer(torch.ones(3), (), 0, (0, 4, 0), 0.5, 1.0)
SUM = PartialSum(torch.ones(3), (), 0, 1, 1, 1, (0, 4, 0), False)
NAN = torch.tensor([1.0, math.nan, 1.0])
PEER_LIES: dict[str, Message] = {
    "longer parameters": dataclasses.replace(OFFER, parameters=torch.ones(4)),
    "no parameters": dataclasses.replace(OFFER, parameters=torch.ones(0)),
    "parameters of another type": dataclasses.replace(OFFER, parameters=torch.ones(3, dtype=torch.float64)),
    "buffers of no model": dataclasses.replace(OFFER, buffers=(torch.ones(2),)),
    "a trillion samples in a second": dataclasses.replace(OFFER, counts=(0, 10**12, 0)),
    "fewer samples than none": dataclasses.replace(OFFER, counts=(0, -1, 0)),
    "counts of too few ranks": dataclasses.replace(OFFER, counts=(0,)),
    "a number before the first": dataclasses.replace(OFFER, sequence=-1),
    "a difference that is NaN": dataclasses.replace(ANSWER, difference=NAN),
    "a distance that is NaN": dataclasses.replace(ANSWER, distance=math.nan),
    "a share that is infinite": dataclasses.replace(ANSWER, alpha_tilde=math.inf),
    "a sum that is NaN": dataclasses.replace(SUM, parameters=NAN),
    "an empty sum of a peer": dataclasses.replace(SUM, parameters=torch.ones(0)),
    "a sum of more peers than there are": dataclasses.replace(SUM, peers=4),
    "a root that does not exist": dataclasses.replace(SUM, root=3),
    "a copy that is NaN": CopyReply(NAN, (), (0, 0, 0), 1.0),
    "members that do not exist": ReduceStart(1, False, (0, 1, 7), False),
    "a partner that does not exist": Paired(1, 9, True),
    "itself as its partner": Paired(1, 0, True),
    "a message to workers": Parameters(torch.ones(3), (), 0, ob.Samples(4)),
}


@pytest.mark.parametrize("lie", PEER_LIES)
def test_a_lie_to_a_peer_changes_nothing(lie: str) -> None:
    peer = hub_of(ob.Gossip(graph=ob.graphs.Complete(), optimizer=ob.SGD(lr=0.1)))
    before = str(peer.state())
    with pytest.raises(InvalidMessage, match=f"rank 1 sent {type(PEER_LIES[lie]).__name__} to rank 0"):
        list(peer.handle(arrives(PEER_LIES[lie])))
    assert str(peer.state()) == before


def test_a_peer_that_diverges_is_declined_and_is_no_liar() -> None:
    peer = hub_of(ob.Gossip(graph=ob.graphs.Complete(), optimizer=ob.SGD(lr=0.1)))
    list(peer.handle(arrives(dataclasses.replace(OFFER, parameters=NAN))))


def test_an_update_that_overflows_ends_training_with_a_sentence() -> None:
    hub = hub_of(ob.AsyncFixed(batch=BATCH, optimizer=ob.SGD(lr=1e30)))
    large = dataclasses.replace(HONEST, gradient=torch.full((3,), 1e37))
    for source in (1, 2):
        list(hub.handle(arrives(large, source)))
    assert "has made parameters that are not finite" in str(hub.state()["failure"])


# A run with a liar in it


class Liar:
    """Joins a run as its second worker, again and again, and sends one lie each time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.credentials = Credentials(shared_token(listener_name(address.port)))
        self.incarnation = 0
        assignment = request_assignment(address, self.credentials, member="liar", rank=None, wait_seconds=120)
        assert assignment.experiment is not None
        description = msgspec.json.decode(assignment.experiment, type=RunDescription)
        experiment, workload = decode_experiment(description.header.experiment).resolved()
        flat = FlatModule(workload.initial_model(experiment.seed))
        self.transport = TcpTransport(
            rank=assignment.rank,
            processes=assignment.processes,
            peers=[0],
            rendezvous=address,
            credentials=self.credentials,
            identity=RunIdentity.of(flat.layout, experiment.strategy),
            admission=Admission(member="liar"),
        )

    def lie(self, lies: dict[str, Any]) -> list[str]:
        """What became of each lie."""
        ends: list[str] = []
        remaining = iter(lies.values())
        try:
            while True:
                match self.transport.receive(120):
                    case MessageArrived(incarnation=incarnation, message=Welcome() as welcome):
                        self.transport.send(0, incarnation, next(remaining)(welcome))
                    case PeerLost(reason=reason):
                        ends.append(reason.name)
                    case None:
                        pytest.fail("nothing happened")
        except RunFailed as error:
            ends.append(str(error))
        finally:
            self.transport.close(0.5)
        return ends


def honest(welcome: Welcome) -> Gradient:
    nothing = torch.zeros_like(welcome.parameters)
    draws = welcome.draw, welcome.draw + 1
    return Gradient(nothing, welcome.buffers, 1, 1.0, welcome.version, draws, 0.1, True)


@pytest.mark.slow
def test_a_run_goes_on_without_its_liar(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "offbeat", "train", "quadratic", "async-fmb", "--workers", "2", "--local-workers"]
    command += ["1", "--listen", "127.0.0.1:0", "--until", "200000", "--straggle", "lognormal:0.1", "--no-report"]
    command += ["--out", str(tmp_path / "runs"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            assert run.stderr is not None
            said = next(line for line in run.stderr if "offbeat work" in line)
            liar = Liar(Address.parse(said.split("offbeat work ")[1].split()[0]))
            ends = liar.lie(
                {
                    "NaN": lambda welcome: dataclasses.replace(
                        honest(welcome), gradient=torch.full_like(welcome.parameters, math.nan)
                    ),
                    "samples": lambda welcome: dataclasses.replace(honest(welcome), samples=10**12),
                    "records": lambda welcome: RecordLines(("not a record",)),
                }
            )
            output, _ = run.communicate(timeout=500)
        finally:
            run.kill()
    assert len(ends) == 4
    assert ends[:3] == [LossReason.BROKEN.name] * 3
    assert "rank 0 refuses rank 2: rank 2 sent RecordLines to rank 0 with a line that is not a record" in ends[3]
    (summary,) = json.loads(output)["runs"]
    assert (run.returncode, summary["failure"]) == (0, None)
    assert summary["samples"] >= 200_000
    records = "".join(path.read_text() for path in (tmp_path / "runs").rglob("records-0.jsonl"))
    assert records.count("its link is closed") == 3
