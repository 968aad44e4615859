"""Values that change, and to which nothing leads by a way that another process would have, too.

A step puts back what only a set holds. A replacement, which has a set of its own, cannot tell whose value is
whose: it is named in the first steps.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

from swift_ft.checkpoint.step.namespaces import MISSING
from swift_ft.checkpoint.step.reach import content_of
from swift_ft.checkpoint.step.script import ScriptVariables
from swift_ft.checkpoint.step.traces import Trace, trace_of
from swift_ft.checkpoint.step.unordered import NAMELESS, in_words
from swift_ft.units import shortened

_logger = logging.getLogger(__name__)


class NamelessValues:
    """Compares them with those of the step before.

    Args:
        variables: finds what a script can reach.
    """

    def __init__(self, variables: ScriptVariables) -> None:
        self._variables = variables
        # By the id() of what has it, which is not held, and the name of a variable.
        self._before: dict[tuple[int, str], tuple[weakref.ref[Any] | None, Trace]] = {}
        self._told: set[str] = set()

    def check(self) -> None:
        """A step begins. Call it after a look of the variables."""
        found: dict[tuple[int, str], tuple[weakref.ref[Any] | None, Trace]] = {}
        new = set[str]()
        for path, owner, name, value in self._values():
            place, now = (id(owner), name), trace_of(value, self._variables.protected.has)
            reference, before = self._before.get(place, (None, now))
            is_same = reference is None or reference() is owner
            if is_same and before != now:
                new.add(in_words(f"{path}.{name}" if name else path))
            found[place] = _reference_to(owner), now
        self._before = found
        if names := sorted(new - self._told):
            self._told.update(names)
            _logger.warning(
                "%s: steps change this, and only a set leads there, or a dictionary with keys that are "
                "others in each process. It goes back with a step, but a replacement cannot tell which "
                "object is which, and has the values of its own script: let a list, an attribute or a "
                "dictionary by names hold these objects as well, before the first step",
                shortened(names),
                extra={"event": "nameless_values_change", "variables": names},
            )

    def _values(self) -> Iterator[tuple[str, Any, str, Any]]:
        """Each with its path, and what it is in."""
        for namespace, name in self._variables.slots:
            if NAMELESS in namespace.path:
                yield namespace.path, namespace.owner, name, namespace.variables.get(name, MISSING)
        for path, cell in self._variables.cells:
            if NAMELESS in path:
                yield path, cell, "", content_of(cell)
        for path, value in self._variables.nameless_leaves:
            yield path, value, "", value


def _reference_to(owner: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(owner)
    except TypeError:  # of a class that allows none
        return None
