"""What of the line a hub and its workers use, each on a machine of its own: network namespaces around a switch.

    python bench/machines.py [--json] [--rate 1gbit ...] [--rounds N] [--tls auto|off]      # needs root and iproute2

A hub and two workers of async-fmb train a model of 11.2 million parameters, whose gradients cost next to nothing, so
that messages of 44 MB in both directions are all that takes time. Every machine sends and receives at `--rate`.

`hub_in`, `hub_out`: what arrived at the hub, and left it, per second over what its line carries, headers of Ethernet,
IP and TCP taken off; between the first update and the last. `overlap`: the same run with rounds that take as long as a
message does; the share of their computing time during which the worker's own last gradient was on its way.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from offbeat.records.files import find_runs, read_run
from offbeat.records.schema import Round, RunRecords, Traffic, Update, of_kind

sys.path.append(str(Path(__file__).parent.parent / "tests" / "live"))
from namespaces import star, why_not

PARAMETERS = 11_200_000
WORKERS = 2
PORT = 7702
ON_THE_WIRE = 1448 / 1514
"""Of each packet of a cable of Ethernet, with time stamps in the headers of TCP, as tbf counts it."""
BITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
LIMIT_SECONDS = 500.0


@dataclass(frozen=True)
class Row:
    rate: str
    hub_in: float
    hub_out: float
    overlap: float
    updates_per_second: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--rate", nargs="+", default=["1gbit", "100mbit"], help="what each line carries")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each worker")
    parser.add_argument("--tls", default="auto", help="as for offbeat train")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.exit(f"there are no machines to measure between: {reason}")
    rows = [measure(rate, arguments.rounds, arguments.tls) for rate in arguments.rate]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for head in ("rate", "hub in", "hub out", "overlap", "updates/s"):
        table.add_column(head, justify="right")
    for row in rows:
        shares = (f"{share:.3f}" for share in (row.hub_in, row.hub_out, row.overlap))
        table.add_row(row.rate, *shares, f"{row.updates_per_second:.3g}")
    Console().print(table)


def measure(rate: str, rounds: int, tls: str) -> Row:
    line = bytes_per_second(rate)
    message_seconds = 4.0 * PARAMETERS / line
    with run_between_machines(rate, rounds, 0.0, tls) as records:
        received, sent, seconds = hub_traffic(records)
        updates = len(list(of_kind(records, Update))) / seconds
    with run_between_machines(rate, rounds, WORKERS * message_seconds, tls) as records:
        overlap = share_of_overlap(records)
    return Row(rate, received / seconds / line, sent / seconds / line, overlap, updates)


def bytes_per_second(rate: str) -> float:
    """What a line of this rate carries of messages."""
    unit = next((unit for unit in BITS if rate.endswith(unit)), None)
    if unit is None or not rate.removesuffix(unit).replace(".", "", 1).isdigit():
        sys.exit(f"a rate is written as 1gbit or 100mbit, but is {rate!r}")
    return float(rate.removesuffix(unit)) * BITS[unit] / 8 * ON_THE_WIRE


def hub_traffic(records: RunRecords) -> tuple[float, float, float]:
    """Bytes that the hub has received and sent, and the seconds this took, from its first count to its last."""
    times = [update.at for update in of_kind(records, Update)]
    counts = [count for count in of_kind(records, Traffic) if count.rank == 0 and times[0] <= count.at <= times[-1]]
    first, last = counts[0], counts[-1]
    received, sent = (
        sum(flow.bytes for flow in getattr(last, way).values())
        - sum(flow.bytes for flow in getattr(first, way).values())
        for way in ("received", "sent")
    )
    return received, sent, last.at - first.at


def share_of_overlap(records: RunRecords) -> float:
    """The computing time of rounds during which the gradient of the round before was sent, over what was possible.

    `send_seconds` of a round is how long that message occupied the link; it left when the round before had ended.
    """
    together, possible = 0.0, 0.0
    for rank in range(1, WORKERS + 1):
        for one in [one for one in of_kind(records, Round) if one.rank == rank][2:]:
            begun_late = one.idle_seconds
            together += max(0.0, min(one.seconds, one.send_seconds - begun_late))
            possible += min(one.seconds, one.send_seconds)
    return together / possible if possible else 0.0


@contextmanager
def run_between_machines(rate: str, rounds: int, compute_seconds: float, tls: str) -> Iterator[RunRecords]:
    """The records of a run with the hub and both workers on machines of their own."""
    with tempfile.TemporaryDirectory(prefix="offbeat-machines-") as temporary, star(WORKERS + 1, rate) as hosts:
        (hub, *others), address = hosts
        token = Path(temporary, "token")
        token.write_text("a secret only for this measurement")
        token.chmod(0o600)
        cluster = Path(temporary, "cluster.toml")
        cluster.write_text(f"[[workers]]\nworkers = [0, 1]\nseconds_per_call = {compute_seconds}\n")
        offbeat = [sys.executable, "-m", "offbeat"]
        words = ["train", "quadratic", "async-fmb", "--dimension", str(PARAMETERS), "--examples", "2", "--batch", "1"]
        words += ["--microbatch", "1", "--workers", str(WORKERS), "--local-workers", "0", "--evaluate", "none"]
        words += ["--until", str(rounds * WORKERS), "--listen", f"{address}:{PORT}", "--token-file", str(token)]
        words += ["--tls", tls, "--quiet", "--no-report", "--checkpoint-seconds", "none"]
        words += ["--cluster", str(cluster), "--out", str(Path(temporary, "runs"))]
        serving = subprocess.Popen(["ip", "netns", "exec", hub, *offbeat, *words], stdout=subprocess.DEVNULL)
        joining = [*offbeat, "work", f"{address}:{PORT}", "--token-file", str(token), "--tls", tls]
        working = [subprocess.Popen(["ip", "netns", "exec", other, *joining]) for other in others]
        try:
            if serving.wait(LIMIT_SECONDS):
                sys.exit(f"the run failed with exit code {serving.returncode}")
            for process in working:
                process.wait(LIMIT_SECONDS)
        finally:
            for process in (serving, *working):
                process.kill()
                process.wait()
        (directory,) = find_runs([Path(temporary, "runs")])
        yield read_run(directory)


if __name__ == "__main__":
    main()
