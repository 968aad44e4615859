"""The policy of ``swift-run --policy``: changes to other worlds that pay, and when they do. Pure.

Others take the slots of machines that leave at once, if others wait, and so do machines that come for those
that losses have taken from the job (`recovery/regrowth.py`). All else waits as one who rents skis
(`recovery/layout/change.py`): until the time that was lost by waiting is what the change costs. So machines
that come and go cost nothing. And each change, or try, doubles the rest after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from swift_ft.recovery.devices import AS_OTHERS
from swift_ft.recovery.job_state import State
from swift_ft.recovery.layout.change import Change
from swift_ft.units import counted

_REST = 8
"""Iterations without a change after the first one. Each further one doubles them."""
_MOST_REST = 512
_HOUR_NS = 3600 * 10**9
_LEAST_GAIN = 20
"""An iteration must become shorter by one part in so many: less is noise."""


class Kind(StrEnum):
    """A reason to change."""

    LEAVE = "leave"
    """A machine was asked to leave."""
    RETURN = "return"
    """Machines have come for some that losses have taken."""
    GROW = "grow"
    """Machines wait that could train, too."""
    SHRINK = "shrink"
    """Fewer machines are faster than some that run the workers of others, too."""
    REPLACE = "replace"
    """A machine is slower than others, or is missing, and another one waits."""


@dataclass(frozen=True, slots=True)
class Member:
    """The machine of a slot.

    Attributes:
        machine: its name.
        guest: it stands on another machine's hardware.
        leaving: it was asked to leave.
        pace: how long its slowest device takes, in thousandths of what others take.
    """

    machine: str
    guest: bool = False
    leaving: bool = False
    pace: int = AS_OTHERS


@dataclass(frozen=True, slots=True)
class Waiting:
    """A machine of its own that waits without a slot and stays.

    Attributes:
        machine: its name.
        since: iterations that were completed when it was seen first.
    """

    machine: str
    since: int


@dataclass(frozen=True, slots=True)
class Price:
    """Prices of machines, and the most that training may cost. In any currency, the same for both.

    Attributes:
        an_hour: one machine's.
        most: for all machines, from the first iteration to the last.
    """

    an_hour: float
    most: float

    def of(self, machine_ns: int) -> float:
        """The price of some time of one machine, in nanoseconds."""
        return self.an_hour * machine_ns / _HOUR_NS


@dataclass(frozen=True, slots=True)
class Limits:
    """The worlds that a policy may choose.

    Attributes:
        least: the fewest machines.
        most: the most; None for any number.
        price: what they may cost; None for any price.
        only_returns: nothing but losses is made good: no policy was asked for.
    """

    least: int = 1
    most: int | None = None
    price: Price | None = None
    only_returns: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """The changes so far.

    Attributes:
        planned: how many were planned, whatever came of them.
        since: iterations that were completed when all began to train as they do now.
        given_up: iterations that were completed when the last change was given up; None if it was not.
    """

    planned: int = 0
    since: int = 0
    given_up: int | None = None

    @property
    def rest(self) -> int:
        """Iterations without a change after the last one."""
        return min(_REST << min(max(0, self.planned - 1), 16), _MOST_REST)


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a decision is made of. Times are nanoseconds.

    Attributes:
        iteration: completed iterations.
        left: iterations to come; None if that is unknown.
        members: by slot.
        spares: the earliest first.
        now_ns: time of an iteration.
        forecast: times of an iteration with other numbers of machines, and with as many, all of them with
            hardware of their own, and none of them slow: as pairs. A number that is missing cannot be.
        cost_ns: how long training stands still for a change.
        past: the changes so far.
        limits: which worlds may be chosen.
        spent_ns: the time of all machines in the iterations so far, summed.
        grown: the machines of the larger world that is possible after losses, by slot; empty for none.
    """

    iteration: int
    left: int | None
    members: tuple[Member, ...]
    spares: tuple[Waiting, ...]
    now_ns: int
    forecast: tuple[tuple[int, int], ...]
    cost_ns: int
    past: Past = Past()
    limits: Limits = Limits()
    spent_ns: int = 0
    grown: tuple[str, ...] = ()

    @property
    def machines(self) -> int:
        """The number of those that train. A guest stands on the hardware of one of them."""
        return sum(not member.guest for member in self.members)

    @property
    def now_machine_ns(self) -> int:
        """The time of all machines in an iteration, summed."""
        return self.machines * self.now_ns


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change that pays.

    Attributes:
        kind: why.
        machines: of the next world, by slot.
        forecast: what it costs and brings.
        reason: in words.
        price: of the whole training with it; None if no price is known, or not how long it lasts.
    """

    kind: Kind
    machines: tuple[str, ...]
    forecast: Change
    reason: str
    price: float | None = None


@dataclass(frozen=True, slots=True)
class Stay:
    """No change pays now.

    Attributes:
        reason: in words.
        too_dear: one would pay, but for its price.
    """

    reason: str
    too_dear: bool = False


@dataclass(frozen=True, slots=True)
class _Option:
    """A world that is possible, and the iteration since which it is."""

    kind: Kind
    machines: tuple[str, ...]
    change: Change
    since: int


def decide(facts: Facts) -> Proposal | Stay:
    """The change to make now, or why none pays."""
    past = facts.past
    if past.given_up is not None and facts.iteration < (until := past.given_up + past.rest):
        return Stay(f"the last change was given up: no other before iteration {until}")
    found = _return(facts)
    if isinstance(found, Proposal) or facts.limits.only_returns:
        return found
    other = _leave(facts) if any(member.leaving for member in facts.members) else _other(facts)
    return found if found.too_dear and not isinstance(other, Proposal) else other


def _return(facts: Facts) -> Proposal | Stay:
    """Make losses good at once, as a machine that comes for a guest does."""
    if not (machines := facts.grown):
        return Stay("no machine waits that a loss has left room for")
    limits = facts.limits
    if not limits.least <= len(machines) <= (limits.most or len(machines)):
        return Stay("machines have come for lost ones, and the limits do not allow as many")
    if facts.left is not None and facts.left * facts.now_ns <= facts.cost_ns:
        return Stay("machines have come for lost ones, and the training ends soon")
    # Where nobody knows how long an iteration takes then, it counts as long as now.
    after_ns = dict(facts.forecast).get(len(machines), facts.now_ns)
    change = Change(facts.now_ns, after_ns, facts.cost_ns)
    option = _Option(Kind.RETURN, machines, change, facts.past.since)
    reason = f"machines have come for lost ones: {len(machines)} train then{_costs(facts, option)}"
    if not _is_affordable(facts, option):
        return Stay(reason, too_dear=True)
    return Proposal(Kind.RETURN, machines, change, reason, _price(facts, option))


def _other(facts: Facts) -> Proposal | Stay:
    """The change that pays best, once it has waited."""
    past = facts.past
    options = list(_options(facts))
    if not options:
        return Stay("no other machines can train, or none that the limits allow")
    if past.planned and facts.iteration < (until := past.since + past.rest):
        return Stay(f"all changed at iteration {past.since}: no other change before iteration {until}")
    affordable = [option for option in options if _is_affordable(facts, option)]
    best = max(affordable or options, key=lambda option: (option.change.gain_ns, -len(option.machines)))
    change = best.change
    if change.gain_ns * _LEAST_GAIN < change.before_ns:
        return Stay(f"{_times(best)}: too little gain")
    pays = f"{_times(best)}: it pays after {change.pays_after} iterations"
    if facts.left is not None and not change.pays_within(facts.left):
        return Stay(f"{pays}, and {facts.left} are left")
    if not change.is_due(waited := facts.iteration - best.since):
        return Stay(f"{pays}, possible for {waited}")
    if not affordable:
        return Stay(f"{_times(best)}{_costs(facts, best)}", too_dear=True)
    reason = f"{_WHY[best.kind]}: {_times(best)}{_costs(facts, best)}"
    return Proposal(best.kind, best.machines, change, reason, _price(facts, best))


_WHY = {
    Kind.GROW: "machines wait",
    Kind.SHRINK: "machines run the workers of others, too",
    Kind.REPLACE: "a machine that waits can take a slot",
}


def _times(option: _Option) -> str:
    before, after = option.change.before_ns / 1e6, option.change.after_ns / 1e6
    return (
        f"an iteration on {counted(len(option.machines), 'machine')} takes {after:.4g} ms, not {before:.4g}"
    )


def _is_affordable(facts: Facts, option: _Option) -> bool:
    """Whether a world is within the price. One that costs at most what the present one does always is."""
    if (limit := facts.limits.price) is None or _iteration_of(option) <= facts.now_machine_ns:
        return True
    price = _price(facts, option)
    return price is not None and price <= limit.most


def _iteration_of(option: _Option) -> int:
    """The time of all machines in an iteration, summed. In nanoseconds."""
    return len(option.machines) * option.change.after_ns


def _price(facts: Facts, option: _Option) -> float | None:
    """The price of all iterations, those that are over included, and of the change; None if unknown."""
    if facts.limits.price is None or facts.left is None:
        return None
    # Those of the next world are there while the present ones stand still.
    change_ns = max(facts.machines, len(option.machines)) * facts.cost_ns
    return facts.limits.price.of(facts.spent_ns + change_ns + facts.left * _iteration_of(option))


def _costs(facts: Facts, option: _Option) -> str:
    """The price in words, after the times of an option. Empty if there is no limit."""
    if (limit := facts.limits.price) is None:
        return ""
    if (price := _price(facts, option)) is None:
        return "; nobody knows how long training lasts, so an iteration must not become dearer"
    return f"; training costs {price:.6g} in all then, and may cost {limit.most:.6g}"


def _leave(facts: Facts) -> Proposal | Stay:
    """Fill the slots of those that were asked to leave. It gains nothing but that they may go."""
    leaving = [member.machine for member in facts.members if member.leaving]
    if any(member.guest for member in facts.members):
        return Stay("a machine leaves, and others run the workers of a lost one: it hands over as it can")
    machines = _filled(facts, frozenset(leaving))
    if machines is None:
        return Stay("a machine leaves, and no other waits to take its slot")
    change = Change(facts.now_ns, facts.now_ns, facts.cost_ns)
    if facts.left is not None and facts.left * facts.now_ns <= facts.cost_ns:
        return Stay("a machine leaves, and the training ends soon")
    return Proposal(Kind.LEAVE, machines, change, f"{' and '.join(leaving)} was asked to leave")


def _options(facts: Facts) -> Iterator[_Option]:
    """All worlds that are faster for one of the reasons, and within the limits."""
    present = tuple(member.machine for member in facts.members)
    guests = frozenset(member.machine for member in facts.members if member.guest)
    slow = frozenset(member.machine for member in facts.members if member.pace > AS_OTHERS)
    forecast = dict(facts.forecast)
    for gone in {guests, guests | slow}:
        if gone and (machines := _filled(facts, gone)) is not None:
            yield from _option(facts, Kind.REPLACE, machines, forecast)
        own = tuple(machine for machine in present if machine not in gone)
        # Slow ones stay where nothing takes their place: they compute, too.
        if gone == guests and guests and own:
            yield from _option(facts, Kind.SHRINK, own, forecast)
        there = (*own, *(spare.machine for spare in facts.spares))
        for count in range(len(present) + 1, len(there) + 1):
            yield from _option(facts, Kind.GROW, there[:count], forecast)


def _option(
    facts: Facts, kind: Kind, machines: tuple[str, ...], forecast: dict[int, int]
) -> Iterator[_Option]:
    count, limits = len(machines), facts.limits
    most = count if limits.most is None else limits.most
    if count not in forecast or not limits.least <= count <= most:
        return
    paces = {member.machine: member.pace for member in facts.members}
    slowest = max(paces.get(machine, AS_OTHERS) for machine in machines)
    after_ns = forecast[count] * max(AS_OTHERS, slowest) // AS_OTHERS
    arrived = [spare.since for spare in facts.spares if spare.machine in machines]
    since = max([facts.past.since, *arrived])
    yield _Option(kind, machines, Change(facts.now_ns, after_ns, facts.cost_ns), since)


def _filled(facts: Facts, gone: frozenset[str]) -> tuple[str, ...] | None:
    """As many machines as now, with those that wait in the place of some; None if too few wait."""
    if len(facts.spares) < len(gone):
        return None
    waiting = iter(facts.spares)
    return tuple(next(waiting).machine if m.machine in gone else m.machine for m in facts.members)


def members_of(state: State) -> tuple[Member, ...]:
    """The machines of a job in which no slot is empty."""
    membership = state.membership
    pace: dict[str, int] = {}
    for device, permille in membership.pace.items():
        machine = device.rpartition("/")[0]
        pace[machine] = max(pace.get(machine, AS_OTHERS), permille)
    return tuple(
        Member(
            machine,
            guest=machine in membership.hosts,
            leaving=machine in membership.draining and machine not in membership.hosts,
            pace=pace.get(membership.hosts.get(machine, machine), AS_OTHERS),
        )
        for machine in membership.by_slot
    )


def spares_of(state: State) -> tuple[str, ...]:
    """The machines of their own that wait and stay, the earliest first."""
    membership = state.membership
    waiting = (machine for machine in membership.waiting() if machine not in membership.hosts)
    return tuple(machine for machine in waiting if machine not in membership.draining)
