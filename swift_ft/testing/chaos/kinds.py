"""All kinds of faults of a campaign: what each needs, and whether this host has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swift_ft.errors import UsageError
from swift_ft.faults import Action
from swift_ft.faults.fault import OF_CHANGES, OF_FILES, OF_NETWORKS, OF_STORES
from swift_ft.host.networks import lacking
from swift_ft.testing.chaos.plans import WEIGHTS

_WORDS = {
    Action.KILL: "SIGKILL of a machine, a worker or an agent",
    Action.STOP: "SIGSTOP of a machine, a worker or an agent: silent, with open connections",
    Action.BREAK: "a worker's connections break, and no process dies",
    Action.FREEZE: "a thread of a worker holds the interpreter for some seconds",
    Action.SUSPEND: "a machine's processes stop for some seconds, as a suspended virtual machine",
    Action.SLOW: "a worker computes several times as slowly from then on",
    Action.CLOCK: "a worker's time.time() and time.time_ns() jump by a minute or a day, no other clock",
    Action.FLIP: "one bit of the newest finished file in the store is another one",
    Action.TRUNCATE: "the newest finished file in the store loses its second half",
    Action.VANISH: "the store is gone for some seconds, the whole folder",
    Action.UNWRITABLE: "all that is written to the store fails",
    Action.UNREADABLE: "all that is read from the store fails",
    Action.MISSING: "the store does not find what is there",
    Action.LAG: "each call of the store takes longer",
    Action.BUSY: "the store asks for fewer calls (503)",
    Action.DENIED: "the store refuses the credentials",
    Action.TORN: "half of what is written gets to the store, then the call fails",
    Action.FULL: "the store has no room",
    Action.READ_ONLY: "the store is mounted read-only",
    Action.UNPLUG: "a machine's network is cut, both ways, from all others or from one",
    Action.MUTE: "nothing that a machine sends arrives",
    Action.DEAF: "nothing that is sent to a machine arrives",
    Action.FLAP: "a machine's network is cut and back again every second",
    Action.THROTTLE: "a machine sends some megabits a second at most",
    Action.RELOAD: "a planned change: new processes on the same machines take the state over",
    Action.MOVE: "a planned change: a spare, or another machine, takes a machine's slot",
}
_GROUPS = {
    "store": OF_STORES | OF_FILES,
    "network": OF_NETWORKS,
    "change": OF_CHANGES,
}
"""Names that stand for several kinds."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of faults.

    Attributes:
        name: as a plan has it.
        meaning: in a line.
        missing: what it needs and this host lacks; empty if it can strike here.
        needs_networks: it strikes machines with networks of their own (``--networks``).
        by_default: it is drawn unless others are asked for.
    """

    name: str
    meaning: str
    missing: str
    needs_networks: bool
    by_default: bool


def kinds() -> list[Kind]:
    """All of them."""
    of_networks = lacking()
    return [
        Kind(
            action.value,
            words,
            missing=of_networks if action in OF_NETWORKS else "",
            needs_networks=action in OF_NETWORKS,
            by_default=action in WEIGHTS,
        )
        for action, words in _WORDS.items()
    ]


def weights_of(names: Sequence[str], *, networks: bool = False) -> dict[Action, int]:
    """The weights with which kinds are drawn.

    Args:
        names: of kinds; ``store``, ``network`` and ``change`` stand for several, ``all`` for all that there
            are here.
        networks: the machines have networks of their own.

    Raises:
        UsageError: there is no such kind, or not here.
    """
    found: dict[Action, int] = {}
    known = {kind.name: kind for kind in kinds()}
    for name in (one for group in names for one in sorted(_GROUPS.get(group, {group}))):
        if name == "all":
            there = [Action(kind.name) for kind in known.values() if not kind.missing]
            there = [action for action in there if networks or action not in OF_NETWORKS]
            found.update((action, WEIGHTS.get(action, 1)) for action in there)
        elif name not in known:
            raise UsageError(f"there is no fault {name!r}: --list-faults shows all")
        elif known[name].missing:
            raise UsageError(f"{name} needs {known[name].missing}, which this host lacks")
        elif name in OF_NETWORKS and not networks:
            raise UsageError(f"{name} needs machines with networks of their own: add --networks")
        else:
            found[Action(name)] = 1
    return found
