"""The plan of a replay without the job: which workers, how far, and what they are told.

The plan is the live job's own (`recovery/plan.py`). The workers of the lost machines report that they have no
state, all others that they are live at the iteration where the replay ends. What the machine cannot be
rebuilt without is lost, too: the machines of its recovery group, which logged no messages to each other, and
the replicas of its stages, whose gradients were averaged with its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from swift_ft.checkpoint.store_claim import log_directory
from swift_ft.checkpoint.worker_record import WorkerRecord
from swift_ft.errors import UsageError
from swift_ft.logging import Direction, LogReader
from swift_ft.logging.format.record import RecordKind
from swift_ft.offline.replay_coverage import Boundary, Entry, ReplayCoverage
from swift_ft.recovery import events as ev
from swift_ft.recovery.plan import make_plan
from swift_ft.storage.store import Store
from swift_ft.units import named

GENERATION = 2
"""In the first one all machines join; in this one the lost ones have been replaced."""

_NEWEST = (0, 0, 0)  # the reader has chosen among the copies of a message


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """A replay without the job.

    Attributes:
        machines: number of slots of the run.
        workers_per_machine: the same on each.
        records: of all workers, by rank.
        lost: the slots whose workers are rebuilt, on this host.
        begin: the checkpoint that they load.
        until: completed iterations at which the replay ends.
        log_since: the generation before which all segments of the log belong to an abandoned history.
        layout: the number of layers of each stage; empty if the model is not a LayerStack.
        start_values: what workers' scripts had set at first, by keys of the rendezvous store; none where
            only the job's own store has them.
        alone: nothing is replayed up to the others' iteration: they have no state either, so all would load.
    """

    machines: int
    workers_per_machine: int
    records: Mapping[int, WorkerRecord]
    lost: tuple[int, ...]
    begin: int
    until: int
    log_since: int = 0
    layout: tuple[int, ...] = ()
    start_values: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The workers that are rebuilt."""
        return tuple(rank for rank in self.records if rank // self.workers_per_machine in self.lost)


def machine_name(slot: int, *, replaced: bool) -> str:
    """The name under which a slot's machine joins the synthetic journal."""
    return f"m-{slot}.{int(replaced)}"


def machines_to_replay(
    records: Mapping[int, WorkerRecord], machine: int, workers_per_machine: int
) -> tuple[int, ...]:
    """The slots of all machines that have to be rebuilt together with one.

    Args:
        records: of all workers, by rank.
        machine: the slot that is asked for.
        workers_per_machine: the same on each machine.

    Raises:
        UsageError: these are all machines of the run: it has no log that a replay could read.
    """
    lost, found = {machine}, set[int]()
    while lost != found:
        found = set(lost)
        ranks = {rank for rank in records if rank // workers_per_machine in lost}
        held = {records[rank].holds for rank in ranks}
        needed = {rank for rank in records if records[rank].holds in held}
        if needed != set(records):
            needed |= _rebuilt_with(records, needed)
        lost |= {rank // workers_per_machine for rank in needed}
    if len(lost) * workers_per_machine == len(records) and len(records) > 0:
        raise UsageError(
            f"machine {machine} cannot be replayed: {named('machine', sorted(lost))} recover together, and "
            "no other machine has a log for them. Resume the run from its checkpoint instead"
        )
    return tuple(sorted(lost))


def workers_to_replay(records: Mapping[int, WorkerRecord], rank: int) -> set[int]:
    """The workers that have to be rebuilt together with one, if no replica of it is left.

    Args:
        records: of all workers, by rank. Only the worker's own pipeline counts.
    """
    own = {other: record for other, record in records.items() if record.pipeline == records[rank].pipeline}
    return _rebuilt_with(own, {rank})


def _rebuilt_with(records: Mapping[int, WorkerRecord], lost: set[int]) -> set[int]:
    """The workers that the live job would rebuild if it lost some: those of their group and neighbours."""
    statuses = {rank: _status(rank, record, None if rank in lost else 1) for rank, record in records.items()}
    # Each record names its group, so that no machine stands for one.
    plan = make_plan(statuses, workers_per_machine=1, committed=0, allow_helpers=False)
    return {rank for rank, task in plan.tasks.items() if not task.idle}


def log_extent(
    store: Store,
    run_id: str,
    records: Mapping[int, WorkerRecord],
    ranks: Sequence[int],
    begin: int,
    *,
    since: int = 0,
) -> int | None:
    """The number of completed iterations up to which some workers can be replayed.

    An iteration counts if each neighbour outside of these workers has logged as many messages in it as in any
    other one, and no fewer than there are microbatches.

    Args:
        run_id: the run.
        records: of all workers, by rank.
        ranks: the workers that are rebuilt.
        begin: completed iterations of the checkpoint that they load.
        since: the generation before which all segments belong to an abandoned history.

    Returns:
        At least ``begin``. None if none of these workers needs a log.

    Raises:
        RecoveryError: a segment that matters is missing, torn or corrupt.
    """
    extents = []
    for rank in ranks:
        senders = _senders(records, rank, ranks)
        if senders:
            directories = [log_directory(sender) for sender in sorted(set(senders.values()))]
            reader = LogReader(
                store, directories, run_id=run_id, since_generation=since, from_iteration=begin
            )
            reader.refresh()
            extents.append(_extent(reader, records[rank], senders, begin))
    return min(extents, default=None)


def _senders(
    records: Mapping[int, WorkerRecord], rank: int, ranks: Sequence[int]
) -> dict[tuple[int, int], int]:
    """The workers that logged the messages which a worker reads, by source and destination stage."""
    own = records[rank]
    holders = {
        stage: other
        for other, record in records.items()
        if record.pipeline == own.pipeline
        for stage in record.stages
    }
    near = {(s + step, s) for s in own.stages for step in (-1, 1) if s + step in holders}
    linked = {(stage, s) for stage in own.linked for s in own.stages}
    return {(source, s): holders[source] for source, s in near | linked if holders[source] not in ranks}


def _extent(reader: LogReader, own: WorkerRecord, senders: Mapping[tuple[int, int], int], begin: int) -> int:
    coverage = ReplayCoverage()
    for source, destination in senders:
        if source == destination - 1:
            every = {(microbatch, 0) for microbatch in range(own.microbatches)}
            coverage.expect(Boundary(source, destination, Direction.FORWARD), every)
    iteration, found = begin, True
    while found:
        keys = [key for key in reader.keys(iteration) if (key.source_stage, key.destination_stage) in senders]
        for key in keys:
            entry = Entry(RecordKind.MESSAGE, key, 0, True, "", _NEWEST)
            coverage.add(senders[key.source_stage, key.destination_stage], [entry])
        iteration, found = iteration + 1, bool(keys)
        coverage.compare_before(iteration)
    return coverage.complete_until(set(senders.values()), begin)


def synthetic_journal(plan: ReplayPlan) -> Iterator[ev.Event]:
    """The journal of a job that has just replaced the lost machines, and whose other workers wait."""
    yield ev.JobOpened(
        machines=plan.machines,
        workers_per_machine=plan.workers_per_machine,
        checkpoint=plan.begin,
        layers=plan.layout,
    )
    for slot in range(plan.machines):
        name = machine_name(slot, replaced=False)
        yield ev.MachineJoined(machine=name, preferred_slot=slot)
    for slot in plan.lost:
        yield ev.MachineLost(machine=machine_name(slot, replaced=False), reason="it is replayed")
    for slot in plan.lost:
        name = machine_name(slot, replaced=True)
        yield ev.MachineJoined(machine=name, preferred_slot=slot)
    for rank, record in plan.records.items():
        if rank not in plan.ranks:
            yield _status(rank, record, None if plan.alone else plan.until)


def _status(rank: int, record: WorkerRecord, iteration: int | None) -> ev.StatusReported:
    return ev.StatusReported(
        rank=rank,
        generation=GENERATION,
        iteration=iteration,
        live=iteration is not None,
        stages=record.stages,
        pipeline_known=True,
        holds=record.holds,
        pipeline=record.pipeline,
        group=record.group,
        linked=record.linked,
        together=record.together,
    )
