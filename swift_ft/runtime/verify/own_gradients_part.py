"""Notes what a replica contributes to the first step after each checkpoint, so that a spare can audit it."""

from __future__ import annotations

from collections.abc import Callable

from swift_ft.checkpoint.own_gradients import OwnGradients
from swift_ft.checkpoint.state_digest import tensor_digests
from swift_ft.runtime.worker.part import Interruption, Part, StepInfo
from swift_ft.torch_core import outputs
from swift_ft.torch_core.outputs import Output


class OwnGradientsPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        due: whether a checkpoint has so many completed iterations.
        own: what is known at the beginning.
        keep: is given all that is known after each such step.
    """

    name = "own gradients"

    def __init__(
        self, due: Callable[[int], bool], own: OwnGradients, keep: Callable[[OwnGradients], None]
    ) -> None:
        self._due = due
        self._own = own
        self._keep = keep
        self._found: dict[str, int] = {}
        self._listens = False

    @property
    def has_begun(self) -> bool:
        """Whether some of the step's gradients are there, and about to be averaged."""
        return bool(self._found)

    def begin(self, step: StepInfo) -> None:
        self._found.clear()
        self._listen(self._due(step.iteration))

    def completed(self, step: StepInfo) -> None:
        if self._listens:
            self._listen(False)
            self._own = self._own.with_step(step.iteration, dict(self._found))
            self._keep(self._own)

    def interrupted(self, interruption: Interruption) -> None:
        self._listen(False)

    def close(self) -> None:
        self._listen(False)

    def _listen(self, listens: bool) -> None:
        self._listens = listens
        outputs.listen(self.name, self._note if listens else None)

    def _note(self, output: Output) -> None:
        """In a step with several averages, those after the first one follow from what others have given."""
        tensors = output.tensors.items()
        own = {name: t for name, t in tensors if outputs.is_gradient(name) and name not in self._found}
        self._found.update(tensor_digests(own))
