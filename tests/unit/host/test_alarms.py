"""What has to happen at a time happens in one thread, in order, and in no child of the process."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from swift_ft.host.alarms import Alarms

LIMIT_S = 60.0


def test_alarms_ring_in_the_order_of_their_times_and_in_one_thread() -> None:
    clock, rung, over = Alarms(), list[str](), threading.Event()
    threads = set[threading.Thread]()

    def ring(name: str) -> None:
        rung.append(name)
        threads.add(threading.current_thread())
        if name == "late":
            over.set()

    clock.after(0.05, lambda: ring("late"))
    clock.after(0.0, lambda: ring("soon"))
    assert over.wait(LIMIT_S)
    assert rung == ["soon", "late"]
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_one_that_is_called_off_does_not_happen() -> None:
    clock, rung, over = Alarms(), list[str](), threading.Event()
    clock.after(0.02, lambda: rung.append("called off")).cancel()
    clock.after(0.04, over.set)
    assert over.wait(LIMIT_S)
    assert not rung


def test_one_that_fails_is_logged_and_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    clock, over = Alarms(), threading.Event()

    def fail() -> None:
        raise OSError("no such place")

    clock.after(0.0, fail)
    clock.after(0.01, over.set)
    assert over.wait(LIMIT_S)
    assert [record.exc_text is not None or record.exc_info is not None for record in caplog.records] == [True]


CHILD = """
import os, threading
from swift_ft.host.alarms import alarms
alarms.after(3600.0, lambda: None)
child = os.fork()
if child == 0:
    rung = threading.Event()
    alarms.after(0.0, rung.set)
    os._exit(0 if rung.wait(60.0) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_has_alarms_of_its_own() -> None:
    assert subprocess.run([sys.executable, "-c", CHILD], timeout=2 * LIMIT_S, check=False).returncode == 0
