"""Notes a replica's own work in the first step after each checkpoint, so that a spare can audit it.

Gradients follow from the state, the batch, variables of the script and random numbers. A spare has these from
the checkpoint, the notes and the script; where it has others after all, a difference of the gradients is
nobody's fault. So what they follow from is noted, too, as the first forward pass begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from swift_ft.checkpoint.own_gradients import OwnStep
from swift_ft.checkpoint.state_digest import tensor_digests
from swift_ft.errors import first_line
from swift_ft.host.processor import processor_in_words
from swift_ft.recovery.audit_orders import pinned
from swift_ft.runtime.worker.part import Interruption, Part, StepInfo
from swift_ft.runtime.worker.ports import Job
from swift_ft.torch_core import outputs
from swift_ft.torch_core.module_hooks import OwnHook
from swift_ft.torch_core.outputs import Output

_logger = logging.getLogger(__name__)


class Replica(Protocol):
    """A model that other workers have, too (:class:`swift_ft.runtime.replicas.replicas.Replicas`)."""

    @property
    def model(self) -> nn.Module:
        """The DDP model."""

    @property
    def averaged(self) -> Sequence[str]:
        """Names of the parameters whose gradients are averaged. None if some of these are sparse."""

    @property
    def takes_first_buffers(self) -> bool:
        """Whether a forward pass that begins gives this replica the first one's buffers."""


class Inputs(Protocol):
    """The inputs of a step, besides what the script gives to the model."""

    def variables(self) -> tuple[str, Mapping[str, int]]:
        """Variables of the script, packed; and the digests of those that were there before its first step."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The parameters and buffers in all models of the session, by what a user calls them."""

    def digest(self, given: Any) -> int:
        """The digest of what the script gives to the model."""


class KeptSteps:
    """A replica's noted steps, as long as an audit may ask for them: their checkpoints stay for as long.

    Args:
        job: knows these checkpoints.
        write: is given all that are kept, by iteration, whenever one comes.
        begin: called before the first one: only then the store is this run's.
    """

    def __init__(
        self, job: Job, write: Callable[[Mapping[int, OwnStep]], None], begin: Callable[[], None]
    ) -> None:
        self._job = job
        self._write = write
        self._begin = begin
        self._steps: dict[int, OwnStep] = {}

    def keep(self, iteration: int, step: OwnStep) -> None:
        """A step is complete."""
        if not self._steps:
            self._begin()
        state = self._job.state
        oldest = min({*state.checkpoints.kept, *pinned(state)}, default=0)
        self._steps = {number: one for number, one in self._steps.items() if number >= oldest}
        self._steps[iteration] = step
        self._write({**self._steps})


class OwnGradientsPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        replica: with the model, whose forward passes are watched from now on.
        inputs: what steps follow from.
        due: whether a checkpoint has so many completed iterations.
        epoch: the present one of checkpoints.
        keep: is given a step that is complete.
        training: an error ends the notes, and not the training.
    """

    name = "own gradients"

    def __init__(
        self,
        replica: Replica,
        inputs: Inputs,
        due: Callable[[int], bool],
        epoch: Callable[[], int],
        keep: Callable[[int, OwnStep], None],
        *,
        training: bool,
    ) -> None:
        self._replica = replica
        self._inputs = inputs
        self._due = due
        self._epoch = epoch
        self._keep = keep
        self._training = training
        self._expected: Collection[str] = ()
        self._packed = ""
        self._begin: dict[str, int] = {}
        self._found: dict[str, int] = {}
        self._passes = 0
        self._iteration: int | None = None  # of the step that is noted; None between two
        self._failed = False
        self.buckets = 0
        self._watch = replica.model.register_forward_pre_hook(OwnHook(self._given), with_kwargs=True)

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of the step are there, about to be averaged for the first time."""
        return bool(self._expected) and self._found.keys() >= {*self._expected}

    def begin(self, step: StepInfo) -> None:
        self._forget()
        if self._due(step.iteration) and not self._failed:
            self._iteration = step.iteration
            self._try(self._note_begin)

    def _note_begin(self) -> None:
        self._expected = [outputs.gradient_of(name) for name in self._replica.averaged]
        if not self._expected:  # nothing would ever be complete: some are sparse, say
            self._iteration = None
            return
        self._packed, digests = self._inputs.variables()
        self._begin = {f"the variable {name}": digest for name, digest in digests.items()}
        outputs.listen(self.name, lambda output: self._try(lambda: self._note(output)))

    def interrupted(self, interruption: Interruption) -> None:
        self._forget()

    def completed(self, step: StepInfo) -> None:
        self._forget()

    def close(self) -> None:
        self._forget()
        self._watch.remove()

    def _forget(self) -> None:
        outputs.listen(self.name, None)
        self._iteration, self._passes, self.buckets = None, 0, 0
        self._begin, self._found = {}, {}

    def _try(self, note: Callable[[], None]) -> None:
        """Training goes on whatever happens here. A failed note would be taken for a lost connection."""
        try:
            note()
        except Exception as error:
            if not self._training:
                raise
            self._failed = True
            self._forget()
            _logger.warning(
                "Spares audit this worker no more: its part in a step cannot be noted (%s).",
                first_line(error),
                extra={"event": "own_gradients_not_noted"},
            )

    def _given(self, model: Any, args: Any, kwargs: Any) -> None:
        """A forward pass begins. None is seen while a compiled model runs: such a step is not noted."""
        if not torch.compiler.is_compiling() and self._iteration is not None:
            self._try(lambda: self._note_pass((args, kwargs)))

    def _note_pass(self, given: Any) -> None:
        self._passes += 1
        if self._passes == 1:
            self._begin |= tensor_digests(self._inputs.tensors())
        elif self._replica.takes_first_buffers:
            self._begin[f"the first replica's buffers in forward pass {self._passes}"] = 1
        self._begin[f"what the model is given in forward pass {self._passes}"] = self._inputs.digest(given)

    def _note(self, output: Output) -> None:
        """In a step with several averages, those after the first one follow from what others have given."""
        if self._iteration is None:
            return
        tensors = output.tensors.items()
        own = {name: t for name, t in tensors if outputs.is_gradient(name) and name not in self._found}
        self.buckets += bool(own)
        # A gradient that is added to zeros has no negative ones: whether there were any is no difference.
        self._found.update(tensor_digests({name: tensor + 0.0 for name, tensor in own.items()}))
        if own and self._passes and self.is_complete:
            host = processor_in_words(next(iter(own.values())).device)
            noted = OwnStep(self._epoch(), host, self._packed, {**self._begin}, {**self._found})
            self._keep(self._iteration, noted)
