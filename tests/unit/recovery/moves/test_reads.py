"""What is read of a checkpoint of other shards: each element once, from the own part where it is there."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.recovery.layout.mesh import Layout, held_by, tiles_of
from swift_ft.recovery.layout.tensors import Ranges, StateTensor, count, relative
from swift_ft.recovery.moves.reads import plan_reads
from tests.support.reshard import FilesOfPart, PlannedBytes, planned_bytes

LENGTHS = st.integers(1, 9)
TENSORS = st.builds(
    lambda rows, columns, split: StateTensor("w", (rows, columns), 4, (0,), split),
    LENGTHS,
    LENGTHS,
    st.sampled_from([(), (("tp", 0),), (("tp", 1),), (("dp", 0), ("tp", 1)), (("dp", 0), ("tp", 0))]),
)
LAYOUTS = st.builds(lambda dp, tp: Layout((((0, 0),),) * dp, tp=tp), st.integers(1, 3), st.integers(1, 4))


def held(tensor: StateTensor, layout: Layout) -> dict[int, dict[str, Ranges]]:
    found = held_by([tensor], tiles_of([tensor], layout))
    return {slot: found.get(slot, {}) for slot in range(layout.size)}


@given(TENSORS, LAYOUTS, LAYOUTS)
def test_each_element_once(tensor: StateTensor, old: Layout, new: Layout) -> None:
    whole = np.arange(np.prod(tensor.shape)).reshape(tensor.shape)
    saved = held(tensor, old)
    for rank, wanted in held(tensor, new).items():
        plan = plan_reads(wanted, saved, own=min(rank, old.size - 1))
        assert not plan.missing
        for name, ranges in wanted.items():
            got = np.full([end - start for start, end in ranges], -1)
            for part, pieces in plan.pieces.items():
                if name in pieces:
                    values = whole[relative(saved[part][name], tuple((0, n) for n in tensor.shape))]
                    place = relative(pieces[name], ranges)
                    assert (got[place] == -1).all()
                    got[place] = values[relative(pieces[name], saved[part][name])]
            assert (got == whole[relative(ranges, tuple((0, n) for n in tensor.shape))]).all()


def test_what_the_own_part_has_comes_from_it() -> None:
    tensor = StateTensor("w", (6,), 4, (0,), (("tp", 0),))
    saved = held(tensor, Layout((((0, 0),),), tp=3))
    plan = plan_reads({"w": ((0, 4),)}, saved, own=1)
    assert plan.pieces == {1: {"w": ((2, 4),)}, 0: {"w": ((0, 2),)}, 2: {}}


def test_parts_that_do_not_have_all() -> None:
    plan = plan_reads({"w": ((0, 4),), "v": ((0, 1),)}, {0: {"w": ((0, 3),)}}, own=0)
    assert plan.missing == ("w", "v")
    assert count(plan.pieces[0]["w"]) == 3


def test_bytes_by_origin() -> None:
    """Of a part of which nothing is needed, only the small file is read."""
    plan = plan_reads(
        {"w": ((0, 4),)}, {0: {"w": ((0, 2),)}, 1: {"w": ((2, 4),)}, 2: {"w": ((4, 6),)}}, own=0
    )
    files = {0: FilesOfPart(1, 10), 1: FilesOfPart(2, 20), 2: FilesOfPart(4, 40)}
    assert planned_bytes(plan, files, {0}, {1}) == PlannedBytes(own_disk=11, peers=22, store=4)
    assert planned_bytes(plan, files, set(), {2}) == PlannedBytes(own_disk=0, peers=4, store=33)
