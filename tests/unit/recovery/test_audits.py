"""Audits: what follows from a judgement, and what stays for an audit. Scenario files have the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from immutables import Map

from swift_ft.recovery import events as ev
from swift_ft.recovery.audit_orders import (
    last_audited,
    next_act,
    next_audit,
    pinned,
    still_due,
    why_nothing_to_audit,
)
from swift_ft.recovery.job_state import State
from swift_ft.recovery.topology import WHOLE_MODEL
from swift_ft.recovery.values import replace
from swift_ft.testing.scenario import Scenario

FOUND = """
audits S 0 {begin}..{until}
audited S 0 {begin}..{until} slots=0
audits S 1 {begin}..{until}
audited S 1 {begin}..{until} {of_1}
"""


def audited(begin: int, until: int, of_1: str = "slots=1") -> str:
    """Spare S has audited both machines: the first one came out as recorded."""
    return FOUND.format(begin=begin, until=until, of_1=of_1)


OPENED = """
open 2
join A B
join S T
report all nothing
committed 0 keep={keep}
committed 20 keep={keep}
"""
BEGIN = (
    OPENED.format(keep=2)
    + audited(0, 20)
    + "committed 40 keep=2"
    + audited(20, 40, "at=29 digest=x")
    + "audits T 1 20..40\n"
)


def acts(tmp_path: Path, last: str, choice: str, *before: str, begin: str = BEGIN) -> Sequence[ev.Event]:
    """The events that follow from the last line."""
    scenario, path = Scenario(), tmp_path / "scenario.txt"
    path.write_text("\n".join([begin, *before, f"{last} then={choice}" if choice else last]))
    scenario.run(path)
    return followed(scenario)


def followed(scenario: Scenario) -> Sequence[ev.Event]:
    """All that machines append because of a judgement."""
    found = list[ev.Event]()
    while due := next_acts(scenario.state):
        (act,) = due  # one machine does it
        found.append(act)
        scenario.apply(act)
    return found


def next_acts(state: State) -> list[ev.Event]:
    machines = sorted({*state.membership.slots, *state.membership.spares})
    return [act for machine in machines if (act := next_act(state, machine)) is not None]


SAME = "audited T 1 20..40 at=29 digest=x"


def test_a_machine_that_was_wrong(tmp_path: Path) -> None:
    assert acts(tmp_path, SAME, "") == acts(tmp_path, SAME, "warn") == []
    (drained,) = acts(tmp_path, SAME, "drain")
    assert isinstance(drained, ev.DrainRequested)
    assert drained.machine == "B"
    (closed,) = acts(tmp_path, SAME, "stop")
    assert isinstance(closed, ev.JobClosed)
    assert "machine 1 has computed iteration 29 wrong" in closed.reason
    doubted, left = acts(tmp_path, SAME, "back")
    assert isinstance(doubted, ev.CheckpointsDoubted)
    assert doubted.iteration == 20
    assert isinstance(left, ev.MachineLost)
    assert (left.machine, left.on_request) == ("B", True)


def test_a_machine_that_nobody_can_replace_leaves_when_somebody_comes(tmp_path: Path) -> None:
    """Both spares were needed meanwhile. Without it all would wait."""
    used = ["lost A", "report 0 nothing", "report 1 at 41", "ready 0", "lost S"]
    used += ["report 0 nothing", "report 1 at 41", "ready 0", "expect members T B", "expect phase live"]
    doubted, drained = acts(tmp_path, SAME, "back", *used)
    assert isinstance(doubted, ev.CheckpointsDoubted)
    assert isinstance(drained, ev.DrainRequested)
    assert drained.machine == "B"


REPLICAS = ("report all nothing", 'report all nothing holds="the model"')
OF_REPLICAS = BEGIN.replace(*REPLICAS).replace("29", "20")


def test_replicas_go_back_to_the_step_that_was_audited(tmp_path: Path) -> None:
    """Of 0..20 the first step is known to be right. A processor may be wrong from iteration 5 on."""
    begin = OF_REPLICAS.replace("committed 40 keep=2", "committed 40 keep=2\nexpect earlier 0 20")
    doubted, _ = acts(tmp_path, "audited T 1 20..40 at=20 digest=x", "back", begin=begin)
    assert isinstance(doubted, ev.CheckpointsDoubted)
    assert doubted.iteration == 0


MARKED = (
    OPENED.format(keep=3)
    + audited(0, 20)
    + "committed 40 keep=3"
    + audited(20, 40)
    + "committed 60 keep=3"
    + audited(40, 60, "at=49 digest=x")
    + "audits T 1 40..60\n"
)
WRONG_AT_49 = "audited T 1 40..60 at=49 digest=x"


@pytest.mark.parametrize(
    ("begin", "back", "of_an_earlier_one"),
    [
        (MARKED, 40, 20),
        (MARKED.replace("report all nothing", 'report all nothing holds="the model"'), 20, 20),
    ],
    ids=["stages", "replicas"],
)
def test_the_newest_audited_checkpoint_before_the_difference(
    begin: str, back: int, of_an_earlier_one: int, tmp_path: Path
) -> None:
    doubted, _ = acts(tmp_path, WRONG_AT_49, "back", begin=begin)
    assert isinstance(doubted, ev.CheckpointsDoubted)
    assert doubted.iteration == back
    scenario = Scenario()
    scenario.run(tmp_path / "scenario.txt")
    mark = last_audited(scenario.state, at_most=30)
    assert mark is not None
    assert mark.right == of_an_earlier_one


def test_what_was_audited_in_part_is_not_known_to_be_right(tmp_path: Path) -> None:
    begin = """
