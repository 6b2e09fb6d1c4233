"""`offbeat network` as a command: what is printed, written and drawn, and one sentence for each mistake."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from offbeat.cli import main, network_command
from offbeat.cli.network_view import heat_map, sentences, view
from offbeat.cli.options import TlsFlags
from offbeat.errors import RunFailed
from offbeat.lab.network_test.plan import NetworkTest, pairs_of
from offbeat.lab.network_test.result import ConcurrentResult, HubResult, NetworkResult, PairResult, read_result
from offbeat.lab.plots.rank_pairs import HeatMap, heat_maps
from offbeat.lab.progress import Progress
from offbeat.launch.rank_info import RankInfo
from offbeat.transports.address import Address
from offbeat.transports.tls import Credentials


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("OFFBEAT_RANK", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def concurrent(flows: int, seconds: float) -> ConcurrentResult:
    nbytes = flows * 4_000_000
    return ConcurrentResult(flows, nbytes, seconds, nbytes / seconds, 4_000_000 / seconds)


def made(ranks: int = 3, corrupted: bool = False) -> NetworkResult:
    """A gigabit network; the pair from rank 1 to rank 0 is ten times slower."""
    pairs = [
        PairResult(
            source, to, 12.5e6 if (source, to) == (1, 0) else 125e6, 50e-6, 7, int(corrupted and (source, to) == (1, 0))
        )
        for source, to in pairs_of(ranks)
    ]
    return NetworkResult(
        transport="tcp",
        ranks=ranks,
        hosts=["a", "b", *["c"] * (ranks - 2)],
        elements=1_000_000,
        pair_elements=1_000_000,
        seconds=1.5,
        blocks=7 * len(pairs),
        corrupted=int(corrupted),
        pairs=pairs,
        ring=concurrent(ranks, 0.032),
        all_to_all=concurrent(len(pairs), 0.064),
        star=HubResult(
            into=concurrent(ranks - 1, 0.064),
            out=concurrent(ranks - 1, 0.064),
            both=concurrent(2 * ranks - 2, 0.064),
            message_bytes=44_000_000,
            updates_per_second=(ranks - 1) * 4_000_000 / 0.064 / 44e6,
            alone_bytes_per_second=125e6,
        ),
        flaws=["1 of 7 blocks from rank 1 to rank 0 came corrupted: its checksum is wrong"] if corrupted else [],
    )


class Processes:
    """A fake for the processes: records the arguments of calls and returns a result."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.outcome: NetworkResult | Exception = made()

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        self.calls.append((*arguments, more))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    fake = Processes()
    for name in ("run_local", "run_mpirun", "run_test_rank", "join_by_hand"):
        monkeypatch.setattr(network_command, name, fake)
    return fake


# What is shown


def shown(network: NetworkResult, width: int = 100, colour: bool = False) -> str:
    console = Console(width=width, force_terminal=colour, color_system="truecolor" if colour else None, highlight=False)
    with console.capture() as captured:
        console.print(view(network, width))
    return captured.get()


def test_the_table_and_the_maps_hold_every_pair() -> None:
    text = shown(made())
    assert "3 ranks on 3 machines over tcp, blocks of 1,000,000 integers (4 MB)" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "→", "0", "12.5", "0.1", "50", "7", "0"] in rows
    assert ["0", "→", "2", "125", "1", "50", "7", "0"] in rows
    assert ["1", "12.5", "–", "125"] in rows
    assert ["2", "50", "50", "–"] in rows
    assert ["all", "into", "rank", "0", "2", "0.064", "125", "1", "62.5"] in rows


@pytest.mark.parametrize("ranks", [2, 6, 7, 16])
def test_maps_of_up_to_16_ranks_fit_where_there_is_no_terminal(ranks: int) -> None:
    text = shown(made(ranks))
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    assert ("the 10 slowest:" in text) == (ranks > 6)
    assert "bandwidth in MB/s" in text


