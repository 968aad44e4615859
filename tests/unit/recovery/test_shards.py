"""Each sample once, in an unchanged order, with a constant global batch, through any changes of layout."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.errors import UsageError
from swift_ft.recovery.shards import Epoch, ShardQueue, deal_microbatches


@st.composite
def deals(draw: st.DrawFn, batch: int) -> tuple[int, ...]:
    """Microbatches of one to four pipelines that divide a batch."""
    total = draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0]))
    speeds = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum))
    return deal_microbatches(total, speeds)


@given(st.data())
@settings(deadline=None)
def test_each_sample_once_and_in_order_through_any_changes(data: st.DataObject) -> None:
    """Tenplex §5.2: the rest of the epoch is dealt out anew at each change."""
    samples, batch = data.draw(st.integers(0, 200)), data.draw(st.integers(1, 24))
    epoch, seen = Epoch(samples, batch), list[int]()
    while epoch.iterations:
        layout = data.draw(deals(batch))
        for iteration in range(iterations := data.draw(st.integers(1, epoch.iterations))):
            taken = epoch.taken(iteration, layout)
            own = [sample for ranges in taken for sample in ranges]
            assert len(own) == batch or iteration == epoch.iterations - 1
            seen += own
        epoch = epoch.after(iterations)
    assert seen == list(range(samples))


@given(st.integers(0, 100), st.integers(1, 12), st.data())
@settings(deadline=None)
def test_the_rest_of_an_epoch_by_pipeline(samples: int, batch: int, data: st.DataObject) -> None:
    epoch = Epoch(samples, batch, first=data.draw(st.integers(0, samples)))
    layout = data.draw(deals(batch))
    parts = epoch.partition(layout)
    assert len(parts) == len(layout)
    own = sorted(sample for ranges in parts for part in ranges for sample in part)
    assert own == list(range(epoch.first, samples))
    for ranges in parts:
        order = [sample for part in ranges for sample in part]
        assert order == sorted(order)


def test_pipelines_take_consecutive_microbatches() -> None:
    epoch = Epoch(100, 12, first=24)
    assert epoch.taken(1, [1, 3]) == [range(36, 39), range(39, 48)]
    assert Epoch(26, 12).taken(2, [2, 2]) == [range(24, 26), range(26, 26)]  # the last batch


@given(st.integers(0, 50), st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum))
def test_microbatches_follow_speeds(microbatches: int, speeds: list[int]) -> None:
    shares = deal_microbatches(microbatches, speeds)
    assert sum(shares) == microbatches
    for share, speed in zip(shares, speeds, strict=True):
        assert abs(share - microbatches * speed / sum(speeds)) < 1


@pytest.mark.parametrize(
    ("microbatches", "iteration", "words"),
    [([3], 0, "divide a global batch of 8"), ([], 0, "divide"), ([2], 5, "it has 5"), ([-1, 2], 0, "divide")],
)
def test_what_is_no_share(microbatches: list[int], iteration: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Epoch(40, 8).taken(iteration, microbatches)


def test_what_is_no_epoch() -> None:
    for samples, batch, first in ((10, 0, 0), (10, 2, 11), (-1, 2, 0)):
        with pytest.raises(UsageError, match="cannot begin"):
            Epoch(samples, batch, first)
    with pytest.raises(UsageError, match="it has 5"):
        Epoch(40, 8).after(6)
    with pytest.raises(UsageError, match="cannot be dealt"):
        deal_microbatches(4, [0, 0])


# --------------------------------------------------------------------------------------- the queue


@given(st.integers(0, 40), st.integers(1, 5), st.data())
@settings(deadline=None)
def test_no_shard_is_lost_and_each_is_done_once(samples: int, size: int, data: st.DataObject) -> None:
    """DLRover §5.2, with losses at any moment, late reports, and restarts from what a checkpoint holds."""
    queue, finished, given_out = ShardQueue(samples, size), Counter[int](), list[int]()
    for _ in range(400):
        if queue.is_done:
            break
        worker = data.draw(st.integers(0, 2))
        action = data.draw(st.sampled_from(["take", "take", "done", "done", "lost", "restart"]))
        mine = sorted(shard for shard, holder in queue.doing.items() if holder == worker)
        if action == "take":
            first = next(iter(queue), None)
            queue, shard = queue.take(worker)
            assert shard == first
            if shard is not None:
                given_out.append(shard)
        elif action == "done" and mine:
            finished[mine[0]] += 1
            queue = queue.done(worker, mine[0])
            assert queue.done(worker, mine[0]) == queue  # reported twice
        elif action == "lost":
            queue = queue.lost(worker)
        elif action == "restart":
            queue = ShardQueue.from_json(queue.to_json())
    while not queue.is_done:
        queue, shard = queue.take(9)
        for left, holder in queue.doing.items():
            finished[left] += 1
            queue = queue.done(holder, left)
    assert finished == Counter(range(queue.shards))
    assert [sample for shard in range(queue.shards) for sample in queue.ranges(shard)] == list(range(samples))
    first_time = list(dict.fromkeys(given_out))
    assert first_time == sorted(first_time)


def test_what_a_lost_worker_had_comes_first() -> None:
    queue = ShardQueue(10, 2)
    for worker in (1, 2, 1):
        queue, _ = queue.take(worker)
    queue = queue.done(1, 0).lost(1)
    assert list(queue) == [2, 3, 4]
    queue, shard = queue.take(3)
    assert shard == 2
    assert queue.done(1, 2) == queue  # a report of the worker that was lost


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"samples": 10, "size": 2, "next": 1, "to_do_again": [3]},
        {"samples": 10, "size": 2, "next": 9, "to_do_again": []},
        {"samples": 10, "size": True, "next": 0, "to_do_again": []},
        {"samples": 10, "size": 2, "next": 0, "to_do_again": "0"},
    ],
)
def test_what_is_no_queue(data: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="is no queue of shards"):
        ShardQueue.from_json(data)
