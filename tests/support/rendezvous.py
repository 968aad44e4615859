"""Acts on the rendezvous store of a run, when the run is in a certain state."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.incarnations import has_begun
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.store_client import connect
from swift_ft.recovery.job_state import Phase, State
from tests.support.waiting import wait_until

ENDPOINT = "endpoint.txt"
"""What ``--endpoint-out`` names, in the folder of a run."""
_LISTENS = "0A"


@contextmanager
def once(folder: Path, due: Callable[[State], bool], act: Callable[[], None]) -> Iterator[threading.Event]:
    """Act as soon as the state of the run in a folder is so. Yields what says that it was done."""
    done, over = threading.Event(), threading.Event()

    def look(_before: State, after: State) -> None:
        if not done.is_set() and due(after):
            act()
            done.set()

    def follow() -> None:
        file = folder / ENDPOINT
        wait_until(lambda: over.is_set() or (file.exists() and file.read_text().endswith("\n")), str(file))
        if over.is_set():
            return
        endpoint, run_id = file.read_text().split()
        client = partial(connect, StoreAddress.parse(endpoint), run_id, admit=has_begun)
        Follower(open_journal(client, by="test"), on_change=look).start()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join(30.0)


def a_recovery_is(phase: Phase) -> Callable[[State], bool]:
    """Whether a state is of a recovery in a phase; of a live one, before the loss."""
    if phase == Phase.LIVE:
        return lambda state: state.phase == Phase.LIVE
    return lambda state: state.generation > 1 and state.phase == phase


def signal_store(folder: Path, number: signal.Signals) -> None:
    """Send a signal to the process that serves the store of the run in a folder."""
    endpoint = StoreAddress.parse((folder / ENDPOINT).read_text().split()[0])
    os.kill(server_of(endpoint.port), number)


def server_of(port: int) -> int:
    """The process that listens at a port of this host; the youngest, where its parent has the socket, too."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    found = [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _has(entry, inodes)
    ]
    assert found, f"nothing listens at port {port}"
    return max(found)


def _has(process: Path, sockets: set[str]) -> bool:
    try:
        return any(str(link.readlink()) in sockets for link in (process / "fd").iterdir())
    except OSError:  # it has ended, or belongs to another user
        return False
