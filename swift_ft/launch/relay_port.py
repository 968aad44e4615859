"""Where other machines reach this one's relay, and how this one reaches theirs."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from swift_ft.coordination.relay.lines import Line
from swift_ft.coordination.relay.upstream import SILENCE_S
from swift_ft.network import Channel, JobSecret, Port, connect
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

__all__ = ["RelayPort"]

_PURPOSE = "relay"
_SECRET = "relays/secret"
_TOKEN_BYTES = 32


class RelayPort:
    """A port for the relay. Only a job that has heads needs it.

    Args:
        host: by which other machines know this one.
        store: the rendezvous store: machines find there where the others listen.
        serve: serves one line, in a thread of its own.
    """

    def __init__(self, host: str, store: RendezvousStore, serve: Callable[[Channel], None]) -> None:
        token = store.compare_set(_SECRET, "", secrets.token_hex(_TOKEN_BYTES)).decode()
        self._secret = JobSecret.of_token(token)
        self._store = store
        self._port = Port(host, self._secret, {_PURPOSE: serve})

    def offer(self, machine: str) -> None:
        """Let others find this machine, under its name. To be called before it joins."""
        self._store.set(_key(machine), self._port.address)

    def reach(self, machine: str) -> Line:
        """Open a line to a machine's relay.

        Raises:
            OSError: it cannot be reached, or does not answer in time.
        """
        if not self._store.check([_key(machine)]):
            raise ConnectionError(f"{machine} has no relay")
        address = self._store.get(_key(machine)).decode()
        return connect(address, self._secret, _PURPOSE, timeout_s=SILENCE_S)

    def close(self) -> None:
        """Stop listening, and end the lines of all that follow."""
        self._port.close()


def _key(machine: str) -> str:
    return f"relays/{machine}"
