"""The size of a message on the wire, by which engines count traffic and limit bandwidth."""

from __future__ import annotations

from typing import NamedTuple

from offbeat.core.messages import Message


class MessageSize(NamedTuple):
    """The kind of a message, its bytes on the wire, and what these would be without compression."""

    kind: type[Message]
    nbytes: int
    nbytes_uncompressed: int
