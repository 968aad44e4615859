"""The store of a simulated job, which outlives its processes: logs, checkpoints, and their state.

The content of a worker's state is a hash chain with one link per applied iteration. A link is made of the
iteration and of the history in which it first ran. Workers of one history have equal chains at equal
iterations; a state that skipped, repeated or mixed iterations has a chain that no other worker has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


class Violation(AssertionError):
    """The simulated job did something that must never happen."""


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a state: the number of completed iterations, and the chain of what was applied."""

    iteration: int
    chain: int


GENESIS = Content(0, 1)


def advance(content: Content, iteration: int, history: int) -> Content:
    """Apply one iteration of a history.

    Raises:
        Violation: if it is not the state's next iteration.
    """
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
    """Logs by rank, iteration and generation; parts of checkpoints by path; commit markers by iteration.

    Attributes:
        failing_loads: how many of the next loads fail.
        damaged: parts that are not what was saved, by path.
        logs_survive: logs survive their machine. Otherwise they are on its own disk, and can only be read
            while it answers.
    """

    logs: dict[int, dict[int, dict[int, Logged]]] = field(default_factory=dict)
    corrupt: set[tuple[int, int]] = field(default_factory=set)
    parts: dict[str, Content] = field(default_factory=dict)
    markers: dict[int, Mapping[int, str]] = field(default_factory=dict)
    failing_loads: int = 0
    damaged: set[str] = field(default_factory=set)
    logs_survive: bool = False

    def write_log(self, rank: int, generation: int, entries: Mapping[int, Logged]) -> None:
        """Store what a worker sent, by iteration."""
        log = self.logs.setdefault(rank, {})
        for iteration, entry in entries.items():
            log.setdefault(iteration, {})[generation] = entry
            self.corrupt.discard((rank, iteration))

    def read_log(self, rank: int, iteration: int, since_generation: int) -> Logged | str:
        """The messages that a worker sent in an iteration, or the reason why they cannot be read."""
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
        """New workers start, on an empty disk of their own."""
        for rank in () if self.logs_survive else ranks:
            self.logs.pop(rank, None)

    def drop_before(self, rank: int, iteration: int, generation: int) -> None:
        """Delete a worker's log of the iterations before this one, up to a generation."""
        log = self.logs.get(rank, {})
        for old in [i for i in log if i < iteration]:
            log[old] = {g: logged for g, logged in log[old].items() if g > generation}
            if not log[old]:
                del log[old]

    def drop_generations_before(self, rank: int, generation: int) -> None:
        """Delete a worker's log of the generations before this one."""
        for segments in self.logs.get(rank, {}).values():
            for old in [g for g in segments if g < generation]:
                del segments[old]

    def commit(self, iteration: int, parts: Mapping[int, str], world_size: int) -> None:
        """Write a checkpoint's marker, which names each worker's part.

        Raises:
            Violation: if parts are missing, or are not all of one history.
        """
        contents = {self.parts.get(path) for path in parts.values()}
        if any(newer > iteration for newer in self.markers):
            contents.discard(None)  # its writer was frozen for a while, and a newer checkpoint replaced it
        if len(parts) != world_size or None in contents:
            raise Violation(f"the marker of checkpoint {iteration} names parts that do not exist")
        if len(contents) > 1 or any(c is not None and c.iteration != iteration for c in contents):
            raise Violation(f"checkpoint {iteration} consists of parts of several histories: {contents}")
        self.markers[iteration] = dict(parts)

    def write_part(self, path: str, content: Content) -> None:
        """Store a worker's part of a checkpoint."""
        self.parts[path] = content
        self.damaged.discard(path)

    def is_damaged(self, iteration: int, rank: int) -> bool:
        """Whether a worker's part of a committed checkpoint is not what was saved."""
        return self._part_for(iteration, rank) in self.damaged

    def _part_for(self, iteration: int, rank: int) -> str:
        """The part that a worker loads, also one of a world with more workers than had saved it."""
        parts = self.markers.get(iteration, {})
        return parts.get(rank) or parts.get(rank % max(1, len(parts)), "")

    def check_kept(self, iterations: Iterable[int]) -> None:
        """Committed checkpoints that count are there, damaged or not.

        Raises:
            Violation: if one is not.
        """
        for iteration in iterations:
            parts = self.markers.get(iteration, {})
            if not parts or any(path not in self.parts for path in parts.values()):
                raise Violation(f"the checkpoint of iteration {iteration} counts, and is gone")

    def load(self, iteration: int, rank: int) -> Content | None:
        """A worker's part of a committed checkpoint; None if it cannot be read."""
        if self.failing_loads > 0:
            self.failing_loads -= 1
            return None
        return self.parts.get(self._part_for(iteration, rank))

    def clean(self, kept: Sequence[int], generation: int) -> None:
        """Keep only these checkpoints of those up to the last of them, and parts of later generations."""
        for iteration in {int(path.split("/")[0]) for path in self.parts}:
            parts = [path for path in self.parts if path.startswith(f"{iteration}/")]
            if iteration in kept:
                named = set(self.markers.get(iteration, {}).values())
                parts = [p for p in parts if named and p not in named and _generation(p) <= generation]
            elif iteration > kept[-1] or any(_generation(path) > generation for path in parts):
                continue
            else:
                self.markers.pop(iteration, None)
            for path in parts:
                del self.parts[path]


def _generation(path: str) -> int:
    """In which a part was saved; 0 in an earlier run."""
    name = path.rpartition(".g")[2]
    return int(name) if name.isdigit() else 0
