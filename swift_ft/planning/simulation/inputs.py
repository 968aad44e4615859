"""Files that a simulation reads: traces of failures, and measured recoveries."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swift_ft.costs.json_files import load_object, read_text
from swift_ft.errors import UsageError
from swift_ft.planning.checks import check_not_negative, check_positive
from swift_ft.planning.simulation.strategies import Cluster, Strategy


def read_failure_trace(path: Path) -> tuple[tuple[float, int], ...]:
    """Failures from a CSV file with the columns ``time`` (seconds from the start of the run) and ``machine``.

    A header line is allowed. The result is sorted by time.

    Raises:
        UsageError: a line is not a failure; the message names it.
    """
    failures = []
    for where, time_s, machine in timed_rows(path, "'time,machine'"):
        if machine < 0:
            raise UsageError(f"{where}: machine {machine} must not be negative")
        failures.append((time_s, machine))
    return tuple(sorted(failures))


def timed_rows(path: Path, expected: str) -> Iterator[tuple[str, float, int]]:
    """The rows of a CSV file with a time in seconds and a whole number, in the order of the file.

    A header line is allowed, and so are comments behind ``#``.

    Args:
        path: the file.
        expected: a row, in words.

    Yields:
        The place of a row for errors, its time, and its number.

    Raises:
        UsageError: a line is not such a row; the message names it.
    """
    for number, row in enumerate(csv.reader(read_text(path).splitlines()), start=1):
        if not row or row[0].lstrip().startswith("#") or (number == 1 and row[0].strip().lower() == "time"):
            continue
        where = f"{path}, line {number}"
        try:
            time_s, value = float(row[0]), int(row[1])
        except (ValueError, IndexError):
            raise UsageError(f"{where}: expected {expected}, got {','.join(row)!r}") from None
        if not math.isfinite(time_s) or time_s < 0:
            raise UsageError(f"{where}: the time {time_s} must be zero or more seconds")
        yield where, time_s, value


def read_calibration(path: Path) -> tuple[MeasuredRecovery, ...]:
    """Measured recoveries from the results of a benchmark.

    ``{"recoveries": [{"strategy": "logging", "startup_s": 1.2, "restore_s": 0.3, "replay_s": 4.0,
    "replayed_iterations": 25, "iteration_s": 0.6}, ...]}``

    Raises:
        UsageError: if the file cannot be read, or a value is missing or negative.
    """
    records = load_object(read_text(path), str(path)).get("recoveries")
    if not isinstance(records, list) or not records:
        raise UsageError(f"{path}: needs a list 'recoveries' with at least one entry")
    numbers = ("startup_s", "restore_s", "replay_s", "replayed_iterations", "iteration_s")
    measured = []
    for i, record in enumerate(records):
        if not isinstance(record, dict) or not isinstance(record.get("strategy"), str):
            raise UsageError(f"{path}: recovery {i} has no 'strategy'")
        check_not_negative({f"{path}: recovery {i}: {key!r}": record.get(key) for key in numbers})
        check_positive({f"{path}: recovery {i}: 'iteration_s'": record["iteration_s"]})
        measured.append(MeasuredRecovery(record["strategy"], *(float(record[key]) for key in numbers)))
    return tuple(measured)


@dataclass(frozen=True)
class MeasuredRecovery:
    """One recovery, as a benchmark measured it.

    Attributes:
        strategy: the strategy's name.
        startup_s: from the death until the replacement had joined.
        restore_s: to load, or to undo and broadcast, the state that recovery began with.
        replay_s: from that state until the iteration of the failure is reached again.
        replayed_iterations: number of replayed iterations.
        iteration_s: duration of an iteration without failures.
    """

    strategy: str
    startup_s: float
    restore_s: float
    replay_s: float
    replayed_iterations: float
    iteration_s: float


def calibrate(
    strategies: Sequence[Strategy], cluster: Cluster, measured: Sequence[MeasuredRecovery]
) -> tuple[tuple[Strategy, ...], Cluster]:
    """Strategies and cluster with measured means; values without a measurement are unchanged.

    The shortest mean start-up of a measured strategy becomes the cluster's, counted as join time. What other
    strategies need beyond it is their extra start-up time.

    Raises:
        UsageError: if a measured strategy is not simulated.
    """
    by_strategy: dict[str, list[MeasuredRecovery]] = {strategy.name: [] for strategy in strategies}
    for record in measured:
        if record.strategy not in by_strategy:
            raise UsageError(
                f"measured strategy {record.strategy!r} is none of {', '.join(sorted(by_strategy))}"
            )
        by_strategy[record.strategy].append(record)
    if not measured:
        return tuple(strategies), cluster
    startup = {
        name: statistics.fmean(record.startup_s for record in mine)
        for name, mine in by_strategy.items()
        if mine
    }
    shortest = min(startup.values())
    cluster = replace(cluster, detection_s=0.0, replacement_s=0.0, join_s=shortest)
    return tuple(
        _with(strategy, by_strategy[strategy.name], startup.get(strategy.name, shortest) - shortest)
        for strategy in strategies
    ), cluster


def _with(strategy: Strategy, mine: Sequence[MeasuredRecovery], extra_startup_s: float) -> Strategy:
    strategy = replace(strategy, extra_startup_s=extra_startup_s)
    if not mine:
        return strategy
    again = sum(record.replayed_iterations * record.iteration_s for record in mine)
    factor = sum(record.replay_s for record in mine) / again if again else strategy.replay_factor
    return replace(
        strategy, restore_s=statistics.fmean(record.restore_s for record in mine), replay_factor=factor
    )
