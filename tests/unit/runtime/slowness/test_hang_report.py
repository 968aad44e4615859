"""Where all workers are while an iteration does not end: the groups, their order, and the words."""

from __future__ import annotations

from dataclasses import asdict, replace

from swift_ft.coordination.progress import STANDS, Stand
from swift_ft.runtime.slowness.hang_report import grouped, in_words

WAITS = Stand(7, "at train.py:40 (main), in torch.distributed.all_reduce", waits=True, stack=())
LOADS = Stand(7, "at data.py:12 (load), in time.sleep", False, ("data.py:12 (load)", "train.py:31 (main)"))


def progress(*stands: Stand | None) -> dict[int, dict[str, object]]:
    return {
        rank: {"iteration": 7, "mode": "live", **({STANDS: asdict(stand)} if stand else {})}
        for rank, stand in enumerate(stands)
    }


def test_the_one_that_all_others_wait_for_is_first() -> None:
    groups = grouped(progress(WAITS, WAITS, LOADS, WAITS), 7)
    assert [group.ranks for group in groups] == [(2,), (0, 1, 3)]
    assert in_words(groups, 4) == (
        "Worker 2 is at data.py:12 (load), in time.sleep: data.py:12 (load) < train.py:31 (main). Workers 0, "
        "1 and 3 are at train.py:40 (main), in torch.distributed.all_reduce, and wait for other workers"
    )


def test_each_group_has_a_stack() -> None:
    """One is in another collective than all others, and both have called the same helper."""
    waits = [replace(WAITS, stack=("comm.py:9 (meet)", f"train.py:{line} (main)")) for line in (40, 52)]
    one, other = waits[0], replace(waits[1], place="at train.py:52 (main), in torch.distributed.barrier")
    said = in_words(grouped(progress(one, other, one), 7), 3).split(". ")
    assert said[0].endswith("and waits for other workers: comm.py:9 (meet) < train.py:52 (main)")
    assert said[1].endswith("and wait for other workers: comm.py:9 (meet) < train.py:40 (main)")


def test_of_those_who_wait_the_smaller_group_is_first() -> None:
    """One is in another collective than all others: they wait for each other for ever."""
    odd = Stand(7, "at train.py:52 (evaluate), in torch.distributed.barrier", waits=True, stack=())
    groups = grouped(progress(WAITS, odd, WAITS), 7)
    assert [group.ranks for group in groups] == [(1,), (0, 2)]


def test_one_that_computes_is_before_those_in_the_backward_pass() -> None:
    """DDP averages gradients there: it may be all but one that are in it."""
    backward = Stand(7, "at train.py:38 (main), in engine", waits=False, stack=(), backward=True)
    groups = grouped(progress(backward, LOADS, LOADS), 7)
    assert [group.ranks for group in groups] == [(1, 2), (0,)]


def test_one_that_is_an_iteration_behind_is_a_group_of_its_own() -> None:
    behind = Stand(6, WAITS.place, waits=True, stack=())
    ahead = Stand(8, WAITS.place, waits=True, stack=())
    groups = grouped(progress(WAITS, behind, WAITS, ahead), 7)
    assert [group.ranks for group in groups] == [(1,), (0, 2)]
    assert in_words(groups, 4).endswith("Worker 3 said nothing of a wait")


def test_one_that_says_nothing_is_named() -> None:
    assert in_words(grouped(progress(WAITS, None), 7), 3).endswith("Workers 1 and 2 said nothing of a wait")
