"""Requests to a cluster of etcd members: over to the next member when one does not answer, until a deadline.

etcd3gw speaks etcd's JSON gateway with one member. This adds what a cluster needs: other members, deadlines,
tokens that are renewed, and watches that end when their member falls silent.

A request that got no answer may have been carried out, and may still be. So all who write through this
must be able to write twice (see :class:`swift_ft.coordination.etcd.store.EtcdStore`).
"""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import DistNetworkError

from swift_ft.config.store_address import StoreAddress
from swift_ft.errors import UsageError
from swift_ft.network.addresses import split_endpoint
from swift_ft.observe.waits import waiting

if TYPE_CHECKING:
    from etcd3gw.client import Etcd3Client

_ATTEMPT_S = 2.0
"""The longest time that one member may take to answer in the first round; twice that in each further one."""
_LONGEST_ATTEMPT_S = 10.0
_PAUSE_S = 0.05
"""After a round in which no member answered; twice as long after each further one."""
_LONGEST_PAUSE_S = 1.0
_WATCH_SLICE_S = 3.0
"""A frozen member says nothing: a watch without news is repeated with the next member (decision 54)."""
_KEEP_REVISIONS = 5_000
"""Revisions that a compaction leaves, so that watches can go on from where they were."""
_COMPACT_EVERY = 20_000
"""Revisions after which history is compacted."""

# Codes of gRPC, as the gateway reports them.
_CANCELLED, _UNKNOWN, _INVALID, _DEADLINE, _EXHAUSTED, _PRECONDITION = 1, 2, 3, 4, 8, 9
_ABORTED, _OUT_OF_RANGE, _INTERNAL, _UNAVAILABLE, _UNAUTHENTICATED = 10, 11, 13, 14, 16
_TRANSIENT = frozenset({_CANCELLED, _UNKNOWN, _DEADLINE, _ABORTED, _INTERNAL, _UNAVAILABLE})
_NEEDS_TOKEN = ("user name is empty", "auth store is old", "invalid auth token")


class Compacted(Exception):
    """The history from a revision on is gone."""


class Refused(DistNetworkError):
    """The cluster answers, and another try would not help: a wrong password, say.

    Attributes:
        code: gRPC's code; -1 if it is not etcd that refuses.
    """

    def __init__(self, message: str, code: int = -1) -> None:
        super().__init__(message)
        self.code = code


class _Transient(Exception):
    """Another member, or the same one a little later, may answer."""


class _Unauthenticated(Exception):
    """The token is missing, or no longer valid."""


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a key.

    Attributes:
        key: the key.
        value: its new value; None if it was deleted.
        revision: the cluster's revision with this change.
    """

    key: bytes
    value: bytes | None
    revision: int


def import_etcd3gw() -> None:
    """Import the client library: before the first use, and in a parent of many workers.

    Raises:
        UsageError: if it is not installed.
    """
    try:
        importlib.import_module("etcd3gw.client")
    except ImportError as error:
        raise UsageError(
            "--rdzv-backend etcd-v3 needs etcd's client: pip install 'swift-ft[etcd]'"
        ) from error


def encoded(value: str | bytes) -> str:
    """As the gateway wants keys and values."""
    return b64encode(value.encode() if isinstance(value, str) else value).decode()


def decoded(value: str) -> bytes:
    """The bytes that the gateway has encoded."""
    return b64decode(value)


def prefix_end(prefix: str) -> str:
    """The end of the range of all keys that begin with a prefix that ends in ASCII."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


