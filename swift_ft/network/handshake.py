"""The handshake in which two members of a job prove to each other that they know its secret. Pure.

    client -> server    version, fresh nonce, what the connection is for
    server -> client    fresh nonce
    client -> server    proof: HMAC of all of the above
    server -> client    proof: another HMAC of it

A stranger who connects learns 32 random bytes and nothing else. A recording proves nothing, since both nonces
are fresh. With TLS the server's certificate is part of what is proved, so a man in the middle with another
certificate is detected, even if the same authority signed it. Each direction's key follows from these bytes.
"""

from __future__ import annotations

import hmac
import secrets as random
from dataclasses import dataclass

from swift_ft.network.errors import RefusedError
from swift_ft.network.secret import JobSecret

MAX_HANDSHAKE_BYTES = 256
"""The longest frame that a stranger may send."""

UNBOUND = bytes(32)
"""In place of a certificate's digest, without TLS."""

_VERSION = b"swift-ft channel 1\n"
_NONCE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one side of a connection."""

    sending: bytes
    receiving: bytes


class ClientHandshake:
    """The side that connects.

    Args:
        secret: the job's.
        purpose: what the connection is for.
        binding: the digest of the certificate that the server has shown.
    """

    def __init__(self, secret: JobSecret, purpose: str, binding: bytes = UNBOUND) -> None:
        self._secret = secret
        self._hello = _VERSION + random.token_bytes(_NONCE_BYTES) + purpose.encode()
        self._binding = binding
        self._transcript = b""

    def hello(self) -> bytes:
        """The first message."""
        return self._hello

    def prove(self, challenge: bytes) -> bytes:
        """The answer to the server's nonce.

        Raises:
            RefusedError: this is not a nonce.
        """
        if len(challenge) != _NONCE_BYTES:
            raise RefusedError("it is no port of this version of swift_ft")
        self._transcript = self._binding + challenge + self._hello
        return self._secret.mac("client", self._transcript)

    def finish(self, proof: bytes) -> Keys:
        """Check the server's proof.

        Raises:
            RefusedError: the server does not know the secret.
        """
        if not hmac.compare_digest(proof, self._secret.mac("server", self._transcript)):
            raise RefusedError("it does not know this job's secret")
        return _keys(self._secret, self._transcript, client=True)


class ServerHandshake:
    """The side that listens.

    Args:
        secret: the job's.
        binding: the digest of the certificate that this side shows.

    Attributes:
        purpose: what the client says the connection is for; empty before it did.
    """

    def __init__(self, secret: JobSecret, binding: bytes = UNBOUND) -> None:
        self.purpose = ""
        self._secret = secret
        self._binding = binding
        self._transcript = b""

    def challenge(self, hello: bytes) -> bytes:
        """The answer to the client's first message.

        Raises:
            RefusedError: this is not one.
        """
        start = len(_VERSION) + _NONCE_BYTES
        if not hello.startswith(_VERSION) or len(hello) < start:
            raise RefusedError("its first bytes are not those of this version of swift_ft")
        self.purpose = hello[start:].decode("ascii", "replace")
        nonce = random.token_bytes(_NONCE_BYTES)
        self._transcript = self._binding + nonce + hello
        return nonce

    def finish(self, proof: bytes) -> tuple[bytes, Keys]:
        """Check the client's proof. Returns the server's own, and the keys.

        Raises:
            RefusedError: the client does not know the secret.
        """
        if not hmac.compare_digest(proof, self._secret.mac("client", self._transcript)):
            raise RefusedError("it does not know this job's secret")
        own = self._secret.mac("server", self._transcript)
        return own, _keys(self._secret, self._transcript, client=False)


def _keys(secret: JobSecret, transcript: bytes, *, client: bool) -> Keys:
    upward, downward = (secret.mac(label, transcript) for label in ("to server", "to client"))
    return Keys(upward, downward) if client else Keys(downward, upward)
