"""A client of the rendezvous store, confined to the names of one run.

The store is torch's TCPStore, or a cluster of etcd members. What is beyond this file knows of neither.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

from torch.distributed import DistError

from swift_ft.config import detection_timings as timings
from swift_ft.config import store_keys
from swift_ft.config.store_address import ETCD, StoreAddress
from swift_ft.errors import RendezvousLostError, UsageError, first_line
from swift_ft.host.alarms import alarms
from swift_ft.torch_adapters.connections import (
    connections_to,
    keep_alive,
    new_connections,
    shut_down,
    tcp_connections,
)
from swift_ft.torch_adapters.rendezvous_store import (
    KeysInFolder,
    PrefixStore,
    RendezvousStore,
    Store,
    TCPStore,
    ask_store,
)

_ANSWER_TIMEOUT = timedelta(seconds=60)
_ATTEMPT_S = 10.0
_PROBE_S = 2.0

Admit = Callable[[Store], bool]
"""A check that a store is that of this run, as it is now: one that was restarted is not, until machines
have republished what they hold. Called with each new connection; it may itself do that, and raise what the
store raises."""


def connect(
    address: StoreAddress,
    run_id: str,
    *,
    timeout_s: float = 30.0,
    silence_s: float = timings.STORE_SILENCE_S,
    admit: Admit | None = None,
) -> RendezvousStore:
    """A new client of the rendezvous store, confined to the names of one run.

    Args:
        address: where the store is.
        run_id: name of the run.
        timeout_s: seconds to wait for the first answer.
        silence_s: seconds after which a store that has vanished counts as lost.
        admit: this client outlasts losses of the store, and goes on with one that is admitted. None: it is
            lost with its connections. etcd keeps what it has, so its clients wait in any case.

    Raises:
        RendezvousLostError: if nothing answers within the deadline.
        UsageError: if the store refuses this client.
    """
    prefix, timeout = store_keys.prefix_of(run_id), timedelta(seconds=timeout_s)
    if address.backend == ETCD:
        return RendezvousStore(partial(_open_etcd, address, prefix, timeout, silence_s))
    if admit is None:
        return RendezvousStore(partial(_open, address, prefix, timeout, silence_s))
    attempt = partial(_open_admitted, address, prefix, timeout_s, silence_s, admit)
    store = RendezvousStore(attempt, patience_s=timeout_s)
    store.patience_s = silence_s
    return store


def keys_of_world(client: RendezvousStore, world: int) -> RendezvousStore:
    """The client for the keys of a world's workers: other worlds have workers of the same ranks."""
    return KeysInFolder(client, partial(store_keys.of_world, world)) if world else client


def how_to_restart(address: StoreAddress) -> str:
    """The way to bring back a store whose process is gone."""
    return (
        f"If its process is gone, start it again on {address.host}, empty: "
        f"python -m swift_ft.cli.store --port {address.port}"
    )


@contextlib.contextmanager
def _deadline(port: int, before: dict[int, str], timeout: timedelta) -> Iterator[None]:
    """End what the block waits for. torch greets the store without a deadline, and a frozen one is silent."""

    def end() -> None:
        shut_down(dict(connections_to(port).items() & new_connections(before).items()))

    alarm = alarms.after(timeout.total_seconds(), end)
    try:
        yield
    finally:
        alarm.cancel()


def _open(address: StoreAddress, prefix: str, timeout: timedelta, silence_s: float) -> Store:
    before = tcp_connections()
    host, port = address.host, address.port
    try:
        with _deadline(port, before, timeout):
            client = TCPStore(host, port, None, False, timeout=timeout)
    except (DistError, RuntimeError) as error:
        raise RendezvousLostError(
            f"No rendezvous store answers at {address} ({first_line(error)}). "
            "Start one with `python -m swift_ft.cli.store`, or check --rdzv-endpoint."
        ) from error
    keep_alive(dict(new_connections(before).items() & connections_to(port).items()), silence_s)
    client.set_timeout(_ANSWER_TIMEOUT)
    return PrefixStore(prefix, client)


def _open_admitted(
    address: StoreAddress, prefix: str, timeout_s: float, silence_s: float, admit: Admit
) -> Store:
    """One attempt. It asks first, since torch's client would print each attempt of its own that fails."""
    attempt_s = min(timeout_s, _ATTEMPT_S)
    try:
        ask_store(address.host, address.port, connect_s=_PROBE_S, answer_s=attempt_s)
    except OSError as error:
        raise RendezvousLostError(
            f"No rendezvous store answers at {address} ({first_line(error)}). {how_to_restart(address)}"
        ) from error
    store = _open(address, prefix, timedelta(seconds=attempt_s), silence_s)
    try:
        if admit(store):
            return store
    except (DistError, RuntimeError) as error:
        raise RendezvousLostError(
            f"The rendezvous store at {address} was lost again ({first_line(error)})."
        ) from error
    raise RendezvousLostError(
        f"The rendezvous store at {address} was started anew, and no machine of the run has republished what "
        "it holds. Start the run again with --resume, if none of them lives."
    )


def _open_etcd(address: StoreAddress, prefix: str, timeout: timedelta, silence_s: float) -> Store:
    from swift_ft.coordination.etcd.client import Refused
    from swift_ft.coordination.etcd.store import EtcdStore

    for name in ("ca", "cert", "key"):
        file = getattr(address, name)
        if file and not os.access(file, os.R_OK):
            raise UsageError(f"The file {file} cannot be read: check --rdzv-conf {name}=FILE.")
    try:
        EtcdStore(address, prefix, silence_s=timeout.total_seconds()).check([store_keys.incarnation()])
    except Refused as error:
        raise UsageError(first_line(error)) from error
    except (DistError, RuntimeError) as error:
        raise RendezvousLostError(
            f"No etcd answers at {address} ({first_line(error)}). Start it, or check --rdzv-endpoint."
        ) from error
    client = EtcdStore(address, prefix, silence_s=silence_s)
    client.set_timeout(_ANSWER_TIMEOUT)
    return client
