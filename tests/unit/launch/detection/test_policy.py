"""What counts as gone, by what was heard and when. Nothing here takes any time."""

from __future__ import annotations

import pytest

from swift_ft.config import detection_timings as timings
from swift_ft.launch.detection.policy import (
    Heartbeats,
    LostMachine,
    StoppedWorkers,
    StoreNews,
    StoreSilence,
    WatchedMachine,
    hears_another,
    silent_with,
)

# --------------------------------------------------------------------------------------------------- machines


def test_watchers_report_in_turn() -> None:
    first, second, third = (
        WatchedMachine("m", "host:1", turn, heard_at=10.0, connected=True) for turn in range(3)
    )
    assert 10.9 < first.due_at(1.0) < second.due_at(1.0) < third.due_at(1.0) == 11.0
    second.end("its agent's connection ended", 10.2)
    second.end("and more", 10.3)
    assert second.due_at(1.0) == 10.2 + timings.END_STEP_S
    assert second.as_lost(10.25) == LostMachine("m", "its agent's connection ended")


def test_the_first_contact_may_take_longer() -> None:
    """Connections are proven by both sides, which may have to connect to many."""
    one = WatchedMachine("m", "host:1", 0, heard_at=10.0)
    assert one.due_at(1.0) == 10.0 + timings.FIRST_CONTACT
    assert one.as_lost(15.0) == LostMachine("m", "its agent cannot be reached (timed out)")
    one.end("its agent cannot be reached (Connection refused)", 11.0)
    assert one.due_at(1.0) == 11.0


def test_a_stall_of_half_the_time_leaves_room_for_a_loaded_host() -> None:
    """The last beat may have been one interval before the stall, and the next one comes late."""
    stalled = WatchedMachine("m", "host:1", 0, heard_at=0.0, connected=True)
    assert stalled.due_at(1.0) - (0.5 + 0.1) > 0.3
    assert stalled.as_lost(0.95) == LostMachine("m", "its agent was silent for 0.9 s", silent=True)


def heard(machine: str, at: float, *, connected: bool = True) -> WatchedMachine:
    return WatchedMachine(machine, "host:1", 0, heard_at=at, connected=connected)


def with_it(silent: WatchedMachine, *others: WatchedMachine) -> list[str]:
    return [one.machine for one in silent_with(silent, [silent, *others], 0.3)]


def test_machines_that_fall_silent_at_once() -> None:
    a, b, c = heard("a", 10.0), heard("b", 10.2), heard("c", 9.8)
    assert with_it(a, b, c) == ["b", "c"]
    assert with_it(a) == []
    assert with_it(a, b, heard("d", 10.9)) == [], "one of them is heard"
    assert with_it(a, b, heard("d", 4.0)) == ["b"], "one was gone before"
    assert with_it(a, heard("d", 4.0)) == [], "and says nothing of the link"


def test_what_says_that_the_link_lives() -> None:
    a, b = heard("a", 10.0), heard("b", 10.0)
    ends = heard("d", 10.0)
    ends.end("its agent's connection ended", 10.1)
    assert with_it(a, b, ends) == ["b"], "it may have ended just before"
    assert with_it(a, ends) == []
    ends.ended_at = 10.6
    assert with_it(a, b, ends) == []


def test_one_that_was_never_reached_says_nothing_of_the_link_unless_none_was() -> None:
    a, b = heard("a", 10.0), heard("b", 10.0)
    dialled, other = heard("d", 10.5, connected=False), heard("e", 10.5, connected=False)
    assert with_it(a, b, dialled) == ["b"]
    assert with_it(a, dialled) == []
    assert with_it(dialled, other) == ["e"]
    assert with_it(dialled, other, heard("f", 12.0)) == []
    assert with_it(dialled, other, heard("f", 12.0, connected=False)) == ["e"], "it was dialled later"


def test_one_that_is_put_off_has_one_more_silence_until_it_is_heard() -> None:
    one = WatchedMachine("m", "host:1", 1, heard_at=10.0, connected=True)
    before = one.due_at(1.0)
    one.put_off = True
    assert one.due_at(1.0) == pytest.approx(before + 1.0)
    lost = one.as_lost(12.0, deaf=True)
    assert lost == LostMachine("m", "its agent was silent for 2.0 s", silent=True, deaf=True)
    one.hear(11.5)
    assert one.due_at(1.0) == pytest.approx(before + 1.5)
    one.put_off = True
    one.end("its agent's connection ended", 11.6)
    assert one.as_lost(11.6, deaf=True) == LostMachine("m", "its agent's connection ended")


def test_a_watcher_that_hears_another_one_again_is_not_deaf() -> None:
    """Whether that fell silent, too, or was watched only afterwards."""
    a, b = heard("a", 10.0), heard("b", 10.0)
    assert not hears_another(a, [a], 0.3)
    assert not hears_another(a, [a, b, heard("d", 4.0)], 0.3)
    assert not hears_another(a, [a, b, heard("d", 11.0, connected=False)], 0.3), "it was only dialled"
    assert hears_another(a, [a, b, heard("d", 11.0)], 0.3)
    dialled, later = heard("e", 10.0, connected=False), heard("f", 12.0, connected=False)
    assert not hears_another(dialled, [dialled, later], 0.3)
    assert hears_another(dialled, [dialled, later, heard("d", 11.0)], 0.3)
    b.hear(11.5)
    assert hears_another(a, [a, b], 0.3)
    b.end("its agent's connection ended", 11.6)
    assert hears_another(a, [a, b], 0.3)


