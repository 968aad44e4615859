"""What grows: the line through samples, its confidence bound, and the times between printed iterations."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.recovery.held import HeldOverTime, trend
from benchmarks.recovery.soak import Clock


def noisy(slope: float, spread: float, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [100.0 + slope * i + draw.gauss(0.0, spread) for i in range(300)]


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_flat_and_a_leak_is_not(seed: int) -> None:
    times = [float(i) for i in range(300)]
    assert trend(times, noisy(0.0, 5.0, seed)).is_flat(0.02)
    leak = trend(times, noisy(0.05, 5.0, seed))
    assert leak.growth == pytest.approx(15.0, abs=4.0)
    assert 0 < leak.at_least < leak.growth
    assert not leak.is_flat(0.02)


def test_one_descriptor_per_recovery_is_found() -> None:
    counts = [40.0 + i // 10 for i in range(300)]
    found = trend([2.0 * i for i in range(300)], counts)
    assert found.growth == pytest.approx(30.0, rel=0.05)
    assert not found.is_flat(0.0)
    assert trend([2.0 * i for i in range(300)], [40.0] * 300).is_flat(0.0)


def test_a_single_peak_is_no_growth() -> None:
    assert trend([float(i) for i in range(300)], [40.0] * 150 + [90.0] + [40.0] * 149).is_flat(0.0)


def test_who_does_not_live_through_it_does_not_count(tmp_path: Path) -> None:
    held = HeldOverTime()
    held.sample(os.getpid(), tmp_path)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleeper) as process:
        held.sample(os.getpid(), tmp_path)
        process.kill()
    held.sample(os.getpid(), tmp_path)
    times, threads = held.of_survivors(lambda one: one.threads, 0.0)
    assert times == held.times
    assert len(threads) == 3
    assert min(threads) >= 1


def test_files_of_the_history_do_not_count(tmp_path: Path) -> None:
    for name in ("checkpoints/8/part", "logs/rank-0/segment", "runs/run.1/journal/0.json", "run.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    held = HeldOverTime()
    held.sample(os.getpid(), tmp_path)
    assert held.files == [3]


def test_iterations_are_timed_by_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look without a new iteration counts for the next one, and one with a recovery not at all."""
    output = tmp_path / "output"
    output.touch()
    clock = Clock(output)
    printed = {0.0: range(10), 2.0: range(10, 20), 4.0: (), 6.0: range(20, 30), 8.0: range(30, 40)}
    for at, numbers in printed.items():
        monkeypatch.setattr("benchmarks.recovery.soak.time.monotonic", lambda at=at: at)
        with output.open("a") as file:
            for number in numbers:
                file.write(f"[machine 1] iteration {number}: loss 4.1\n")
            file.write("[machine 0] iteration ")  # half a line
        clock.read()
        with output.open("a") as file:
            file.write("0: loss 4.1\n")
    assert clock.per_iteration() == ([2.0, 8.0], [0.2, 0.2])
