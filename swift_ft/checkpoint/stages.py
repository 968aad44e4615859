"""The choice of the parts of a checkpoint that have the tensors of a stage of a pipeline.

Stages may name their tensors alike: two halves of an ``nn.Sequential`` both have a ``0.weight``. So a stage
reads from parts of the same stage as long as there are as many stages. With another number of stages, a name
must be that of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from swift_ft.checkpoint.state_payload import StatePath, TensorKind
from swift_ft.errors import TopologyMismatchError
from swift_ft.recovery.layout.tensors import Ranges
from swift_ft.torch_core.tensors import same_bits


@dataclass(frozen=True, slots=True)
class StagesHere:
    """The stages of a pipeline on one worker.

    Attributes:
        own: their indices.
        count: stages of the whole pipeline.
    """

    own: tuple[int, ...] = (0,)
    count: int = 1

    def __str__(self) -> str:
        return f"stage {' and '.join(map(str, self.own))} of {self.count}"


class StagedPart(Protocol):
    """A part of a checkpoint: :class:`swift_ft.checkpoint.sliced_part.SlicedPart` is one."""

    @property
    def stages(self) -> StagesHere:
        """Of the worker that saved it."""

    @property
    def kinds(self) -> Mapping[StatePath, TensorKind]:
        """The tensors in it."""

    def ranges(self, path: StatePath) -> Ranges:
        """The ranges of a tensor that this part has."""

    def read(self, pieces: Mapping[StatePath, Ranges]) -> dict[StatePath, torch.Tensor]:
        """Some tensors, of each the given ranges of the whole one."""


P = TypeVar("P", bound=StagedPart)


def parts_for(here: StagesHere, parts: Mapping[int, P]) -> dict[int, P]:
    """The parts that may have a worker's tensors: of its own stages, where there are as many; else all."""
    same = {rank: part for rank, part in parts.items() if part.stages == here}
    return same or {**parts}


def check_names(paths: Iterable[StatePath], parts: Mapping[int, StagedPart]) -> None:
    """See that parts of several stages mean the same tensor by a name, wherever several have it.

    Raises:
        TopologyMismatchError: they do not. Names the tensor.
    """
    for path in paths:
        one: StagedPart | None = None
        for rank in sorted(parts):
            part = parts[rank]
            if path not in part.kinds:
                continue
            if one is None:
                one = part
            elif part.stages != one.stages and not _same(path, one, part):
                raise TopologyMismatchError(
                    f"{path[1]}.{path[-1]} is in {one.stages} and in {part.stages}, with other values: name "
                    "tensors as in the whole model, or keep the number of stages",
                    key=path[-1],
                )


def _same(path: StatePath, one: StagedPart, other: StagedPart) -> bool:
    """Whether two parts have the same values where both have the tensor."""
    pairs = zip(one.ranges(path), other.ranges(path), strict=True)
    both: Ranges = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
    if any(first >= end for first, end in both):
        return True  # nothing is in both
    values, others = (part.read({path: both})[path] for part in (one, other))
    return same_bits(values, others)
