"""The stacks of layers in a training state, and the layers that names lead to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.torch_adapters.layer_stack import LayerStack
from swift_ft.torch_core.model_state import plain_name


@dataclass(frozen=True, slots=True)
class Stack:
    """A LayerStack in the state, and what names of its layers begin with."""

    part: str
    prefix: str
    stack: LayerStack

    def layer_of(self, name: str) -> int | None:
        """The layer that has a tensor of this name in the part; None if it is in no layer of the stack."""
        found = (_number_after(prefix, name) for prefix in self._prefixes)
        return next((number for number in found if number is not None), None)

    @property
    def _prefixes(self) -> tuple[str, ...]:
        # Names of parameters lack the "module." of a wrapper; other names, and paths of variables, have it.
        return tuple(dict.fromkeys((self.prefix, self.prefix.removeprefix("module."))))

    def layer_at(self, path: str) -> int | None:
        """The layer that a path from the part leads to; None if it leads to none of the stack."""
        found = (_number_after(f"{self.part}.{prefix}", path) for prefix in self._prefixes)
        return next((number for number in found if number is not None), None)


def stacks_in(state: TrainingState) -> Iterator[Stack]:
    """All of them, within other modules, too."""
    for part, module in state.modules.items():
        for name, inner in module.named_modules():
            if isinstance(inner, LayerStack):
                yield Stack(part, plain_name(f"{name}.") if name else "", inner)


def _number_after(prefix: str, name: str) -> int | None:
    number = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
    return int(number) if number.isdigit() else None
