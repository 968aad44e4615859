"""Evidence of one computation of a step: a digest of each tensor that it gave, got and left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from swift_ft.checkpoint.state_digest import StateDigests, tensor_digests
from swift_ft.torch_core.outputs import Output

STATE = "the state at the end"
"""The place of what stays on a worker."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The digests of one output: see :class:`swift_ft.torch_core.outputs.Output`."""

    digests: StateDigests
    members: tuple[int, ...] = ()
    received: bool = False


@dataclass
class Evidence:
    """One worker's, in the order in which things happened to it.

    Attributes:
        entries: by place. What happens several times in a step has a number.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    _numbers: Counter[str] = field(default_factory=Counter)

    def note(self, output: Output) -> None:
        """Something is given, or has arrived."""
        number = self._numbers[output.place]
        self._numbers[output.place] += 1
        place = f"{output.place} ({number + 1})" if number else output.place
        self.entries[place] = Entry(tensor_digests(output.tensors), output.members, output.received)

    def end(self, state: Mapping[str, torch.Tensor]) -> None:
        """The step is complete, and leaves a state."""
        self.entries[STATE] = Entry(tensor_digests(state))

    @property
    def places(self) -> dict[str, int]:
        """The position of each entry."""
        return {place: position for position, place in enumerate(self.entries)}

    @property
    def has_outputs(self) -> bool:
        """Whether the step gave anything to others."""
        return any(not entry.received for place, entry in self.entries.items() if place != STATE)
