"""The node around a node: what leaves it, what reaches the inner one, and what it remembers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import offbeat as ob
from offbeat.core.actions import Action, ClearTimer, Send
from offbeat.core.compression import decode, is_encoded
from offbeat.core.events import Event, MessageArrived, PeerLost, Started, TimerFired
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Buffers, Message, Stop
from offbeat.core.strategy import Node, State
from offbeat.simulation.delivery import Lease
from offbeat.strategies.compressed_node import CompressedNode, build_node
from offbeat.strategies.gossip.replica import Replica

LONGEST = 1 << 20
TOP_K = ob.compression.TopK(share=0.1)


@dataclass(frozen=True)
class Everything(Message):
    """A message with one tensor of each sort."""

    increments: ClassVar[tuple[str, ...]] = ("change",)
    values: ClassVar[tuple[str, ...]] = ("point",)
    roundtrip: ClassVar[tuple[str, ...]] = ("settled",)
    residual_key_fields: ClassVar[tuple[str, ...]] = ("fragment",)

    change: Tensor
    point: Tensor
    settled: Tensor
    exact: Tensor
    buffers: Buffers
    fragment: int = 0


class Parrot(Node):
    """Sends what it is told to, and remembers what it hears."""

    def __init__(self) -> None:
        self.says: list[Action] = []
        self.heard: list[Event] = []

    def handle(self, event: Event) -> Iterable[Action]:
        self.heard.append(event)
        says, self.says = self.says, []
        return says

    def state(self) -> State:
        return {"heard": len(self.heard)}

    def restore(self, state: State) -> None:
        self.heard = [Started(0.0)] * state["heard"]

    def replica(self) -> Tensor | None:
        return torch.ones(2)


def noise(seed: int, numel: int = 100) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def everything(seed: int = 0, **changes: Any) -> Everything:
    tensors = {name: noise(seed + i) for i, name in enumerate(("change", "point", "settled", "exact"))}
    return Everything(**{**tensors, "buffers": (noise(seed + 4),), **changes})


def said(node: CompressedNode, *sends: Send) -> list[Any]:
    """The messages that leave when the inner node sends these."""
    assert isinstance(node._inner, Parrot)
    node._inner.says = list(sends)
    return [action.message for action in node.handle(TimerFired(0.0, "")) if isinstance(action, Send)]


def wrapped(compression: ob.compression.Compression) -> CompressedNode:
    return CompressedNode(Parrot(), compression, torch.empty(LONGEST))


def heard_by(node: CompressedNode, message: Message, keep: Any = None) -> MessageArrived:
    list(node.handle(MessageArrived(1.0, 2, message, keep or (lambda: message))))
    assert isinstance(node._inner, Parrot)
    event = node._inner.heard[-1]
    assert isinstance(event, MessageArrived)
    return event


def test_without_a_compression_there_is_no_wrapper() -> None:
    context = ob.nodes.NodeContext(1, (0, 1), None, torch.zeros(3), (), None, ob.Samples(1), None)  # type: ignore[arg-type]
    assert not isinstance(build_node(ob.FixedMinibatch(), context), CompressedNode)
    assert isinstance(build_node(ob.FixedMinibatch(compression=ob.compression.Int8()), context), CompressedNode)


@pytest.mark.parametrize("compression", [ob.compression.BFloat16(), ob.compression.Int8(), TOP_K], ids=str)
def test_what_is_declared_is_coded_and_everything_else_travels_as_it_is(
    compression: ob.compression.Compression,
) -> None:
    message = everything()
    [coded] = said(wrapped(compression), Send(1, message))
    assert is_encoded(coded.change)
    assert is_encoded(coded.settled)
    assert is_encoded(coded.point) == (compression != TOP_K)
    assert coded.exact is message.exact
    assert coded.buffers is message.buffers
    [stop] = said(wrapped(compression), Send(1, Stop(noise(0), (), 3)))
    assert torch.equal(stop.parameters, noise(0))


@pytest.mark.parametrize("compression", [ob.compression.BFloat16(), ob.compression.Int8(), TOP_K], ids=str)
def test_the_other_side_hears_the_same_message_with_the_tensors_decoded(
    compression: ob.compression.Compression,
) -> None:
    message = everything(fragment=7)
    [coded] = said(wrapped(compression), Send(1, message))
    heard = heard_by(wrapped(compression), coded)
    assert isinstance(heard.message, Everything)
    assert heard.message.fragment == 7
    assert (heard.at, heard.source) == (1.0, 2)
    assert torch.equal(heard.message.change, compression.roundtrip(message.change, Pool()))
    assert torch.equal(heard.message.exact, message.exact)
    if compression == TOP_K:
        assert torch.equal(heard.message.point, message.point)


def test_other_events_and_actions_pass_and_a_send_keeps_its_key() -> None:
    node = wrapped(ob.compression.Int8())
    assert isinstance(node._inner, Parrot)
    node._inner.says = [ClearTimer("a"), Send(1, everything(), supersedes="newest")]
    clear, send = node.handle(TimerFired(3.0, "tick"))
    assert clear == ClearTimer("a")
    assert isinstance(send, Send)
    assert (send.to, send.supersedes) == (1, "newest")
    assert node._inner.heard == [TimerFired(3.0, "tick")]
    replica = node.replica()
    assert replica is not None
    assert replica.tolist() == [1.0, 1.0]


def test_a_lease_that_is_taken_back_takes_no_decoded_tensor_along() -> None:
    [coded] = said(wrapped(ob.compression.Int8()), Send(1, everything()))
    lease = Lease(coded.copy())
    heard = heard_by(wrapped(ob.compression.Int8()), lease.message, lease)
    change = heard.message.change.clone()  # type: ignore[attr-defined]
    assert not lease.kept
    kept = heard.keep()
    assert lease.kept
    lease.message.change.fill_(255)  # type: ignore[attr-defined]
    assert isinstance(kept, Everything)
    assert torch.equal(kept.change, change)
    assert torch.equal(kept.exact, coded.exact)


def test_one_snapshot_for_many_is_coded_once_and_anew_when_it_has_changed() -> None:
    node, point = wrapped(ob.compression.Int8()), noise(0)
    first, second = said(node, Send(1, everything(point=point)), Send(2, everything(point=point)))
    assert first.point is second.point
    [third] = said(node, Send(1, everything(point=point.add_(1.0))))
    assert third.point is not first.point
    assert torch.equal(decode(third.point, Pool()), ob.compression.Int8().roundtrip(point, Pool()))
    del point, first, second, third
    assert node._coded == {}


def test_what_was_lost_of_an_increment_comes_with_the_next_to_the_same_peer() -> None:
    node = wrapped(TOP_K)
    total = {1: torch.zeros(100), 2: torch.zeros(100)}
    for seed in range(100, 140):
        for message, peer in zip(said(node, Send(1, everything(seed)), Send(2, everything(seed))), (1, 2), strict=True):
            total[peer] += decode(message.change, Pool())
    given = torch.stack([noise(seed) for seed in range(100, 140)]).sum(0)
    unaided = torch.stack([TOP_K.roundtrip(noise(seed), Pool()) for seed in range(100, 140)]).sum(0)
    assert torch.equal(total[1], total[2])
    assert (total[1] - given).norm() < 0.7 * (unaided - given).norm()
    residual = node._residuals[1, "Everything", "change", (0,)]
    torch.testing.assert_close(total[1] + residual, given, atol=1e-4, rtol=1e-4)


def test_without_feedback_nothing_is_remembered() -> None:
    for compression in (
        ob.compression.BFloat16(),
        ob.compression.Int8(feedback=False),
        ob.compression.TopK(0.1, feedback=False),
    ):
        node = wrapped(compression)
        said(node, Send(1, everything()))
        assert node.state()["residuals"] == []


def test_fragments_have_residuals_of_their_own() -> None:
    node = wrapped(TOP_K)
    said(node, Send(1, everything(fragment=0)), Send(1, everything(fragment=1, change=noise(9, 40))))
    assert [residual.numel() for residual in node._residuals.values()] == [100, 40]


def test_a_residual_goes_when_its_peer_is_lost_and_all_go_when_the_process_begins_anew() -> None:
    node = wrapped(TOP_K)
    said(node, Send(1, everything()), Send(2, everything()))
    list(node.handle(PeerLost(1.0, 1, 0)))
    assert [key[0] for key in node._residuals] == [2]
    list(node.handle(Started(2.0)))
    assert node._residuals == {}


def test_an_increment_that_cannot_be_coded_travels_as_it_is_and_leaves_the_residual_alone() -> None:
    node = wrapped(TOP_K)
    said(node, Send(1, everything()))
    before = node.state()["residual_vectors"][0]
    broken, empty = noise(0).fill_(float("nan")), torch.empty(0)
    first, second = said(node, Send(1, everything(change=broken)), Send(1, everything(change=empty)))
    assert first.change is broken
    assert second.change is empty
    assert torch.equal(node.state()["residual_vectors"][0], before)
    assert heard_by(wrapped(TOP_K), first).message.change is broken  # type: ignore[attr-defined]


def test_a_restored_node_goes_on_as_the_one_before() -> None:
    node = wrapped(TOP_K)
    said(node, Send(1, everything()), Send(2, everything(50, fragment=3)))
    again = wrapped(TOP_K)
    again.restore(node.state())
    sends = [Send(1, everything(60)), Send(2, everything(70, fragment=3))]
    for left, right in zip(said(node, *sends), said(again, *sends), strict=True):
        assert torch.equal(left.change, right.change)
    assert again.state()["inner"] == node.state()["inner"]


def test_a_state_does_not_change_with_the_node() -> None:
    node = wrapped(TOP_K)
    said(node, Send(1, everything()))
    state = node.state()
    before = state["residual_vectors"][0].clone()
    said(node, Send(1, everything(60)))
    assert torch.equal(state["residual_vectors"][0], before)


@pytest.mark.parametrize("compression", [ob.compression.BFloat16(), ob.compression.Int8(chunk=16), TOP_K], ids=str)
def test_both_ends_of_an_exchange_of_peers_take_the_same_difference(compression: ob.compression.Compression) -> None:
    mine, theirs = noise(1), noise(2)
    answers = Replica(mine, (), accelerated=False, compression=compression)
    begins = Replica(theirs, (), accelerated=False)
    met = answers.meet(theirs, (), 0.5)
    assert met is not None
    [coded] = said(wrapped(compression), Send(1, everything(settled=met.difference)))
    begins.settle(decode(coded.settled, Pool()), (), 0.5)
    moved = answers.parameters - mine
    assert moved.any()
    torch.testing.assert_close(answers.parameters + begins.parameters, mine + theirs)
    torch.testing.assert_close(theirs - begins.parameters, moved)


def test_a_tensor_that_claims_to_be_longer_than_the_parameters_is_refused_before_there_is_room_for_it() -> None:
    node = CompressedNode(Parrot(), ob.compression.TopK(0.01), torch.empty(100))
    blob = ob.compression.TopK(0.01).encode(torch.ones(1000), Pool())
    with pytest.raises(ob.ContractViolation, match="claims 1000 elements, but 100 is the maximum"):
        heard_by(node, everything(change=blob))
