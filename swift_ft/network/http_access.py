"""Signed HTTP requests: they prove that a member of the job sent them, and never carry the secret.

    GET /name                                          401, WWW-Authenticate: Swift NONCE
    GET /name   Authorization: Swift PROOF             the answer

The proof is an HMAC of the nonce, the method, the path, and the length of the content. A nonce is good for
one request of its connection, so a recording proves nothing. With TLS the server's certificate is part of it.
"""

from __future__ import annotations

import hmac
import http.client
import secrets
import ssl
from collections.abc import Mapping
from http import HTTPStatus

from swift_ft.network.addresses import split_endpoint
from swift_ft.network.handshake import UNBOUND
from swift_ft.network.secret import JobSecret
from swift_ft.network.tls import binding_of

_SCHEME = "Swift "
_NONCE_BYTES = 32


def _proof(secret: JobSecret, nonce: str, request: str, binding: bytes) -> str:
    return secret.mac("http", binding + f"{nonce} {request}".encode()).hex()


def _request(method: str, path: str, length: int) -> str:
    return f"{method} {path} {length}"


class RequestCheck:
    """The server's side, for the requests of one connection.

    Args:
        secret: the job's.
    """

    def __init__(self, secret: JobSecret) -> None:
        self._secret = secret
        self._binding = UNBOUND if secret.certificates is None else secret.certificates.binding()
        self._nonce = ""

    def challenge(self) -> str:
        """The value of ``WWW-Authenticate``. The one before it is worthless now."""
        self._nonce = secrets.token_hex(_NONCE_BYTES)
        return _SCHEME + self._nonce

    def accepts(self, authorization: str, method: str, path: str, length: int) -> bool:
        """Whether a request proves that it comes from a member. It can do so once."""
        nonce, self._nonce = self._nonce, ""
        if not nonce or not authorization.startswith(_SCHEME):
            return False
        expected = _proof(self._secret, nonce, _request(method, path, length), self._binding)
        given = authorization.removeprefix(_SCHEME).encode("latin-1", "replace")
        return hmac.compare_digest(given, expected.encode())


class JobConnection(http.client.HTTPConnection):
    """The client's side: a connection to another member's server.

    Args:
        address: ``host:port``.
        secret: the job's.
        timeout_s: how long to wait for the other side's next bytes.
    """

    def __init__(self, address: str, secret: JobSecret, *, timeout_s: float) -> None:
        host, port = split_endpoint(address)
        super().__init__(host, port, timeout=timeout_s)
        self._secret = secret
        self._binding = UNBOUND

    def connect(self) -> None:
        """Connect, with TLS where the job has certificates."""
        super().connect()
        if self._secret.certificates is not None:
            self.sock = self._secret.certificates.client_context().wrap_socket(self.sock)
            assert isinstance(self.sock, ssl.SSLSocket)
            self._binding = binding_of(self.sock)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> http.client.HTTPResponse:
        """Ask for something. The caller closes the answer.

        Args:
            headers: further ones, which the proof does not cover.
        """
        headers = headers or {}
        self.request("GET", path, headers=headers)
        answer = self.getresponse()
        if answer.status != HTTPStatus.UNAUTHORIZED:
            return answer
        authorization = self._authorization(answer, "GET", path, 0)
        self.request("GET", path, headers={**headers, "Authorization": authorization})
        return self.getresponse()

    def authorization(self, method: str, path: str, length: int) -> str:
        """The header's value for a request with content.

        Raises:
            ConnectionError: the other side does not ask for it.
        """
        self.request("GET", path)
        return self._authorization(self.getresponse(), method, path, length)

    def _authorization(self, answer: http.client.HTTPResponse, method: str, path: str, length: int) -> str:
        with answer:
            answer.read(0)
            challenge = answer.headers.get("WWW-Authenticate", "")
        if answer.status != HTTPStatus.UNAUTHORIZED or not challenge.startswith(_SCHEME):
            raise ConnectionError(f"{self.host}:{self.port} answers {answer.status} {answer.reason}")
        nonce = challenge.removeprefix(_SCHEME)
        return _SCHEME + _proof(self._secret, nonce, _request(method, path, length), self._binding)
