"""`offbeat network`: measure the network between some processes, and verify that it carries blocks without damage."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from cyclopts import Parameter

from offbeat.cli.mpirun import read_rank_info_for
from offbeat.cli.network_view import scaled, sentences, view
from offbeat.cli.options import JsonFlag, QuietFlag, TlsFlags, option
from offbeat.cli.output import console, print_json, print_lines, print_status, refuse_unwritable
from offbeat.core.configuration import from_plain
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, MissingDependency, unknown
from offbeat.lab.network_test.plan import NetworkTest
from offbeat.lab.network_test.processes import FAILURES, join_by_hand, run_local, run_mpirun, run_test_rank
from offbeat.lab.network_test.result import NetworkResult, write_result
from offbeat.lab.plots.rank_pairs import HeatMap, heat_maps
from offbeat.lab.plots.style import save
from offbeat.lab.progress import Progress, show_progress
from offbeat.launch.listeners import advertised_address
from offbeat.launch.rank_info import TRANSPORTS, RankInfo, read_rank_info
from offbeat.launch.token_files import joining_token, read_token
from offbeat.transports.address import Address
from offbeat.transports.tls import Credentials, Tls

Default = TypeVar("Default", int, None)

RESULT, FIGURE = "network.json", "network.png"


def network(
    *words: Annotated[str, Parameter(name="HOST:PORT", help="join the network test that listens there")],
    n: Annotated[str | None, option("how many ranks, 2 or more", "N", ("-n", "--processes"))] = None,
    elements: Annotated[str | None, option("32-bit integers in a block [100000000]", "N")] = None,
    repeats: Annotated[
        str | None, option("times that each figure is measured [3; large blocks at once 1]", "N")
    ] = None,
    message_bytes: Annotated[str | None, option("bytes of a message, for updates per second [44000000]", "N")] = None,
    transport: Annotated[str, option("auto, tcp or mpi [auto: mpi under mpirun, else tcp]", "NAME")] = "auto",
    no_shared_memory: Annotated[bool, option("use sockets also between ranks of one machine")] = False,
    listen: Annotated[str | None, option("for ranks on other machines [this machine alone]", "HOST:PORT")] = None,
    token_file: Annotated[str | None, option("file with the secret to show; needed with --listen", "FILE")] = None,
    tls: Annotated[TlsFlags, Parameter(name="*")] = TlsFlags(),  # noqa: B008 (frozen)
    local: Annotated[str | None, option("ranks on this machine, this one among them [all]", "N")] = None,
    wait: Annotated[str | None, option("how long to wait for links to all ranks [60]", "SECONDS")] = None,
    corrupt: Annotated[bool, option("a test: damage a block of the last pair, or of A:B with --corrupt A:B")] = False,
    out: Annotated[str | None, option("directory for network.json and network.png [none]", "DIR")] = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> int:
    """Measure the network, print the result, and report corrupted blocks."""
    require(transport in TRANSPORTS, str(unknown("transport", transport, TRANSPORTS)))
    test = NetworkTest(
        elements=_number("--elements", elements, NetworkTest.elements),
        repeats=_number("--repeats", repeats, None),
        message_bytes=_number("--message-bytes", message_bytes, NetworkTest.message_bytes),
        wait_seconds=from_plain(float, wait or "60", "--wait"),
        shared_memory=not no_shared_memory,
    )
    ranks = _number("-n", n, None)
    require(ranks is None or ranks >= 2, f"-n must be 2 or more, but is {ranks}")
    if words and not corrupt:
        require(ranks is None and listen is None, f"{words[0]} says who takes part; leave out -n and --listen")
        return _join(words, token_file, tls.settings(), transport, test)
    info = read_rank_info_for(transport)
    if not info.alone:
        _check_launcher(info, ranks, transport)
        require(
            tls == TlsFlags() and token_file is None,
            f"{info.launcher} has started the ranks; set OFFBEAT_TOKEN_FILE, OFFBEAT_TLS and the like instead of flags",
        )
        ranks = info.processes
    require(ranks is not None, "-n says how many ranks there are; type, for example: offbeat network -n 3")
    assert ranks is not None
    if corrupt and ranks >= 2:
        test = replace(test, corrupt=_corrupt_flow(words, ranks))
    with show_progress(quiet or info.rank > 0, step_line=_step_line) as progress:
        result: NetworkResult | None
        if info.alone:
            local_ranks = _number("--local", local, ranks)
            token = None if token_file is None else read_token(token_file)
            run = functools.partial(run_local, test, ranks, listen=listen, token=token, tls=tls.settings())
            result = _start(run, test, ranks, transport, progress, local=local_ranks, listen=listen)
        else:
            result = run_test_rank(info, test, progress.step)
    return 0 if result is None else _present(result, None if out is None else Path(out), json)


def _number(flag: str, text: str | None, default: Default) -> int | Default:
    return default if text is None else from_plain(int, text, flag)


def _corrupt_flow(words: Sequence[str], ranks: int) -> tuple[int, int]:
    """The pair whose block is damaged: the one named by --corrupt, or the last."""
    require(len(words) <= 1, f"--corrupt takes one pair, such as 1:0, so {' '.join(words[1:])} is too much")
    if not words:
        return ranks - 1, ranks - 2
    pair = re.fullmatch(r"(\d+):(\d+)", words[0], re.ASCII)
    if pair is None:
        raise ConfigurationError(f"--corrupt names a pair of ranks, such as 1:0, but is {words[0]!r}")
    flow = int(pair[1]), int(pair[2])
    require(
        flow[0] != flow[1] and max(flow) < ranks,
        f"--corrupt {words[0]} is no pair of these {ranks} ranks; name two different ones from 0 to "
        f"{ranks - 1}, such as {ranks - 1}:0",
    )
    return flow


# Ranks: joined by hand, started by a launcher, or started here


def _join(words: Sequence[str], token_file: str | None, tls: Tls, transport: str, test: NetworkTest) -> int:
    require(len(words) == 1, f"{words[-1]!r} is one word too many; type, for example: offbeat network {words[0]}")
    require(transport != "mpi", "ranks of MPI are started by mpirun, and none can join; leave out --transport mpi")
    address = Address.parse(words[0])
    join_by_hand(address, Credentials(joining_token(address, token_file), tls), test)
    return 0


def _check_launcher(info: RankInfo, ranks: int | None, transport: str) -> None:
    require(
        ranks is None or ranks == info.processes,
        f"{info.launcher} started {info.processes} processes, so -n {ranks} cannot be; leave out -n",
    )
    require(
        transport in ("auto", info.transport),
        f"{info.launcher} connects processes over {info.transport}; leave out --transport {transport}",
    )


def _start(
    run: Callable[..., NetworkResult],
    test: NetworkTest,
    ranks: int,
    transport: str,
    progress: Progress,
    *,
    local: int,
    listen: str | None,
) -> NetworkResult:
    """`run` starts the ranks of this machine, where they are not those of MPI."""
    require(1 <= local <= ranks, f"--local must be from 1 to {ranks}, but is {local}")
    require(local == ranks or listen is not None, "--local leaves ranks to other machines; add --listen HOST:PORT")
    if transport == "mpi":
        require(listen is None, "ranks of MPI are started by mpirun, and none can join; leave out --listen")
        return run_mpirun(test, ranks, lambda rank, line: _show_step(progress, line))

    def announce(address: Address) -> None:
        there = advertised_address(str(listen), address)
        print_status(f"others join with: offbeat network {there} --token-file FILE")

    return run(progress.step, local=local, on_listen=announce)


def _step_line(kind: str, done: float, total: float | None) -> str:
    return f"[{done:4.0%}] {kind}"


def _show_step(progress: Progress, line: str) -> None:
    """Show the progress that another process printed by `_step_line`."""
    if match := re.fullmatch(r"\[ *(\d+)%\] (.*)", line):
        progress.step(match[2], int(match[1]) / 100)


def run_network_rank(path: Path, settings: str) -> int:
    """Run the rank of this process, as `processes` starts it. Rank 0 prints progress and writes the result."""
    test = msgspec.json.decode(settings, type=NetworkTest)
    result = run_test_rank(read_rank_info(), test, Progress(step_line=_step_line).step)
    if result is not None:
        write_result(result, path)
    return 0


# The result


def _present(result: NetworkResult, out: Path | None, json: bool) -> int:
    if json:
        print_json(msgspec.to_builtins(result))
    else:
        screen = console()
        screen.print(view(result, screen.width))
        print_lines(*sentences(result))
    if out is not None:
        for path in [write_result(result, out / RESULT), _figure(result, out / FIGURE)]:
            if path is not None and not json:
                print(f"written: {path}")
    for sentence in result.flaws:
        print_status(sentence)
    return 1 if result.corrupted else 0


def _figure(result: NetworkResult, path: Path) -> Path | None:
    bandwidth, latency = scaled(result.bandwidth(), 1e-6), scaled(result.latency(), 1e6)
    panels = [HeatMap("bandwidth, MB/s", bandwidth, True), HeatMap("latency, µs", latency, False)]
    try:
        with refuse_unwritable(path):
            return save(heat_maps(panels), path)
    except MissingDependency as missing:
        print_status(f"no figure was drawn: {missing}")
        return None


if __name__ == "__main__":
    from offbeat.cli.worker_process import run_reported

    result = Path(sys.argv[1])
    sys.exit(run_reported(lambda: run_network_rank(result, sys.argv[2]), result.with_name(FAILURES)))
