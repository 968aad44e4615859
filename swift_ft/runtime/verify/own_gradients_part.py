"""Notes a replica's own work in the first step after each checkpoint, so that a spare can audit it.

Gradients follow from the state, the batch and random numbers. A spare has these from the checkpoint and the
script; where it has others after all, a difference of the gradients is nobody's fault. So what they follow
from is noted, too, as the first forward pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from swift_ft.checkpoint.own_gradients import OwnStep
from swift_ft.checkpoint.state_digest import tensor_digests
from swift_ft.host.processor import processor_in_words
from swift_ft.runtime.worker.part import Interruption, Part, StepInfo
from swift_ft.torch_core import outputs
from swift_ft.torch_core.outputs import Output


class Replica(Protocol):
    """A model that other workers have, too (:class:`swift_ft.runtime.replicas.replicas.Replicas`)."""

    @property
    def model(self) -> nn.Module:
        """The DDP model."""

    @property
    def averaged(self) -> Sequence[str]:
        """Names of the parameters whose gradients are averaged, but for sparse ones."""

    @property
    def takes_first_buffers(self) -> bool:
        """Whether a forward pass that begins gives this replica the first one's buffers."""

    def tensors_by_word(self) -> Mapping[str, torch.Tensor]:
        """The tensors of the model from which its gradients follow, and gradients that are there already."""


class OwnGradientsPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        replica: with the model, whose forward passes are watched from now on.
        digest: of what the script gives to the model.
        variables: digests of the script's variables that were there before its first step.
        due: whether a checkpoint has so many completed iterations.
        epoch: the present one of checkpoints.
        keep: is given a step that is complete.
    """

    name = "own gradients"

    def __init__(
        self,
        replica: Replica,
        digest: Callable[[Any], int],
        variables: Callable[[], Mapping[str, int]],
        due: Callable[[int], bool],
        epoch: Callable[[], int],
        keep: Callable[[int, OwnStep], None],
    ) -> None:
        self._replica = replica
        self._digest = digest
        self._variables = variables
        self._due = due
        self._epoch = epoch
        self._keep = keep
        self._expected: Collection[str] = ()
        self._begin: dict[str, int] = {}
        self._found: dict[str, int] = {}
        self._passes = 0
        self._iteration: int | None = None  # of the step that is noted; None between two
        self.buckets = 0
        replica.model.register_forward_pre_hook(self._given, with_kwargs=True)

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of the step are there, about to be averaged for the first time."""
        return bool(self._expected) and self._found.keys() >= {*self._expected}

    def begin(self, step: StepInfo) -> None:
        self._forget()
        if self._due(step.iteration):
            self._iteration = step.iteration
            self._expected = [outputs.gradient_of(name) for name in self._replica.averaged]
            self._begin = {f"the variable {name}": d for name, d in self._variables().items()}
            outputs.listen(self.name, self._note)

    def interrupted(self, interruption: Interruption) -> None:
        self._forget()

    def completed(self, step: StepInfo) -> None:
        self._forget()

    def close(self) -> None:
        self._forget()

    def _forget(self) -> None:
        outputs.listen(self.name, None)
        self._iteration, self._passes, self.buckets = None, 0, 0
        self._begin, self._found = {}, {}

    def _given(self, model: Any, args: Any, kwargs: Any) -> None:
        """A forward pass begins. None is seen while a compiled model runs: such a step is not noted."""
        if self._iteration is None or torch.compiler.is_compiling():
            return
        self._passes += 1
        if self._passes == 1:
            self._begin |= tensor_digests(self._replica.tensors_by_word())
        elif self._replica.takes_first_buffers:
            self._begin[f"the first replica's buffers in forward pass {self._passes}"] = 1
        name = f"what the model is given in forward pass {self._passes}"
        self._begin[name] = self._digest((args, kwargs))

    def _note(self, output: Output) -> None:
        """In a step with several averages, those after the first one follow from what others have given."""
        tensors = output.tensors.items()
        own = {name: t for name, t in tensors if outputs.is_gradient(name) and name not in self._found}
        self.buckets += bool(own)
        self._found.update(tensor_digests(own))
        if own and self._passes and self._iteration is not None and self.is_complete:
            host = processor_in_words(next(iter(own.values())).device)
            self._keep(self._iteration, OwnStep(self._epoch(), host, {**self._begin}, {**self._found}))
