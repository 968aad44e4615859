"""The machines of the next world, for each change that somebody may ask for."""

from __future__ import annotations

import pytest

from swift_ft.errors import UsageError
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.next_world import check_changeable, moved, moved_somewhere, resized, same_machines
from swift_ft.recovery.protocol import step, step_all
from tests.support.journals import checkpoint, machine, opening


def live(machines: int, spares: int = 0) -> State:
    """A job whose workers train."""
    state = step_all(State(), opening(machines, spares=spares))
    ready = (ev.WorkerReady(rank=rank, generation=state.generation) for rank in range(machines))
    state = step_all(state, ready)
    assert state.phase == Phase.LIVE
    return state


def with_guest() -> State:
    """Three machines, of which one runs the lost one's workers, too."""
    state = step_all(live(3), checkpoint(3, 10))
    state = step(state, ev.MachineLost(machine=machine(1), reason="power"))
    guest = ev.MachineJoined(
        machine="guest.0", address="host-2:2", setup=("torch: 2",), preferred_slot=1, host=machine(2)
    )
    state = step(state, guest)
    assert state.membership.members[1] == "guest.0"
    return state


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(machine(number) for number in numbers)


def test_the_same_machines_by_slot() -> None:
    assert same_machines(live(3, 2)) == names(0, 1, 2)


def test_a_spare_takes_the_slot_of_who_moves() -> None:
    state = live(3, 2)
    assert moved(state, machine(1)) == names(0, 3, 2)
    assert moved(state, machine(1), machine(4)) == names(0, 4, 2)


def test_a_machine_moves_to_a_spare_or_else_to_the_next_slot() -> None:
    assert moved_somewhere(live(3, 2), 1) == names(0, 3, 2)
    assert moved_somewhere(live(3), 0) == names(1, 0, 2)
    assert moved_somewhere(live(3), 2) == names(2, 1, 0)
    with pytest.raises(UsageError, match="no spare waits, and there is no other machine"):
        moved_somewhere(live(1), 0)
    with pytest.raises(UsageError, match="there is no slot 3: the job has 3 machines"):
        moved_somewhere(live(3, 1), 3)


def test_who_is_asked_to_leave_takes_no_slot_and_may_be_moved() -> None:
    state = step(live(3, 2), ev.DrainRequested(machine=machine(3)))
    assert moved(state, machine(1)) == names(0, 4, 2)
    state = step(state, ev.DrainRequested(machine=machine(1)))
    assert moved(state, machine(1)) == names(0, 4, 2)
    with pytest.raises(UsageError, match=r"m-1\.0 was asked to leave"):
        moved(state, machine(2))
    with pytest.raises(UsageError, match=r"m-1\.0 was asked to leave"):
        same_machines(state)


def test_what_cannot_move() -> None:
    with pytest.raises(UsageError, match="no spare waits to take its place: start a machine"):
        moved(live(3), machine(1))
    with pytest.raises(UsageError, match=r"m-3\.0 has no slot to move"):
        moved(live(3, 1), machine(3))
    with pytest.raises(UsageError, match=r"m-2\.0 is no spare that could take a slot: the spares are m-3\.0"):
        moved(live(3, 1), machine(1), machine(2))
    with pytest.raises(UsageError, match=r"m-2\.0 is no spare that could take a slot: there is no spare"):
        moved(live(3), machine(1), machine(2))


@pytest.mark.parametrize(
    ("count", "machines"), [(1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (4, (0, 1, 2, 3)), (5, (0, 1, 2, 3, 4))]
)
def test_the_last_slots_go_first_and_spares_come_after_them(count: int, machines: tuple[int, ...]) -> None:
    assert resized(live(3, 2), count) == names(*machines)


def test_who_is_asked_to_leave_is_in_no_world_of_another_size() -> None:
    state = step(live(3, 2), ev.DrainRequested(machine=machine(0)))
    assert resized(state, 2) == names(1, 2)
    assert resized(state, 4) == names(1, 2, 3, 4)
    with pytest.raises(UsageError, match="the job has 4 machines, 2 of them as spares: start 1 more with"):
        resized(state, 5)


def test_numbers_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="at least 1 machines, not 0"):
        resized(live(3), 0)
    with pytest.raises(UsageError, match="the job has 5 machines, 2 of them as spares: start 2 more"):
        resized(live(3, 2), 7)
    opened, *joined = opening(3)
    assert isinstance(opened, ev.JobOpened)
    least = ev.JobOpened(machines=3, min_machines=2, setup=opened.setup)
    with pytest.raises(UsageError, match="at least 2 machines, not 1"):
        resized(step_all(State(), [least, *joined]), 1)


def test_a_guest_is_in_no_other_world() -> None:
    state = with_guest()
    assert resized(state, 2) == names(0, 2)
    with pytest.raises(UsageError, match=r"slot 1 is run by other machines, too: start 1 more .* scale 2"):
        same_machines(state)
    spare = ev.MachineJoined(machine="late.0", address="host-9:1", setup=("torch: 2",))
    state = step(state, spare)
    assert resized(state, 3) == (*names(0, 2), "late.0")
    with pytest.raises(UsageError, match="slot 1 is run by other machines"):
        moved(state, machine(0))


def test_a_job_that_trains_can_change_once_at_a_time() -> None:
    state = live(2, 1)
    check_changeable(state)
    state = step(state, ev.ChangePlanned(world=1, machines=names(0, 2)))
    with pytest.raises(UsageError, match="a change to world 1 is under way"):
        check_changeable(state)
    check_changeable(step(state, ev.ChangeGivenUp(world=1, reason="nobody wants it")))


def test_a_job_that_does_not_train_cannot_change() -> None:
    state = live(2)
    with pytest.raises(UsageError, match=r"does not train now \(agreeing\)"):
        check_changeable(step_all(State(), opening(2)[:-1]))
    with pytest.raises(UsageError, match=r"does not train now \(forming\)"):
        check_changeable(step(state, ev.MachineLost(machine=machine(1), reason="power")))
    with pytest.raises(UsageError, match="the run has ended"):
        check_changeable(step(state, ev.JobClosed(reason="Ctrl-C", exit_code=130)))
    with pytest.raises(UsageError, match="the training is complete"):
        check_changeable(step(state, ev.WorkerFinished(rank=0, generation=state.generation)))
    with pytest.raises(UsageError, match="has no session"):
        check_changeable(step_all(State(), opening(2)[:3]))
