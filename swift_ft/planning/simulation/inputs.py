"""Files that a simulation reads: traces of failures, and measured recoveries."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from swift_ft.costs.json_files import load_object, read_text
from swift_ft.errors import UsageError
from swift_ft.planning.simulation.calibration import MeasuredRecovery


def read_failure_trace(path: Path) -> tuple[tuple[float, int], ...]:
    """Failures from a CSV file with the columns ``time`` (seconds from the start of the run) and ``machine``.

    A header line is allowed. The result is sorted by time.

    Raises:
        UsageError: a line is not a failure; the message names it.
    """
    failures = []
    for number, row in enumerate(csv.reader(read_text(path).splitlines()), start=1):
        if not row or row[0].lstrip().startswith("#") or (number == 1 and row[0].strip().lower() == "time"):
            continue
        try:
            time_s, machine = float(row[0]), int(row[1])
        except (ValueError, IndexError):
            raise UsageError(
                f"{path}, line {number}: expected 'time,machine', got {','.join(row)!r}"
            ) from None
        if not math.isfinite(time_s) or time_s < 0 or machine < 0:
            raise UsageError(f"{path}, line {number}: time and machine must not be negative")
        failures.append((time_s, machine))
    return tuple(sorted(failures))


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
        values = []
        for key in numbers:
            value = record.get(key)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not math.isfinite(value)
                or value < 0
            ):
                raise UsageError(
                    f"{path}: recovery {i}: {key!r} is {value!r}, it must be a number of zero or more"
                )
            values.append(float(value))
        if values[-1] == 0:
            raise UsageError(f"{path}: recovery {i}: 'iteration_s' must be positive")
        measured.append(MeasuredRecovery(record["strategy"], *values))
    return tuple(measured)
