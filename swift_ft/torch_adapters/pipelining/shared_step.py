"""The arguments and results of a schedule's step of which other workers compute a part.

Private parts used (tested on torch 2.11 to 2.14): of a schedule, ``_check_inputs``, ``_internal_losses``,
``_update_losses`` and ``_n_microbatches``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.pipelining.stage import _PipelineStageBase

from swift_ft.torch_adapters.pipelining.microbatch import (
    Computed,
    Gradients,
    Inputs,
    autocast_here,
    evaluating,
)

Split = tuple[list[Any] | None, list[Any] | None, list[Any] | None]
"""Arguments, keyword arguments and targets by microbatch, as a schedule splits them."""


def gradients_of(stages: Sequence[_PipelineStageBase]) -> dict[int, Gradients]:
    """The gradients that stages have now, by stage index."""
    return {stage.stage_index: [p.grad for p in stage.submod.parameters()] for stage in stages}


def inputs_of(
    schedule: Any,
    stages: Sequence[_PipelineStageBase],
    split: Split,
    losses: list[Any] | None,
    had: Mapping[int, Gradients],
    return_outputs: bool,
    loss_kwargs: dict[str, Any] | None,
) -> Inputs:
    """The inputs that the script gives to a step.

    Args:
        schedule: torch's.
        stages: on this worker.
        split: what was given, by microbatch.
        losses: the list that the script wants filled.
        had: gradients before the step.
        return_outputs: whether the script asked for the last stage's outputs.
        loss_kwargs: for the loss function.

    Raises:
        ValueError: as torch does, if their numbers are not that of the microbatches.
    """
    args, kwargs = schedule._check_inputs(*split, losses)
    return Inputs(
        args if any(stage.is_first for stage in stages) else (),
        kwargs,
        split[2] if any(stage.is_last for stage in stages) else None,
        loss_kwargs,
        return_outputs,
        begun=[index for index, own in had.items() if any(gradient is not None for gradient in own)],
        autocast=autocast_here(),
        evaluating={stage.stage_index: evaluating(stage.submod) for stage in stages},
    )


def leave(
    schedule: Any,
    stages: Sequence[_PipelineStageBase],
    inputs: Inputs,
    had: Mapping[int, Gradients],
    results: Mapping[int, Computed],
    gradients: Mapping[int, Gradients],
    losses: list[Any] | None,
) -> None:
    """Leave gradients, losses and outputs as the schedule would.

    Args:
        schedule: torch's.
        stages: on this worker.
        had: gradients before the step.
        results: by microbatch.
        gradients: of the step, added to those before it, by stage.
        losses: the list that the script wants filled.
    """
    ordered = [results[microbatch] for microbatch in range(schedule._n_microbatches)]
    for stage in stages:
        index = stage.stage_index
        parameters = stage.submod.parameters()
        for parameter, before, gradient in zip(parameters, had[index], gradients[index], strict=True):
            if before is None or gradient is None:
                parameter.grad = gradient
            else:  # in place, as autograd adds
                parameter.grad = before.copy_(gradient)
        if stage.is_last:
            schedule._internal_losses.extend(result.loss for result in ordered)
            stage.output_chunks.extend(result.output for result in ordered if inputs.outputs)
    schedule._update_losses(stages, losses)
    for stage in stages:
        stage.perform_reduce_grad(len(ordered) if schedule.scale_grads else 1)