open 2
join A B
join S T
report all nothing
committed 0 keep=2
committed 20 keep=2
audits S 0 0..20
audited S 0 0..20 "the log has a gap"
audits T 0 0..20
audited T 0 0..20 "the log has a gap"
audits S 1 0..20
audited S 1 0..20 slots=1
expect marks 20:1
committed 40 keep=2
committed 60 keep=2
expect earlier 40
audits S 0 40..60
audited S 0 40..60 slots=0
audits S 1 40..60
audited S 1 40..60 at=49 digest=x
audits T 1 40..60
"""
    doubted, _ = acts(tmp_path, WRONG_AT_49, "back", begin=begin)
    assert isinstance(doubted, ev.CheckpointsDoubted)
    assert doubted.iteration == 40


@pytest.mark.parametrize("choice", ["drain", "stop", "back"])
def test_a_spare_that_was_wrong_leaves(choice: str, tmp_path: Path) -> None:
    (drained,) = acts(tmp_path, "audited T 1 20..40 slots=1", choice)
    assert isinstance(drained, ev.DrainRequested)
    assert drained.machine == "S"


@pytest.mark.parametrize("choice", ["drain", "stop", "back"])
def test_nobody_is_blamed_if_all_differ(choice: str, tmp_path: Path) -> None:
    assert acts(tmp_path, "audited T 1 20..40 at=29 digest=y", choice) == []


NOTHING_LOGGED = """
open 4
join A B C D
join S
report 0,1 nothing pipeline=0 layers=6
report 2,3 nothing pipeline=2 layers=6
committed 0 keep=2
committed 20 keep=2
expect audit S nothing
"""


def test_pipelines_that_give_each_other_layers_have_no_log(tmp_path: Path) -> None:
    scenario, path = Scenario(), tmp_path / "scenario.txt"
    path.write_text(NOTHING_LOGGED)
    scenario.run(path)
    assert "pipelines of a LayerStack log no messages" in why_nothing_to_audit(scenario.state)


def test_machines_that_are_one_recovery_group_have_no_log(tmp_path: Path) -> None:
    scenario, path = Scenario(), tmp_path / "scenario.txt"
    path.write_text(BEGIN)
    scenario.run(path)
    statuses = scenario.state.round.statuses
    in_one = Map({rank: dataclasses.replace(status, group=0) for rank, status in statuses.items()})
    state = replace(scenario.state, round=replace(scenario.state.round, statuses=in_one))
    assert "one recovery group" in why_nothing_to_audit(state)
    whole = Map({rank: dataclasses.replace(one, holds=WHOLE_MODEL) for rank, one in in_one.items()})
    state = replace(state, round=replace(state.round, statuses=whole))
    assert why_nothing_to_audit(state) == "", "replicas need no log"


TOGETHER = """
open 4
join A B C D
join S
report 0,1 nothing pipeline=0
report 2,3 nothing pipeline=2
committed 0 keep=2
committed 20 keep=2
audits S 1 0..20
audited S 1 0..20 slots=1,3
audits S 0 0..20
audited S 0 0..20 at=9 rank=2 digest=x slots=0,2
audits S 0 0..20
"""
ONE_OF_THEM = "audited S 0 0..20 at=9 rank=2 digest=x slots=0,2"


def test_no_machine_leaves_that_was_rebuilt_with_others(tmp_path: Path) -> None:
    """What they send each other is in no log: the difference may come from any of them."""
    assert acts(tmp_path, ONE_OF_THEM, "drain", begin=TOGETHER) == []
    (closed,) = acts(tmp_path, ONE_OF_THEM, "stop", begin=TOGETHER)
    assert isinstance(closed, ev.JobClosed)
    assert "one of machines 0 and 2 has computed iteration 9 wrong" in closed.reason
    (doubted,) = acts(tmp_path, ONE_OF_THEM, "back", begin=TOGETHER)
    assert isinstance(doubted, ev.CheckpointsDoubted)
    assert doubted.iteration == 0


def test_all_go_back_once_if_nobody_leaves(tmp_path: Path) -> None:
    """It comes out the same each time, so they would go back for ever."""
    again = [ONE_OF_THEM, "doubted 0", "report 0,1 nothing pipeline=0", "report 2,3 nothing pipeline=2"]
    again += ["ready all", "committed 20 keep=2", *TOGETHER.split("committed 20 keep=2\n")[1].splitlines()]
    assert acts(tmp_path, ONE_OF_THEM, "back", *again, begin=TOGETHER) == []


BACK_AT_0 = [
    *(ONE_OF_THEM, "doubted 0"),
    *("report 0,1 nothing pipeline=0", "report 2,3 nothing pipeline=2", "ready all", "committed 20 keep=2"),
]


def test_all_go_back_again_for_other_machines(tmp_path: Path) -> None:
    again = [*BACK_AT_0, "audits S 0 0..20", "audited S 0 0..20 slots=0,2", "audits S 1 0..20"]
    others = "audited S 1 0..20 at=9 rank=1 digest=x slots=1,3"
    (doubted,) = acts(tmp_path, others, "back", *again, others, "audits S 1 0..20", begin=TOGETHER)
    assert isinstance(doubted, ev.CheckpointsDoubted)
    assert doubted.iteration == 0


def test_all_go_back_again_for_another_interval(tmp_path: Path) -> None:
    again = [*BACK_AT_0, "audits S 0 0..20", "audited S 0 0..20 slots=0,2", "audits S 1 0..20"]
    again += ["audited S 1 0..20 slots=1,3", "committed 40 keep=2", "audits S 1 20..40"]
    again += ["audited S 1 20..40 slots=1,3", "audits S 0 20..40"]
    later = "audited S 0 20..40 at=29 rank=2 digest=x slots=0,2"
    (doubted,) = acts(tmp_path, later, "back", *again, later, "audits S 0 20..40", begin=TOGETHER)
    assert isinstance(doubted, ev.CheckpointsDoubted)
    assert doubted.iteration == 20


def test_two_spares_that_were_wrong_leave(tmp_path: Path) -> None:
    """Both replays were of the same machines, and a third one comes out as recorded."""
    begin = TOGETHER.split("audits S 1")[0].replace("join S", "join S T U")
    begin += "audits S 0 0..20\naudits T 2 0..20\naudited S 0 0..20 at=9 digest=x slots=0,2\n"
    begin += "audited T 2 0..20 at=3 rank=0 digest=y slots=0,2\naudits U 1 0..20\n"
    begin += "audited U 1 0..20 slots=1,3\naudits U 0 0..20\n"
    left = acts(tmp_path, "audited U 0 0..20 slots=0,2", "drain", begin=begin)
    assert [event.machine for event in left if isinstance(event, ev.DrainRequested)] == ["S", "T"]


@pytest.mark.parametrize("choice", ["drain", "stop", "back"])
def test_nothing_follows_if_no_second_replay_can_be_made(choice: str, tmp_path: Path) -> None:
    assert acts(tmp_path, 'audited T 1 20..40 "the log has a gap"', choice) == []


def test_a_wrong_spare_leaves_under_its_present_name(tmp_path: Path) -> None:
    begin = BEGIN.replace("S", "m-1.0")
    came_back = ["lost m-1.0", "join m-1.1"]
    (drained,) = acts(tmp_path, "audited T 1 20..40 slots=1", "drain", *came_back, begin=begin)
    assert isinstance(drained, ev.DrainRequested)
    assert drained.machine == "m-1.1"


def test_a_program_that_was_changed_is_not_audited(tmp_path: Path) -> None:
    """A spare's process has the one with which the run began."""
    scenario, path = Scenario(), tmp_path / "scenario.txt"
    path.write_text(BEGIN)
    scenario.run(path)
    state = scenario.state
    assert why_nothing_to_audit(state) == ""
    assert pinned(state) == {20, 40}
    changed = replace(state.worlds.present, command=("script", "other.py"))
    state = replace(state, worlds=replace(state.worlds, present=changed))
    assert "was changed" in why_nothing_to_audit(state)
    assert next_audit(state, "S") is None
    assert pinned(state) == {20}


