"""Values of a script that change in place and are too large to be noted: no repeated step has them back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash

from swift_ft.checkpoint.step.leaves import MOST_BYTES
from swift_ft.checkpoint.step.script import ScriptVariables
from swift_ft.torch_core.tensors import version_of

_Large: TypeAlias = torch.Tensor | np.ndarray[Any, Any]


class LargeValues:
    """Compares the large tensors and arrays of a script's own objects at two moments.

    Args:
        variables: finds those that a script can reach.
    """

    def __init__(self, variables: ScriptVariables) -> None:
        self._variables = variables
        self._noted: dict[str, tuple[weakref.ref[Any], int]] = {}

    def note(self) -> None:
        """The first moment."""
        self._noted = {name: (weakref.ref(value), _fingerprint(value)) for name, value in self._now()}

    def changed(self) -> list[str]:
        """Names of those that are other ones in themselves now; not of variables that have another object."""
        return [
            name
            for name, value in self._now()
            if name in self._noted
            and self._noted[name][0]() is value
            and self._noted[name][1] != _fingerprint(value)
        ]

    def _now(self) -> Iterator[tuple[str, _Large]]:
        self._variables.look()
        for namespace, name in self._variables.slots:
            value: Any = namespace.variables.get(name)
            if isinstance(value, torch.Tensor):
                # Those in attributes of modules are watched as parameters are.
                if (
                    namespace.module is not None
                    or value.grad_fn is not None
                    or self._variables.is_protected(value)
                ):
                    continue
            elif not isinstance(value, np.ndarray) or isinstance(value, np.memmap):
                continue
            if value.nbytes > MOST_BYTES:
                yield f"{namespace.path}.{name}".lstrip("."), value


def _fingerprint(value: _Large) -> int:
    if isinstance(value, torch.Tensor):
        return version_of(value)
    return xxhash.xxh3_64_intdigest(value.tobytes())
