"""How processes find each other: the messages of a connection before it becomes a link.

Both sides have authenticated when the first message is sent; see `listener.py` and `authentication.py`. Only small
typed messages are decoded, and there is no pickle. Every wait is limited.

    purpose      client                    listener
    all          CallRequest               Assignment, or Rejection
    link         LinkRequest               LinkAccepted, or Rejection; LinkConfirmed by the client; then it is the link
    register                               RelayRequest at any time; it stays open, so that the rank notices when rank 0
                                           is gone
    lookup                                 Endpoint, or Rejection
    relay                                  RelayAccepted, or Rejection; then the rank asked about is at the other end
    relayed                                nothing: then the rank that asked is at the other end
    assignment                             nothing more
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar, Union

import msgspec

from offbeat.core.run_identity import RunIdentity
from offbeat.errors import ConfigurationError, OffbeatError, RunFailed, shortened
from offbeat.transports.address import Address
from offbeat.transports.authentication import NEEDS_TLS, NO_BINDING, WRONG_TOKEN, NotAuthenticated, client_steps
from offbeat.transports.byte_stream import ByteStream, PlainStream, TlsStream
from offbeat.transports.link import ConnectionLost
from offbeat.transports.shared_memory import SlotTable
from offbeat.transports.tls import Credentials, peer_binding
from offbeat.transports.wire import WIRE_VERSION

REPLY_SECONDS = 10.0
"""How long one side of a connection waits for the next message of the other."""

REQUEST_BYTES_MAX = 1 << 16
"""The longest message of a connection."""

_LENGTH = struct.Struct("<I")

ControlStruct = TypeVar("ControlStruct", bound=msgspec.Struct)


class Unreachable(OffbeatError):
    """Nothing listens there, or the connection broke: retrying may help."""


class Rejected(OffbeatError):
    """The other side rejected the request; `final` if retrying would not help."""

    def __init__(self, why: str, final: bool = True) -> None:
        super().__init__(why)
        self.final = final


class Assignment(msgspec.Struct, frozen=True, tag=True):
    """Rank 0's answer to a request: the rank of the client and the elapsed time. `experiment` is opaque here."""

    rank: int
    processes: int
    elapsed_seconds: float
    experiment: bytes | None


class Endpoint(msgspec.Struct, frozen=True, tag=True):
    """Where a rank listens. `name` distinguishes a listener from earlier ones of the same rank."""

    host: str
    port: int
    name: str


Program = Literal["training", "network test"]
"""What listens: a run, or a network test, which refuses workers."""


class CallRequest(msgspec.Struct, frozen=True, tag=True):
    """The first message of a client.

    `about` is the rank that it looks up or wants a relay to, `listener` the listener that it registers, `relay` the
    number of the RelayRequest that it answers, `program` what it is to take part in.
    """

    purpose: Literal["link", "assignment", "register", "lookup", "relay", "relayed"]
    rank: int | None
    member: str = ""
    about: int | None = None
    listener: Endpoint | None = None
    relay: int | None = None
    program: Program = "training"
    version: int = WIRE_VERSION


class LinkRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for a link with an incarnation of at least `incarnation_min`, and with `slot_table` for shared memory."""

    identity: RunIdentity
    incarnation_min: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    slot_table: SlotTable | None = None


class LinkAccepted(msgspec.Struct, frozen=True, tag=True):
    """Answer to a LinkRequest; `slot_table` if memory is shared."""

    incarnation: int
    slot_table: SlotTable | None = None


class LinkConfirmed(msgspec.Struct, frozen=True, tag=True):
    """The client has received the answer, and mapped the slot table; the connection is the link from here on."""


class RelayRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks a registered rank to connect once more, for a rank that cannot reach it."""

    number: int


class RelayAccepted(msgspec.Struct, frozen=True, tag=True):
    """The rank that was asked about is at the other end from here on."""


class Rejection(msgspec.Struct, frozen=True, tag=True):
    """The request is rejected; `final` if retrying would not help."""

    why: str
    final: bool