def test_a_changed_message_drains_nobody(tmp_path: Path) -> None:
    assert acts(tmp_path, f"{SAME} changed", "drain") == []
    (doubted,) = acts(tmp_path, f"{SAME} changed", "back")
    assert isinstance(doubted, ev.CheckpointsDoubted)


def test_all_go_back_once_for_a_link(tmp_path: Path) -> None:
    """Nobody leaves, so one that changes the same bits each time would have them do so for ever."""
    changed = "audited {0} 20..40 at=29 digest=x changed then=back"
    again = [changed.format("T 1"), "doubted 20", "report all nothing", "ready all", "committed 40 keep=2"]
    again += ["audits S 0 20..40", "audited S 0 20..40 slots=0", "audits S 1 20..40"]
    again += [changed.format("S 1"), "audits T 1 20..40"]
    assert acts(tmp_path, changed.format("T 1"), "", *again) == []
    later = [one.replace("20..40", "40..60") for one in again[4:]]
    (doubted,) = acts(
        tmp_path,
        changed.format("T 1").replace("20..40", "40..60"),
        "",
        *again,
        changed.format("T 1"),
        "committed 60 keep=2",
        *later[1:],
    )
    assert isinstance(doubted, ev.CheckpointsDoubted)


def test_a_machine_that_came_since_is_not_drained(tmp_path: Path) -> None:
    """It may be the one before it that was wrong."""
    replaced = ["lost B", "report 0 at 41", "report 1 nothing", "ready 1", "expect members A S"]
    assert acts(tmp_path, SAME, "drain", *replaced) == []


