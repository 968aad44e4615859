"""A watcher's own time: what it counts, and when it was held up itself."""

from __future__ import annotations

import pytest

from swift_ft.launch.detection.awake_clock import AwakeClock, Looks


def test_the_clock_counts_only_what_its_process_saw() -> None:
    clock = AwakeClock(0.02, now=100.0)
    assert clock.look(100.1, 0.1) == pytest.approx(0.1)
    assert clock.look(100.15, 0.1) == pytest.approx(0.15)  # something came
    assert clock.look(100.26, 0.1) == pytest.approx(0.26)
    assert clock.look(160.0, 0.1) == pytest.approx(0.26)  # frozen for a minute
    assert clock.awake_s == pytest.approx(0.26)


def test_the_clock_of_a_process_that_is_held_up_is_slow() -> None:
    clock = AwakeClock(0.02, now=100.0)
    assert clock.look(100.16, 0.1) == pytest.approx(0.16 - 2 * 0.04)
    assert clock.look(100.46, 0.1) == pytest.approx(0.08)


def test_looks_are_apart_after_half_of_the_silence() -> None:
    looks = Looks()
    assert not looks.were_apart(1000.0, 10.0), "it is the first one"
    assert not looks.were_apart(1005.0, 10.0)
    assert looks.were_apart(1010.1, 10.0)
    assert not looks.were_apart(1010.2, 10.0)
    assert Looks(100.0).were_apart(106.0, 10.0)
