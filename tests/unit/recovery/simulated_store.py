"""What outlives the processes of a simulation: logs, checkpoints, groups; and the state that they hold.

The contents of a worker's state are a hash chain: one link per applied iteration, made of the iteration and
of the history (epoch) in which it was first run. Workers of one history have the same chain at the same
iteration; a state that skipped, repeated or mixed iterations has a chain that nobody else has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["GENESIS", "Content", "Group", "SharedStore", "Violation", "advance"]


class Violation(AssertionError):
    """Something that must never happen did happen."""


@dataclass(frozen=True, slots=True)
class Content:
    """A state's contents: iterations completed, and the chain of what was applied."""

    iteration: int
    chain: int


GENESIS = Content(0, 1)


def advance(content: Content, iteration: int, history: int) -> Content:
    """Apply one iteration of a history."""
    if content.iteration != iteration:
        raise Violation(f"iteration {iteration} applied to a state that has completed {content.iteration}")
    return Content(iteration + 1, hash((content.chain, iteration, history)))


@dataclass(frozen=True, slots=True)
class Logged:
    """All messages that a worker sent in one iteration: from which state, and in which history."""

    chain: int
    history: int


@dataclass(slots=True)
class SharedStore:
    """Logs by rank, iteration and generation; parts of checkpoints by path; markers by iteration.

    Attributes:
        logs_outlive: their machines; else they are on a machine's own disk, and had while it answers.
    """

    logs: dict[int, dict[int, dict[int, Logged]]] = field(default_factory=dict)
    corrupt: set[tuple[int, int]] = field(default_factory=set)
    parts: dict[str, Content] = field(default_factory=dict)
    markers: dict[int, Mapping[int, str]] = field(default_factory=dict)
    failing_loads: int = 0
    logs_outlive: bool = False

    def write_log(self, rank: int, generation: int, entries: Mapping[int, Logged]) -> None:
        log = self.logs.setdefault(rank, {})
        for iteration, entry in entries.items():
            log.setdefault(iteration, {})[generation] = entry
            self.corrupt.discard((rank, iteration))

    def read_log(self, rank: int, iteration: int, since_generation: int) -> Logged | str:
        """What a worker sent in an iteration, or why that cannot be told."""
        if (rank, iteration) in self.corrupt:
            return "corrupt"
        found = {
            entry
            for generation, entry in self.logs.get(rank, {}).get(iteration, {}).items()
            if generation >= since_generation
        }
        if len(found) > 1:
            raise Violation(f"the log of rank {rank} holds iteration {iteration} of two histories")
        return found.pop() if found else "missing"

    def replace_machine(self, ranks: Iterable[int]) -> None:
        """New workers are started, on a disk of their own."""
        for rank in () if self.logs_outlive else ranks:
            self.logs.pop(rank, None)

    def drop_before(self, rank: int, iteration: int) -> None:
        log = self.logs.get(rank, {})
        for old in [i for i in log if i < iteration]:
            del log[old]

    def drop_generations_before(self, rank: int, generation: int) -> None:
        for segments in self.logs.get(rank, {}).values():
            for old in [g for g in segments if g < generation]:
                del segments[old]

    def commit(self, iteration: int, parts: Mapping[int, str], world: int) -> None:
        contents = {self.parts.get(path) for path in parts.values()}
        if any(newer > iteration for newer in self.markers):
            contents.discard(None)  # its writer was frozen meanwhile: nobody will ask for it any more
        if len(parts) != world or None in contents:
            raise Violation(f"the marker of checkpoint {iteration} names parts that are not there")
        if len(contents) > 1 or any(c is not None and c.iteration != iteration for c in contents):
            raise Violation(f"checkpoint {iteration} is made of parts of several histories: {contents}")
        self.markers[iteration] = dict(parts)

    def load(self, iteration: int, rank: int) -> Content | None:
        """A worker's part of a committed checkpoint; None if it cannot be read."""
        if self.failing_loads > 0:
            self.failing_loads -= 1
            return None
        return self.parts.get(self.markers.get(iteration, {}).get(rank, ""))

    def clean(self, committed: int, keep: int) -> None:
        """Delete what is older than the newest committed checkpoints, as far as commits are known."""
        kept = sorted(i for i in self.markers if i <= committed)[-keep:]
        for iteration in [i for i in self.markers if i < committed and i not in kept]:
            for path in self.markers.pop(iteration).values():
                self.parts.pop(path, None)
        for iteration in kept:
            named = set(self.markers[iteration].values())
            for path in [p for p in self.parts if p.startswith(f"{iteration}/") and p not in named]:
                del self.parts[path]


@dataclass(slots=True)
class Group:
    """A process group: formed once all ranks are there; whoever left or died is gone for good.

    In a joint replay, ``ready`` holds with what each of them begins.
    """

    ready: dict[int, Content] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    broken: bool = False
    mail: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)
