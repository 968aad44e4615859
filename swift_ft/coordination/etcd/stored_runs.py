"""The runs that a cluster of etcd holds, and how those that have ended are deleted.

Nothing of a run is deleted by itself: a machine that was frozen at the end still reads in the journal that it
has ended, and so does anyone who looks at it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from swift_ft.config import store_keys
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.etcd.client import EtcdClient, decoded, encoded, prefix_end
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.runs import newest_key
from swift_ft.coordination.store_client import connect
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import Phase

_RUN = re.compile(r"(.*)\.\d+-[0-9a-f]{8}", re.DOTALL)
_PLACE = re.compile(r".*?(?:\.\d+-[0-9a-f]{8}|/runs)(?=/)", re.DOTALL)
"""The part of a key that stands for a run's name. The name that a user gave may hold any character."""

_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run whose keys are in etcd.

    Attributes:
        run_id: its name and number.
        keys: how many it has.
        has_ended: its journal says so.
        silent_s: seconds since the last event of its journal; None if there is none that can be read.
    """

    run_id: str
    keys: int
    has_ended: bool
    silent_s: float | None


def stored_runs(address: StoreAddress, clock: Callable[[], float] = time.time) -> list[StoredRun]:
    """All runs in a cluster, by name.

    Raises:
        UsageError, RendezvousLostError: the cluster refuses, or does not answer.
    """
    client = _client(address)
    return [_look_at(address, client, run_id, clock()) for run_id in _names(client) if _RUN.fullmatch(run_id)]


def delete_run(address: StoreAddress, run_id: str) -> None:
    """Delete all keys of a run that has ended, and what says that it is the newest of its name.

    Raises:
        UsageError, RendezvousLostError: as above.
    """
    found = _RUN.fullmatch(run_id)
    assert found is not None
    client = _client(address)
    # First: a launcher that finds this run and then an empty journal looks for the newest one again.
    newest = newest_key(found[1])
    is_this = {"key": encoded(newest), "target": "VALUE", "result": "EQUAL", "value": encoded(run_id)}
    names = {"request_delete_range": _range(newest.rpartition("/")[0] + "/")}
    client.call("/kv/txn", {"compare": [is_this], "success": [names]}, _deadline())
    client.call("/kv/deleterange", _range(f"{store_keys.prefix_of(run_id)}/"), _deadline())


def _names(client: EtcdClient) -> Iterator[str]:
    """The names of runs, and what else stands in their place, each once."""
    root = store_keys.prefix_of("")
    begin, end = root, prefix_end(root)
    while True:
        request = {"key": encoded(begin), "range_end": encoded(end), "limit": 1, "keys_only": True}
        found = client.call("/kv/range", request, _deadline()).get("kvs")
        if not found:
            return
        key = decoded(found[0]["key"]).decode().removeprefix(root)
        name = place[0] if (place := _PLACE.match(key)) else key.partition("/")[0]
        yield name
        begin = prefix_end(f"{root}{name}/")


def _look_at(address: StoreAddress, client: EtcdClient, run_id: str, now: float) -> StoredRun:
    request = {**_range(f"{store_keys.prefix_of(run_id)}/"), "count_only": True}
    keys = int(client.call("/kv/range", request, _deadline()).get("count", 0))
    last: list[Entry] = []

    def on_entries(entries: Sequence[Entry]) -> None:
        last[:] = entries[-1:]

    journal = open_journal(partial(connect, address, run_id), by="gc")
    state = Follower(journal, on_entries=on_entries).state
    return StoredRun(run_id, keys, state.phase == Phase.ENDED, now - last[0].at if last else None)


def _client(address: StoreAddress) -> EtcdClient:
    connect(address, "")  # so that mistakes are told as they are elsewhere
    return EtcdClient(address)


def _range(prefix: str) -> dict[str, Any]:
    return {"key": encoded(prefix), "range_end": encoded(prefix_end(prefix))}


def _deadline() -> float:
    return time.monotonic() + _ANSWER_S
