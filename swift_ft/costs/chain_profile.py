"""Costs of a pipeline's machines and of the boundaries between them, and the files that hold them.

``profile.json`` holds the measurements of a few iterations (paper §5.3)::

    {"machines": [{"compute_s": 0.51}, {"compute_s": 0.49, "failure_weight": 2.0}],
     "boundary_bytes": [536870912]}

``boundary_bytes`` has one entry per pair of neighbouring machines: bytes per iteration, both directions
together. ``groups.json`` holds the groups that were chosen for it, as lists of machines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swift_ft.costs.json_files import load_object, read_text, whole, write_text
from swift_ft.errors import UsageError

_MAX_BYTES = 2**62  # sums of bytes stay exact in int64


@dataclass(frozen=True)
class ChainProfile:
    """Measurements of a pipeline over a few iterations, machine by machine in pipeline order.

    Attributes:
        compute_s: seconds of computation per iteration on each machine.
        boundary_bytes: bytes per iteration, both directions together, between machine ``i`` and ``i + 1``.
        failure_weight: how often each machine fails relative to the others; empty means equally often.
    """

    compute_s: tuple[float, ...]
    boundary_bytes: tuple[int, ...]
    failure_weight: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.compute_s)
        if n == 0:
            raise UsageError("the profile has no machines: give at least one entry under 'machines'")
        if len(self.boundary_bytes) != n - 1:
            raise UsageError(
                f"{n} machines have {n - 1} boundaries, but 'boundary_bytes' has "
                f"{len(self.boundary_bytes)} entries: give one per pair of neighbours"
            )
        if self.failure_weight and len(self.failure_weight) != n:
            raise UsageError(
                f"{len(self.failure_weight)} failure weights for {n} machines: give one each, or none"
            )
        _check_numbers("compute_s of machine", self.compute_s)
        _check_numbers("failure_weight of machine", self.failure_weight)
        for i, size in enumerate(self.boundary_bytes):
            if isinstance(size, bool) or not isinstance(size, int):
                raise UsageError(f"boundary_bytes {i} is {size!r}: it must be a whole number of bytes")
            if size < 0:
                raise UsageError(f"boundary_bytes {i} is {size}: it must not be negative")
        if sum(self.boundary_bytes) > _MAX_BYTES:
            raise UsageError("boundary_bytes add up to more than 2**62: are they really bytes per iteration?")
        if self.failure_weight and sum(self.failure_weight) <= 0:
            raise UsageError("all failure weights are zero: at least one machine must be able to fail")

    @property
    def n_machines(self) -> int:
        """The number of machines that the pipeline spans."""
        return len(self.compute_s)

    def to_json(self) -> str:
        """The profile as the text of a ``profile.json``."""
        machines: list[dict[str, float]] = [{"compute_s": seconds} for seconds in self.compute_s]
        for machine, weight in zip(machines, self.failure_weight, strict=False):
            machine["failure_weight"] = weight
        return (
            json.dumps({"machines": machines, "boundary_bytes": list(self.boundary_bytes)}, indent=1) + "\n"
        )

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> ChainProfile:
        """Reads the text of a ``profile.json``.

        Raises:
            UsageError: if it is not a valid profile; the message begins with ``source``.
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


def read_profile(path: Path) -> ChainProfile:
    """Reads a ``profile.json``.

    Raises:
        UsageError: if it cannot be read, or is not a valid profile.
    """
    return ChainProfile.from_json(read_text(path), str(path))


def write_profile(profile: ChainProfile, path: Path) -> None:
    """Writes a ``profile.json``.

    Raises:
        UsageError: if it cannot be written.
    """
    write_text(path, profile.to_json())


def read_groups(path: Path) -> tuple[tuple[int, ...], ...]:
    """The groups in a ``groups.json``.

    Raises:
        UsageError: if it cannot be read, or holds none.
    """
    groups = load_object(read_text(path), str(path)).get("groups")
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise UsageError(f"{path}: has no list of lists 'groups'")
    return tuple(tuple(whole(slot) for slot in group) for group in groups)


def _check_numbers(what: str, values: Sequence[float]) -> None:
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UsageError(f"{what} {i} is {value!r}: it must be a finite number")
        if value < 0:
            raise UsageError(f"{what} {i} is {value}: it must not be negative")
