"""The machines of a job: in slots, as spares, lost and refused. A part of its state. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from immutables import Map

from swift_ft.recovery.maps import Numbers, without
from swift_ft.recovery.values import replace


@dataclass(frozen=True, slots=True)
class Spare:
    """A machine without a slot.

    Attributes:
        arrival: its number among all machines that ever joined; the earliest spare goes first.
        preferred_slot: the slot that it would rather fill; None for any.
        domain: its failure domain; empty if it is one of its own.
    """

    arrival: int
    preferred_slot: int | None
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of one machine that count.

    Attributes:
        count: how often it was lost, without the losses that are forgotten.
        domain: its failure domain; empty if it is one of its own.
        commits: checkpoints in which it took part since the first of them, or since one was forgotten last.
    """

    count: int
    domain: str = ""
    commits: int = 0


OFTEN = 3
"""So many losses of one machine come too often for chance."""
OFTEN_EACH = 2
"""And so many of each of several machines of one failure domain: it is the rack."""
COMMITS_FOR_A_LOSS = 100
"""Committed checkpoints in which a machine takes part, for which one of its losses is forgotten.

A loss costs the others the iterations since the last checkpoint at most. Who is lost more seldom than this
costs them a hundredth of their time, and in a long run every machine is lost a few times by chance.
"""


def base_of(machine: str) -> str:
    """The prefix of all names of a machine: it joins as ``m-1.0``, and after a loss as ``m-1.1``."""
    # A lost name is never a member again, so a machine comes back under another one (decision 8).
    return machine.rpartition(".")[0] or machine


