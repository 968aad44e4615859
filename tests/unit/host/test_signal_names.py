"""Signals, by their names and in exit codes."""

from __future__ import annotations

import signal

import pytest

from swift_ft.host.signal_names import signal_in, signal_name


@pytest.mark.parametrize(
    ("number", "name"),
    [(9, "SIGKILL"), (signal.SIGRTMIN + 1, "signal 35"), (62, "signal 62"), (signal.SIGRTMAX, "SIGRTMAX")],
)
def test_every_signal_has_a_name(number: int, name: str) -> None:
    assert signal_name(number) == name


@pytest.mark.parametrize(
    ("code", "number"),
    [(-9, 9), (-40, 40), (137, 9), (139, 11), (168, 40), (0, 0), (1, 0), (127, 0), (128, 0), (255, 0)],
)
def test_the_signal_in_an_exit_code(code: int, number: int) -> None:
    assert signal_in(code) == number
