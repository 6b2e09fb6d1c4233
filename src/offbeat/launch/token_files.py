"""Tokens in files: those that users make, and those that the processes of one user on one machine share.

A file that other users can read is refused, as ssh does with keys.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from offbeat.errors import ConfigurationError
from offbeat.transports.address import Address
from offbeat.transports.authentication import MAKE_A_TOKEN, check_token


def read_token(path: str | Path) -> bytes:
    """The token in a file, stripped; raises ConfigurationError, also if others can read it."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(4096).strip()
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise ConfigurationError(
            f"the token file {path} cannot be read: {reason}; to make one type: {MAKE_A_TOKEN}"
        ) from None
    if mode & 0o077 and stat.S_ISREG(mode):
        raise ConfigurationError(f"other users can read the token file {path}; type: chmod 600 {path}")
    if not token:
        raise ConfigurationError(f"the token file {path} is empty; to make a token type: {MAKE_A_TOKEN}")
    try:
        check_token(token)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    return token


def shared_token(name: str) -> bytes:
    """The token of this name, made by whichever process of this user asks first; raises ConfigurationError."""
    directory = _directory()
    path, new = directory / name, directory / f".{name}-{secrets.token_hex(8)}"
    try:
        if not path.exists():
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            with suppress(FileExistsError):  # another process was first
                os.link(new, path)
            new.unlink()
    except OSError as error:
        raise _cannot_share(directory, error.strerror or str(error)) from None
    return read_token(path)


def joining_token(address: Address, token_file: str | None) -> bytes:
    """The token for a run that listens at an address: that of the file, or the one that this user's processes share."""
    if token_file is not None:
        return read_token(token_file)
    if not address.is_loopback:
        raise ConfigurationError(f"joining at {address} needs the token of the run; give it with --token-file FILE")
    return shared_token(listener_name(address.port))


def listener_name(port: int) -> str:
    """The name of the token of a run that listens at a port of this machine."""
    return f"port-{port}"


def _directory() -> Path:
    """A directory that belongs to this user alone; raises ConfigurationError if another user may have made it.

    The runtime directory of a session may be missing, or be another user's, after `su` or under a batch system.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    is_usable = runtime is not None and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.getuid()
    path = Path(str(runtime)) / "offbeat" if is_usable else Path(tempfile.gettempdir()) / f"offbeat-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            path.mkdir(0o700)
        found = path.lstat()
    except OSError as error:
        raise _cannot_share(path, error.strerror or str(error)) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise _cannot_share(path, "it is not a directory that belongs to you alone")
    return path


def _cannot_share(directory: Path, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"processes of this machine share their token in {directory}, which cannot be used ({reason}); remove it, or "
        f"put a token of your own into a file and name that by --token-file or OFFBEAT_TOKEN_FILE: {MAKE_A_TOKEN}"
    )
