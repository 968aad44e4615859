"""Files that the planner reads and writes: profiles, groups, measured recoveries, failure traces.

A profile holds the measurements of a few iterations (§5.3)::

    {"machines": [{"compute_s": 0.51}, {"compute_s": 0.49, "failure_weight": 2.0}],
     "boundary_bytes": [536870912]}

``boundary_bytes`` has one entry per pair of neighbouring machines: bytes per iteration, both directions
together.
"""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

from swift_ft.errors import UsageError
from swift_ft.planning.files import load_object, read_text, whole, write_text
from swift_ft.planning.grouping.chain import ChainProfile
from swift_ft.planning.grouping.groups import GroupPlan
from swift_ft.planning.simulation.calibration import MeasuredRecovery

__all__ = [
    "Profile",
    "read_calibration",
    "read_failure_trace",
    "read_groups",
    "read_profile",
    "write_groups",
    "write_profile",
]


class Profile(ChainProfile):
    """A :class:`ChainProfile` that can be written and read as JSON."""

    def to_json(self) -> str:
        """The profile as the text of a ``profile.json``."""
        machines: list[dict[str, float]] = [{"compute_s": seconds} for seconds in self.compute_s]
        for machine, weight in zip(machines, self.failure_weight, strict=False):
            machine["failure_weight"] = weight
        return (
            json.dumps({"machines": machines, "boundary_bytes": list(self.boundary_bytes)}, indent=1) + "\n"
        )

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> Profile:
        """Reads the text of a ``profile.json``.

        Raises:
            UsageError: if it is no valid profile; the message begins with ``source``.
        """
        data = load_object(text, source)
        machines = data.get("machines")
        boundaries = data.get("boundary_bytes")
        if not isinstance(machines, list) or not isinstance(boundaries, list):
            raise UsageError(f"{source}: needs the lists 'machines' and 'boundary_bytes'")
        for i, machine in enumerate(machines):
            if not isinstance(machine, dict) or "compute_s" not in machine:
                raise UsageError(f"{source}: machine {i} has no 'compute_s'")
        weighted = any("failure_weight" in machine for machine in machines)
        try:
            return cls(
                compute_s=tuple(machine["compute_s"] for machine in machines),
                boundary_bytes=tuple(whole(size) for size in boundaries),
                failure_weight=tuple(m.get("failure_weight", 1.0) for m in machines) if weighted else (),
            )
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None


def read_profile(path: Path) -> Profile:
    """Reads a ``profile.json``.

    Raises:
        UsageError: if it cannot be read, or is no valid profile.
    """
    return Profile.from_json(read_text(path), str(path))


def write_profile(profile: Profile, path: Path) -> None:
    """Writes a ``profile.json``."""
    path.write_text(profile.to_json(), encoding="utf-8")


def write_groups(plan: GroupPlan, path: Path) -> None:
    """Writes the ``groups.json`` that a session takes.

    Raises:
        UsageError: if the file cannot be written.
    """
    write_text(path, json.dumps(plan.to_dict(), indent=1) + "\n")


def read_groups(path: Path) -> tuple[tuple[int, ...], ...]:
    """The groups in a ``groups.json``.

    Raises:
        UsageError: if it cannot be read, or holds none.
    """
    groups = load_object(read_text(path), str(path)).get("groups")
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise UsageError(f"{path}: has no list of lists 'groups'")
    return tuple(tuple(whole(slot) for slot in group) for group in groups)


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
