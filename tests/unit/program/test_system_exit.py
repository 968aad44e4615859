"""What ``sys.exit(...)`` says: the interpreter's exit code and words, and whether a signal is behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from swift_ft.program.system_exit import exit_code, is_of_signal

CODES = [
    *(None, 0, 3, -1, True, False, 256, 2**32 + 5, 2**63, -(2**70)),
    *("no data", "", (1, 2), 1.5),
]


@pytest.mark.parametrize("code", CODES, ids=repr)
def test_the_code_and_the_words_are_the_interpreters(code: Any, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-S", "-c", f"raise SystemExit({code!r})"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert exit_code(SystemExit(code)) == done.returncode
    assert capfd.readouterr() == ("", done.stderr)


def test_words_that_nobody_can_read_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w") as closed:  # noqa: PTH123  (no path)
        monkeypatch.setattr(sys, "stderr", closed)
    assert exit_code(SystemExit("no data")) == 1


def leave(*_: object) -> None:
    sys.exit(0)


def shut_down_and_say(signum: int = 0, frame: object = None) -> None:
    assert signum or frame is None
    sys.exit(0)


class Leaver:
    def leave(self, *_: object) -> None:
        sys.exit(0)

    def __call__(self, *_: object) -> None:
        self.leave()


@pytest.fixture
def raised(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Gets the signal that a handler ends the process by."""
    before = signal.signal(signal.SIGUSR1, request.param)
    yield lambda: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


HANDLERS: dict[str, Any] = {
    "function": leave,
    "lambda": lambda *_: sys.exit(0),
    "method": Leaver().leave,
    "object": Leaver(),
    "with arguments": partial(leave, 3),
    "may be called": shut_down_and_say,
}


@pytest.mark.parametrize("raised", HANDLERS.values(), ids=HANDLERS, indirect=True)
def test_a_handler_of_a_signal_is_behind_it(raised: Callable[[], None]) -> None:
    with pytest.raises(SystemExit) as end:
        raised()
    assert is_of_signal(end.value)


@pytest.mark.parametrize("raised", [leave, shut_down_and_say], indirect=True)
@pytest.mark.usefixtures("raised")
def test_a_handler_that_the_program_calls_itself_is_no_signal() -> None:
    handler: Any = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as end:
        handler()
    assert not is_of_signal(end.value)


def exits_when_it_fails(act: Callable[[], object]) -> None:
    try:
        act()
    except BaseException:
        sys.exit(3)


@pytest.mark.parametrize("raised", [leave], indirect=True)
def test_another_end_in_its_place(raised: Callable[[], None]) -> None:
    with pytest.raises(SystemExit) as end:
        exits_when_it_fails(raised)
    assert is_of_signal(end.value)


@pytest.mark.usefixtures("raised")
@pytest.mark.parametrize("raised", [leave], indirect=True)
def test_an_end_of_the_programs_own() -> None:
    """The handler is there all the same."""
    with pytest.raises(SystemExit) as end:
        exits_when_it_fails(lambda: [].pop())
    assert not is_of_signal(end.value)
