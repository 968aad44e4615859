"""A stop signal ends a launcher whenever it comes, also while the watch for it is being set up."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SENDS_ITSELF_ONE = """
import os, signal, sys, time
from swift_ft.launch.signals import ending_with_a_line

number, when = signal.Signals[sys.argv[1]], sys.argv[2]
signal.signal(number, lambda *_: os._exit(128 + number))
set_wakeup_fd = signal.set_wakeup_fd

def send():
    os.kill(os.getpid(), number)
    time.sleep(0.2)

def sends(fd, **options):
    signal.set_wakeup_fd = set_wakeup_fd
    if when == "before":
        send()
    before = set_wakeup_fd(fd, **options)
    if when == "after":
        send()
    return before

signal.set_wakeup_fd = sends
with ending_with_a_line():
    if when == "within":
        send()
    time.sleep(0.2)
print("it was lost")
"""


@pytest.mark.parametrize("when", ["before", "after", "within"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_signal_is_lost(number: signal.Signals, when: str) -> None:
    command = [sys.executable, "-c", SENDS_ITSELF_ONE, number.name, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (128 + number, ""), done.stderr
