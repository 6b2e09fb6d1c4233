"""TLS 1.3 for connections between machines: contexts, and certificates that are made for one run.

A certificate of one run proves nothing by itself, and no end checks who signed it: both ends prove that they know the
token and see the same certificate; see `authentication.py`. With certificates of the user's own, both ends also check
that the other's was signed by the authority in `ca`.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import ConfigurationError, unknown
from offbeat.transports.authentication import binding_of, check_token

TLS_MODES = ("auto", "on", "off")


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Which connections are encrypted, and with which certificates."""

    mode: str = "auto"
    """auto: those with other machines; on: all; off: none."""
    certificate: str | None = None
    """File with this machine's own certificate, and those between it and the authority's, in PEM."""
    key: str | None = None
    """File with its private key, in PEM."""
    ca: str | None = None
    """File with the certificates that must have signed those of the other machines, in PEM."""

    def __post_init__(self) -> None:
        if self.mode not in TLS_MODES:
            raise unknown("TLS mode", self.mode, TLS_MODES)
        files = (self.certificate, self.key, self.ca)
        if any(files) and not all(files):
            raise ConfigurationError(
                "certificates of your own need all three files: --certificate FILE --key FILE --ca FILE"
            )
        if any(files) and self.mode == "off":
            raise ConfigurationError("certificates are given, but --tls off uses none; leave one of the two out")

    def covers(self, host: str) -> bool:
        """Whether a connection to or from an address, as a number, is encrypted."""
        address = ipaddress.ip_address(host.partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address  # how a listener on IPv6 sees a client on IPv4
        return self.mode == "on" or (self.mode == "auto" and not address.is_loopback)

    def check(self) -> None:
        """Raise ConfigurationError for files that cannot be used."""
        if self.certificate is not None:
            self.listener_side()
            self.client_side()

    def listener_side(self) -> ListenerTls:
        """For a process that listens: with its own certificate, or with one that is made now."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # nothing is resumed
        if self.certificate is None:
            certificate, key = _make_certificate()
            with _in_memory(key + certificate) as path:
                context.load_cert_chain(path)
        else:
            certificate = self._load(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return ListenerTls(context, binding_of(ssl.PEM_cert_to_DER_cert(_first(certificate))))

    def client_side(self) -> ssl.SSLContext:
        """For a process that connects."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # machines of a run are known by the token, not by name
        context.verify_mode = ssl.CERT_NONE
        if self.certificate is not None:
            self._load(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _load(self, context: ssl.SSLContext) -> bytes:
        """Load the files of the user, and return the certificate."""
        assert self.certificate is not None
        for name in (self.certificate, self.key, self.ca):
            try:
                Path(str(name)).read_bytes()
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise ConfigurationError(f"{name} cannot be read: {reason}; type the path of a file in PEM") from None
        try:
            context.load_cert_chain(self.certificate, self.key, password=b"")  # never ask at the terminal
            context.load_verify_locations(self.ca)
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error)
            raise ConfigurationError(
                f"the certificate {self.certificate}, its key {self.key} and the authority {self.ca} cannot be used "
                f"together ({reason}); give files in PEM, with a key without password that belongs to the certificate"
            ) from None
        return Path(self.certificate).read_bytes()


@dataclass(frozen=True)
class ListenerTls:
    """The context of a listener, and what proofs say about its certificate."""

    context: ssl.SSLContext
    binding: bytes


@dataclass(frozen=True)
class Credentials:
    """What a process shows to the others of its run, and wants to see: the token, and TLS."""

    token: bytes
    tls: Tls = Tls()

    def __post_init__(self) -> None:
        check_token(self.token)


def peer_binding(connected: ssl.SSLSocket) -> bytes:
    """What proofs say about the certificate that the other end showed."""
    certificate = connected.getpeercert(binary_form=True)
    assert certificate is not None  # a listener always shows one
    return binding_of(certificate)


def _first(pem: bytes) -> str:
    end = "-----END CERTIFICATE-----"
    text = pem.decode("ascii", "replace")
    start = text.find("-----BEGIN CERTIFICATE-----")
    return text[start : text.find(end) + len(end)] + "\n"


def _make_certificate() -> tuple[bytes, bytes]:
    """A new certificate and its key, in PEM. It is known by its hash, so it may be valid for long."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "offbeat")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """A path at which OpenSSL, which reads nothing but files, finds the data; on Linux it is on no disk."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("offbeat", os.MFD_CLOEXEC)
        try:
            os.write(file, data)
            yield f"/proc/self/fd/{file}"
        finally:
            os.close(file)
    else:
        with tempfile.NamedTemporaryFile() as named:  # readable by its owner alone
            named.write(data)
            named.flush()
            yield named.name
