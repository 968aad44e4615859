"""Who waits for a script's imports is told what helps."""

from __future__ import annotations

import logging

import pytest

from swift_ft.runtime.slowness.straggler_watch import say_if_slow


def test_a_script_that_begins_slowly_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        say_if_slow(2.34, rank=3)
    assert "worker 3: the script took 2.3 s before its session" in caplog.text
    assert "--preload" in caplog.text


@pytest.mark.parametrize("took_s", [0.0, 0.4])
def test_any_other_is_not(took_s: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        say_if_slow(took_s, rank=3)
    assert not caplog.text
