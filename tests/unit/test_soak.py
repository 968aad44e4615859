"""What grows: the line through samples, its confidence bound, and the times between printed iterations."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.recovery.held import Files, HeldOverTime, trend
from benchmarks.recovery.soak import Clock, of_history
from swift_ft.testing.chaos.leftovers import MARK, end_processes


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


def test_a_process_that_each_recovery_leaves_behind_is_found(tmp_path: Path) -> None:
    """None of them lives for long enough to be counted by what it holds, and some have lost their parents."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    parent = [sys.executable, "-c", f"import subprocess; subprocess.Popen({sleeper})"]
    held, children = HeldOverTime(), []
    marked = {**os.environ, MARK: str(tmp_path)}
    try:
        held.sample(os.getpid(), tmp_path, tmp_path)
        for _ in range(3):
            children.append(subprocess.Popen(sleeper, env=marked))
            subprocess.run(parent, env=marked, check=True)
            held.sample(os.getpid(), tmp_path, tmp_path)
    finally:
        end_processes(tmp_path)
        for child in children:
            child.wait()
    assert [count - held.processes[0] for count in held.processes] == [0, 2, 4, 6]


def test_files_of_the_history_are_told_apart(tmp_path: Path) -> None:
    for name in ("checkpoints/8/part", "logs/rank-0/segment", "runs/run.1/journal/0.json", "run.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    held = HeldOverTime()
    held.sample(os.getpid(), tmp_path)
    assert held.stored == [Files(3, len("checkpoints/8/part" + "logs/rank-0/segment" + "run.json"))]
    assert held.history == [Files(1, len("runs/run.1/journal/0.json"))]


@pytest.mark.parametrize(("sizes", "later"), [([100] * 8, 1.0), ([100 * n for n in range(1, 9)], 2.6)])
def test_a_history_whose_pieces_grow_is_found(sizes: list[int], later: float) -> None:
    """As an archive that repeats all that came before, at each recovery."""
    total = [sum(sizes[:number]) for number in range(9)]
    held = HeldOverTime(
        [float(i) for i in range(9)], history=[Files(i, size) for i, size in enumerate(total)]
    )
    each, relative = of_history(held, [i + 0.5 for i in range(8)])
    assert each == total[-1] / 8
    assert relative == pytest.approx(later)


def test_iterations_are_timed_by_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look without a new iteration counts for the next one, and one with a recovery not at all."""
    output = tmp_path / "output"
    output.touch()
    clock = Clock(output)
    printed = {0.0: range(10), 2.0: range(10, 20), 4.0: (), 6.0: range(20, 30), 8.0: range(30, 40)}
    for at, numbers in printed.items():
        monkeypatch.setattr("benchmarks.recovery.soak.time.time", lambda at=at: at)
        with output.open("a") as file:
            for number in numbers:
                file.write(f"[machine 1] iteration {number}: loss 4.1\n")
            file.write("[machine 0] iteration ")  # half a line
        clock.read()
        with output.open("a") as file:
            file.write("0: loss 4.1\n")
    assert clock.per_iteration([(4.0, 4.5)]) == ([2.0, 8.0], [0.2, 0.2])
    assert clock.per_iteration([]) == ([2.0, 6.0, 8.0], [0.2, 0.4, 0.2])


@pytest.mark.parametrize("slower", [2.0, 1.2])
def test_steps_that_take_longer_from_some_time_on_are_found(tmp_path: Path, slower: float) -> None:
    """However much longer: only what a recovery explains is left out."""
    clock, now = Clock(tmp_path / "output"), 0.0
    recoveries = [(100.0 * n + 30, 100.0 * n + 31) for n in range(6)]
    for look in range(300):
        clock.times[10 * look] = now
        now += 2.0 * (slower if look >= 180 else 1.0) + sum(now < at <= now + 2 for at, _ in recoveries)
    assert not trend(*clock.per_iteration(recoveries)).is_flat(0.03)
