"""Hub and workers on hosts of their own, with a network between them. Left out where no host can be made."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import two_hosts, why_not

from offbeat.records.files import rank_files

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-m", "offbeat"]

if why_not() is None:

    def ports_at(host: str) -> list[str]:
        """The TCP ports at which anything listens on a host."""
        shown = subprocess.run(["ip", "netns", "exec", host, "ss", "-Htln"], capture_output=True, text=True, check=True)
        return [line.split()[3].rpartition(":")[2] for line in shown.stdout.splitlines()]

    def joined(runs: Path) -> bool:
        """Wait until both workers have sent records, which travel over their links."""
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline:
            if all(any(runs.glob(f"async-fmb-*/*{rank}*.jsonl")) for rank in (1, 2)):
                return True
            time.sleep(0.05)
        return False

    def test_workers_on_another_host_train_over_a_gigabit(tmp_path: Path) -> None:
        token = tmp_path / "token"
        token.write_text("a secret only for this test")
        token.chmod(0o600)
        with two_hosts("1gbit") as (hub, far, address):
            words = ["train", "digits", "async-fmb", "--workers", "2", "--local-workers", "0", "--until", "40000"]
            words += ["--listen", f"{address}:7701", "--token-file", str(token), "--json", "--quiet", "--no-report"]
            here = ["ip", "netns", "exec", hub, *COMMAND, *words, "--out", str(tmp_path / "runs")]
            there = ["ip", "netns", "exec", far, *COMMAND, "work", f"{address}:7701", "--token-file", str(token)]
            run = subprocess.Popen(here, stdout=subprocess.PIPE, text=True)
            workers = [subprocess.Popen(there) for _ in range(2)]
            try:
                listening = [ports_at(hub), ports_at(far)] if joined(tmp_path / "runs") else None
                output, _ = run.communicate(timeout=500)
                codes = [worker.wait(timeout=500) for worker in workers]
            finally:
                for process in (run, *workers):
                    process.kill()
        assert listening == [["7701"], []]
        summary = json.loads(output)["runs"][0]
        assert (run.returncode, codes) == (0, [0, 0])
        assert summary["accuracy"] >= 0.9
        assert summary["samples"] >= 40_000
        assert summary["bytes_per_second"] > 0
        # What the workers recorded has come over the wire, too: there is no disk between the two hosts.
        (directory,) = (tmp_path / "runs").glob("async-fmb-*")
        assert [rank for rank, _ in rank_files(directory)] == [0, 1, 2]
        assert summary["compute_seconds"] > 0
