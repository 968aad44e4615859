"""The address of a run's rendezvous store: all that a client needs, and nothing secret.

Written as one text, it fits a command line, a file and a message: ``host:port`` for the embedded store, and
``etcd-v3://a:2379,b:2379?ca=/etc/ca.pem`` for etcd. Passwords are never part of it: it names their file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode

from swift_ft.errors import UsageError
from swift_ft.network.addresses import endpoint, split_endpoint

TCP = "tcp"
"""The embedded store: torch's TCPStore."""

ETCD = "etcd-v3"
"""A cluster of etcd members."""

_SEPARATOR = "://"
_ETCD_PORT = 2379
_FILES = ("ca", "cert", "key", "credentials")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The address of a rendezvous store, and the credentials of its clients.

    Attributes:
        endpoints: ``host:port`` of each server; one for the embedded store.
        backend: :data:`TCP` or :data:`ETCD`.
        ca: file with the certificates of those who may have signed the servers' ones; empty without TLS.
        cert: file with this client's own certificate; empty if the servers ask for none.
        key: file with its private key.
        credentials: file with ``user:password`` in its first line; empty for none.
    """

    endpoints: tuple[str, ...]
    backend: str = TCP
    ca: str = ""
    cert: str = ""
    key: str = ""
    credentials: str = ""

    @classmethod
    def tcp(cls, host: str, port: int) -> StoreAddress:
        """The embedded store at a host and a port."""
        return cls((endpoint(host, port),))

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """Read what ``str()`` of an address gives.

        Raises:
            UsageError: if it is not an address.
        """
        backend, separator, rest = text.rpartition(_SEPARATOR)
        places, _, query = rest.partition("?")
        endpoints = tuple(filter(None, places.split(",")))
        files = dict(parse_qsl(query))
        address = cls(endpoints, backend if separator else TCP)
        known = all(_is_endpoint(endpoint) for endpoint in endpoints) and endpoints
        if not known or address.backend not in (TCP, ETCD) or (address.backend == TCP and len(endpoints) > 1):
            raise UsageError(
                f"{text!r} is not an endpoint: write host:port, or etcd-v3://host:port,host:port for etcd."
            )
        return address.with_files(files)

    def with_files(self, files: Mapping[str, str]) -> StoreAddress:
        """The same address with the files that ``ca=..., cert=..., key=..., credentials=...`` name.

        Raises:
            UsageError: if there is another name among them, or this kind of store uses no files.
        """
        if unknown := sorted(set(files) - set(_FILES)):
            raise UsageError(f"The rendezvous store has no setting {unknown[0]!r}: use {', '.join(_FILES)}.")
        if files and self.backend == TCP:
            raise UsageError("The embedded store has neither users nor TLS: use --rdzv-backend etcd-v3.")
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return StoreAddress(**{**own, **{name: str(Path(file).absolute()) for name, file in files.items()}})

    @classmethod
    def etcd(cls, endpoints: str) -> StoreAddress:
        """A cluster of etcd: ``host:port`` of its members, separated by commas; 2379 is the usual port."""
        members = (member.strip() for member in endpoints.split(",") if member.strip())
        known = (member if _is_endpoint(member) else f"{member}:{_ETCD_PORT}" for member in members)
        return cls.parse(f"{ETCD}{_SEPARATOR}{','.join(known)}")

    @property
    def host(self) -> str:
        """Host of the embedded store, or of the first member."""
        return split_endpoint(self.endpoints[0])[0]

    @property
    def port(self) -> int:
        """Port of the embedded store, or of the first member."""
        return split_endpoint(self.endpoints[0])[1]

    def __str__(self) -> str:
        places = ",".join(self.endpoints)
        if self.backend == TCP:
            return places
        files = {name: getattr(self, name) for name in _FILES if getattr(self, name)}
        query = f"?{urlencode(files, safe='/', quote_via=quote)}" if files else ""
        return f"{self.backend}{_SEPARATOR}{places}{query}"


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit()
