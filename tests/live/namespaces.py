"""Hosts on one machine: network namespaces, joined by a cable, or by a switch, of limited bandwidth."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


def why_not() -> str | None:
    """Why there can be no namespaces here, or None."""
    if os.geteuid() != 0:
        return "it needs root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "it needs ip and tc, from iproute2"
    made = subprocess.run(["ip", "netns", "add", f"obtry{os.getpid()}"], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"namespaces cannot be made here ({made.stderr.strip() or made.returncode})"
    subprocess.run(["ip", "netns", "delete", f"obtry{os.getpid()}"], check=False, capture_output=True)
    return None


@contextmanager
def two_hosts(rate: str) -> Iterator[tuple[str, str, str]]:
    """The names of two namespaces and the address of the first; each sends at `rate` at the most."""
    mark = os.getpid() % 10_000
    hub, far = f"obhub{mark}", f"obfar{mark}"
    near_end, far_end = f"obh{mark}", f"obf{mark}"
    try:
        for name in (hub, far):
            _do("ip", "netns", "add", name)
        _do("ip", "link", "add", near_end, "netns", hub, "type", "veth", "peer", "name", far_end, "netns", far)
        for name, end, address in ((hub, near_end, "10.213.7.1/24"), (far, far_end, "10.213.7.2/24")):
            _do("ip", "-n", name, "addr", "add", address, "dev", end)
            _do("ip", "-n", name, "link", "set", end, "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
            _limit(name, end, rate)
        yield hub, far, "10.213.7.1"
    finally:
        for name in (hub, far):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@contextmanager
def star(hosts: int, rate: str) -> Iterator[tuple[list[str], str]]:
    """The names of namespaces around a switch, and the address of the first; each sends and receives at `rate`."""
    mark = os.getpid() % 10_000
    switch, names = f"obsw{mark}", [f"obstar{mark}h{host}" for host in range(hosts)]
    try:
        for name in (switch, *names):
            _do("ip", "netns", "add", name)
        _do("ip", "-n", switch, "link", "add", "hub", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "hub", "up")
        for host, name in enumerate(names):
            end, port = f"obe{mark}", f"port{host}"
            _do("ip", "link", "add", end, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            _do("ip", "-n", switch, "link", "set", port, "master", "hub", "up")
            _do("ip", "-n", name, "addr", "add", f"10.213.8.{host + 1}/24", "dev", end)
            for link in (end, "lo"):
                _do("ip", "-n", name, "link", "set", link, "up")
            _limit(name, end, rate)
            _limit(switch, port, rate)
        yield names, "10.213.8.1"
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _limit(namespace: str, end: str, rate: str) -> None:
    """Let no more than `rate` leave at this end."""
    queue = ["tbf", "rate", rate, "burst", "1mb", "latency", "50ms"]
    _do("tc", "-n", namespace, "qdisc", "add", "dev", end, "root", *queue)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
