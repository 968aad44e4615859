"""The time of an iteration when stages share a machine, because one runs the workers of another one, too.

As in ``makespan.py``, each worker does its actions in its schedule's order. But the workers of one machine
compute one after the other: it takes the action that can begin first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from swift_ft.costs.schedule_orders import Action, Schedule, stages_of
from swift_ft.planning.layout.makespan import PipelineRun, StageTime, orders_of


def shared_makespan_ns(
    stages: Sequence[StageTime],
    machines: Sequence[str | int],
    microbatches: int,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    *,
    workers: int | None = None,
) -> int:
    """The time of an iteration.

    Args:
        stages: in order.
        machines: of each stage; stages of one worker have the same.
        microbatches: per iteration.
        schedule: which.
        workers: of the pipeline; one per stage by default.

    Returns:
        Nanoseconds from the first forward to the last backward pass. Messages take no time.

    Raises:
        UsageError: if torch would refuse the sizes.
    """
    workers = workers or len(stages)
    chunks = len(stages) // workers
    orders = orders_of(schedule, workers, chunks, microbatches)
    first = [stages_of(schedule, worker, workers=workers, chunks=chunks)[0] for worker in range(workers)]
    done = _SharedRun(orders, stages, [machines[stage] for stage in first]).carry_out()
    return max(one.end_ns for own in done for one in own)


class _SharedRun(PipelineRun):
    """Carries the orders out in the order of time.

    Args:
        orders: one for each worker.
        stages: in order.
        machines: one for each worker.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        stages: Sequence[StageTime],
        machines: Sequence[str | int],
    ) -> None:
        super().__init__(orders, stages, [0] * (len(stages) - 1))
        self._machines = machines
        self._free: Counter[str | int] = Counter()
        """When each machine has done what it has begun."""
        self._ready: list[tuple[int, int, int]] = []
        """When the next action of a worker may begin, since when it is ready, and the worker."""

    def _advance(self, worker: int) -> None:
        """Queue the worker's next action, and do what comes first of all that are known."""
        self._queue(worker)
        while self._ready and not self._runnable:
            begin, ready, worker = heapq.heappop(self._ready)
            free = self._free[self._machines[worker]]
            if free > begin:  # another worker of the machine came before it
                heapq.heappush(self._ready, (free, ready, worker))
                continue
            action = self._orders[worker][len(self._done[worker])]
            self._free[self._machines[worker]] = self._do(worker, action, begin)
            self._queue(worker)

    def _queue(self, worker: int) -> None:
        done, order = self._done[worker], self._orders[worker]
        if len(done) == len(order):
            return
        needed = self._needed(order[len(done)])
        if needed is not None and needed not in self._arrived:
            self._waiting[needed] = worker
            return
        ready = max(done[-1].end_ns if done else 0, 0 if needed is None else self._arrived[needed])
        heapq.heappush(self._ready, (max(ready, self._free[self._machines[worker]]), ready, worker))
