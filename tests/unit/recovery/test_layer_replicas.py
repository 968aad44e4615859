"""Whatever survivors report: afterwards all layers are of one iteration, from states that are whole."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.layer_replicas import reconcile_layers, why_no_layers
from swift_ft.recovery.layout.stage_layers import layers_by_rank

LAYERS, BEFORE = 6, 30


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, ...]:
    ends = sorted(draw(st.lists(st.integers(1, LAYERS - 1), min_size=2, max_size=2, unique=True)))
    return tuple(end - first for first, end in pairwise([0, *ends, LAYERS]))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[int, StatusReported], dict[int, tuple[int, ...]]]:
    """Two or three pipelines of three stages, interrupted somewhere in an iteration."""
    pipelines = draw(st.integers(2, 3))
    somebody_passed = draw(st.booleans())
    statuses = {}
    for rank in range(3 * pipelines):
        state = draw(st.sampled_from(["lost", "before", "dirty", *["after", "averaged"] * somebody_passed]))
        updated = draw(st.booleans()) and state == "before" and somebody_passed
        statuses[rank] = StatusReported(
            rank=rank,
            generation=2,
            iteration=None if state == "lost" else BEFORE + (state == "after"),
            live=state != "lost",
            stages=(rank % 3,),
            pipeline=rank - rank % 3,
            layers=LAYERS,
            dirty="half updated" if state == "dirty" else None,
            updated=(0, 1) if updated else (),
            undoable=(0, 1) if state == "after" and draw(st.booleans()) else (),
            completes=state == "averaged",
        )
    layout = sum((draw(cuts()) for _ in range(pipelines)), ())
    return statuses, layers_by_rank(statuses, layout)


@given(jobs())
def test_all_layers_are_of_one_iteration(
    job: tuple[dict[int, StatusReported], dict[int, tuple[int, ...]]],
) -> None:
    statuses, placed = job
    found = reconcile_layers(statuses, placed)
    whole = {r: s for r, s in statuses.items() if s.live and not s.dirty}
    held = {layer for rank in whole for layer in placed[rank]}
    if found is None:
        assert why_no_layers(statuses, placed)
        at_best = {s.iteration for s in whole.values() if not s.updated}
        assert held != {*range(LAYERS)} or len(at_best) > 1 or any(s.updated for s in whole.values())
        return
    state = {
        (rank, layer): statuses[rank].iteration if rank in whole and not statuses[rank].updated else None
        for rank, layers in placed.items()
        for layer in layers
    }
    for rank in found.completing:
        assert statuses[rank].completes
        state |= {(rank, layer): BEFORE + 1 for layer in placed[rank]}
    for rank, parameters in found.undo.items():
        assert parameters in (statuses[rank].updated, statuses[rank].undoable)
        state |= {(rank, layer): BEFORE for layer in placed[rank]}
    sources = {transfer.source for transfer in found.transfers}
    for transfer in found.transfers:
        for layer in transfer.layers:
            assert state[transfer.source, layer] == found.iteration
            for target in transfer.targets:
                state[target, layer] = found.iteration
    assert {*state.values()} == {found.iteration}
    assert all(statuses[rank].live for rank in sources)


@given(jobs())
def test_nothing_is_undone_if_it_can_be_copied_or_completed(
    job: tuple[dict[int, StatusReported], dict[int, tuple[int, ...]]],
) -> None:
    statuses, placed = job
    found = reconcile_layers(statuses, placed)
    for rank in found.undo if found is not None else ():
        assert found is not None
        others = [r for r in placed if r != rank and statuses[r].live and not statuses[r].dirty]
        whole_there = {
            layer
            for r in others
            if statuses[r].iteration == found.iteration and not statuses[r].updated
            for layer in placed[r]
        }
        assert not {*placed[rank]} <= whole_there


def test_layers_are_sent_to_all_who_need_them_at_once() -> None:
    statuses = {
        rank: StatusReported(
            rank=rank,
            generation=2,
            iteration=30 + (rank == 0) if rank != 1 else None,
            live=rank != 1,
            stages=(0,),
            pipeline=rank,
            layers=2,
        )
        for rank in range(3)
    }
    found = reconcile_layers(statuses, layers_by_rank(statuses, (2, 2, 2)))
    assert found is not None
    ((source, targets, layers),) = [(t.source, t.targets, t.layers) for t in found.transfers]
    assert (source, targets, layers) == (0, (1, 2), (0, 1))


@pytest.mark.parametrize("lost", [(0,), (0, 1), (0, 4), (1, 3, 5)])
def test_as_long_as_each_layer_is_somewhere(lost: tuple[int, ...]) -> None:
    """Two pipelines of three stages, with unlike cuts."""
    statuses = {
        rank: StatusReported(
            rank=rank,
            generation=2,
            iteration=None if rank in lost else 30,
            live=rank not in lost,
            stages=(rank % 3,),
            pipeline=rank - rank % 3,
            layers=6,
        )
        for rank in range(6)
    }
    placed = layers_by_rank(statuses, (2, 2, 2, 3, 1, 2))
    left = {layer for rank, layers in placed.items() if rank not in lost for layer in layers}
    assert (reconcile_layers(statuses, placed) is not None) == (left == {*range(6)})
    assert [*accumulate(map(len, placed.values()))][-1] == 12
