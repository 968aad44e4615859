"""The table of news: each row is told by some recovery, with all facts that it promises."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from swift_ft.cli.journal_news import news_of
from swift_ft.cli.news import KINDS, News, Weight
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.history import History
from swift_ft.testing.scenario import Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"
OF_A_LAUNCHER = {"launcher_failed", "hook_failed", "events_dropped"}


class Told(Scenario):
    """A scenario whose events are told."""

    def __init__(self) -> None:
        super().__init__()
        self.history = History()
        self.news: list[News] = []

    def apply(self, event: ev.Event) -> None:
        super().apply(event)
        change = self.history.apply(Entry(0, event, 0.0, "test"))
        self.news += news_of(change, self.history)
        assert change.after == self.state


def losing_one_of_three(*after: ev.Event, **facts: Any) -> list[ev.Event]:
    """Three workers of which worker 1 is replaced; ``facts`` of each report, then what follows the plan."""

    def reports(generation: int, at: int | None) -> list[ev.StatusReported]:
        every = [ev.StatusReported(rank=rank, generation=generation, iteration=at) for rank in range(3)]
        stages = (facts if "holds" in facts else {**facts, "stages": (one.rank,)} for one in every)
        return [
            replace(one, live=at is not None, pipeline_known=True, **more)
            for one, more in zip(every, stages, strict=True)
        ]

    survivors = [one for one in reports(2, 47) if one.rank != 1]
    return [
        ev.JobOpened(machines=3, max_failures=9),
        *(ev.MachineJoined(machine=name) for name in "abcd"),
        *reports(1, None),
        *(ev.WorkerReady(rank=rank, generation=1) for rank in range(3)),
        ev.CheckpointCommitted(iteration=40, epoch=1),
        ev.MachineLost(machine="b", reason="gone"),
        *survivors,
        next(replace(one, generation=2) for one in reports(1, None) if one.rank == 1),
        *after,
    ]


def all_told() -> list[News]:
    found: list[News] = []
    replayed = ev.WorkerReady(rank=0, generation=2, replayed=7)
    declined = ev.HelpDeclined(rank=2, generation=2, reason="no room")
    for events in (
        losing_one_of_three(replayed, declined, max_replay_shards=4),
        losing_one_of_three(holds=("the model",), own_statistics=True),
    ):
        story = Told()
        for event in events:
            story.apply(event)
        found += story.news
    for path in sorted(SCENARIOS.glob("*.txt")):
        scenario = Told()
        scenario.run(path)
        found += scenario.news
    return found


def test_each_row_is_told_with_all_its_facts() -> None:
    found = all_told()
    assert KINDS.keys() - {one.event for one in found} == OF_A_LAUNCHER
    for one in found:
        kind = KINDS[one.event]
        assert one.text
        assert "None" not in one.text
        assert (one.level == kind.level) or kind.level == "info or error"
        assert tuple(json.loads(json.dumps(one.fields))) == tuple(kind.fields.split())


def test_a_row_has_a_level_and_a_meaning_or_is_for_persons_only() -> None:
    for kind in KINDS.values():
        assert bool(kind.level) == bool(kind.meaning)
        assert kind.level or (kind.weight > Weight.SILENT and not kind.fields)