@dataclass(frozen=True, slots=True)
class Membership:
    """The machine of each slot. A machine is a member, a spare, fenced, or refused: never two of these.

    The one exception: a machine that is lost after its script has exited stays a member, and is fenced, too.
    """

    members: Map[int, str] = field(default_factory=Map)
    """The machine of each slot. An empty slot is missing here."""
    slots: Map[str, int] = field(default_factory=Map)
    """The inverse of ``members``."""
    started_in: Map[int, int] = field(default_factory=Map)
    """By slot, the generation in which its workers were started: 0 for never, and at most the current one."""
    domains: Map[int, str] = field(default_factory=Map)
    """By slot, the failure domain of the machine that fills it, or filled it last; empty without a name."""
    spares: Map[str, Spare] = field(default_factory=Map)
    """Machines that wait for a slot."""
    arrivals: int = 0
    """Machines that ever joined. Never decreases."""
    addresses: Map[str, str] = field(default_factory=Map)
    """The address (``host:port``) at which each member and spare is watched. Fenced machines have none."""
    fenced: Map[str, None] = field(default_factory=Map)
    """Lost machines. They return under another name, or not at all."""
    left: Map[str, None] = field(default_factory=Map)
    """Those of them that were asked to leave: they do not return."""
    refused: Map[str, str] = field(default_factory=Map)
    """Machines that differ from the job, or are not healthy, with the reason. They never return."""
    identities: Map[str, str] = field(default_factory=Map)
    """By :func:`base_of` its names: a machine's identity, if it has said one. Never forgotten."""
    bearers: Map[str, str] = field(default_factory=Map)
    """By identity: the machine that has joined with it last."""
    silenced: Map[str, int] = field(default_factory=Map)
    """By :meth:`identity_of` a machine: how often others have lost sight of it. Forgotten once it is a member
    when a checkpoint is committed."""
    losses: Map[str, Losses] = field(default_factory=Map)
    """By :meth:`identity_of` a machine: how often it was lost by its own fault (`COMMITS_FOR_A_LOSS`)."""
    silent: Map[str, None] = field(default_factory=Map)
    """By machine, under all its names: those of which nothing was heard, until they join again."""
    draining: Map[str, int] = field(default_factory=Map)
    """Machines that were asked to leave: the last committed checkpoint at that time, -1 for none."""
    hosts: Map[str, str] = field(default_factory=Map)
    """By guest, also by one that has left: the machine that it stands on (`recovery/guests.py`)."""
    pace: Map[str, int] = field(default_factory=Map)
    """By device (`recovery/devices.py`), how long a slow one takes, in thousandths of what others take."""
    declined: Map[str, str] = field(default_factory=Map)
    """Machines that take no guest for the present loss, with the reason."""
    requested: Map[int, str] = field(default_factory=Map)
    """By slot without a machine of its own: the machine that has asked the scheduler for one."""
    asked_again: int = 0
    """Requests that came to nothing, as the machine was refused, since one was fulfilled."""
    exited: Numbers = field(default_factory=Map)
    """Slots whose scripts have all ended with exit code 0."""
    ended: Map[int, int | None] = field(default_factory=Map)
    """By rank: iterations that a worker had completed whose script has ended with exit code 0."""
    recorded: Map[int, int] = field(default_factory=Map)
    """By rank: the iteration before which a worker that is lost has given its records. Never decreases."""
    restart_all: bool = False
    """The next generation restarts all processes, not only those of empty slots."""

    @property
    def first(self) -> str | None:
        """The machine in the lowest slot that is filled; None if none is."""
        # Persistent maps have no stable order (decision 4).
        return self.members[min(self.members)] if self.members else None

    @property
    def by_slot(self) -> tuple[str, ...]:
        """All members, in order of their slots. Costs the size of the job."""
        return tuple(machine for _, machine in sorted(self.members.items()))

    def knows(self, machine: str) -> bool:
        """Whether a machine of this name has joined before."""
        # Fenced and refused names count, too: neither may ever join again (decision 8).
        return any(machine in of for of in (self.slots, self.spares, self.fenced, self.refused))

    def silence(self, machine: str) -> Membership:
        """Note that others have lost sight of a machine."""
        identity = self.identity_of(machine)
        return replace(self, silenced=self.silenced.set(identity, self.silenced.get(identity, 0) + 1))

    def fell_silent(self, machine: str) -> Membership:
        """Note that nothing was heard of a machine. If it ever joins again, it was only frozen."""
        return replace(self, silent=self.silent.set(base_of(machine), None))

    def identity_of(self, machine: str) -> str:
        """A word for a machine's hardware: the same under all names, also of another launcher there."""
        base = base_of(machine)
        return self.identities.get(base, base)

    def identify(self, machine: str, said: str) -> Membership:
        """Note what a machine that joins says of its identity; nothing if that is empty.

        Two that are there at the same time are two machines, whatever they say: the second one gets a number.
        """
        if not said:
            return self
        base = base_of(machine)
        identity, number = self.identities.get(base, said), 1
        while base not in self.identities and self._has_bearer(identity):
            number += 1
            identity = f"{said} ({number})"
        return replace(
            self,
            identities=self.identities.set(base, identity),
            bearers=self.bearers.set(identity, machine),
        )

    def _has_bearer(self, identity: str) -> bool:
        bearer = self.bearers.get(identity, "")
        return bearer in self.slots or bearer in self.spares

    def note_loss(self, machine: str) -> Membership:
        """Note that a member, or a spare, was lost by its own fault."""
        spare, slot = self.spares.get(machine), self.slots.get(machine, -1)
        domain = spare.domain if spare is not None else self.domains.get(slot, "")
        identity = self.identity_of(machine)
        before = self.losses.get(identity, Losses(0))
        after = Losses(before.count + 1, domain, before.commits)
        return replace(self, losses=self.losses.set(identity, after))

    def forget_losses(self, members: Set[str]) -> Membership:
        """Note that members have committed a checkpoint, for which old losses of theirs are forgotten.

        Args:
            members: their identities.
        """
        losses = self.losses.mutate()
        for identity, before in self.losses.items():
            if identity not in members:
                continue
            if before.commits + 1 < COMMITS_FOR_A_LOSS:
                losses[identity] = replace(before, commits=before.commits + 1)
            elif before.count > 1:
                losses[identity] = replace(before, count=before.count - 1, commits=0)
            else:
                del losses[identity]
        return replace(self, losses=losses.finish())

    def often_lost(self, machine: str, domain: str = "") -> int:
        """The losses of a machine that come too often for chance: its own, or those of several of its domain.

        Args:
            machine: under any of its names.
            domain: its failure domain; empty if it is one of its own.
        """
        own = self.losses.get(self.identity_of(machine), Losses(0)).count
        if not domain:
            return own if own >= OFTEN else 0
        of_domain = [losses.count for losses in self.losses.values() if losses.domain == domain]
        is_domain = sum(count >= OFTEN_EACH for count in of_domain) > 1
        return sum(of_domain) if is_domain else own if own >= OFTEN else 0

    def waiting(self) -> list[str]:
        """The spares, the earliest first, those that are lost often at the end."""

        def turn(machine: str) -> tuple[int, int]:
            spare = self.spares[machine]
            return self.often_lost(machine, spare.domain), spare.arrival

        return sorted(self.spares, key=turn)

    def own_spares(self) -> list[str]:
        """Those of :meth:`waiting`, without guests and without those that were asked to leave."""
        return [spare for spare in self.waiting() if spare not in self.hosts and spare not in self.draining]

    def without(self, machine: str) -> Membership:
        """The membership once a machine's slot is empty."""
        # Its devices go with it: the next machine in this slot is judged by its own work (decision 21).
        slow = [device for device in self.pace if device.rpartition("/")[0] == machine]
        return replace(
            self,
            members=self.members.delete(self.slots[machine]),
            slots=self.slots.delete(machine),
            pace=without(self.pace, slow),
        )
