"""Worlds: sets of workers with a layout of their own, and the change from one to the next. Pure.

    planned ──▶ workers of the next world start, and make their models, while the present one trains
            ──▶ all are prepared: the present world stops at one iteration, and offers its state
            ──▶ all have taken what they need: the next world is the present one
                └── whatever fails before that: the present world trains on

A world is what its workers agree on: machines by slot, the script with its arguments, the layout. All its
processes are its own. So nothing of the present world is touched before the next one has its state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from immutables import Map

from swift_ft.recovery.layout.change import Change as Forecast
from swift_ft.recovery.maps import Numbers
from swift_ft.recovery.values import replace


@dataclass(frozen=True, slots=True)
class World:
    """A set of workers that train together.

    Attributes:
        number: 0 for the first one; each one that was planned has another.
        machines: of each slot, when it was planned; empty for the first one.
        command: its script, or module, and the arguments; empty for those of the launchers.
        proof: that a member of the job has asked for the command.
        sources: the number of the world for which the program's files were read: 0 for the start of the run.
        plan: its layout, as its workers read it; empty if they find one by their number.
        since: iterations that were completed when it began.
        forecast: what the change to it was to cost and to bring; None if no policy asked for it.
        spent_ns: the time of all machines in the iterations before it, summed; 0 if that is unknown.
    """

    number: int = 0
    machines: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    proof: str = ""
    sources: int = 0
    plan: str = ""
    since: int = 0
    forecast: Forecast | None = None
    spent_ns: int = 0

    @property
    def has_own_program(self) -> bool:
        """Whether its script, or the arguments, are not those with which the run began."""
        return bool(self.command or self.sources)

    def begins_at(self, iteration: int) -> bool:
        """Whether it has taken over from another world once so many iterations were completed."""
        return bool(self.number) and self.since == iteration

    def spent_until(self, iteration: int, each_ns: int) -> int:
        """The time of all machines in the iterations of the whole training so far, summed. In nanoseconds.

        Those before this world count as its own do, if nothing is known about them.

        Args:
            iteration: completed iterations.
            each_ns: the time of all machines in an iteration of this world.
        """
        before_ns = self.spent_ns or self.since * each_ns
        return before_ns + max(0, iteration - self.since) * each_ns


@dataclass(frozen=True, slots=True)
class FullSize:
    """The size that a job had before losses made it smaller, to which it goes back once machines come.

    Attributes:
        machines: of each slot, empty for those that were lost.
        plan: its layout; empty if its workers find one by their number.
        shares: the parts in which workers hold the state: pipelines of a LayerStack, or shards.
        pipelines: of a LayerStack, that are replicas of each other: the ranks of each. Empty if there is one.
        layers: how many that has.
        microbatches: of all pipelines in an iteration; 0 if the script does not take them from a plan.
    """

    machines: tuple[str, ...]
    plan: str = ""
    shares: int = 1
    pipelines: tuple[tuple[int, ...], ...] = ()
    layers: int = 0
    microbatches: int = 0


class OfferedState(NamedTuple):
    """A state that is offered: see :class:`swift_ft.recovery.events.StateOffered`."""

    rank: int
    address: str
    machine: str
    digest: str


@dataclass(frozen=True, slots=True)
class Change:
    """The change to another world that is under way.

    Attributes:
        world: the next one.
        started_in: the generation with which it will begin. Any other change of the generation ends this one.
        prepared: its workers that wait for their state.
        offered: by rank in the present world, the states that are offered.
        taken: workers of the next world that have their state.
        held: after a loss, what each worker of the present world held, by rank, lost ones too: names of
            layers, or of parts. Empty for a change between two iterations.
        sources: after a loss, the workers whose states survivors offer, once all have reported.
        copies: by rank of these workers, the survivor in whose memory a copy of their state is; empty if
            survivors offer the states that they are in.
        full: the size to which the next world is to go back later; None if it is not to.
    """

    world: World
    started_in: int
    prepared: Numbers = field(default_factory=Map)
    offered: Map[int, OfferedState] = field(default_factory=Map)
    taken: Numbers = field(default_factory=Map)
    held: Map[int, tuple[str, ...]] = field(default_factory=Map)
    sources: tuple[int, ...] = ()
    copies: Map[int, int] = field(default_factory=Map)
    full: FullSize | None = None

    def owed_by(self, survivor: int) -> tuple[int, ...]:
        """The workers whose states a survivor of a loss has yet to offer."""
        owed = (rank for rank in self.sources if self.copies.get(rank, rank) == survivor)
        return tuple(rank for rank in owed if rank not in self.offered)

    def slot_of(self, machine: str) -> int | None:
        """The slot of a machine in the next world; None if it has none."""
        machines = self.world.machines
        return machines.index(machine) if machine in machines else None


@dataclass(frozen=True, slots=True)
class Worlds:
    """The present world, and the one that is to follow.

    Attributes:
        present: the one that trains.
        change: to the next one; None if none is under way.
        planned: the number of the last world that was planned.
        given_up: why the last change did not come about; empty if it did.
        declined: why no smaller world came of the present loss; empty if none was tried.
        full: the size that losses have taken from the job; None if they have not, or nobody wants it back.
    """

    present: World = World()
    change: Change | None = None
    planned: int = 0
    given_up: str = ""
    declined: str = ""
    full: FullSize | None = None


def without_change(worlds: Worlds, reason: str) -> Worlds:
    """The worlds without a change that was under way, if one was: it is given up for this reason."""
    if worlds.change is None:
        return worlds
    declined = reason if worlds.change.held else worlds.declined
    return replace(worlds, change=None, given_up=reason, declined=declined)


class NextTodo(StrEnum):
    """The order of an agent for workers of the next world on its machine."""

    NOTHING = "nothing"
    """There are none, or they are as they should be."""
    START = "start"
    """Start them beside those that train."""
    DROP = "drop"
    """End them: their world does not take over."""
    ADOPT = "adopt"
    """Their world has taken over: end the workers that trained until now."""


def next_todo(worlds: Worlds, machine: str, started: int | None) -> NextTodo:
    """The order of a machine's agent, which has started workers of the next world ``started``; None if none.

    It may start each world once: workers that end before they take over end the change.
    """
    change = worlds.change
    if started is not None and started == worlds.present.number:
        return NextTodo.ADOPT
    if started is not None and (change is None or change.world.number != started):
        return NextTodo.DROP
    if started is None and change is not None and change.slot_of(machine) is not None:
        return NextTodo.START
    return NextTodo.NOTHING
