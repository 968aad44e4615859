"""Runs of one name: which one a launcher joins, and when the store ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.runs import close_after_run, find_run, newest_run
from swift_ft.coordination.store_client import connect
from swift_ft.errors import RendezvousLostError
from swift_ft.recovery import events as ev
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore, TCPStore

LAUNCHERS = 6


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def find_together(store: TCPStore) -> set[str]:
    """The runs that several launchers find which start at the same time."""
    client = partial(connect, StoreAddress.tcp("127.0.0.1", store.port))
    start = threading.Barrier(LAUNCHERS)

    def find(_: int) -> str:
        start.wait()
        return find_run(client, "job")

    with ThreadPoolExecutor(LAUNCHERS) as launchers:
        return {*launchers.map(find, range(LAUNCHERS))}


def end(store: TCPStore, run: str, *, exit_code: int = 1) -> None:
    client = partial(connect, StoreAddress.tcp("127.0.0.1", store.port), run)
    open_journal(client, by="test").append(ev.JobClosed(reason="stopped", exit_code=exit_code))


def test_launchers_agree_on_a_run_and_begin_the_next_one_after_its_end(store: TCPStore) -> None:
    (first,) = find_together(store)
    assert first.startswith("job.1-")
    assert find_together(store) == {first}
    end(store, first)
    (second,) = find_together(store)
    assert second.startswith("job.2-")
    assert find_together(store) == {second}
    client = partial(connect, StoreAddress.tcp("127.0.0.1", store.port))
    assert newest_run(client, "job") == second
    assert newest_run(client, second) == second
    assert newest_run(client, "another") == "another"


def test_no_run_begins_in_a_store_that_ends(store: TCPStore) -> None:
    """A run that begins while the store lingers after the last one keeps it."""
    client = partial(connect, StoreAddress.tcp("127.0.0.1", store.port))
    first = find_run(client, "job")
    end(store, first)
    waited: list[str] = []

    def wait_until_over(of_run: RendezvousStore) -> None:
        waited.append("")
        if len(waited) == 1:
            assert find_run(client, "job").startswith("job.2-")

    close_after_run(client, "job", wait_until_over)
    assert len(waited) == 2
    with pytest.raises(RendezvousLostError, match="ends with the last run"):
        find_run(client, "job")


def test_a_mistyped_name_is_named(store: TCPStore, caplog: pytest.LogCaptureFixture) -> None:
    client = partial(connect, StoreAddress.tcp("127.0.0.1", store.port))
    ended = find_run(client, "yesterday")
    end(store, ended)
    for _ in range(2):
        find_run(client, "job7")
    assert not caplog.records, "one has ended, and the other is its own"
    find_run(client, "jbo7")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "which has 'job7' already" in line
    assert "yesterday" not in line
    assert "correct its --rdzv-id" in line