@pytest.mark.parametrize(("ranks", "width", "mapped"), [(12, 80, True), (13, 80, False), (16, 100, True)])
def test_maps_of_fast_networks_with_long_numbers_are_whole_or_left_out(ranks: int, width: int, mapped: bool) -> None:
    network = made(ranks)
    pairs = [
        msgspec.structs.replace(pair, bytes_per_second=1.234e9 * (1 + pair.source), latency_seconds=9.876e-3)
        for pair in network.pairs
    ]
    text = shown(msgspec.structs.replace(network, pairs=pairs), width)
    assert "…" not in text
    assert ("bandwidth in Gbit/s" in text) == mapped


def test_of_more_ranks_the_slowest_pairs_are_named() -> None:
    text = shown(made(20))
    assert "380 pairs: 12.5 to 125 MB/s, median 125" in text
    assert "1 → 0 " in text
    assert "row to column" not in text


def test_a_slow_pair_has_another_colour_than_a_fast_one() -> None:
    assert "12.5" in shown(made(), colour=True)
    console = Console(width=60, force_terminal=True, color_system="truecolor")
    with console.capture() as captured:
        console.print(heat_map([[None, 100.0], [10.0, None]], more_is_better=True))
    _, fast, slow = captured.get().splitlines()
    colours = [line.partition("48;2;")[2].partition("m")[0] for line in (fast, slow)]
    assert all(colours)
    assert colours[0] != colours[1]


def test_the_star_in_words() -> None:
    updates, share, verified = sentences(made())
    assert updates.startswith("At 44 MB per message this star carries 2.84 updates/s")
    assert share == "Of 2 flows into rank 0 at once each gets 62.5 MB/s, 50% of what one gets alone."
    assert verified.startswith("42 of 42 blocks verified")
    assert sentences(made(corrupted=True))[-1].startswith("41 of 42 blocks verified")


