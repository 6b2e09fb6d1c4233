"""`offbeat network` with real processes: on this machine, over MPI, joined by hand, and in network namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from namespaces import star, why_not

from offbeat.cli import main

COMMAND = [sys.executable, "-m", "offbeat", "network"]
LIMIT_SECONDS = 500


@contextmanager
def started(*commands: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes; they are killed at the end."""
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def token_in(directory: Path, text: str = "a secret only for this test") -> str:
    path = directory / f"token-{len(text)}"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize("transport", ["tcp", pytest.param("mpi", marks=pytest.mark.integration)])
def test_three_ranks_of_this_machine_are_measured_and_a_damaged_block_is_detected(
    transport: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["-n", "3", "--elements", "600000", "--transport", transport, "--corrupt", "2:0", "--json"]
    assert main(["network", *words]) == 1
    said = capfd.readouterr()
    result = json.loads(said.out)
    assert (result["transport"], result["ranks"], result["corrupted"]) == (transport, 3, 1)
    bad = [(pair["source"], pair["destination"]) for pair in result["pairs"] if pair["corrupted"]]
    assert bad == [(2, 0)]
    (sentence,) = [line for line in said.err.splitlines() if line.startswith("offbeat: ")]
    assert "from rank 2 to rank 0 came corrupted" in sentence


@pytest.mark.slow
def test_ranks_that_join_by_hand(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Over sockets, with a token; a process with another token is refused."""
    token = ["--token-file", token_in(tmp_path)]
    words = ["-n", "3", "--local", "2", "--listen", "127.0.0.1:0", "--elements", "300000", "--no-shared-memory"]
    with started([*COMMAND, *words, *token, "--json"]) as (hub,):
        assert hub.stderr is not None
        address = hub.stderr.readline().split("offbeat network ")[1].split()[0]
        assert main(["network", address, "--token-file", token_in(tmp_path, "another secret for this test")]) == 1
        assert "does not accept the token" in capfd.readouterr().err
        assert main(["work", address, *token]) == 1
        assert "'offbeat network', and trains nothing" in capfd.readouterr().err
        assert main(["network", address, *token, "--no-shared-memory"]) == 0
        output, said = hub.communicate(timeout=LIMIT_SECONDS)
    assert hub.returncode == 0, said
    result = json.loads(output)
    assert (result["corrupted"], result["ranks"], len(result["pairs"])) == (0, 3, 6)


def test_a_killed_rank_ends_the_test_with_one_sentence() -> None:
    with started([*COMMAND, "-n", "3", "--elements", "1000000", "--repeats", "2000"]) as (hub,):
        assert hub.stderr is not None
        for line in hub.stderr:
            if "bandwidth" in line:
                break
        numbers = Path(f"/proc/{hub.pid}/task/{hub.pid}/children").read_text().split()
        commands = {number: Path(f"/proc/{number}/cmdline").read_bytes() for number in numbers}
        children = [number for number, command in commands.items() if b"killpg" not in command]  # without the guard
        assert len(children) == 2
        os.kill(int(children[-1]), signal.SIGKILL)
        _, said = hub.communicate(timeout=LIMIT_SECONDS)
    assert hub.returncode == 1
    (sentence,) = [line for line in said.splitlines() if line.startswith("offbeat: ")]
    assert sentence == "offbeat: rank 2 was killed by SIGKILL"
    assert not Path(f"/proc/{children[0]}").exists()


if why_not() is None:

    def around_a_switch(tmp_path: Path, *words: str) -> dict[str, Any]:
        """The result of three hosts that are linked in a star of 1 Gbit/s.

        Without encryption: what is compared are links, and beside other load a flow would be limited by the processor.
        """
        token = ["--token-file", token_in(tmp_path), "--tls", "off"]
        with star(3, "1gbit") as (hosts, address):
            at = [["ip", "netns", "exec", host, *COMMAND] for host in hosts]
            there = f"{address}:7702"
            hub = [*at[0], "-n", "3", "--local", "1", "--listen", there, "--json", *token, *words]
            with started(hub, *([*command, there, *token] for command in at[1:])) as (first, *others):
                output, said = first.communicate(timeout=LIMIT_SECONDS)
                codes = [first.returncode, *(other.wait(timeout=LIMIT_SECONDS) for other in others)]
        assert codes == [0, 0, 0], said
        result: dict[str, Any] = json.loads(output)
        return result

    @pytest.mark.integration
    def test_a_star_of_a_gigabit_shows_its_bandwidth_and_that_flows_share_the_link_of_rank_0(tmp_path: Path) -> None:
        result = around_a_switch(tmp_path, "--elements", "5000000", "--repeats", "3")
        hub = result["star"]
        rates = [pair["bytes_per_second"] * 8 / 1e9 for pair in result["pairs"]]
        print("Gbit/s of each pair alone:", [round(rate, 3) for rate in rates], "the star:", hub)
        assert result["corrupted"] == 0
        # Far above what the links carry, and far below what memory does; two into one share what one alone has.
        assert max(rates) <= 1.3
        assert hub["into"]["bytes_per_second"] * 8 / 1e9 <= 1.3
        assert hub["into"]["per_flow_bytes_per_second"] < 0.85 * hub["alone_bytes_per_second"]
