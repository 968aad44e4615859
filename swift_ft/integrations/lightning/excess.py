"""Variables that are too large to be given to all other workers in each step, such as an epoch's predictions.

A survivor still has them: what an interrupted step has added to a list is cut off again. Who cannot do that,
as a replacement that has none, says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from swift_ft.integrations.lightning.plain_text import is_measure, measured, plain_variables, to_text

_logger = logging.getLogger(__name__)

Owners = Mapping[str, Mapping[str, Any]]
"""Objects with variables, by kind and name."""


class Excess:
    """The variables that do not travel, until less is in them again."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[str, str, str], int] = {}  # values in each as it became too large

    def variables(self, kind: str, name: str, owner: object) -> dict[str, Any]:
        """The plain variables of an object; of those that are too large, what tells them from later ones."""
        found = {key: value for key, value in vars(owner).items() if (kind, name, key) in self._sizes}
        forms = {key: measured(value) for key, value in found.items()}
        too_large = {key: form for key, (form, size) in forms.items() if size >= self._sizes[kind, name, key]}
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
            if not is_measure(form)
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
        _, self._sizes[place] = measured(vars(owners[kind][name])[key])
        return True

    def say_missing(self, names: list[str]) -> None:
        """Name the variables that the lost worker had and this one has not."""
        if names:
            _logger.warning(
                "%s was too large to be given to other workers, and is not here as it was: what the script "
                "makes of it in this epoch lacks samples, or has some twice",
                ", ".join(names),
                extra={"event": "variables_missing", "variables": names},
            )