def test_progress_as_lines_can_be_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(step_line=network_command._step_line)
    progress.step("ring", 0.071)
    progress.step("ring", 0.2)
    progress.step("all-to-all", 1.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["[  7%] ring", "[100%] all-to-all"]
    again = Progress(step_line=network_command._step_line)
    for line in [*lines, "offbeat: something"]:
        network_command._show_step(again, line)
    assert capsys.readouterr().err.splitlines() == lines


# What is written


def test_json_is_one_object_and_nothing_else(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["network", "-n", "3", "--json", "--quiet", "--out", "there"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert msgspec.convert(json.loads(said.out), NetworkResult) == made() == read_result(Path("there/network.json"))
    assert Path("there/network.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_figure_and_the_line_that_installs_it(
    processes: Processes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["network", "-n", "3", "--quiet", "--out", "there"]) == 0
    said = capsys.readouterr()
    assert "no figure was drawn" in said.err
    assert "pip install 'offbeat[report]'" in said.err
    assert "written: there/network.json" in said.out


def test_a_corrupted_block_makes_the_exit_code_1(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    processes.outcome = made(corrupted=True)
    assert main(["network", "-n", "3", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert said == "offbeat: 1 of 7 blocks from rank 1 to rank 0 came corrupted: its checksum is wrong\n"


def test_a_lost_rank_makes_the_exit_code_1(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    processes.outcome = RunFailed("rank 2 was lost (silent for 10 seconds)")
    assert main(["network", "-n", "3", "--quiet"]) == 1
    assert capsys.readouterr().err == "offbeat: rank 2 was lost (silent for 10 seconds)\n"


@pytest.mark.parametrize("ranks", [2, 17])
def test_the_figure_has_a_number_in_each_cell_where_there_is_room(ranks: int) -> None:
    figure = heat_maps([HeatMap("MB/s", made(ranks).bandwidth(), True), HeatMap("µs", made(ranks).latency(), False)])
    numbers = [len(axes.texts) for axes in figure.axes[:2]]
    assert numbers == ([2, 2] if ranks == 2 else [0, 0])


def test_a_figure_of_nothing_known_can_be_drawn() -> None:
    figure = heat_maps([HeatMap("MB/s", [[None, math.nan], [None, None]], True)])
    assert not figure.axes[0].texts


# What reaches the processes


def test_flags_reach_the_network_test(processes: Processes) -> None:
    argv = ["--elements", "1000", "--repeats", "2", "--message-bytes", "5", "--wait", "7", "--no-shared-memory"]
    assert main(["network", "-n", "4", "--quiet", *argv, "--corrupt", "2:0"]) == 0
    (test, ranks, _, options) = processes.calls[0]
    sizes = {"elements": 1000, "repeats": 2, "message_bytes": 5}
    assert test == NetworkTest(**sizes, corrupt=(2, 0), wait_seconds=7.0, shared_memory=False)
    assert ranks == 4
    assert (options["local"], options["listen"], options["token"]) == (4, None, None)


def test_corrupt_alone_means_the_last_pair(processes: Processes) -> None:
    assert main(["network", "-n", "4", "--quiet", "--corrupt"]) == 0
    assert processes.calls[0][0].corrupt == (3, 2)


def test_an_address_means_to_join(processes: Processes) -> None:
    Path("token").write_text("a secret that is long enough")
    Path("token").chmod(0o600)
    assert main(["network", "there:7700", "--token-file", "token"]) == 0
    assert processes.calls[0][:2] == (Address("there", 7700), Credentials(b"a secret that is long enough"))


def test_under_a_launcher_the_process_runs_the_rank_that_it_was_given(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = RankInfo(0, 3, Address("127.0.0.1", 1), launcher="slurm")
    monkeypatch.setattr(network_command, "read_rank_info_for", lambda transport: info)
    assert main(["network", "--quiet"]) == 0
    assert processes.calls[0][0] == info
    assert main(["network", "-n", "4", "--quiet"]) == 2
    assert "slurm started 3 processes" in capsys.readouterr().err


MISTAKES = {
    "network": "-n says how many ranks there are",
    "network -n 1": "-n must be 2 or more, but is 1",
    "network -n three": "-n",
    "network -n 3 --elements 2": "--elements must be from 3",
    "network -n 3 --elements many": "--elements",
    "network -n 3 --repeats 0": "--repeats must be 1 or more",
    "network -n 3 --message-bytes 0": "--message-bytes must be 1 or more",
    "network -n 3 --transport gloo": "unknown transport 'gloo'",
    "network -n 3 --corrupt 3:0": "--corrupt 3:0 is no pair of these 3 ranks",
    "network -n 3 --corrupt here": "--corrupt names a pair of ranks",
    "network -n 3 --corrupt 1:1": "--corrupt 1:1 is no pair of these 3 ranks",
    "network -n 3 --corrupt 1": "--corrupt names a pair of ranks",
    "network -n 3 --corrupt 0:1:2": "--corrupt names a pair of ranks",
    "network -n 3 --corrupt 1:0 2:0": "is too much",
    "network -n 3 --wait -1": "--wait must be 0 or more",
    "network -n 3 --local 1": "add --listen HOST:PORT",
    "network -n 3 --local 4 --listen 127.0.0.1:0": "--local must be from 1 to 3",
    "network -n 3 --listen 0.0.0.0:0": "needs a token",
    "network -n 3 --listen nonsense": "'nonsense' is not an address",
    "network -n 3 --token-file none": "the token file none cannot be read",
    "network -n 3 --transport mpi --listen 127.0.0.1:0": "leave out --listen",
    "network nowhere": "'nowhere' is not an address",
    "network here:1 there:2": "'there:2' is one word too many",
    "network here:1 -n 3": "leave out -n",
    "network here:1 --transport mpi": "leave out --transport mpi",
}


@pytest.mark.parametrize("line", list(MISTAKES))
def test_a_mistake_is_answered_with_one_sentence(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (sentence,) = said.err.splitlines()
    assert MISTAKES[line] in sentence


# The page about it


def cells(head: str) -> list[str]:
    """The code words in the first column of the table under this head."""
    page = (Path(__file__).parents[2] / "docs/network.md").read_text(encoding="utf-8")
    rows = page.partition(f"| {head} |")[2].split("\n\n")[0].splitlines()[2:]
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_the_page_lists_every_option_and_every_key() -> None:
    parameters = inspect.signature(network_command.network).parameters
    names = [*parameters, *(item.name for item in dataclasses.fields(TlsFlags) if item.name not in parameters)]
    options = ["--" + name.replace("_", "-") for name in names if name not in ("words", "n")]
    assert sorted(cell.split()[0] for cell in cells("option | meaning")) == sorted(options)
    assert sorted(cells("key | value")) == sorted(NetworkResult.__struct_fields__)
