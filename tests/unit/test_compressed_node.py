"""The node that compresses the messages of another: what it sends, what the inner node receives, and its state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import offbeat as ob
from offbeat.core.actions import Action, ClearTimer, Send
from offbeat.core.compression import decode, is_encoded
from offbeat.core.events import Event, MessageArrived, PeerLost, Started, TimerFired
from offbeat.core.flat import layout_of
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Buffers, Message, Stop
from offbeat.core.strategy import Node, State
from offbeat.simulation.leases import Lease
from offbeat.strategies.compressed_node import CompressedNode, build_node
from offbeat.strategies.gossip.replica import Replica

NUMEL_MAX = 1 << 20
TOP_K = ob.compression.TopK(share=0.1)


@dataclass(frozen=True)
class EveryKind(Message):
    """A message with one tensor of each kind."""

    increments: ClassVar[tuple[str, ...]] = ("change",)
    values: ClassVar[tuple[str, ...]] = ("point",)
    roundtrip: ClassVar[tuple[str, ...]] = ("rounded",)
    residual_key_fields: ClassVar[tuple[str, ...]] = ("fragment",)

    change: Tensor
    point: Tensor
    rounded: Tensor
    exact: Tensor
    buffers: Buffers
    fragment: int = 0


class ScriptedNode(Node):
    """Returns the actions it was given, and stores the events it handles."""

    def __init__(self) -> None:
        self.script: list[Action] = []
        self.handled: list[Event] = []

    def handle(self, event: Event) -> Iterable[Action]:
        self.handled.append(event)
        actions, self.script = self.script, []
        return actions

    def state(self) -> State:
        return {"handled": len(self.handled)}

    def restore(self, state: State) -> None:
        self.handled = [Started(0.0)] * state["handled"]

    def replica(self) -> Tensor | None:
        return torch.ones(2)


def noise(seed: int, numel: int = 100) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def every_kind(seed: int = 0, **changes: Any) -> EveryKind:
    tensors = {name: noise(seed + i) for i, name in enumerate(("change", "point", "rounded", "exact"))}
    return EveryKind(**{**tensors, "buffers": (noise(seed + 4),), **changes})


def sent_by(node: CompressedNode, *sends: Send) -> list[Any]:
    """The messages that leave when the inner node sends these."""
    assert isinstance(node._inner, ScriptedNode)
    node._inner.script = list(sends)
    return [action.message for action in node.handle(TimerFired(0.0, "")) if isinstance(action, Send)]


def wrapped(compression: ob.compression.Compression) -> CompressedNode:
    return CompressedNode(ScriptedNode(), compression, torch.empty(NUMEL_MAX))


def received_by(node: CompressedNode, message: Message, keep: Any = None) -> MessageArrived:
    list(node.handle(MessageArrived(1.0, 2, message, keep or (lambda: message))))
    assert isinstance(node._inner, ScriptedNode)
    event = node._inner.handled[-1]
    assert isinstance(event, MessageArrived)
    return event


def test_without_a_compression_there_is_no_wrapper() -> None:
    layout = layout_of(nn.Linear(2, 1))
    context = ob.nodes.NodeContext(1, (0, 1), layout, torch.zeros(3), (), None, ob.Samples(1), None)  # type: ignore[arg-type]
    assert not isinstance(build_node(ob.FixedMinibatch(), context), CompressedNode)
    assert isinstance(build_node(ob.FixedMinibatch(compression=ob.compression.Int8()), context), CompressedNode)


@pytest.mark.parametrize("compression", [ob.compression.BFloat16(), ob.compression.Int8(), TOP_K], ids=str)
def test_declared_tensors_are_encoded_and_all_others_are_sent_exactly(
    compression: ob.compression.Compression,
) -> None:
    message = every_kind()
    [coded] = sent_by(wrapped(compression), Send(1, message))
    assert is_encoded(coded.change)
    assert is_encoded(coded.rounded)
    assert is_encoded(coded.point) == (compression != TOP_K)
    assert coded.exact is message.exact
    assert coded.buffers is message.buffers
    [stop] = sent_by(wrapped(compression), Send(1, Stop(noise(0), (), 3)))
    assert torch.equal(stop.parameters, noise(0))


@pytest.mark.parametrize("compression", [ob.compression.BFloat16(), ob.compression.Int8(), TOP_K], ids=str)
def test_the_receiver_gets_the_same_message_with_its_tensors_decoded(
    compression: ob.compression.Compression,
) -> None:
    message = every_kind(fragment=7)
    [coded] = sent_by(wrapped(compression), Send(1, message))
    arrived = received_by(wrapped(compression), coded)
    assert isinstance(arrived.message, EveryKind)
    assert arrived.message.fragment == 7
    assert (arrived.at, arrived.source) == (1.0, 2)
    assert torch.equal(arrived.message.change, compression.roundtrip(message.change, Pool()))
    assert torch.equal(arrived.message.exact, message.exact)
    if compression == TOP_K:
        assert torch.equal(arrived.message.point, message.point)


def test_other_events_and_actions_are_unchanged_and_a_send_keeps_its_key() -> None:
    node = wrapped(ob.compression.Int8())
    assert isinstance(node._inner, ScriptedNode)
    node._inner.script = [ClearTimer("a"), Send(1, every_kind(), supersedes="newest")]
    clear, send = node.handle(TimerFired(3.0, "tick"))
    assert clear == ClearTimer("a")
    assert isinstance(send, Send)
    assert (send.to, send.supersedes) == (1, "newest")
    assert node._inner.handled == [TimerFired(3.0, "tick")]
    replica = node.replica()
    assert replica is not None
    assert replica.tolist() == [1.0, 1.0]


def test_decoded_tensors_outlive_the_lease_of_their_message() -> None:
    [coded] = sent_by(wrapped(ob.compression.Int8()), Send(1, every_kind()))
    lease = Lease(coded.copy())
    arrived = received_by(wrapped(ob.compression.Int8()), lease.message, lease)
    change = arrived.message.change.clone()  # type: ignore[attr-defined]
    assert not lease.kept
    kept = arrived.keep()
    assert lease.kept
    lease.message.change.fill_(255)  # type: ignore[attr-defined]
    assert isinstance(kept, EveryKind)
    assert torch.equal(kept.change, change)
    assert torch.equal(kept.exact, coded.exact)


def test_a_snapshot_for_many_peers_is_encoded_once_and_again_when_it_has_changed() -> None:
    node, point = wrapped(ob.compression.Int8()), noise(0)
    first, second = sent_by(node, Send(1, every_kind(point=point)), Send(2, every_kind(point=point)))
    assert first.point is second.point
    [third] = sent_by(node, Send(1, every_kind(point=point.add_(1.0))))
    assert third.point is not first.point
    assert torch.equal(decode(third.point, Pool()), ob.compression.Int8().roundtrip(point, Pool()))
    del point, first, second, third
    assert node._coded == {}


def test_the_encoding_error_of_an_increment_is_added_to_the_next_for_the_same_peer() -> None:
    node = wrapped(TOP_K)
    total = {1: torch.zeros(100), 2: torch.zeros(100)}
    for seed in range(100, 140):
        for message, peer in zip(
            sent_by(node, Send(1, every_kind(seed)), Send(2, every_kind(seed))), (1, 2), strict=True
        ):
            total[peer] += decode(message.change, Pool())
    given = torch.stack([noise(seed) for seed in range(100, 140)]).sum(0)
    unaided = torch.stack([TOP_K.roundtrip(noise(seed), Pool()) for seed in range(100, 140)]).sum(0)
    assert torch.equal(total[1], total[2])
    assert (total[1] - given).norm() < 0.7 * (unaided - given).norm()
    residual = node._residuals[1, "EveryKind", "change", (0,)]
    torch.testing.assert_close(total[1] + residual, given, atol=1e-4, rtol=1e-4)


def test_without_feedback_there_is_no_residual() -> None:
    for compression in (
        ob.compression.BFloat16(),
        ob.compression.Int8(feedback=False),
        ob.compression.TopK(0.1, feedback=False),
    ):
        node = wrapped(compression)
        sent_by(node, Send(1, every_kind()))
        assert not node.state()["residuals"]


def test_fragments_have_residuals_of_their_own() -> None:
    node = wrapped(TOP_K)
    sent_by(node, Send(1, every_kind(fragment=0)), Send(1, every_kind(fragment=1, change=noise(9, 40))))
    assert [residual.numel() for residual in node._residuals.values()] == [100, 40]


def test_a_residual_is_dropped_when_its_peer_is_lost_and_all_when_the_process_restarts() -> None:
    node = wrapped(TOP_K)
    sent_by(node, Send(1, every_kind()), Send(2, every_kind()))
    list(node.handle(PeerLost(1.0, 1, 0)))
    assert [key[0] for key in node._residuals] == [2]
    list(node.handle(Started(2.0)))
    assert node._residuals == {}


def test_an_increment_that_cannot_be_encoded_is_sent_as_it_is_and_leaves_the_residual_alone() -> None:
    node = wrapped(TOP_K)
    sent_by(node, Send(1, every_kind()))
    before = node.state()["residuals"][0][1]
    nonfinite, empty = noise(0).fill_(float("nan")), torch.empty(0)
    first, second = sent_by(node, Send(1, every_kind(change=nonfinite)), Send(1, every_kind(change=empty)))
    assert first.change is nonfinite
    assert second.change is empty
    assert torch.equal(node.state()["residuals"][0][1], before)
    assert received_by(wrapped(TOP_K), first).message.change is nonfinite  # type: ignore[attr-defined]


def test_a_restored_node_behaves_as_the_original() -> None:
    node = wrapped(TOP_K)
    sent_by(node, Send(1, every_kind()), Send(2, every_kind(50, fragment=3)))
    again = wrapped(TOP_K)
    again.restore(node.state())
    sends = [Send(1, every_kind(60)), Send(2, every_kind(70, fragment=3))]
    for left, right in zip(sent_by(node, *sends), sent_by(again, *sends), strict=True):
        assert torch.equal(left.change, right.change)
    assert again.state()["inner"] == node.state()["inner"]


def test_a_state_does_not_change_with_the_node() -> None:
    node = wrapped(TOP_K)
    sent_by(node, Send(1, every_kind()))
    state = node.state()
    before = state["residuals"][0][1].clone()
    sent_by(node, Send(1, every_kind(60)))
    assert torch.equal(state["residuals"][0][1], before)


@pytest.mark.parametrize("compression", [ob.compression.BFloat16(), ob.compression.Int8(chunk=16), TOP_K], ids=str)
def test_both_peers_of_an_exchange_apply_the_same_difference(compression: ob.compression.Compression) -> None:
    mine, theirs = noise(1), noise(2)
    answers = Replica(mine, (), accelerated=False, compression=compression)
    begins = Replica(theirs, (), accelerated=False)
    met = answers.respond(theirs, (), 0.5)
    assert met is not None
    [coded] = sent_by(wrapped(compression), Send(1, every_kind(rounded=met.difference)))
    begins.complete(decode(coded.rounded, Pool()), (), 0.5)
    moved = answers.parameters - mine
    assert moved.any()
    torch.testing.assert_close(answers.parameters + begins.parameters, mine + theirs)
    torch.testing.assert_close(theirs - begins.parameters, moved)


def test_a_code_that_claims_more_elements_than_the_parameters_is_refused_before_memory_is_allocated() -> None:
    node = CompressedNode(ScriptedNode(), ob.compression.TopK(0.01), torch.empty(100))
    blob = ob.compression.TopK(0.01).encode(torch.ones(1000), Pool())
    with pytest.raises(ob.ContractViolation, match="claims 1000 elements, but 100 is the maximum"):
        received_by(node, every_kind(change=blob))
