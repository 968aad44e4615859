"""Seconds that a recovery takes, from the measurements of a job's workers (paper §5.3, §5.4). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median

from swift_ft.costs.job import Job, Measured, Worker
from swift_ft.costs.layer_profile import NANOSECONDS
from swift_ft.costs.schedule_orders import Schedule
from swift_ft.costs.shared_machines import (
    balanced,
    loads_of_pipelines,
    parts,
    slowest_ns,
    worth_moving_to,
    worth_sharing,
)
from swift_ft.planning.advisor import Advice, LoggingQuestion, advise
from swift_ft.planning.layout.makespan import StageTime
from swift_ft.planning.layout.shared_makespan import shared_makespan_ns
from swift_ft.planning.presets import Fact
from swift_ft.recovery.layout.stage_layers import StageLayers, cuts_of
from swift_ft.recovery.plan import Plan, Task

_MANY = 64
"""Workers beyond which an iteration is bounded, and not computed action by action."""


@dataclass(frozen=True, slots=True)
class Movements:
    """The workers whose state comes from elsewhere in a plan, each in one set.

    Attributes:
        loading: they load their parts of the checkpoint in the store.
        receiving: the others that get a state from a replica.
        fetching: they get a copy from the memory of another machine.
    """

    loading: Set[int]
    receiving: Set[int]
    fetching: Set[int]

    @classmethod
    def of(cls, plan: Plan) -> Movements:
        """Those of a plan."""
        tasks = plan.tasks.items()
        loading = {rank for rank, task in tasks if task.load is not None and task.holder is None}
        receiving = {rank for transfer in plan.transfers for rank in transfer.targets}
        fetching = {rank for rank, task in tasks if task.holder not in (None, rank)}
        return cls(loading, receiving - loading, fetching)


class Costs:
    """Measured rates and times. A worker without a measurement counts like the others; None if none has one.

    Args:
        job: the training.

    Attributes:
        iteration_s: seconds of an iteration, on the slowest worker.
        link: bytes per second from machine to machine.
        copy: bytes per second from a device to the host.
        save: bytes per second at which a worker writes its part of a checkpoint.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.iteration_s = self._of(lambda m: m.iteration_s, max)
        self.link = self._of(lambda m: m.link_bytes_per_s, median)
        self.copy = self._of(lambda m: m.copy_bytes_per_s, median)
        self.save = self._of(lambda m: m.save_bytes_per_s, median)

    def _of(
        self, read: Callable[[Measured], float | None], take: Callable[[Sequence[float]], float]
    ) -> float | None:
        found = [value for worker in self.job.workers if (value := read(worker.measured)) is not None]
        return take(found) if found else None

    def _state(self, ranks: Set[int]) -> list[int] | None:
        sizes = [self.job.workers[rank].measured.state_bytes for rank in sorted(ranks)]
        return None if None in sizes else [size for size in sizes if size is not None]

    def hosted_s(self, slot: int, host: int) -> float | None:
        """Seconds of an iteration while a machine also runs the workers of another one.

        Workers of the same place on both machines share a device, and compute one after the other. Where the
        schedule and the costs of layers are known it is what the schedule makes of that, else a lower bound.
        """
        if (
            exact := self._exact(slot, self._machines(slot, host), self._cut(slot), shared=False)
        ) is not None:
            return exact[1]
        pairs = zip(self.job.ranks(slot), self.job.ranks(host), strict=True)
        spans = [[self.job.workers[rank].measured.compute_s for rank in pair] for pair in pairs]
        sums = [total(*pair) for pair in spans]
        if self.iteration_s is None or None in sums:
            return None
        return max(self.iteration_s, *(span for span in sums if span is not None))

    def rerouted(self, slot: int, host: int) -> tuple[tuple[int, ...], float] | None:
        """The microbatches of each pipeline once the other ones help, and the seconds of an iteration then.

        None where they cannot move, or where not all of that is known.
        """
        machines, cut = self._machines(slot, host), self._cut(slot)
        return self._exact(slot, machines, cut, shared=True) if self.job.shares_microbatches else None

    def shared_s(self, slot: int, host: int) -> float | None:
        """As :meth:`hosted_s`, once layers and microbatches are redistributed. None where layers cannot move.

        Of several pipelines only the layers of the one that has lost a machine move.
        """
        workers, layers = self._beside(slot), self.job.layers
        compute = total(*(worker.measured.compute_s for worker in workers))
        if self.iteration_s is None or compute is None or not layers:
            return None
        machines = self._machines(slot, host)
        present = self._cut(slot)
        best = worth_moving_to(layers, machines, present) if present else balanced(layers, machines)
        if (exact := self._exact(slot, machines, best, shared=self.job.shares_microbatches)) is not None:
            return exact[1]
        share = slowest_ns(layers, machines, best)
        return max(self.iteration_s, compute * share / sum(layer.compute_ns for layer in layers))

    def _machines(self, slot: int, host: int) -> list[str]:
        """By stage of its pipeline, what computes it when a machine also runs the workers of another one."""
        per_machine, found = self.job.per_machine, dict[int, str]()
        for rank, worker in enumerate(self.job.workers):
            if worker.pipeline == self.job.pipeline_of(slot):
                at, place = divmod(rank, per_machine)
                found |= dict.fromkeys(worker.stages, f"{host if at == slot else at}/{place}")
        return [found[stage] for stage in sorted(found)]

    def _beside(self, slot: int) -> list[Worker]:
        """The workers of a machine's pipeline."""
        return [worker for worker in self.job.workers if worker.pipeline == self.job.pipeline_of(slot)]

    def _cut(self, slot: int) -> StageLayers:
        """The layers of each stage of a machine's pipeline."""
        return self._cuts()[self._number(slot)]

    def _cuts(self) -> list[StageLayers]:
        """By pipeline."""
        stages = Counter[int]()
        for worker in self.job.workers:
            stages[worker.pipeline] += len(worker.stages)
        return cuts_of(self.job.layout, [stages[pipeline] for pipeline in self.job.pipelines])

    def _number(self, slot: int) -> int:
        """Of a machine's pipeline."""
        return self.job.pipelines.index(self.job.pipeline_of(slot))

    @property
    def knows_schedule(self) -> bool:
        """Whether all is known that an iteration consists of, and the job is small enough to compute it."""
        job = self.job
        return job.schedule is not None and bool(job.layout and job.layers) and len(job.workers) <= _MANY

    def _exact(
        self, slot: int, machines: Sequence[str], cut: StageLayers, *, shared: bool
    ) -> tuple[tuple[int, ...], float] | None:
        """The microbatches of each pipeline, and the seconds of an iteration.

        These are what is measured now, and what the schedules of all pipelines add to it. None where not all
        of that is known, as where a machine computes for two pipelines.

        Args:
            slot: a machine of the pipeline that changes.
            machines: of that pipeline's stages.
            cut: its layers by stage.
            shared: whether microbatches move, as far as that pays.
        """
        job, number = self.job, self._number(slot)
        if self.iteration_s is None or not self.knows_schedule:
            return None
        slots = {self._number(one): one for one in range(job.machines)}
        if len(slots) < len(job.pipelines):  # machines have workers of several pipelines
            return None
        before = [self._machines(slots[one], slots[one]) for one in range(len(slots))]
        cuts, then = [*self._cuts()], [*before]
        cuts[number], then[number] = cut, [*machines]
        if len({device for own in then for device in own}) < sum(len({*own}) for own in then):
            return None
        counts = [*(job.counts or [job.microbatches] * len(cuts))]
        now = max(map(self._span_ns, self._cuts(), before, counts))
        if shared:
            fewest = max(map(len, cuts)) if job.schedule == Schedule.ONE_F_ONE_B else 1
            counts = worth_sharing(loads_of_pipelines(job.layers, then, cuts), counts, fewest)
        changed_ns = max(map(self._span_ns, cuts, then, counts)) - now
        return tuple(counts), self.iteration_s + changed_ns / NANOSECONDS

    def _span_ns(self, cut: StageLayers, machines: Sequence[str], microbatches: int) -> int:
        """The time of an iteration of a pipeline."""
        job = self.job
        assert job.schedule is not None
        stages = [
            StageTime(sum(one.forward_ns for one in own), sum(one.backward_ns for one in own))
            for own in parts(job.layers, cut)
        ]
        workers = len(stages) // len(job.workers[0].stages)  # all have equally many
        return shared_makespan_ns(stages, machines, microbatches, job.schedule, workers=workers)

    def load_s(self, ranks: Set[int]) -> float | None:
        """Seconds to load: each worker loads its own part, all in parallel, at the speed of writing."""
        sizes = self._state(ranks)
        return _over(max(sizes, default=0), self.save) if sizes is not None else None

    def transfer_s(self, ranks: Set[int]) -> float | None:
        """Seconds to receive the state over the one link of the lost machine."""
        sizes = self._state(ranks)
        return _over(sum(sizes), self.link) if sizes is not None else None

    def replay_s(self, tasks: Mapping[int, Task]) -> float | None:
        """Seconds per iteration of the slowest replay group, each as a group of §5.3."""
        replaying = {
            rank: task.replay_group or (rank,) for rank, task in tasks.items() if task.load is not None
        }
        return _largest([self._replay_group_s(ranks) for ranks in set(replaying.values())])

    def _replay_group_s(self, ranks: tuple[int, ...]) -> float | None:
        """``R(G)``: the computation of its machines, and what they send each other over the link."""
        by_slot: dict[int, list[float | None]] = {}
        for rank in ranks:
            compute_s = self.job.workers[rank].measured.compute_s
            by_slot.setdefault(rank // self.job.per_machine, []).append(compute_s)
        inside = sum(
            size
            for rank in ranks
            for slot, size in self.job.workers[rank].measured.sent.items()
            if slot in by_slot and slot != rank // self.job.per_machine
        )
        return total(*map(_largest, by_slot.values()), _over(inside, self.link))

    def advice(self, replays: Sequence[float | None]) -> Advice | None:
        """Whether logging is worth it (§5.4).

        Args:
            replays: seconds of the replay, for each machine that a replay would rebuild.
        """
        job, ranks = self.job, range(len(self.job.workers))
        parts = {worker.holds: rank for rank, worker in enumerate(job.workers)}
        state = self._state(set(parts.values()))
        again = [seconds for seconds in replays if seconds is not None]
        bubbles = [worker.measured.bubble_s for worker in job.workers]
        if not again or not state or self.copy is None or not self.iteration_s or None in bubbles:
            return None
        copy = self.copy
        # The sender whose bubble leaves the least room would slow the others down.
        tight = max(ranks, key=lambda rank: job.logged(rank) / copy - (bubbles[rank] or 0.0))
        return advise(
            LoggingQuestion(
                log_bytes_per_iteration=sum(map(job.logged, ranks)),
                busiest_sender_bytes=job.logged(tight),
                model_bytes=sum(state),
                checkpoint_interval=job.checkpoint_interval,
                iteration_s=self.iteration_s,
                copy_bandwidth=copy,
                bubble=min((bubbles[tight] or 0.0) / self.iteration_s, 0.999),
                replay_s=sum(again) / len(again) / job.lost_iterations,
            )
        )

    def facts(self) -> tuple[Fact, ...]:
        """The numbers measured and assumed."""
        job = self.job
        logged = sum(map(job.logged, range(len(job.workers))))
        found = (
            ("iterations to make up for", job.lost_iterations, "", "assumed: half a checkpoint interval"),
            ("iteration", self.iteration_s, "s", "measured: the slowest worker's median"),
            ("logged per iteration", logged if self.iteration_s else None, "bytes", "measured, all workers"),
            ("state of the largest worker", self._largest_state(), "bytes", "measured"),
            ("link between machines", self.link, "bytes/s", "measured: a short message, at the start"),
            ("copy to the host", self.copy, "bytes/s", "measured: a short copy, at the start"),
            ("writing a checkpoint", self.save, "bytes/s", "measured, per worker: the last part"),
            ("loading a checkpoint", self.save, "bytes/s", "assumed: as fast as writing"),
        )
        return tuple(Fact(name, value, unit, source) for name, value, unit, source in found if value)

    def _largest_state(self) -> float | None:
        return self._of(lambda m: m.state_bytes, max)

    def unknown(self) -> tuple[str, ...]:
        """Missing measurements, without which there is no answer in seconds."""
        if any(worker.measured.iteration_s is None for worker in self.job.workers):
            return ("Not all is measured yet: ask again after the first ten iterations.",)
        if self.save is None:
            return ("No part of a checkpoint has been written yet: ask again after the first one.",)
        return ()


def times(count: float, seconds: float | None) -> float | None:
    """The product, or None without a measurement."""
    return None if seconds is None else count * seconds


def _over(size: float, rate: float | None) -> float | None:
    """Seconds for ``size`` bytes; zero bytes take no time even at an unknown rate."""
    if not size:
        return 0.0
    return None if not rate else size / rate


def total(*parts: float | None) -> float | None:
    """The sum, or None if one part is not measured."""
    return None if None in parts else sum(part for part in parts if part is not None)


def _largest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known, default=0.0) if len(known) == len(values) else None
