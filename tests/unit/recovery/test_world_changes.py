"""Changes to other worlds as a journal tells them: one event a second."""

from __future__ import annotations

from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.history import History
from swift_ft.recovery.occupancy import occupancy
from swift_ft.recovery.waits import Limit, waiting_for
from swift_ft.recovery.world_changes import WorldChange

STARTED: list[ev.Event] = [
    ev.JobOpened(machines=2),
    *(ev.MachineJoined(machine=name) for name in "ABC"),
    *(ev.StatusReported(rank=rank, generation=1, holds=("model",), iteration=None) for rank in (0, 1)),
]
AT = float(len(STARTED))
"""When the change is planned."""


def a_change(machines: tuple[str, ...] = ("C", "A"), world: int = 1) -> list[ev.Event]:
    ranks = range(len(machines))
    return [
        ev.ChangePlanned(world=world, machines=machines, reason="more memory", asked_by="an operator"),
        *(ev.NextPrepared(rank=rank, world=world) for rank in ranks),
        ev.SwitchRequested(rank=0, generation=1, iteration=7, world=world),
        *(ev.StateOffered(rank=rank, generation=1, iteration=7, address="", digest="") for rank in (1, 0)),
        *(ev.StateTaken(rank=rank, world=world, own=10 * rank, peers=5) for rank in ranks),
        *(
            ev.StatusReported(rank=rank, generation=2, holds=("model",), iteration=7, live=True)
            for rank in ranks
        ),
    ]


def history_of(*more: ev.Event) -> History:
    events = [*STARTED, *more]
    return History.of(Entry(at, event, float(at), "test") for at, event in enumerate(events))


def only(history: History) -> WorldChange:
    (change,) = history.worlds
    return change


def test_a_change_that_comes_about() -> None:
    history = history_of(*a_change())
    change = only(history)
    assert (change.world, change.machines) == (1, ("C", "A"))
    assert (change.reason, change.asked_by) == ("more memory", "an operator")
    assert (change.planned, change.prepared, change.iteration) == (AT, AT + 2, 7)
    assert (change.stopped, change.offered, change.switched, change.live) == (AT + 4, AT + 5, AT + 7, AT + 9)
    assert change.pause_s == 5.0
    assert (change.own, change.peers) == ({0: 0, 1: 10}, {0: 5, 1: 5})
    assert (change.ended, change.given_up, change.is_open) == (None, "", False)
    assert not history.recoveries
    assert not history.layouts


def test_as_json() -> None:
    told = only(history_of(*a_change())).to_dict()
    assert told["machines"] == ["C", "A"]
    assert told["own"] == {"0": 0, "1": 10}
    assert told["pause_s"] == 5.0


def test_a_change_that_is_given_up_and_one_that_follows() -> None:
    history = history_of(*a_change()[:5], ev.ChangeGivenUp(world=1, reason="slow"), *a_change(world=2)[:2])
    first, second = history.worlds
    assert (first.ended, first.given_up, first.pause_s, first.stopped) == (AT + 5, "slow", None, AT + 4)
    assert (second.world, second.is_open, second.prepared) == (2, True, None)


def test_a_loss_gives_it_up_and_begins_a_recovery() -> None:
    history = history_of(*a_change()[:5], ev.MachineLost(machine="A", reason="killed"))
    assert only(history).given_up == "machine A was lost"
    assert len(history.recoveries) == 1


def test_a_loss_between_the_switch_and_training() -> None:
    lost = ev.MachineLost(machine="A", reason="killed")
    again = ev.StatusReported(rank=1, generation=3, holds=("model",), iteration=None)
    history = history_of(*a_change()[:-1], lost, again)
    change = only(history)
    assert (change.switched, change.live) == (AT + 7, AT + 10)
    assert len(history.recoveries) == 1


def test_a_run_that_ends_meanwhile() -> None:
    change = only(history_of(*a_change()[:3], ev.JobClosed(reason="Ctrl-C")))
    assert (change.ended, change.given_up) == (AT + 3, "the run has ended")


def test_a_plan_that_cannot_be_is_no_change() -> None:
    assert not history_of(ev.ChangePlanned(world=1, machines=("A", "A"))).worlds


def test_who_was_where() -> None:
    history, changes = History(), []
    for at, event in enumerate([*STARTED, *a_change(("C",))]):
        changes.append(history.apply(Entry(at, event, float(at), "test")))
    found = occupancy(changes)
    places = {(one.machine, one.slot, one.end) for one in found.tenures}
    assert places == {
        *{("A", 0, "became a spare"), ("B", 1, "became a spare")},
        *{("A", None, ""), ("B", None, ""), ("C", None, "took slot 0"), ("C", 0, "")},
    }
    last = [span for span in found.workers if span.rank == 1][-1]
    assert last.until == only(history).switched
    first = [span for span in found.workers if span.rank == 0][-1]
    assert first.machine == "C"


def test_what_all_wait_for() -> None:
    def waits(count: int) -> tuple[str, Limit | None] | None:
        found = waiting_for(history_of(*a_change(("C",))[:count]).state)
        return None if found is None else (found.what, found.limit)

    assert waits(3) is None
    assert waits(4) == ("worker 0 to stop, since world 1 takes over", None)
    assert waits(5) == ("worker 0 of world 1 to take its state", Limit.REPORT)