class EtcdClient:
    """Talks to a cluster. For one thread at a time.

    Args:
        is_over: whether what the thread does is no longer needed: its requests then raise soon.
    """

    def __init__(self, address: StoreAddress, is_over: Callable[[], bool] = lambda: False) -> None:
        import_etcd3gw()
        self._address = address
        self._is_over = is_over
        self._members = [_member(address, endpoint) for endpoint in address.endpoints]
        self._at = random.randrange(len(self._members))
        self._token = ""
        self._compacted_at: int | None = None
        self._unheard = 0  # watches in a row that no member took
        self.revision = 0

    def call(self, path: str, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Ask one member after the other until one answers.

        Args:
            path: of the gateway, after ``/v3``.
            request: JSON-ready.
            deadline: a monotonic time.

        Returns:
            The answer.

        Raises:
            Compacted: if the request is about history that is gone.
            Refused: if the cluster refuses, or at the first request of all no certificate of its is right.
            DistNetworkError: if no member has answered by the deadline.
        """
        with waiting(f"a member of {self._address} to answer", max(0.0, deadline - time.monotonic())):
            return self._call(path, request, deadline)

    def _call(self, path: str, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        tried, said = 0, ""
        while True:
            rounds = tried // len(self._members)
            limit_s = min(_ATTEMPT_S * 2**rounds, _LONGEST_ATTEMPT_S, max(0.1, deadline - time.monotonic()))
            try:
                answer = self._ask(path, request, limit_s)
            except _Transient as error:
                said = str(error)
                if not self.revision and tried + 1 >= len(self._members) and _is_about_tls(error):
                    raise Refused(f"TLS with etcd at {self._address} fails: {said}") from error
            else:
                self.revision = int(answer.get("header", {}).get("revision", self.revision))
                return answer
            self._check_over()
            if time.monotonic() >= deadline:
                raise DistNetworkError(f"no member of {self._address} answers: {said}")
            tried += 1
            self._at = (self._at + 1) % len(self._members)
            if tried % len(self._members) == 0:
                time.sleep(min(_PAUSE_S * 2**rounds, _LONGEST_PAUSE_S))

    def watch(self, key: str, range_end: str, revision: int, deadline: float = math.inf) -> Iterator[Event]:
        """The changes from a revision on, as they come. Ends early when it is time to look again.

        The member may have died, or be frozen: so who watches must then ask for what there is, and go on
        from there.

        Args:
            key: the first key.
            range_end: the key after the last one; empty for the first key alone.
            revision: the first one that is wanted.
            deadline: a monotonic time.

        Raises:
            Compacted: if the history from the revision on is gone.
        """
        import requests

        creation: dict[str, Any] = {"key": encoded(key), "start_revision": revision}
        if range_end:
            creation["range_end"] = encoded(range_end)
        slice_s = min(_WATCH_SLICE_S, max(0.05, deadline - time.monotonic()))
        heard = False
        try:
            member = self._members[self._at]
            if self._needs_token():
                self._authenticate(member, _ATTEMPT_S)
            with member.session.post(
                member.get_url("/watch"),
                json={"create_request": creation},
                stream=True,
                timeout=(_ATTEMPT_S, slice_s),
                headers=self._headers(),
            ) as answer:
                heard = answer.ok
                if not heard:
                    self._token = ""  # it may be the token
                    return
                for line in _lines(answer.iter_content(chunk_size=None)):
                    yield from _events(json.loads(line))
                    if self._is_over():
                        return
        except (requests.RequestException, ValueError, OSError, _Transient):
            pass
        finally:
            self._at = (self._at + 1) % len(self._members)
            self._unheard = 0 if heard else self._unheard + 1
            if self._unheard:
                pause_s = min(_PAUSE_S * 2 ** min(self._unheard // len(self._members), 8), _LONGEST_PAUSE_S)
                time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))

    def compact_history(self, deadline: float) -> None:
        """Forget old revisions, if many have come since this was done last. All clients share the work."""
        if self._compacted_at is None:
            self._compacted_at = self.revision
        if self.revision < self._compacted_at + _COMPACT_EVERY:
            return
        self._compacted_at = self.revision
        self.compact(self.revision - _KEEP_REVISIONS, deadline)

    def compact(self, revision: int, deadline: float) -> None:
        """Forget what was before a revision; deleted keys leave no trace then."""
        try:
            self.call("/kv/compaction", {"revision": revision}, deadline)
        except Compacted:  # another client has done it
            return

    def _ask(self, path: str, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        member = self._members[self._at]
        if self._needs_token():
            self._authenticate(member, limit_s)
        try:
            return _post(member, path, request, limit_s, self._headers())
        except _Unauthenticated as error:
            if not self._address.credentials and _given_credentials() is None:
                raise Refused(
                    f"etcd at {self._address} wants a user: name a file that holds user:password with "
                    "--rdzv-conf credentials=FILE."
                ) from error
            self._token = ""
            self._authenticate(member, limit_s)
        try:
            return _post(member, path, request, limit_s, self._headers())
        except _Unauthenticated as error:
            raise _Transient(str(error)) from error

    def _needs_token(self) -> bool:
        return not self._token and (bool(self._address.credentials) or _given_credentials() is not None)

    def _authenticate(self, member: Etcd3Client, limit_s: float) -> None:
        user, password = _credentials(self._address)
        try:
            answer = _post(member, "/auth/authenticate", {"name": user, "password": password}, limit_s, {})
        except Refused as error:
            if error.code == _PRECONDITION:  # it asks for no users
                self._token = "-"
                return
            raise Refused(f"etcd at {self._address} refuses user {user!r}: {error}", error.code) from error
        self._token = answer["token"]

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token not in ("", "-") else {}

    def _check_over(self) -> None:
        if self._is_over():
            raise DistNetworkError("the wait for etcd was ended: its result is not needed any more")


def _given_credentials() -> str | None:
    """``user:password``, from the environment; None if it is not there."""
    return os.environ.get("SWIFT_FT_STORE_CREDENTIALS")


def _credentials(address: StoreAddress) -> tuple[str, str]:
    text = _given_credentials()
    if address.credentials:
        try:
            text = Path(address.credentials).read_text()
        except OSError as error:
            raise Refused(f"The credentials for etcd cannot be read: {error}") from error
    user, separator, password = (text or "").strip().partition(":")
    if not separator:
        raise Refused("The credentials for etcd must be user:password, in one line.")
    return user, password


def _member(address: StoreAddress, endpoint: str) -> Etcd3Client:
    from etcd3gw.client import Etcd3Client

    host, port = split_endpoint(endpoint)
    secure = bool(address.ca or address.cert)
    member = Etcd3Client(
        host=host,
        port=port,
        protocol="https" if secure else "http",
        ca_cert=address.ca or None,
        cert_cert=address.cert or None,
        cert_key=address.key or None,
        api_path="/v3/",
    )
    member.session.trust_env = False  # no proxy stands between a job and its store
    return member


def _post(
    member: Etcd3Client, path: str, request: dict[str, Any], limit_s: float, headers: dict[str, str]
) -> dict[str, Any]:
    from etcd3gw.exceptions import ConnectionFailedError, ConnectionTimeoutError, Etcd3Exception
    from requests import RequestException

    member.timeout = limit_s
    place = f"{member.host}:{member.port}"
    try:
        answer: dict[str, Any] = member.post(member.get_url(path), json=request, headers=headers)
    except Etcd3Exception as error:
        code, text = _reason(error)
        if code is None:  # nothing of etcd's has answered
            if isinstance(error, ConnectionFailedError | ConnectionTimeoutError):
                raise _Transient(f"{place}: {_in_short(text)}") from error
            raise Refused(f"{place} does not answer as etcd does: {text}", -1) from error
        raise _meaning(code, f"{place}: {text}") from error
    except (RequestException, OSError, ValueError) as error:
        raise _Transient(f"{place}: {error}") from error
    return answer


def _reason(error: Any) -> tuple[int | None, str]:
    text = error.detail_text or str(error)
    try:
        facts = json.loads(text)
        return int(facts["code"]), str(facts.get("message") or facts.get("error"))
    except (ValueError, KeyError, TypeError):
        return None, " ".join(text.split())


def _is_about_tls(error: BaseException | None) -> bool:
    from requests.exceptions import SSLError

    while error is not None:
        if isinstance(error, SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _in_short(text: str) -> str:
    """The end of what requests says: the rest repeats the address."""
    return text.rpartition("Caused by ")[2].rstrip(")") or text


def _meaning(code: int, text: str) -> Exception:
    """The exception that an error of etcd means for the caller."""
    if code == _UNAUTHENTICATED or any(words in text for words in _NEEDS_TOKEN):
        return _Unauthenticated(text)
    if code == _OUT_OF_RANGE and "compact" in text:
        return Compacted(text)
    if code in _TRANSIENT or (code == _EXHAUSTED and "too many requests" in text):
        return _Transient(text)
    return Refused(text, code)


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines as they come: a chunk is what has arrived."""
    text = b""
    for chunk in chunks:
        *lines, text = (text + chunk).split(b"\n")
        yield from filter(None, lines)


def _events(message: dict[str, Any]) -> Iterator[Event]:
    result = message.get("result", {})
    if int(result.get("compact_revision", 0)):
        raise Compacted(f"history before revision {result['compact_revision']} is gone")
    for event in result.get("events", ()):
        kv = event["kv"]
        deleted = event.get("type") == "DELETE"
        value = None if deleted else decoded(kv.get("value", ""))
        yield Event(decoded(kv["key"]), value, int(kv["mod_revision"]))