# ---------------------------------------------------------------------------------------- workers: heartbeats


def test_a_worker_is_silent_after_the_limit() -> None:
    heartbeats = Heartbeats()
    heartbeats.hear(0, 100.0)
    heartbeats.hear(1, 101.0)
    assert heartbeats.silent(104.0, 4.0) == []
    assert heartbeats.silent(104.5, 4.0) == [0]
    assert heartbeats.ages(104.5) == {0: 4.5, 1: 3.5}
    heartbeats.forget(0)
    assert heartbeats.silent(106.0, 4.0) == [1]
    heartbeats.forget_all()
    assert heartbeats.silent(107.0, 4.0) == []


def test_workers_are_not_silent_because_their_agent_was_frozen() -> None:
    heartbeats = Heartbeats()
    for local_rank in range(2):
        heartbeats.hear(local_rank, 100.0)
    assert heartbeats.silent(101.0, 4.0) == []
    assert heartbeats.silent(160.0, 4.0) == [], "they get a new deadline"
    heartbeats.hear(1, 161.0)
    assert heartbeats.silent(162.0, 4.0) == []
    assert heartbeats.silent(163.9, 4.0) == []
    assert heartbeats.silent(164.5, 4.0) == [0], "one of them has really stopped"


# -------------------------------------------------------------------------------------- workers: stopped ones

LIMIT_S = 1.0
PIDS = {0: 100, 1: 101}


class Kernel:
    """Time, and which processes a signal has stopped."""

    def __init__(self) -> None:
        self.now = 50.0
        self.states = {100: "R", 101: "S"}
        self.stopped = StoppedWorkers()

    def look(self, age_s: float = 60.0) -> list[int]:
        """What the agent does in each turn."""
        if not self.stopped.is_due(self.now):
            return []
        stopped = {local_rank: pid for local_rank, pid in PIDS.items() if self.states[pid] == "T"}
        return self.stopped.look(self.now, stopped, dict.fromkeys(PIDS, age_s), LIMIT_S)

    def found_within(self, seconds: float, *, age_s: float = 60.0, every_s: float = 0.1) -> list[int]:
        """Those that are found while the agent looks again and again for some time."""
        end = self.now + seconds
        found: set[int] = set()
        while self.now < end:
            self.now += every_s
            found.update(self.look(age_s))
        return sorted(found)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_one_that_is_stopped_is_found_within_the_limit(kernel: Kernel) -> None:
    assert kernel.found_within(5.0) == []
    kernel.states[101] = "T"
    assert kernel.found_within(LIMIT_S / 2) == []
    assert kernel.found_within(LIMIT_S / 2) == [1]


def test_one_that_goes_on_in_between_is_not(kernel: Kernel) -> None:
    for _ in range(5):
        kernel.states[101] = "T"
        assert kernel.found_within(LIMIT_S / 2) == []
        kernel.states[101] = "R"
        assert kernel.found_within(LIMIT_S / timings.STOPPED_LOOKS) == []


def test_a_stop_that_was_told_is_looked_at_at_once(kernel: Kernel) -> None:
    """Without it, the next look would come with the next event of any kind."""
    assert kernel.found_within(LIMIT_S / timings.STOPPED_LOOKS) == []
    assert not kernel.stopped.some
    kernel.states[101] = "T"
    kernel.look()
    assert not kernel.stopped.some
    kernel.stopped.tell()
    kernel.look()
    assert kernel.stopped.some


def test_one_that_was_heard_meanwhile_is_not(kernel: Kernel) -> None:
    kernel.states[101] = "T"
    assert kernel.found_within(5.0, age_s=0.05) == []


def test_an_agent_that_was_frozen_itself_begins_anew(kernel: Kernel) -> None:
    kernel.states[101] = "T"
    assert kernel.found_within(3 * LIMIT_S, every_s=0.6 * LIMIT_S) == []


# --------------------------------------------------------------------------------------- the rendezvous store


def looked(silence: StoreSilence, since: float, seconds: int) -> dict[int, StoreNews]:
    """What is told while one looks each second, by the seconds that have passed."""
    news = ((second, silence.look(since + second)) for second in range(1, seconds + 1))
    return {second: told for second, told in news if told is not None}


def test_the_silence_of_the_store_is_told_ever_more_rarely() -> None:
    silence = StoreSilence(10.0, now=100.0)
    told = looked(silence, 100.0, 60)
    assert told == {11: StoreNews.SILENT, 23: StoreNews.SILENT, 47: StoreNews.SILENT}
    silence.answered(160.5)
    assert looked(silence, 160.0, 5) == {1: StoreNews.ANSWERS}
    assert silence.silence_s(165.5) == 5.0
    assert looked(silence, 165.0, 10) == {6: StoreNews.SILENT}, "it is told as early as the first time"


def test_a_machine_that_was_frozen_does_not_blame_the_store() -> None:
    silence = StoreSilence(10.0, now=100.0)
    assert silence.look(101.0) is None
    assert silence.look(200.0) is None
    assert looked(silence, 200.0, 11) == {11: StoreNews.SILENT}
