"""Servers of tests and benchmarks that end by themselves come back; those that are killed do not."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lib.kept_server import KeptServer
from benchmarks.lib.ports import wait_until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_one_that_ends_by_itself_comes_back(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "server.log"
    server = KeptServer(
        "a server", [sys.executable, "-c", "import time; print('began', flush=True); time.sleep(600)"], log
    )
    server.begin()
    try:
        server.keep(lambda: log.read_text().count("began") == 1)
        server.send_signal(number)
        wait_until(lambda: log.read_text().count("began") == 2, lambda: True, "the second one", log)
    finally:
        server.kill()
    time.sleep(1.0)  # it would be back by then
    assert log.read_text().count("began") == 2


def test_one_that_does_not_begin_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise OSError('no port')"]
    server = KeptServer("a server", command, tmp_path / "server.log")
    server.begin()
    with pytest.raises(RuntimeError, match="no port"):
        server.keep(lambda: False)
