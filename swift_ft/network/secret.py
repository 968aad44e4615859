"""The job's secret, which only its members know. It comes from a file, a variable, or is made for one run.

It is never sent and stands on no command line. A launcher's children get it in memory through the fork.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swift_ft.errors import UsageError
from swift_ft.network.tls import Certificates

_logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "SWIFT_FT_TOKEN"
"""The variable that holds the token where no ``--token-file`` names a file."""

SECRET_VARIABLE = "SWIFT_FT_SECRET"
"""The variable in which swift-run gives the key to a worker that is not a Python script of its own fork."""

_LEAST_CHARACTERS = 16
_MOST_BYTES = 4096
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class JobSecret:
    """The secret that the members of a job share.

    Attributes:
        key: derived from the user's token.
        certificates: of this machine, if the job's connections are encrypted.
    """

    key: bytes = field(repr=False)
    certificates: Certificates | None = None

    @classmethod
    def of_token(cls, token: str, certificates: Certificates | None = None) -> JobSecret:
        """The secret of a token: the same on all machines that were given the same one."""
        return cls(hashlib.sha256(b"swift-ft job secret\0" + token.encode()).digest(), certificates)

    @classmethod
    def generated(cls, certificates: Certificates | None = None) -> JobSecret:
        """A secret that no other run has."""
        return cls(secrets.token_bytes(_TOKEN_BYTES), certificates)

    def mac(self, label: str, data: bytes) -> bytes:
        """The proof that this side knows the secret: 32 bytes.

        Args:
            label: what the proof is for, so that it serves for nothing else.
            data: what is proved to be known, too.
        """
        return hmac.digest(self.key, label.encode() + b"\0" + data, "sha256")

    def token(self, purpose: str) -> str:
        """A token for one purpose, which tells nothing about the secret or about another purpose's token."""
        return self.mac("token", purpose.encode()).hex()


def token_of(file: str | None, environ: Mapping[str, str]) -> str | None:
    """The user's token: from the file if one is named, else from :data:`TOKEN_VARIABLE`; None without either.

    Raises:
        UsageError: it cannot be read, is empty or too short, or others can read the file.
    """
    if file is not None:
        return _checked(_read(Path(file)), f"--token-file {file}")
    if TOKEN_VARIABLE in environ:
        return _checked(environ[TOKEN_VARIABLE], f"the variable {TOKEN_VARIABLE}")
    return None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = path.stat().st_mode
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--token-file {path} cannot be read ({error.strerror}): check the path.") from error
    if mode & stat.S_IRWXO:
        raise UsageError(f"--token-file {path} is open to all users of this host: chmod 600 {path}.")
    if mode & stat.S_IRWXG:
        _logger.warning(
            "--token-file %s is open to its group: chmod 600 keeps it to its owner.",
            path,
            extra={"event": "token_file_open"},
        )
    if len(content) > _MOST_BYTES:
        raise UsageError(f"--token-file {path} has more than {_MOST_BYTES} bytes: a token is one line.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"--token-file {path} is not text: write one line, such as {_EXAMPLE}.") from error


_EXAMPLE = "the output of: openssl rand -hex 32"


def _checked(text: str, where: str) -> str:
    token = text.strip()
    if not token:
        raise UsageError(f"{where} is empty: write a token into it, such as {_EXAMPLE}.")
    if len(token) < _LEAST_CHARACTERS:
        raise UsageError(
            f"{where} has {len(token)} characters, which can be guessed: take {_LEAST_CHARACTERS} or more, "
            f"such as {_EXAMPLE}."
        )
    return token


_held: JobSecret | None = None


def hold_secret(secret: JobSecret) -> None:
    """Make a job's secret the one of this process and of those that it forks."""
    global _held
    _held = secret


def held_secret() -> JobSecret | None:
    """The secret of this process's job; None if it was given none."""
    return _held


def secret_in(environ: Mapping[str, str], certificates: Certificates | None) -> JobSecret | None:
    """The secret that a program got from swift-run; None if it got none."""
    key = environ.get(SECRET_VARIABLE)
    return None if key is None else JobSecret(bytes.fromhex(key), certificates)
