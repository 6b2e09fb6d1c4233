"""The buffers of a replica that is trained locally and merged at a hub now and then.

learn    a round has changed the buffers that it began with
send     what was learned since the last exchange, as a contribution: see `core/buffer_merge.py`
apply    the hub's values, which include exchanges up to a number; what was learned after those is added to them
"""

from __future__ import annotations

from offbeat.core.buffer_merge import BufferMerge
from offbeat.core.flat import Layout
from offbeat.core.messages import Buffers
from offbeat.strategies.node_state import Stateful


class LocalBuffers(Stateful):
    """The buffers of one replica. Tensors are replaced and never changed in place, so they may be sent."""

    current: Buffers
    anchor: Buffers
    """The last values from the hub."""
    sent: list[tuple[int, Buffers]]
    """Exchanges that no applied values include: number, and the buffers when it was sent."""
    before_round: Buffers
    changed_in_round: bool = False
    """Whether values of the hub were applied since the round under way began."""

    def __init__(self, layout: Layout, buffers: Buffers) -> None:
        self._merge = BufferMerge(layout.statistics)
        self.reset(buffers)

    def reset(self, buffers: Buffers) -> None:
        """Continue with these values, of which nothing was learned here."""
        self.current = self.anchor = self.before_round = buffers
        self.sent = []

    def begin_round(self) -> None:
        self.before_round, self.changed_in_round = self.current, False

    def learn(self, after: Buffers) -> None:
        """The round has ended with the buffers `after`, a lease."""
        if self.changed_in_round:
            self.current = self._merge.rebase(self.before_round, after, self.current)
        else:
            self.current = tuple(buffer.clone() for buffer in after)

    @property
    def last_sent(self) -> Buffers:
        """The buffers when the last exchange was sent."""
        return self.sent[-1][1] if self.sent else self.anchor

    def revert(self) -> None:
        """Discard what was learned since the last exchange."""
        self.current = self.last_sent

    def send(self, exchange: int) -> Buffers:
        """What was learned since the last exchange, for the exchange of this number."""
        learned = self._merge.contribution(self.last_sent, self.current)
        self.sent.append((exchange, self.current))
        return learned

    def apply(self, values: Buffers, included: int) -> None:
        """Replace what the exchanges up to number `included` have sent by values of the hub; empty: there are none."""
        reference = self.anchor
        while self.sent and self.sent[0][0] <= included:
            _, reference = self.sent.pop(0)
        if not values:
            self.anchor = reference
            return
        self.current = self._merge.rebase(reference, self.current, values)
        self.sent = [(exchange, self._merge.rebase(reference, sent, values)) for exchange, sent in self.sent]
        self.anchor = values
        self.changed_in_round = True
