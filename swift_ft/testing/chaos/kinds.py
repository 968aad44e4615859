"""All kinds of faults of a campaign: what each needs, and whether this host has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swift_ft.errors import UsageError
from swift_ft.faults import Action
from swift_ft.testing.chaos.plans import WEIGHTS

_WORDS = {
    Action.KILL: "SIGKILL of a machine, a worker or an agent",
    Action.STOP: "SIGSTOP of a machine, a worker or an agent: silent, with open connections",
    Action.BREAK: "a worker's connections break, and no process dies",
    Action.FREEZE: "a thread of a worker holds the interpreter for some seconds",
    Action.SUSPEND: "a machine's processes stop for some seconds, as a suspended virtual machine",
    Action.SLOW: "a worker computes several times as slowly from then on",
    Action.CLOCK: "a worker's clock jumps by a minute or a day",
    Action.FLIP: "one bit of the newest file in the store is another one",
    Action.TRUNCATE: "the newest file in the store loses its second half",
    Action.VANISH: "the store is gone for some seconds",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of faults.

    Attributes:
        name: as a plan has it.
        meaning: in a line.
        missing: what it needs and this host lacks; empty if it can strike here.
        needs_root: it is for root only.
        by_default: it is drawn unless others are asked for.
    """

    name: str
    meaning: str
    missing: str
    needs_root: bool
    by_default: bool


def kinds() -> list[Kind]:
    """All of them."""
    return [
        Kind(action.value, words, missing="", needs_root=False, by_default=action in WEIGHTS)
        for action, words in _WORDS.items()
    ]


def weights_of(names: Sequence[str]) -> dict[Action, int]:
    """The weights with which kinds are drawn; ``all`` stands for all that there are here.

    Raises:
        UsageError: there is no such kind.
    """
    found: dict[Action, int] = {}
    known = {kind.name: kind for kind in kinds()}
    for name in names:
        if name == "all":
            found.update((Action(kind.name), 1) for kind in known.values() if not kind.missing)
        elif name not in known:
            raise UsageError(f"there is no fault {name!r}: --list-faults shows all")
        elif known[name].missing:
            raise UsageError(f"{name} needs {known[name].missing}, which this host lacks")
        else:
            found[Action(name)] = 1
    return found