def test_checkpoints_that_are_committed_meanwhile_do_not_push_out_the_one_to_go_back_to(
    tmp_path: Path,
) -> None:
    """The interval gets its mark with the judgement, and nothing else would keep its first checkpoint."""
    begin = BEGIN.replace(audited(0, 20), "")
    later = [f"{SAME} then=back", "committed 60 keep=2", "committed 80 keep=2"]
    doubted, left = acts(tmp_path, "expect phase live", "", *later, begin=begin)
    assert isinstance(doubted, ev.CheckpointsDoubted)
    assert doubted.iteration == 20
    assert isinstance(left, ev.MachineLost)


def test_all_go_back_once_for_two_machines(tmp_path: Path) -> None:
    begin = """
open 3
join A B C
join S T
report all nothing
committed 0 keep=2
committed 20 keep=2
audits S 0 0..20
audited S 0 0..20 slots=0
audits S 1 0..20
audited S 1 0..20 at=9 digest=x
audits S 2 0..20
audited S 2 0..20 at=9 digest=y
audits S 1 0..20
audits T 2 0..20
audited S 1 0..20 at=9 digest=x then=back
"""
    doubted, *left = acts(tmp_path, "audited T 2 0..20 at=9 digest=y", "back", begin=begin)
    assert isinstance(doubted, ev.CheckpointsDoubted)
    assert [event.machine for event in left if isinstance(event, ev.MachineLost)] == ["B", "C"]


def test_what_is_done_is_due_no_more(tmp_path: Path) -> None:
    scenario, path = Scenario(), tmp_path / "scenario.txt"
    path.write_text(f"{BEGIN}{SAME} then=back")
    scenario.run(path)
    assert len(still_due(scenario.state)) == 1
    assert 20 in pinned(scenario.state)
    followed(scenario)
    assert still_due(scenario.state) == ()


@pytest.mark.parametrize(
    ("end", "code", "why"),
    [
        ([ev.JobClosed(reason="stopped by SIGINT", exit_code=130)], 130, "stopped by SIGINT"),
        ([ev.JobClosed(reason="no machine is left")], 1, "no machine is left"),
        (
            [
                ev.ScriptExited(machine="A", started_in=1),
                ev.MachineLost(machine="B", reason="its connection ended"),
            ],
            1,
            "machine 1 has computed iteration 29 wrong: a message (worker 1). That was found when the loop",
        ),
    ],
    ids=["by a signal", "without a machine", "with a loss"],
)
def test_a_job_that_ends_before_all_have_gone_back_leaves_no_checkpoint_in_doubt(
    end: list[ev.Event], code: int, why: str, tmp_path: Path
) -> None:
    """A run that is resumed begins with the newest that is in the store."""
    scenario, path = Scenario(), tmp_path / "scenario.txt"
    path.write_text(f"{BEGIN}{SAME} then=back\ncommitted 60 keep=2")
    scenario.run(path)
    assert [*scenario.state.checkpoints.kept] == [20, 40, 60]
    for event in end:
        scenario.apply(event)
    assert scenario.state.verdict is not None
    assert scenario.state.verdict.exit_code == code
    assert why in scenario.state.verdict.reason  # behind an end of its own, if it had one
    assert [*scenario.state.checkpoints.kept] == [20]
    assert [doubt.after for doubt in scenario.state.checkpoints.doubts] == [20]
    assert next_acts(scenario.state) == []


def test_bytes_that_changed_on_their_way_are_called_that(tmp_path: Path) -> None:
    doubted, *_ = acts(tmp_path, f"{SAME} changed", "back")
    assert isinstance(doubted, ev.CheckpointsDoubted)
    assert "has sent arrived as something else" in doubted.reason
