"""Which messages a replay would find: from records alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from swift_ft.logging.format.record import Direction, MessageKey, RecordKind
from swift_ft.offline.replay_coverage import Entry, ReplayCoverage

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
MICROBATCHES = 3


def entry(
    kind: RecordKind, key: MessageKey, *, checksum: int = 0, intact: bool = True, generation: int = 1
) -> Entry:
    own = checksum or hash((key.iteration, key.microbatch, key.source_stage, key.destination_stage))
    return Entry(kind, key, own, intact, f"g{generation}", (generation, key.iteration, key.microbatch))


def pair(one: int, other: int) -> list[tuple[int, int, Direction]]:
    return [(one, other, FORWARD), (other, one, BACKWARD)]


def records(
    iteration: int, stage: int, boundaries: Iterable[tuple[int, int, Direction]], salt: int = 0
) -> Iterator[Entry]:
    """What the worker of a stage logs of an iteration, if these boundaries are logged."""
    for (source, destination, direction), microbatch in product(boundaries, range(MICROBATCHES)):
        key = MessageKey(iteration, microbatch, direction, source, destination, 0)
        checksum = 1 + salt * 1000 + iteration * 100 + microbatch * 10 + source
        if stage == source:
            yield entry(RecordKind.MESSAGE, key, checksum=checksum)
        if stage == destination:
            yield entry(RecordKind.RECEIPT, key, checksum=checksum)


def coverage_of(
    iterations: Iterable[int],
    *,
    stages: int = 3,
    boundaries: Iterable[tuple[int, int, Direction]] = (*pair(0, 1), *pair(1, 2)),
    without: Iterable[tuple[int, int]] = (),
) -> ReplayCoverage:
    """A pipeline of one stage per worker. ``without`` are iterations that a worker's log lacks."""
    boundaries, without, coverage = list(boundaries), set(without), ReplayCoverage()
    for iteration, stage in product(iterations, range(stages)):
        if (stage, iteration) not in without:
            coverage.add(stage, records(iteration, stage, boundaries))
    coverage.compare_before(float("inf"))
    return coverage


def test_all_is_there() -> None:
    coverage = coverage_of(range(4, 8))
    assert coverage.newest == 8
    replays = coverage.replays(4)
    assert {rank: (replay.stages, replay.until, replay.holes) for rank, replay in replays.items()} == {
        rank: ((rank,), 8, ()) for rank in range(3)
    }
    assert replays[1].writers == (0, 2)
    assert replays[0].writers == (1,)


def test_a_hole_concerns_the_neighbours_from_the_checkpoint_on() -> None:
    coverage = coverage_of(range(4, 8), without=[(0, 5)])
    replays = coverage.replays(4)
    (hole,) = replays[1].holes
    assert (hole.writer, hole.iteration, hole.count, hole.sent, hole.later) == (0, 5, 3, True, True)
    assert {rank: replay.until for rank, replay in replays.items()} == {0: 8, 1: 5, 2: 8}
    assert {rank: replay.until for rank, replay in coverage.replays(6).items()} == {0: 8, 1: 8, 2: 8}


def test_an_end_that_is_not_there_yet() -> None:
    """Receipts prove that it was sent; nothing proves it where the receiver's log ends, too."""
    coverage = coverage_of(range(4, 8), without=[(0, 7)])
    (hole,) = coverage.replays(4)[1].holes
    assert (hole.iteration, hole.sent, hole.later) == (7, True, False)
    coverage = coverage_of(range(4, 8), without=[(0, 7), (1, 7)])
    assert coverage.newest == 8  # for worker 2
    (hole,) = coverage.replays(4)[1].holes[:1]
    assert (hole.writer, hole.iteration, hole.sent, hole.later) == (0, 7, False, False)


def test_workers_that_are_rebuilt_together_read_what_the_others_sent() -> None:
    """So what one of them lacks, all of them lack."""
    boundaries = [*pair(0, 1), *pair(2, 3)]  # 1 and 2 are a group
    coverage = coverage_of(range(4, 8), stages=4, boundaries=boundaries, without=[(0, 6)])
    replays = coverage.replays(4, {1: {1, 2}, 2: {1, 2}})
    assert (replays[1].together, replays[2].together) == ((2,), (1,))
    assert replays[2].writers == (0, 3)
    assert {rank: replay.until for rank, replay in replays.items()} == {0: 8, 1: 6, 2: 6, 3: 8}


def test_pipelines_of_replicas_are_told_apart_by_what_they_sent() -> None:
    """Workers 0 and 1 are one pipeline, 2 and 3 another; stages and keys are the same."""
    coverage = ReplayCoverage()
    for iteration, rank in product(range(4, 8), range(4)):
        if (rank, iteration) != (2, 6):
            coverage.add(rank, records(iteration, rank % 2, pair(0, 1), salt=rank // 2))
    coverage.compare_before(float("inf"))
    replays = coverage.replays(4)
    assert {rank: replay.writers for rank, replay in replays.items()} == {0: (1,), 1: (0,), 2: (3,), 3: (2,)}
    assert {rank: replay.until for rank, replay in replays.items()} == {0: 8, 1: 8, 2: 8, 3: 6}
    assert coverage.receipts_that_differ() == []


def test_a_log_that_is_gone_is_known_from_receipts() -> None:
    coverage = coverage_of(range(4, 8), without=[(0, iteration) for iteration in range(4, 8)])
    replay = coverage.replays(4)[1]
    assert replay.until == 4
    assert {(hole.writer, hole.count, hole.sent) for hole in replay.holes} == {(None, 3, True)}


def test_the_newest_copy_of_a_message_counts() -> None:
    for damaged, until in ((1, 5), (2, 4)):
        coverage = coverage_of(range(4, 4))
        for generation in (1, 2):
            for one in records(4, 0, pair(0, 1)):
                intact = generation != damaged
                order = (generation, 0, one.key.microbatch)
                coverage.add(0, [one._replace(order=order, intact=intact)])
        coverage.add(1, records(4, 1, pair(0, 1)))
        coverage.compare_before(float("inf"))
        assert coverage.replays(4)[1].until == until
        assert coverage.mismatches == []


def test_copies_and_receipts_that_differ() -> None:
    coverage = coverage_of(range(4, 6), stages=2, boundaries=pair(0, 1))
    key = MessageKey(6, 0, FORWARD, 0, 1, 0)
    coverage.add(0, [entry(RecordKind.MESSAGE, key, checksum=7)])
    coverage.add(0, [entry(RecordKind.MESSAGE, key, checksum=8, generation=2)])
    coverage.add(1, [entry(RecordKind.RECEIPT, key, checksum=7)])
    coverage.compare_before(float("inf"))
    ((path, what),) = coverage.mismatches
    assert path == "g2"
    assert "two copies of iteration 6, microbatch 0" in what
    ((path, what),) = coverage.receipts_that_differ()
    assert path == "g2"
    assert "worker 1 received other bytes of iteration 6" in what