_DECODERS: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(Union[kind, Rejection])  # noqa: UP007 (kind is a value)
    for kind in (
        CallRequest,
        Assignment,
        LinkRequest,
        LinkAccepted,
        LinkConfirmed,
        Endpoint,
        RelayRequest,
        RelayAccepted,
        Rejection,
    )
}
"""Made at import, before there are threads: two threads that make the first decoder of a Struct at the same time crash
the process."""


class ControlConnection:
    """An authenticated connection, used by one thread; any other may call `disconnect`, which wakes that thread."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self.local_host = stream.local_host
        self.same_host = stream.peer_host == self.local_host
        self._committed = False
        self._detached = False

    def send(self, message: msgspec.Struct) -> None:
        """Raises Unreachable, or ConfigurationError if the message is too long."""
        raw = msgspec.msgpack.encode(message)
        if len(raw) > REQUEST_BYTES_MAX:
            raise ConfigurationError(
                f"{type(message).__name__} takes {len(raw)} bytes, but at most {REQUEST_BYTES_MAX} can be sent when a "
                "process joins; make the experiment's description shorter"
            )
        try:
            self._stream.write([memoryview(_LENGTH.pack(len(raw)) + raw)])
        except ConnectionLost as error:
            raise Unreachable(str(error)) from None

    def recv(self, kind: type[ControlStruct]) -> ControlStruct:
        """The next message, which must be of this kind; raises Unreachable, and Rejected for a Rejection."""
        try:
            message = _DECODERS[kind].decode(self._read())
        except ConnectionLost as error:
            raise Unreachable(str(error)) from None
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Unreachable(
                f"{kind.__name__} was expected, but something else was received: {shortened(error)}"
            ) from None
        if isinstance(message, Rejection):
            raise Rejected(message.why.strip() or "it was rejected without a reason", message.final)
        assert isinstance(message, kind)
        return message

    def _read(self) -> bytes:
        prefix = bytearray(_LENGTH.size)
        self._stream.read(memoryview(prefix))
        (length,) = _LENGTH.unpack(prefix)
        if length > REQUEST_BYTES_MAX:
            raise ValueError(f"{length} bytes are announced, but at most {REQUEST_BYTES_MAX} are accepted")
        raw = bytearray(length)
        self._stream.read(memoryview(raw))
        return bytes(raw)

    def keep_open(self, silence_seconds: float) -> None:
        """Wait without a limit from now on; the kernel checks whether the other side is alive."""
        self._stream.set_limit(None)
        self._stream.watch_other_machine(silence_seconds)

    def detach(self, limit_seconds: float) -> ByteStream:
        """The stream, for other uses; closing this object does not close it any more."""
        self._stream.set_limit(limit_seconds)
        self._detached = True
        return self._stream

    def commit(self) -> None:
        """From now on `disconnect` does nothing: the other side would wait for a link that never comes."""
        self._committed = True

    def disconnect(self) -> None:
        if not self._committed:
            self.shut_down()

    def shut_down(self) -> None:
        """Disconnect even if committed."""
        if not self._detached:
            self._stream.break_off()

    def close(self) -> None:
        if not self._detached:
            self._stream.break_off()
            self._stream.close()

    def __enter__(self) -> ControlConnection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def connect(address: Address, credentials: Credentials, limit_seconds: float = REPLY_SECONDS) -> ControlConnection:
    """An authenticated connection; raises Unreachable, and Rejected if the token or the certificate is wrong.

    `limit_seconds` is for all of it, and then for each wait.
    """
    deadline = time.monotonic() + limit_seconds
    connected: socket.socket | None = None
    try:
        connected = socket.create_connection((address.host, address.port), timeout=limit_seconds)
        binding = NO_BINDING
        if credentials.tls.covers(connected.getpeername()[0]):
            connected = _encrypted(connected, credentials, deadline)
            binding = peer_binding(connected)
        _take_steps(connected, credentials.token, binding, deadline)
        kind = TlsStream if isinstance(connected, ssl.SSLSocket) else PlainStream
        return ControlConnection(kind(connected, limit_seconds))  # type: ignore[arg-type]
    except BaseException as error:
        if connected is not None:
            connected.close()
        if isinstance(error, NotAuthenticated):
            raise _refused(address, error) from None
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            raise _not_encrypted(address, error) from None
        if isinstance(error, OSError):
            raise Unreachable(_reason(error)) from None
        if isinstance(error, ValueError | OverflowError):  # a host or a port that no system call accepts
            raise Unreachable(f"host {address.host[:80]!r} and port {address.port} are not an address") from None
        raise


def _encrypted(connected: socket.socket, credentials: Credentials, deadline: float) -> ssl.SSLSocket:
    context = credentials.tls.client_side()
    wrapped = context.wrap_socket(connected, do_handshake_on_connect=False)
    try:
        wrapped.settimeout(max(deadline - time.monotonic(), 0.01))
        wrapped.do_handshake()
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def _take_steps(connected: socket.socket, token: bytes, binding: bytes, deadline: float) -> None:
    steps = client_steps(token, binding)
    wanted = next(steps)
    while True:
        connected.settimeout(max(deadline - time.monotonic(), 0.01))
        received = b""
        if isinstance(wanted, bytes):
            connected.sendall(wanted)
        else:
            while len(received) < wanted:
                more = connected.recv(wanted - len(received))
                if not more:
                    raise ConnectionResetError(0, "the connection was closed")
                received += more
        try:
            wanted = steps.send(received)
        except StopIteration:
            return


def _refused(address: Address, error: NotAuthenticated) -> OffbeatError:
    if error.status == WRONG_TOKEN:
        return Rejected(
            f"the process at {address} does not accept the token; give the one of the run with --token-file FILE"
        )
    if error.status == NEEDS_TLS:
        return Rejected(f"the process at {address} wants encrypted connections; type --tls on")
    return Unreachable(f"what answers there is not a process of this run ({error})")


def _not_encrypted(address: Address, error: ssl.SSLError) -> OffbeatError:
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "certificate" in reason or "unknown ca" in reason or "bad cert" in reason:
        return Rejected(
            f"the process at {address} and this one do not accept each other's certificates ({reason}); start both "
            "with --certificate FILE --key FILE --ca FILE of one authority, or both without"
        )
    return Rejected(
        f"the process at {address} does not answer with TLS ({reason}); if it was started with --tls off, type that "
        "here as well"
    )


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError | BlockingIOError):
        return "no answer in time"
    if isinstance(error, ssl.SSLError):
        return "the connection was closed"
    return error.strerror or str(error) or type(error).__name__


def backoff() -> Iterator[float]:
    """Seconds to wait before each further attempt."""
    seconds = 0.1
    while True:
        yield seconds
        seconds = min(2 * seconds, 2.0)


def request_assignment(
    address: Address,
    credentials: Credentials,
    *,
    member: str,
    rank: int | None,
    wait_seconds: float,
    program: Program = "training",
) -> Assignment:
    """Ask rank 0 which rank this process is to be.

    Args:
        address: of rank 0's listener.
        credentials: of the run.
        member: name of this process, by which rank 0 recognises it.
        rank: the rank it wants; None for any.
        wait_seconds: how long to retry while rank 0 cannot be reached.
        program: what this process expects to join.

    Raises:
        RunFailed: rank 0 rejected the request, or could not be reached in time.
    """
    deadline = time.monotonic() + wait_seconds
    for pause in backoff():
        left = max(deadline - time.monotonic(), 0.1)
        try:
            with connect(address, credentials, min(left, REPLY_SECONDS)) as connection:
                connection.send(CallRequest("assignment", rank, member, program=program))
                return connection.recv(Assignment)
        except Rejected as error:
            reason = str(error)
            if error.final:
                raise RunFailed(reason) from None
        except Unreachable as error:
            reason = f"nothing answers at {address}: {error}; start the hub first, or check the address"
        if time.monotonic() + pause >= deadline:
            raise RunFailed(reason)
        time.sleep(pause)
    raise AssertionError("backoff never ends")
