"""Certificates: those made for a run, and those of the user's own, which an authority must have signed."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from offbeat.errors import ConfigurationError
from offbeat.transports.address import Address
from offbeat.transports.listener import Listener
from offbeat.transports.rendezvous import Assignment, CallRequest, ControlConnection, Rejected, connect
from offbeat.transports.tls import Credentials, Tls

TOKEN = b"a token only for these tests"
ASSIGNMENT = Assignment(1, 2, 0.0, None)


class Authority:
    """Signs certificates, and writes them to a directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory / name
        self.directory.mkdir()
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        write(self.directory / "ca.pem", self.certificate(self.name, self.key, is_authority=True))

    def certificate(self, name: x509.Name, key: ec.EllipticCurvePrivateKey, is_authority: bool = False) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        built = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .sign(self.key, hashes.SHA384())
        )
        return built.public_bytes(serialization.Encoding.PEM)

    def sign(self, machine: str) -> Tls:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, machine)])
        certificate, key_file = self.directory / f"{machine}.pem", self.directory / f"{machine}.key"
        write(certificate, self.certificate(name, key))
        private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        write(key_file, key.private_bytes(serialization.Encoding.PEM, *private))
        ca = self.directory / "ca.pem"
        return Tls(mode="on", certificate=str(certificate), key=str(key_file), ca=str(ca))


def write(path: Path, data: bytes) -> None:
    path.touch(0o600)
    path.write_bytes(data)


@pytest.fixture
def listen() -> Iterator[Callable[[Tls], Address]]:
    listeners: list[Listener] = []

    def assign(connection: ControlConnection) -> bool:
        connection.recv(CallRequest)
        connection.send(ASSIGNMENT)
        return False

    def make(tls: Tls) -> Address:
        listeners.append(Listener(Address("127.0.0.1", 0), Credentials(TOKEN, tls)))
        listeners[-1].serve(assign)
        return listeners[-1].address

    yield make
    for listener in listeners:
        listener.close()


def ask(address: Address, tls: Tls) -> Assignment:
    with connect(address, Credentials(TOKEN, tls)) as connection:
        connection.send(CallRequest("assignment", None))
        return connection.recv(Assignment)


def test_each_listener_has_a_certificate_of_its_own() -> None:
    assert Tls().listener_side().binding != Tls().listener_side().binding


def test_machines_with_certificates_of_one_authority_accept_each_other(
    listen: Callable[[Tls], Address], tmp_path: Path
) -> None:
    ours = Authority(tmp_path, "ours")
    assert ask(listen(ours.sign("hub")), ours.sign("worker")) == ASSIGNMENT


@pytest.mark.parametrize("side", ["listener", "client", "client without"])
def test_a_certificate_of_another_authority_or_none_is_refused_even_with_the_token(
    listen: Callable[[Tls], Address], tmp_path: Path, side: str
) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    other = Tls(mode="on") if side == "client without" else theirs.sign("machine")
    hub, worker = (other, ours.sign("worker")) if side == "listener" else (ours.sign("hub"), other)
    with pytest.raises(Rejected, match="do not accept each other's certificates"):
        ask(listen(hub), worker)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"key": None}, "certificates of your own need all three files: --certificate FILE --key FILE --ca FILE"),
        ({"mode": "off"}, "certificates are given, but --tls off uses none"),
        ({"mode": "of"}, "unknown TLS mode 'of'; did you mean 'off'"),
        ({"ca": "none.pem"}, r"none\.pem cannot be read: no such file or directory"),
    ],
)
def test_settings_that_cannot_be_are_one_sentence(change: dict[str, str | None], sentence: str, tmp_path: Path) -> None:
    good = vars(Authority(tmp_path, "ours").sign("hub"))
    with pytest.raises(ConfigurationError, match=sentence):
        Tls(**{**good, **change}).check()


def test_a_key_that_does_not_belong_to_the_certificate_is_one_sentence(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    one, other = ours.sign("one"), ours.sign("other")
    mixed = Tls(certificate=one.certificate, key=other.key, ca=one.ca)
    with pytest.raises(ConfigurationError, match=r"cannot be used together .*; give files in PEM, with a key without"):
        mixed.check()
    Path(str(one.certificate)).write_text("no certificate")
    with pytest.raises(ConfigurationError, match="cannot be used together"):
        one.check()


@pytest.mark.parametrize(
    ("mode", "host", "is_encrypted"),
    [
        ("auto", "127.0.0.1", False),
        ("auto", "127.0.0.2", False),
        ("auto", "::1", False),
        ("auto", "::ffff:127.0.0.1", False),
        ("auto", "::ffff:192.0.2.7", True),
        ("auto", "192.0.2.7", True),
        ("auto", "fe80::1%eth0", True),
        ("on", "127.0.0.1", True),
        ("off", "192.0.2.7", False),
    ],
)
def test_which_connections_are_encrypted(mode: str, host: str, is_encrypted: bool) -> None:
    assert Tls(mode=mode).covers(host) == is_encrypted
