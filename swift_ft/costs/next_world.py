"""The time of an iteration with other numbers of machines, from what was measured with those of now. Pure.

What is measured is a whole iteration, and the work in it. A model of the work says how both would change: a
forecast is the iteration of now, times the model's ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swift_ft.costs.job import Worker
from swift_ft.costs.layer_profile import NANOSECONDS, LayerProfile
from swift_ft.costs.schedule_orders import Schedule, is_allowed
from swift_ft.costs.shared_machines import pipeline_ns
from swift_ft.recovery.layout.stage_layers import even_layout, layers_of

ORDINARY = 1000
"""The load of a device that is as fast as most, and computes for one worker."""
_ALL_MEET_NS = NANOSECONDS // 2
"""Time of a change besides that of its state: all stop, meet again, and make their first messages."""


@dataclass(frozen=True, slots=True)
class Pipelines:
    """The pipelines of a LayerStack, as the workers of another world would form them.

    Attributes:
        schedule: of torch; None for one that is not known.
        microbatches: of each, in an iteration.
        stages_per_worker: in each.
        count: how many pipelines there are.
        workers_per_machine: the same on all.
    """

    schedule: Schedule | None
    microbatches: int
    stages_per_worker: int = 1
    count: int = 1
    workers_per_machine: int = 1


def of_layers(
    layers: Sequence[LayerProfile],
    pipelines: Pipelines,
    placed: Mapping[int, Sequence[int]],
    loads: Mapping[int, int],
    *,
    now_ns: int,
    most: int,
) -> dict[int, int]:
    """Times of an iteration of a LayerStack, by the number of ordinary machines that can train it.

    Args:
        layers: with times as on an ordinary device.
        pipelines: their shape.
        placed: the layers of each worker now, by rank.
        loads: by rank, how long its device takes for its work now, in thousandths of an ordinary one's time.
        now_ns: an iteration now.
        most: machines to look at.
    """
    each = len(placed) // pipelines.count
    now = [
        sum(layers[n].compute_ns for n in placed[rank]) * loads[rank] // ORDINARY for rank in sorted(placed)
    ]
    model_now = max(
        pipeline_ns(now[first : first + each], pipelines.microbatches) for first in range(0, len(now), each)
    )
    found = {}
    for machines in range(1, most + 1):
        stages = _even_stages(layers, pipelines, machines)
        if stages is not None and model_now:
            found[machines] = now_ns * pipeline_ns(stages, pipelines.microbatches) // model_now
    return found


def of_replicas(*, own_ns: int, now_ns: int, machines: int, most: int) -> dict[int, int]:
    """Times of an iteration of replicas that share a batch, by the number of machines.

    Args:
        own_ns: of an iteration, the work that each one's share of the batch takes.
        now_ns: an iteration now.
        machines: of now, all of them alike.
        most: machines to look at.
    """
    rest_ns = max(0, now_ns - own_ns)
    return {count: rest_ns + own_ns * machines // count for count in range(1, most + 1)}


def change_ns(workers: Sequence[Worker]) -> int:
    """The time for which training stands still while another world takes the state over, at most.

    Each state is written to memory and read by another machine, as fast as parts of checkpoints and messages
    were in the first iterations.
    """
    longest = 0.0
    for measured in (worker.measured for worker in workers):
        speeds = (measured.save_bytes_per_s, measured.link_bytes_per_s)
        longest = max(longest, sum((measured.state_bytes or 0) / speed for speed in speeds if speed))
    return _ALL_MEET_NS + round(longest * NANOSECONDS)


def _even_stages(
    layers: Sequence[LayerProfile], pipelines: Pipelines, machines: int
) -> tuple[int, ...] | None:
    """The time of each worker of a pipeline, with layers dealt evenly; None if there can be no such one."""
    workers, rest = divmod(machines * pipelines.workers_per_machine, pipelines.count)
    stages = workers * pipelines.stages_per_worker
    schedule = pipelines.schedule
    if rest or not 0 < stages <= len(layers) or schedule is None:
        return None
    chunks, microbatches = pipelines.stages_per_worker, pipelines.microbatches
    if not is_allowed(schedule, workers=workers, microbatches=microbatches, chunks=chunks):
        return None
    layout = even_layout(len(layers), stages)
    times = [sum(layers[n].compute_ns for n in layers_of(layout, stage)) for stage in range(stages)]
    if schedule.is_v:
        return tuple(times[worker] + times[-1 - worker] for worker in range(workers))
    return tuple(sum(times[worker::workers]) for worker in range(workers))
