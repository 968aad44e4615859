"""The order in which a schedule of torch makes stages compute, found out with stages that compute nothing.

For conformance tests. Private parts used (tested on torch 2.11 to 2.14): ``pipeline_order`` of a schedule
with several stages per worker and the ``sub_actions`` of an action; of one with a single stage
``_initialize_stage`` and ``_step_microbatches``; ``_PipelineStageBase``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import Mock

from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase

from swift_ft.costs.schedule_orders import Action, Kind


def computed_order(
    schedule: type[Any], *, workers: int, chunks: int, microbatches: int
) -> tuple[dict[int, list[Action]], Any]:
    """The order in which a schedule makes stages compute that compute and send nothing.

    Args:
        schedule: the class.
        workers: their number in the pipeline.
        chunks: stages per worker.
        microbatches: their number in an iteration.

    Returns:
        The computations of each worker, and the schedule of the last one.

    Raises:
        ValueError: the schedule refuses the sizes.
    """
    if issubclass(schedule, PipelineScheduleSingle):
        if chunks != 1:
            raise ValueError(f"{schedule.__name__} takes one stage per worker, not {chunks}.")
        orders = {}
        for worker in range(workers):
            orders[worker], made = _carried_out(schedule, worker, workers, microbatches)
        return orders, made
    stages = [_stand_in(chunk * workers, 0, workers, workers * chunks) for chunk in range(chunks)]
    made = schedule(stages, microbatches)
    return {worker: list(_flat(actions)) for worker, actions in made.pipeline_order.items()}, made


def _carried_out(schedule: Any, worker: int, workers: int, microbatches: int) -> tuple[list[Action], Any]:
    """The actions of a schedule's one stage. The order that torch prints miscounts the last stage's."""
    stage = _stand_in(worker, worker, workers, workers)
    done: list[Action] = []
    stage.forward_one_chunk.side_effect = lambda index, *_, **__: done.append(
        Action(Kind.FORWARD, worker, index)
    )
    stage.backward_one_chunk.side_effect = lambda index, **_: done.append(
        Action(Kind.BACKWARD, worker, index)
    )
    made = schedule(stage, microbatches, loss_fn=Mock())
    made._initialize_stage = Mock()
    made._step_microbatches()
    return done, made


def _flat(actions: Sequence[Any]) -> Iterator[Action]:
    """The computations among torch's actions; those that it overlaps stand one after the other."""
    kinds = {kind.value: kind for kind in Kind}
    for action in actions:
        for one in (action.sub_actions or (action,)) if action is not None else ():
            if one.computation_type.value in kinds:
                yield Action(kinds[one.computation_type.value], one.stage_index, one.microbatch_index)


def _stand_in(index: int, rank: int, workers: int, stages: int) -> Any:
    """A stage of torch that computes and sends nothing."""
    stage = Mock(spec=_PipelineStageBase)
    communication = ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops")
    stage.configure_mock(
        stage_index=index,
        group_size=workers,
        group_rank=rank,
        num_stages=stages,
        group=None,
        submod=None,
        is_last=False,
        **{f"{name}.return_value": [] for name in communication},
    )
    return stage
