"""What a person reads of a timeline: in a terminal of any width, and in the report for a browser."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from swift_ft.cli.recover.main import main
from swift_ft.cli.timeline.page import html_of
from swift_ft.cli.timeline.picture import draw
from swift_ft.cli.timeline.reader import grade
from swift_ft.cli.timeline.tables import ReportTable, place_table
from swift_ft.cli.timeline.terminal import print_table
from swift_ft.offline.lost_time import Cause
from swift_ft.offline.run_store import open_run_store
from swift_ft.offline.timeline import RunTimeline, run_timeline
from swift_ft.recovery import events as ev
from tests.support.journals import (
    BEGAN,
    ENDED,
    RECOVERED,
    checkpoint,
    machine,
    opening,
    store_with,
    work_of_recovered,
)
from tests.support.stored_run import change_record

WRITTEN = datetime.fromtimestamp(BEGAN, UTC)
PROTOCOL = ("slot", "agreeing", "regrouping", "fallback", "noted up to", "held back")
"""Words of the code, which no reader of a report has to know."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work_of_recovered(store_with(str(tmp_path), [*RECOVERED, *ENDED], machines=2))
    return tmp_path


@pytest.fixture
def timeline(folder: Path) -> RunTimeline:
    return run_timeline(open_run_store(str(folder)))


@pytest.mark.parametrize("width", [200, 80, 60, 40, 10, 2, 1])
def test_a_terminal_of_any_width(
    width: int, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    monkeypatch.setenv("TERM", "xterm")
    assert main(["timeline", str(folder)]) == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = out.splitlines()
    assert max(map(cell_len, lines)) <= width
    assert "…" not in out
    for word in ("goodput", "replayed", "messages", "regrouping"):
        assert word in (out if width >= 40 else out.replace("\n", "").replace(" ", ""))


def test_in_eighty_columns_tables_are_tables(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["timeline", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.count("┏━") == 4
    assert "agreeing 2.00 s " in out  # a number and its unit are not torn apart
    waited = [line for line in out.splitlines() if line.startswith("recovery 1 waited for: ")]
    assert len(waited) == 1  # no terminal: a program gets one line
    assert len(waited[0]) > 80


def test_a_long_name_does_not_make_a_table_a_list() -> None:
    out = StringIO()
    table = ReportTable("hosts", ("name", "steps"), [("h" * 70, "5"), ("short", "123456789")], ("steps",))
    print_table(Console(file=out, width=60), table)
    assert "┏━" in out.getvalue()
    print_table(Console(file=out, width=20), table)
    assert "  name: short" in out.getvalue()
    assert "    steps: 5" in out.getvalue()


@pytest.mark.parametrize(("share", "how"), [(0.97, "good"), (0.6, "fair"), (0.224, "bad")])
def test_a_bad_goodput_is_coloured_as_bad(share: float, how: str, timeline: RunTimeline) -> None:
    graded = replace(timeline.goodput, share=share)
    assert grade(graded) == how
    page = html_of(replace(timeline, goodput=graded), WRITTEN)
    assert f'<div class="tile main {how}"><b>{100 * share:.1f} %</b><span>goodput</span></div>' in page
    assert f".tile.main.{how} b {{ color: var(" in page


def test_the_page_has_words_of_a_reader(timeline: RunTimeline) -> None:
    page = html_of(timeline, WRITTEN)
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    shown = re.sub(r'class="[^"]*"', "", body)
    assert [word for word in PROTOCOL if word in shown] == []
    for words in (Cause.AGREEING.told, "took the place of machine 1", "known up to iteration"):
        assert words in shown


def in_memory(*, used: bool) -> list[ev.Event]:
    """Three workers with copies of iterations 10 and 15 on each other's machines; one of them is lost."""
    start = [
        replace(event, stages=(), holds=()) if isinstance(event, ev.StatusReported) else event
        for event in opening(3, spares=1)
    ]
    kept = (10, 15) if used else ()

    def report(rank: int, of: int) -> ev.StatusReported:
        return ev.StatusReported(
            rank=rank,
            generation=2,
            iteration=17,
            live=True,
            kept=kept,
            held=kept,
            held_of=of if used else None,
        )

    return [
        *start,
        *(ev.WorkerReady(rank=rank, generation=1) for rank in range(3)),
        ev.MachineLost(machine=machine(1), reason="gone"),
        report(0, of=2),
        ev.StatusReported(rank=1, generation=2, iteration=None),
        report(2, of=1),
        *(ev.WorkerReady(rank=rank, generation=2) for rank in range(3)),
    ]


@pytest.mark.parametrize("used", [True, False])
def test_memory_checkpoints_are_marked(used: bool, tmp_path: Path) -> None:
    store_with(str(tmp_path), in_memory(used=used), machines=3)
    found = run_timeline(open_run_store(str(tmp_path)))
    assert [(one.iteration, one.used) for one in found.memory_checkpoints] == [(15, True)] * used
    told = found.to_dict()["memory_checkpoints"]
    assert [(one["iteration"], one["used"]) for one in told] == [(15, True)] * used
    page = html_of(found, WRITTEN)
    assert page.count('<polygon class="mark memory"') == used
    assert ("the memory checkpoint of iteration 15 is on the machines that are left" in page) == used
    assert ("all workers went back to a memory checkpoint" in page) == used
    draw(found, tmp_path / "run.png")


@pytest.mark.parametrize(
    ("stages", "part"), [((), "the model"), ((0,), "stage 0")], ids=["FSDP2", "FSDP2 in a pipeline"]
)
def test_shards_of_replicas_are_named(stages: tuple[int, ...], part: str, tmp_path: Path) -> None:
    """Two replicas of two shards: workers 0 and 2 hold the same."""
    events = [
        replace(event, stages=stages, holds=(f"{part}, shard {event.rank % 2} of 2",))
        if isinstance(event, ev.StatusReported)
        else event
        for event in [*opening(4), *checkpoint(4, 0)]
    ]
    store_with(str(tmp_path), events, machines=4)
    found = run_timeline(open_run_store(str(tmp_path)))
    held = [row[5] for row in place_table(found).rows]
    assert held == [f"shard {n % 2} of 2 of {part}, replica of worker {(n + 2) % 4}" for n in range(4)]
    assert f"shard 1 of 2 of {part}, replica of worker 3" in html_of(found, WRITTEN)


@pytest.mark.parametrize("sharded", [True, False])
def test_shards_without_replicas_are_told_apart_from_what_is_unknown(sharded: bool, tmp_path: Path) -> None:
    events = [
        replace(event, stages=(), holds=()) if isinstance(event, ev.StatusReported) else event
        for event in [*opening(2), *checkpoint(2, 0)]
    ]
    store = store_with(str(tmp_path), events, machines=2)
    run = open_run_store(store.url)
    change_record(tmp_path, topology={**run.topology, **({"sharded": True} if sharded else {})})
    found = run_timeline(open_run_store(store.url))
    held = {row[5] for row in place_table(found).rows}
    assert held == ({"shards of the model that no other machine had"} if sharded else {"unknown"})
