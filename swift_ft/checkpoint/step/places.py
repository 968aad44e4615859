"""Places of a script's variables, and what stands for some values there when they travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNSAVED = "swift_ft.unsaved"
"""In the place of a value that has changed and cannot be saved: what there is stays. With it are the words of
its trace."""
OF_EPOCH = "swift_ft.of_epoch"
"""Around a value that the script has set at the top of this epoch: only who lacks it is given it, .."""
AT_START = "swift_ft.at_start"
"""In the place of a value that is again the one of the start."""
ALIKE = "swift_ft.alike"
""".. unless it is the same on all replicas."""

OBJECT = "swift_ft.object"
"""The key of the path of one of the script's own objects: a variable may have another one by now."""

Place = tuple[str, str]
"""A path, and the name of a variable there. Variables of the functions that run the loop have their names."""

Saved = Mapping[str, Mapping[str, Any]]
"""Values by path and name."""

CELLS, FLAGS = "(cells)", "(requires_grad)"
BY_NAME = frozenset({CELLS, FLAGS})
"""Paths of places whose names lead on from a part of the state, as paths of others do."""


@dataclass(frozen=True)
class Arrived:
    """Values that come from elsewhere.

    Attributes:
        saved: by path and name.
        own: what each replica has for itself: it is not taken from another one.
        of_own: what the lost worker of this rank had of it.
        behind: those of ``own`` that are not of the iteration of the rest.
    """

    saved: Saved
    own: frozenset[Place]
    of_own: Saved = field(default_factory=dict)
    behind: frozenset[Place] = frozenset()


def is_object_of_script(value: Any) -> bool:
    """Whether it stands for one of the script's own objects."""
    return isinstance(value, dict) and OBJECT in value


def with_own(saved: Saved, own: frozenset[Place], of_own: Saved) -> tuple[Saved, frozenset[Place]]:
    """The values to take over, and the places that keep what is there."""
    taken = {path: dict(values) for path, values in saved.items()}
    given = {(path, name): value for path, values in of_own.items() for name, value in values.items()}
    for path, name in own & given.keys():
        taken.setdefault(path, {})[name] = given[path, name]
    return taken, own - given.keys()


def key_of(place: Place) -> str:
    """Its key among digests."""
    return "\n".join(place)


def place_of_key(key: str) -> Place:
    """The inverse of :func:`key_of`."""
    path, _, variable = key.partition("\n")
    return path, variable


def in_words(place: Place) -> str:
    """As the script would name it."""
    return ".".join(filter(None, place))
