"""TCP addresses as users type them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from offbeat.errors import ConfigurationError, quoted

PORT_DIGITS_MAX = 9
"""Digits of a port that are looked at: Python converts no integer of any length."""


@dataclass(frozen=True)
class Address:
    """A host and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """From `HOST:PORT`, with an IPv6 host in brackets; raises ConfigurationError."""
        host, colon, port = text.strip().rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ConfigurationError(f"{quoted(text)} is ambiguous as an address; type an IPv6 address as [HOST]:PORT")
        if not colon or not host:
            raise ConfigurationError(f"{quoted(text)} is not an address; type HOST:PORT, such as 192.168.1.5:7700")
        if not port.isascii() or not port.isdigit() or len(port) > PORT_DIGITS_MAX or int(port) > 65535:
            raise ConfigurationError(f"{quoted(port)} in {quoted(text)} is not a port; type a number from 0 to 65535")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
