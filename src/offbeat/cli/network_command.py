"""`offbeat network`: what the network between some processes can do, and whether it keeps what it carries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from offbeat.cli.mpirun import read_rank_info_for
from offbeat.cli.network_view import Lines, Progress, progress, sentences, view
from offbeat.cli.output import console, print_json, print_status
from offbeat.core.configuration import from_plain
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, MissingDependency, unknown
from offbeat.lab.network_test.plan import Probe
from offbeat.lab.network_test.processes import TestOptions, join_there, probe_here, probe_under_mpirun, take_part
from offbeat.lab.network_test.result import Network, write_result
from offbeat.lab.plots.rank_pairs import Panel, heat_maps
from offbeat.lab.plots.style import save
from offbeat.launch.listeners import advertised_address
from offbeat.launch.rank_info import TRANSPORTS, RankInfo, read_token
from offbeat.transports.rendezvous import Address

EXAMPLE = "type, for example: offbeat network -n 3"
RESULT, FIGURE = "network.json", "network.png"


def _option(text: str, metavar: str | None = None, name: str | tuple[str, ...] | None = None) -> Parameter:
    return Parameter(name=name, help=text, metavar=metavar, negative=(), show_default=False)


def network(
    *words: Annotated[str, Parameter(name="HOST:PORT", help="join the probe that listens there, which says the rest")],
    n: Annotated[str | None, _option("how many ranks, 2 or more", "N", ("-n", "--processes"))] = None,
    elements: Annotated[str | None, _option("32-bit integers in a block [100000000]", "N")] = None,
    repeats: Annotated[
        str | None, _option("times that each figure is measured [3; large blocks at once 1]", "N")
    ] = None,
    message_bytes: Annotated[str | None, _option("bytes of a message, for updates per second [44000000]", "N")] = None,
    transport: Annotated[str, _option("auto, gloo or mpi [auto: mpi under mpirun, else gloo]", "NAME")] = "auto",
    no_shared_memory: Annotated[bool, _option("use sockets also between ranks of one machine")] = False,
    listen: Annotated[str | None, _option("for ranks on other machines [this machine alone]", "HOST:PORT")] = None,
    token_file: Annotated[str | None, _option("file with the secret to show; needed with --listen", "FILE")] = None,
    local: Annotated[str | None, _option("ranks on this machine, this one among them [all]", "N")] = None,
    wait: Annotated[str | None, _option("how long to wait until everybody is there [60]", "SECONDS")] = None,
    corrupt: Annotated[bool, _option("a test: damage a block of the last pair, or of A:B with --corrupt A:B")] = False,
    out: Annotated[str | None, _option("directory for network.json and network.png [none]", "DIR")] = None,
    json: Annotated[bool, _option("print one JSON object and nothing else")] = False,
    quiet: Annotated[bool, _option("show no progress")] = False,
) -> int:
    """Measure, print, and say what was corrupted."""
    require(transport in TRANSPORTS, str(unknown("transport", transport, TRANSPORTS)))
    seconds = from_plain(float, wait or "60", "--wait")
    require(seconds >= 0, f"--wait must be 0 or more, but is {seconds:g}")
    options = TestOptions(wait_seconds=seconds, shared_memory=not no_shared_memory)
    token = None if token_file is None else read_token(token_file)
    ranks = None if n is None else from_plain(int, n, "-n")
    require(ranks is None or ranks >= 2, f"-n must be 2 or more, but is {ranks}")
    if words and not corrupt:
        require(ranks is None and listen is None, f"{words[0]} says who takes part; leave out -n and --listen")
        return _join(words, token, transport, options)
    probe = _probe(elements, repeats, message_bytes)
    place = read_rank_info_for(transport)
    damage = words if corrupt else None
    with progress(quiet or place.rank > 0) as told:
        if not place.alone:
            result = _under_launcher(place, _damaged(probe, damage, place.processes), ranks, transport, options, told)
        else:
            require(ranks is not None, f"-n says how many ranks there are; {EXAMPLE}")
            assert ranks is not None
            crew = _crew(ranks, local, listen, token)
            result = _from_here(crew, _damaged(probe, damage, ranks), transport, options, told)
    return 0 if result is None else _present(result, None if out is None else Path(out), json)


def _probe(elements: str | None, repeats: str | None, message_bytes: str | None) -> Probe:
    probe = Probe()
    if elements is not None:
        probe = replace(probe, elements=from_plain(int, elements, "--elements"))
    if repeats is not None:
        probe = replace(probe, repeats=from_plain(int, repeats, "--repeats"))
    if message_bytes is not None:
        probe = replace(probe, message_bytes=from_plain(int, message_bytes, "--message-bytes"))
    return probe


def _damaged(probe: Probe, words: tuple[str, ...] | None, ranks: int) -> Probe:
    """The probe with the pair whose block is damaged, if that is asked for; it must be one of these ranks."""
    if words is None or ranks < 2:
        return probe
    require(len(words) <= 1, f"--corrupt takes one pair, such as 1:0, so {' '.join(words[1:])} is too much")
    probe = replace(probe, corrupt=words[0] if words else f"{ranks - 1}:{ranks - 2}")
    probe.corrupt_flow(ranks)
    return probe


# The ways in which processes come together


def _join(words: tuple[str, ...], token: bytes | None, transport: str, options: TestOptions) -> int:
    require(len(words) == 1, f"{words[-1]!r} is one word too many; type, for example: offbeat network {words[0]}")
    require(transport != "mpi", "ranks of MPI are started by mpirun, and none can join; leave out --transport mpi")
    join_there(Address.parse(words[0]), token, options)
    return 0


@dataclass(frozen=True)
class _Crew:
    """Who takes part in a probe that is started here."""

    ranks: int
    here: int
    listen: str | None
    token: bytes | None


def _crew(ranks: int, local: str | None, listen: str | None, token: bytes | None) -> _Crew:
    here = ranks if local is None else from_plain(int, local, "--local")
    require(1 <= here <= ranks, f"--local must be from 1 to {ranks}, but is {here}")
    require(here == ranks or listen is not None, "--local leaves ranks to other machines; add --listen HOST:PORT")
    return _Crew(ranks, here, listen, token)


def _from_here(crew: _Crew, probe: Probe, transport: str, options: TestOptions, told: Progress) -> Network:
    if transport == "mpi":
        require(crew.listen is None, "ranks of MPI are started by mpirun, and none can join; leave out --listen")
        return probe_under_mpirun(probe, crew.ranks, options, _reading(told))

    def invite(opened: Address) -> None:
        assert crew.listen is not None
        print_status(f"others join with: offbeat network {advertised_address(crew.listen, opened)} --token-file FILE")

    return probe_here(
        probe,
        crew.ranks,
        options,
        told,
        lambda rank, line: None,  # what a rank says on its way out is told with why it ended
        local=crew.here,
        listen=crew.listen,
        token=crew.token,
        invite=invite,
    )


def _under_launcher(
    place: RankInfo, probe: Probe, ranks: int | None, transport: str, options: TestOptions, told: Progress
) -> Network | None:
    require(
        ranks is None or ranks == place.processes,
        f"{place.launcher} started {place.processes} processes, so -n {ranks} cannot be; leave out -n",
    )
    require(
        transport in ("auto", place.transport),
        f"{place.launcher} brings processes together over {place.transport}; leave out --transport {transport}",
    )
    return take_part(place, probe, options, told)


def _reading(told: Progress) -> Callable[[int, str], None]:
    """Progress of a process that writes lines about it."""

    def line(rank: int, text: str) -> None:
        read = Lines.read(text)
        if read is not None:
            told(*read)

    return line


# The result


def _present(network: Network, out: Path | None, json: bool) -> int:
    if json:
        print_json(msgspec.to_builtins(network))
    else:
        screen = console()
        screen.print(view(network, screen.width))
        for sentence in sentences(network):
            screen.print(sentence, markup=False, soft_wrap=not screen.is_terminal)
    if out is not None:
        for path in [write_result(network, out / RESULT), _figure(network, out / FIGURE)]:
            if path is not None and not json:
                print(f"written: {path}")
    for sentence in network.flaws:
        print_status(sentence)
    return 1 if network.corrupted else 0


def _figure(network: Network, path: Path) -> Path | None:
    bandwidth = [[None if value is None else value / 1e6 for value in row] for row in network.bandwidth()]
    latency = [[None if value is None else value * 1e6 for value in row] for row in network.latency()]
    panels = [Panel("bandwidth, MB/s", bandwidth, True), Panel("latency, µs", latency, False)]
    try:
        return save(heat_maps(panels), path)
    except MissingDependency as missing:
        print_status(f"no figure was drawn: {missing}")
        return None
    except OSError as error:
        raise ConfigurationError(f"cannot write {path} ({error.strerror}); name another place with --out") from None
