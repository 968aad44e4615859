"""Values of a script that change in place and are too large to be noted: no repeated step has them back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from swift_ft.checkpoint.step.kinds import CONTAINERS
from swift_ft.checkpoint.step.leaves import MOST_BYTES, fingerprint_of
from swift_ft.checkpoint.step.script import ScriptVariables
from swift_ft.checkpoint.step.traces import is_looked_into, trace_of


class LargeValues:
    """Compares the large tensors, arrays and containers of a script's own objects at two moments.

    Args:
        variables: finds those that a script can reach.
    """

    def __init__(self, variables: ScriptVariables) -> None:
        self._variables = variables
        self._noted: dict[str, tuple[Callable[[], Any], int]] = {}

    def note(self) -> None:
        """The first moment."""
        self._noted = {name: (_reference_to(value), self._fingerprint(value)) for name, value in self._now()}

    def changed(self) -> list[str]:
        """Names of those that are other ones in themselves now; not of variables that have another object."""
        return [
            name
            for name, value in self._now()
            if name in self._noted
            and self._noted[name][0]() is value
            and self._noted[name][1] != self._fingerprint(value)
        ]

    def _now(self) -> Iterator[tuple[str, Any]]:
        self._variables.look()
        found: list[tuple[str, Any, bool]] = [
            (f"{one.path}.{name}".lstrip("."), one.variables.get(name), one.module is not None)
            for one, name in self._variables.slots
        ]
        found += [(name, value, False) for (_, name), value in self._variables.of_loop().items()]
        for path, value, in_module in found:
            if isinstance(value, CONTAINERS):
                if id(value) in self._variables.unnoted or not is_looked_into(value):
                    yield path, value
                continue
            if isinstance(value, torch.Tensor):
                # Those in attributes of modules are watched as parameters are.
                if in_module or value.grad_fn is not None or self._variables.protected.has(value):
                    continue
            elif not isinstance(value, np.ndarray) or isinstance(value, np.memmap):
                continue
            if value.nbytes > MOST_BYTES:
                yield path, value

    def _fingerprint(self, value: Any) -> int:
        if isinstance(value, torch.Tensor | np.ndarray):
            return fingerprint_of(value)
        return trace_of(value, self._variables.protected.has).digest


def _reference_to(value: Any) -> Callable[[], Any]:
    """A weak one, where there is such a thing: large tensors must not live on."""
    return (lambda: value) if isinstance(value, CONTAINERS) else weakref.ref(value)
