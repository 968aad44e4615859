"""Which workers are persistently slower than their peers."""

from __future__ import annotations

import random
from collections import deque
from statistics import median

import pytest

from swift_ft.costs.equal_devices import on_equal_devices
from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.stragglers import Sample, Stragglers, least_of_peers

EXPECTED = {0: 1.0, 1: 2.0, 2: 1.0, 3: 0.5}


class Job:
    """Workers that say the median of five noisy iterations, and a judge that looks after each one."""

    def __init__(self, expected: dict[int, float], seed: int, sigma: float, step_s: float = 0.34) -> None:
        self._step_s = step_s
        self._random = random.Random(seed)
        self._sigma = sigma
        self._expected = expected
        self._own: dict[int, deque[float]] = {rank: deque(maxlen=5) for rank in expected}
        self._stragglers = Stragglers(1.5)
        self.slow: dict[int, int] = {}
        self.iteration = 0

    def run(self, iterations: int, factors: dict[int, float] | None = None) -> list[tuple[int, int, int]]:
        """Returns what was noted: iteration, rank and pace."""
        noted = []
        for _ in range(iterations):
            self.iteration += 1
            common = self._random.lognormvariate(0.0, 0.2)  # longer sequences, say
            for rank, seconds in self._expected.items():
                noise = self._random.lognormvariate(0.0, self._sigma)
                if self._random.random() < 0.03:  # something else ran
                    noise *= self._random.uniform(1, 5)
                own = seconds * common * noise * (factors or {}).get(rank, 1.0)
                self._own[rank].append(own)
            now_s = self.iteration * self._step_s
            longest = max(median(own) for own in self._own.values())
            samples = {
                rank: Sample(self.iteration, median(own), 2 * longest) for rank, own in self._own.items()
            }
            for rank, pace in self._stragglers.judge(samples, self._expected, self.slow, now_s).items():
                noted.append((self.iteration, rank, pace))
                self.slow[rank] = pace
        return noted


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_worker_slowed_to_a_third_is_found_within_twenty_iterations(seed: int, rank: int) -> None:
    job = Job(EXPECTED, seed, sigma=0.1)
    assert job.run(50) == []
    found = job.run(20, {rank: 3.0})  # the first word may come before its pace is fully known
    assert {rank for _, rank, _ in found} == {rank}
    assert 2300 <= job.slow[rank] <= 3900
    assert [(rank, pace) for _, rank, pace in job.run(30)] == [(rank, 1000)]


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_no_false_alarm_in_an_hour_of_noise(workers: int) -> None:
    """An hour of iterations of a third of a second."""
    job = Job(dict.fromkeys(range(workers), 1.0), seed=workers, sigma=0.15)
    assert job.run(10_800) == []


def test_a_burst_of_two_seconds_is_no_alarm_however_many_iterations_it_has() -> None:
    """Another process took a worker's core: seen in an hour beside other work."""
    job = Job(EXPECTED, 1, sigma=0.02, step_s=0.1)
    assert job.run(20) == []
    assert job.run(25, {1: 1.8}) == []
    assert job.run(20) == []
    assert {rank for _, rank, _ in job.run(40, {1: 1.8})} == {1}


def test_what_makes_no_iteration_longer_is_no_alarm() -> None:
    """Of an iteration that takes a second, two milliseconds are five now."""
    watch = Stragglers(1.5)
    for number in range(0, 60, 3):
        samples = {rank: Sample(number, own_s, 1.0) for rank, own_s in enumerate((0.002, 0.005, 0.002))}
        assert watch.judge(samples, dict.fromkeys(samples, 0.002), {}, float(number)) == {}


def test_two_slow_ones_of_four() -> None:
    job = Job(EXPECTED, 1, sigma=0.02)
    job.run(20)
    assert {rank for _, rank, _ in job.run(20, {1: 2.0, 2: 4.0})} == {1, 2}


def test_all_slower_is_nobody_s_fault() -> None:
    job = Job(EXPECTED, 1, sigma=0.02)
    job.run(20)
    assert job.run(40, dict.fromkeys(EXPECTED, 4.0)) == []


def test_a_pace_that_changes_is_told_anew() -> None:
    job = Job(EXPECTED, 1, sigma=0.01)
    job.run(20)
    job.run(20, {1: 2.0})
    ((_, rank, pace),) = job.run(20, {1: 4.0})
    assert (rank, round(pace, -3)) == (1, 4000)


def test_with_one_worker_there_are_no_peers() -> None:
    assert Stragglers(1.5).judge({0: Sample(9, 5.0, 5.0)}, {0: 1.0}, {}, 0.0) == {}


def layer(times: int, state: int = 10) -> LayerProfile:
    return LayerProfile(times, 2 * times, state, activation_bytes=7)


def test_layers_that_are_alike_show_which_device_is_slow() -> None:
    layers = [layer(30, 4), layer(10), layer(10), layer(31), layer(29), layer(10), layer(10), layer(5, 6)]
    devices = "aaabbccc"
    found = on_equal_devices(layers, devices)
    assert [one.forward_ns for one in found] == pytest.approx([30, 10, 10, 10, 10, 10, 10, 5], abs=1)


@pytest.mark.parametrize("times", [(10, 30, 10, 30), (10, 10, 30, 60)])
def test_layers_that_are_alike_only_in_size_show_nothing(times: tuple[int, ...]) -> None:
    layers = [layer(time) for time in times]
    assert on_equal_devices(layers, "aabb") == layers


def test_layers_on_one_device_each_stay_as_measured() -> None:
    layers = [layer(10), layer(30, 11), layer(20, 12)]
    assert on_equal_devices(layers, "abc") == layers


def test_replicas_are_as_quick_as_the_faster_half_of_them() -> None:
    holds = {0: "stage 0", 1: "stage 1", 2: "stage 0", 3: "stage 1"}
    found = least_of_peers({0: 3.0, 1: 1.0, 2: 2.0, 3: 5.0}, holds)
    assert found == {0: 2.0, 1: 1.0, 2: 2.0, 3: 1.0}
