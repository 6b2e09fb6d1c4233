"""Ranks under mpirun, as a case for `check_transport`: the checks use proxies that control `mpi_ranks.py`."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from mpi_ranks import pack, read_incoming, recv_plain, send_plain
from torch import Tensor
from transport_cases import IDENTITY, SHORT_SILENCE_SECONDS

from offbeat.core.messages import Message
from offbeat.core.run_identity import RunIdentity
from offbeat.testing import Remote, TransportCase, Violation
from offbeat.transports.transport import SILENCE_SECONDS, Transport, TransportEvent

START_SECONDS = 500.0
MPIRUN = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe"]
if os.geteuid() == 0:
    MPIRUN.append("--allow-run-as-root")
FAULT_TOLERANT = ["--with-ft", "ulfm"]


class MpiRanks:
    """One mpirun whose ranks follow commands. `end` kills all of them, whatever they are doing."""

    def __init__(self, processes: int, *options: str) -> None:
        self._directory = tempfile.mkdtemp(prefix="offbeat-mpi-")
        key = secrets.token_bytes(16)
        address = f"{self._directory}/ranks"
        self.connections: dict[tuple[int, str], Connection] = {}
        self.pids: dict[int, int] = {}
        self.dead: set[int] = set()
        self.tolerant = False
        script = str(Path(__file__).parent / "mpi_ranks.py")
        with Listener(address, "AF_UNIX", backlog=2 * processes, authkey=key) as listener:
            listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
            self._mpirun = subprocess.Popen(
                [*MPIRUN, *options, "-n", str(processes), sys.executable, script, address],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "OFFBEAT_TEST_KEY": key.hex()},
            )
            try:
                for _ in range(2 * processes):
                    connection = listener.accept()
                    (rank, purpose, pid, self.tolerant), _ = recv_plain(connection)
                    self.connections[rank, purpose] = connection
                    self.pids[rank] = pid
            except BaseException:
                self.end()
                raise

    def finish(self) -> int:
        """Let the ranks end by themselves; the exit code of mpirun."""
        for (rank, purpose), connection in self.connections.items():
            if purpose == "rest" and rank not in self.dead:
                send_plain(connection, "finish")
        return self._mpirun.wait(START_SECONDS)

    def end(self) -> None:
        for connection in self.connections.values():
            connection.close()
        with suppress(ProcessLookupError):  # it had ended already
            os.killpg(self._mpirun.pid, signal.SIGKILL)
        for pid in self.pids.values():  # mpirun puts each into a process group of its own
            if self._is_ours(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._mpirun.wait(START_SECONDS)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _is_ours(self, pid: int) -> bool:
        try:
            return self._directory.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False


class Proxy(Transport):
    """The transport of a rank in another process."""

    def __init__(self, ranks: MpiRanks, rank: int) -> None:
        self._receives = ranks.connections[rank, "receives"]
        self._rest = ranks.connections[rank, "rest"]
        self._lock = threading.Lock()

    def ask(self, *plain: Any, body: bytes = b"") -> Any:
        with self._lock:
            send_plain(self._rest, *plain, body=body)
            (answer,), _ = recv_plain(self._rest)
            return answer

    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        self.ask("send", to, incarnation, key, body=pack(message))

    def send_raw(self, to: int, incarnation: int, head: Tensor) -> None:
        self.ask("raw", to, incarnation, None, body=head.numpy().tobytes())

    def receive(self, timeout: float | None = None) -> TransportEvent | None:
        send_plain(self._receives, timeout)
        return read_incoming(*recv_plain(self._receives))

    def wake(self) -> None:
        self.ask("wake")

    def disconnect(self, peer: int, incarnation: int, why: str, final: bool = False) -> None:
        self.ask("disconnect", peer, incarnation, why, final)

    def close(self, linger_seconds: float = 5.0) -> None:
        if not self.ask("close", linger_seconds):
            raise Violation("a tensor that was kept was written over by a later message")


class StoppableRank(Remote):
    def __init__(self, pid: int) -> None:
        self._pid = pid

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)
        until = time.monotonic() + START_SECONDS
        while Path(f"/proc/{self._pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < until
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


class MpiCase(TransportCase):
    """Every rank of an mpirun opens a transport for each check; ranks that a check does not need have no peers."""

    abilities = frozenset({"garbage", "pool", "processes"})

    def __init__(self, ranks: MpiRanks | None = None, *, checksum: bool = False) -> None:
        self._ranks = ranks
        self._checksum = checksum
        self._open: dict[int, Proxy] = {}
        self._remote: StoppableRank | None = None

    def open(
        self,
        processes: int,
        *,
        role: str = "",
        silence_seconds: float = SILENCE_SECONDS,
        identities: dict[int, RunIdentity] | None = None,
    ) -> list[Transport]:
        assert self._ranks is not None
        for rank in self._ranks.pids:
            peers = [] if rank >= processes else [0] if rank else list(range(1, processes))
            proxy = self._open[rank] = Proxy(self._ranks, rank)
            part = role if rank == processes - 1 else ""
            identity = (identities or {}).get(rank, IDENTITY)
            proxy.ask("open", peers, silence_seconds, part, identity.model, identity.strategy, self._checksum)
        return [self._open[rank] for rank in range(processes if not role else processes - 1)]

    def send_raw(self, rank: int, incarnation: int, head: Tensor) -> None:
        self._open[rank].send_raw(0, incarnation, head)

    def allocations(self, transport: Transport) -> int:
        assert isinstance(transport, Proxy)
        return int(transport.ask("allocated"))

    def open_with_remote(self, processes: int) -> tuple[list[Transport], Remote]:
        assert self._ranks is not None
        self._remote = StoppableRank(self._ranks.pids[processes - 1])
        return self.open(processes, role="echo", silence_seconds=SHORT_SILENCE_SECONDS), self._remote

    def open_with_crashing_rank(self, processes: int) -> list[Transport]:
        transports = self.open(processes, role="doomed", silence_seconds=SHORT_SILENCE_SECONDS)
        del self._open[processes - 1]
        assert self._ranks is not None
        self._ranks.dead.add(processes - 1)
        return transports

    def close(self) -> None:
        if self._remote is not None:
            self._remote.resume()
            self._remote = None
        opened, self._open = self._open, {}
        for proxy in opened.values():
            proxy.close()
