"""The modules and parameters of a model, which are looked for again only when one of them is another one.

To walk through a model at each step takes several times as long as to ask whether anything has changed.

Private parts used (tested on torch 2.11 to 2.14): ``Module._modules`` and ``Module._parameters``, where a
module keeps what is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn


class ModuleTree:
    """The content of some modules.

    Args:
        roots: by name.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = roots
        # What was found, and where. It is held, so that nothing new can have the id() of what was there.
        self._modules: list[nn.Module] = []
        self._named: dict[str, nn.Parameter] = {}
        self._places: list[dict[str, Any]] = []
        self._found: list[int] = []

    def modules(self) -> Sequence[nn.Module]:
        """Each module once, the roots among them."""
        self._look()
        return self._modules

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Each parameter once, by its root's name and its own there: one dictionary until one is another."""
        self._look()
        return self._named

    def content(self) -> tuple[Sequence[nn.Module], dict[str, nn.Parameter]]:
        """The results of :meth:`modules` and :meth:`named_parameters`, for one look."""
        return self.modules(), self._named

    def _look(self) -> None:
        if self._modules and self._found == _ids(self._places):
            return
        self._modules = all_within(self._roots.values())
        names: dict[nn.Parameter, str] = {}
        for part, root in self._roots.items():
            for name, parameter in root.named_parameters():
                names.setdefault(parameter, f"{part}.{name.removeprefix('module.')}")
        self._named = {name: parameter for parameter, name in names.items()}
        self._places = [place for m in self._modules for place in (m._modules, m._parameters)]
        self._found = _ids(self._places)


def all_within(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Some modules and all that are inside of them, each once."""
    return [*dict.fromkeys(inner for module in modules for inner in module.modules())]


def _ids(places: Sequence[dict[str, Any]]) -> list[int]:
    """The number of things in each of these places, then the ``id`` of each thing."""
    return [*map(len, places), *map(id, chain.from_iterable(place.values() for place in places))]
