"""The iteration up to which the logs in a store allow a replay, by the workers' records of who sends what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swift_ft.checkpoint.store_claim import log_directory
from swift_ft.checkpoint.worker_record import WorkerRecord
from swift_ft.logging import Direction, LogReader
from swift_ft.logging.format.record import RecordKind
from swift_ft.offline.replay_coverage import Boundary, Entry, ReplayCoverage
from swift_ft.storage.store import Store

_NEWEST = (0, 0, 0)  # the reader has chosen among the copies of a message


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
