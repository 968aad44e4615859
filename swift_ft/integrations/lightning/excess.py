"""Variables that are too large to be given to all other workers in each step, such as an epoch's predictions.

A survivor still has them: what an interrupted step has added to a list is cut off again. A replacement has
none, and says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from swift_ft.integrations.lightning.plain_text import lengths, plain_variables, to_text

_logger = logging.getLogger(__name__)

Owners = Mapping[str, Mapping[str, Any]]
"""Objects with variables, by kind and name."""


class Excess:
    """The variables that do not travel, until they are shorter again."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[str, str, str], int] = {}  # elements that each had as it became too large

    def variables(self, kind: str, name: str, owner: object) -> dict[str, Any]:
        """The plain variables of an object; of those that are too large, the lengths."""
        too_large = {
            key
            for key, value in vars(owner).items()
            if _size(value) >= self._sizes.get((kind, name, key), math.inf)
        }
        return plain_variables(owner, too_large)

    def leave_out_largest(self, forms: Mapping[str, Any], owners: Owners) -> bool:
        """From now on the largest variable does not travel. False if there is none to leave out.

        Args:
            forms: by kind, name and variable, as :meth:`variables` has given them.
            owners: with these variables.
        """
        sizes = {
            (kind, name, key): len(to_text(form))
            for kind, named in owners.items()
            for name, owner in named.items()
            for key, form in forms[kind][name].items()
            if form != lengths(vars(owner)[key])
        }
        if not sizes:
            return False
        place = kind, name, key = max(sizes, key=sizes.__getitem__)
        if place not in self._sizes:
            what = ".".join(filter(None, place))
            _logger.warning(
                "%s takes %s bytes, and that is too much to give to all other workers in each step: after a "
                "loss, the replacement will not have it; compute such metrics in a validation",
                what,
                f"{sizes[place]:,}",
                extra={"event": "variable_too_large", "variable": what, "bytes": sizes[place]},
            )
        self._sizes[place] = _size(vars(owners[kind][name])[key])
        return True

    def say_missing(self, names: list[str]) -> None:
        """Name the variables that the lost worker had and this one has not."""
        if names:
            _logger.warning(
                "%s was too large to be given to other workers, and is not here any more: what the script "
                "makes of it in this epoch lacks samples",
                ", ".join(names),
                extra={"event": "variables_missing", "variables": names},
            )


def _size(value: Any) -> int:
    """The elements of a list, and of all in a dictionary."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return len(value) if isinstance(value, list) else 0
