"""A launcher's console about two machines, one of which is lost for good: started by ``test_console.py``."""

from __future__ import annotations

import argparse
import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from swift_ft.cli.console import LauncherConsole
from swift_ft.cli.options import add_options, config_from
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.incarnations import begin
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.store_client import connect
from swift_ft.launch.log_handlers import EventPipe
from swift_ft.launch.rendezvous.store_service import StoreService
from swift_ft.recovery import events as ev


class LatePipe(EventPipe):
    """A pipe whose reader takes its time."""

    def receive(self) -> dict[str, Any] | None:
        """As always, a little later."""
        time.sleep(0.2)
        return super().receive()


def main() -> None:
    """Lets the console follow a journal that is written here."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    config = config_from(parser.parse_args())
    late = int(os.environ.get("LATE", "0"))
    if late:  # the console's reader is late, too
        patch("swift_ft.cli.console.EventPipe", LatePipe).start()
    console = LauncherConsole(config)
    store = StoreService("127.0.0.1", 0)
    begin(connect(store.address, "story"))
    console.follow(store.address, "story")
    if config.events_log:
        extra = {"event": "log_suspended", "rank": 1, "until": Path("x")}
        logger = logging.getLogger("swift_ft.logging")
        logger.warning("the log is %s", "suspended", extra=extra)
        logger.warning("a line without an event")
    journal = open_journal(partial(connect, store.address, "story"), by="test")
    for event in events():
        journal.append(event)
    assert Follower(journal).state.verdict is not None
    console.fail("the rendezvous store died")
    for number in range(late):
        logging.getLogger("swift_ft.logging").warning("late %d", number, extra={"event": "log_resumed"})
    console.close()
    store.close()


def events() -> list[ev.Event]:
    """The journal: seven iterations after its checkpoint the run loses a machine, and falls back."""
    joins = [ev.MachineJoined(machine=name) for name in "abc"]
    began = [ev.StatusReported(rank=rank, generation=1, iteration=None) for rank in range(2)]
    ready = [ev.WorkerReady(rank=rank, generation=1) for rank in range(2)]
    survivor = ev.StatusReported(rank=0, generation=2, iteration=47, live=True)
    again = [ev.WorkerReady(rank=rank, generation=2) for rank in range(2)]
    exits = [ev.ScriptExited(machine="a", started_in=1), ev.ScriptExited(machine="c", started_in=2)]
    return [
        ev.JobOpened(machines=2),
        *joins,
        *began,
        *ready,
        ev.CheckpointCommitted(iteration=40, epoch=1),
        ev.MachineLost(machine="b", reason="its agent's connection ended"),
        survivor,
        ev.StatusReported(rank=1, generation=2, iteration=None),
        *again,
        *exits,
    ]


if __name__ == "__main__":
    main()
