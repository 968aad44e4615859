"""The place of a worker that cannot tell it: it dies in native code, or a call holds the interpreter."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swift_ft.coordination.agent_channel import channel_pair, receive
from swift_ft.launch.processes import stacks
from swift_ft.launch.processes.stacks import SIGNAL, StackFile
from tests.support.waiting import wait_until

PROGRAM = """\
import ctypes, socket, sys
from swift_ft.coordination.agent_channel import AgentChannel
from swift_ft.launch.processes.stacks import offer_stack

channel = AgentChannel(socket.socket(fileno=int(sys.argv[1])), beat_s=60, on_agent_lost=lambda: None)
offer_stack(channel)

def deeper(levels, what):
    return deeper(levels - 1, what) if levels else what()

def hold():
    channel.send(holds=True)
    sum(range(10**12))  # without letting the interpreter go

def fail():
    sys.stdin.read()  # until its file is open here
    ctypes.string_at(0)

deeper(60, {what})
"""


@contextmanager
def worker(folder: Path, what: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket, StackFile]]:
    """A process that does something, once it has offered its stack."""
    script = folder / "train.py"
    script.write_text(PROGRAM.replace("{what}", what))
    ours, theirs = channel_pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(script), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
        )
    ours.settimeout(60)
    try:
        message = receive(ours)
        while message is not None and "stack" not in message:
            message = receive(ours)
        assert message is not None
        stack = StackFile(**message["stack"])
        yield process, ours, stack
        stack.close()
    finally:
        process.kill()
        process.communicate(timeout=60)
        ours.close()


def test_one_that_holds_the_interpreter_is_asked(tmp_path: Path) -> None:
    with worker(tmp_path, "hold") as (process, channel, stack):
        while "holds" not in (receive(channel) or {"holds": None}):
            pass
        assert stack.read() == []

        def held() -> list[str]:
            """Until it has left the call that sent the message, this is where it is."""
            (place,) = stack.ask(60)
            assert place.startswith("at train.py:")
            return [place] if place.endswith("(hold)") else []

        place = wait_until(held, "it does not hold the interpreter")
        assert process.poll() is None
        for _ in range(40):  # and again: all of it is more than is read at once
            assert stack.ask(60) == place
        assert stack.read() == []  # it has been asked, and has not died
        assert os.fstat(stack._file).st_size < 2 * stacks._MOST_BYTES, "its memory is bounded"


def test_what_a_dead_one_has_left_is_kept() -> None:
    file = os.memfd_create("stack")
    stack = StackFile(os.getpid(), file)
    os.write(file, f"{'x' * (1 << 17)}{FATAL}{PYTHON}".encode())
    before = signal.signal(SIGNAL, lambda *_: None)
    try:
        assert stack.ask(0.0) == []
    finally:
        signal.signal(SIGNAL, before)
    assert stack.read() == ["at train.py:3 (step)"]
    stack.close()
    os.close(file)


def test_one_that_dies_in_native_code_has_left_its_place(tmp_path: Path) -> None:
    with worker(tmp_path, "fail") as (process, _, stack):
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGSEGV
        (place,) = stack.read()
        assert place.startswith("at train.py:")
        assert place.endswith("(fail), in __init__.string_at")


def test_a_stack_that_is_not_whole_is_waited_for() -> None:
    """Lines of what the user's code has called come first, and a cut one looks like a whole one."""
    file = os.memfd_create("stack")
    stack = StackFile(os.getpid(), file)
    writes = (
        b"Stack (most recent call first):\n",
        f'  File "{socket.__file__}", line 7 in send\n'.encode(),
        b'  File "/home/me/train.py", line 3 in step\n',
        b'  File "/home/me/train.py", line 9 in <module>\n',
    )
    before = signal.signal(SIGNAL, lambda *_: None)
    asking = threading.Thread(target=lambda: answers.append(stack.ask(60)))
    answers: list[list[str]] = []
    try:
        asking.start()
        for piece in writes:
            asking.join(0.1)
            assert asking.is_alive()
            os.write(file, piece)
        asking.join(60)
    finally:
        signal.signal(SIGNAL, before)
        stack.close()
    assert answers == [["at train.py:3 (step), in socket.send"]]


PYTHON = """\
Stack (most recent call first):
  File "/home/me/train.py", line 3 in step
  File "/home/me/train.py", line 9 in <module>
"""
OF_C = """\

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3.14", at _Py_DumpStack+0x31 [0x55d0c1]
  Binary file "/lib/libc.so.6", at +0x3c050 [0x7f3a10]

Extension modules: torch._C, numpy._core._multiarray_umath (total: 2)
"""
FATAL = "Fatal Python error: Segmentation fault\n\n"


@pytest.mark.parametrize(
    ("written", "place"),
    [
        (FATAL + PYTHON, ["at train.py:3 (step)"]),
        (FATAL + PYTHON + OF_C, ["at train.py:3 (step)"]),  # from Python 3.14 on
        (PYTHON, []),
        (PYTHON.replace("3 in", "7 in") + FATAL + PYTHON + OF_C, ["at train.py:3 (step)"]),
        (FATAL + "Stack (most recent call first):\n  <no Python frame>\n" + OF_C, []),
        ("x" * (1 << 17) + FATAL + PYTHON, ["at train.py:3 (step)"]),
    ],
    ids=["alone", "with C", "asked and then killed", "asked before", "no line of Python", "after much"],
)
def test_the_place_of_a_death_is_that_of_its_last_stack_in_python(written: str, place: list[str]) -> None:
    file = os.memfd_create("stack")
    stack = StackFile(os.getpid(), file)
    os.write(file, written.encode())
    assert stack.read() == place
    stack.close()
    os.close(file)


def test_one_that_is_stopped_is_not_waited_for(tmp_path: Path) -> None:
    with worker(tmp_path, "hold") as (process, _, stack):
        os.kill(process.pid, signal.SIGSTOP)
        assert stack.ask(0.05) == []


def test_one_that_is_gone() -> None:
    with pytest.raises(OSError, match="No such file"):
        StackFile(2**22 + 1, 3)
