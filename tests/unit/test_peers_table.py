"""The side by side with peers: what is read from traces, what a script's changes count, what a page says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.figures import Figure
from benchmarks.lib.markdown import read_body
from benchmarks.lib.runs import Table, newest, read_runs
from benchmarks.peers import report
from benchmarks.peers.cells import MACHINES, Case, Outcome, System, evaluate
from benchmarks.peers.draw import seconds
from benchmarks.peers.lines import changed_lines
from benchmarks.peers.report import Cell, equal, judge
from benchmarks.peers.systems import GUEST_SWIFT, OURS, PLAIN, SWIFT, SYSTEMS, TUNED_TORCHFT
from benchmarks.peers.table import turns
from docs import peers_page
from docs.house import ROOT
from examples.commands import CommandError

CASE = Case("data", "spare", 1)
FAST = Outcome(0.1, 300, {CASE.last: {0: "a", 1: "a"}}, None, 0.1, 1.0, 1.0, 0)
SCRIPT = "\n".join(
    [
        '"""Trains."""',
        "import torch",
        "",
        "",
        "def main():",
        '    """All of it."""',
        "    for i in range(3):",
        "        go(i)",
        "",
    ]
)


# ------------------------------------------------------------------------------------------- changed lines


@pytest.mark.parametrize(
    ("other", "count"),
    [
        (SCRIPT, 0),
        (SCRIPT.replace("Trains", "Trains otherwise").replace("\n\n\n", "\n# a remark\n\n"), 0),
        (SCRIPT.replace("range(3)", "range(\n        3,\n    )"), 0),
        (SCRIPT.replace("import torch\n", "import torch\nimport swift_ft\n"), 1),
        (SCRIPT.replace("go(i)", "go(i)\n        save(i)"), 1),
        (SCRIPT.replace("go(i)", "with step:\n            go(i)"), 2),
        (SCRIPT.replace("        go(i)\n", "        pass\n"), 1),
        (SCRIPT.replace("import torch\n", ""), 1),
    ],
)
def test_changed_lines_of_a_script(other: str, count: int) -> None:
    assert changed_lines(SCRIPT, other) == count


def test_each_system_has_its_scripts_and_changes_some_lines() -> None:
    for system in SYSTEMS:
        for layout, name in system.scripts.items():
            plain, other = ((report.SCRIPTS / one).read_text() for one in (PLAIN.scripts[layout], name))
            assert 0 < changed_lines(plain, other) < 60, name


# --------------------------------------------------------------------------------------------------- traces


def _trace(*, lost: int = 0, pause: float = 2.0) -> list[dict[str, Any]]:
    """Four workers with steps of 1 s; rank 1 dies in the middle of one, and all go on after a pause."""
    lines: list[dict[str, Any]] = []

    def step(rank: int, iteration: int, at: float) -> None:
        lines.append({"event": "begin", "rank": rank, "at": at, "iteration": iteration})
        lines.append(
            {
                "event": "end",
                "rank": rank,
                "at": at + 1,
                "iteration": iteration,
                "peak_kb": 2048,
                "cpu": at / 2,
            }
        )

    for rank in range(MACHINES):
        for iteration in range(CASE.kill_iteration):
            step(rank, iteration, iteration)
        lines.append(
            {"event": "begin", "rank": rank, "at": CASE.kill_iteration, "iteration": CASE.kill_iteration}
        )
    killed = CASE.kill_iteration + 0.5
    lines.append({"event": "kill", "rank": 1, "at": killed, "iteration": CASE.kill_iteration})
    lines.append({"event": "left", "rank": 0, "at": killed + 0.25, "iteration": CASE.kill_iteration})
    for rank in range(MACHINES):
        for number, iteration in enumerate(range(CASE.kill_iteration - lost, CASE.last + 1)):
            step(rank, iteration, killed + pause + number)
        end = killed + pause + 10
        lines.append({"event": "weights", "rank": rank, "at": end, "iteration": CASE.last, "digest": "a"})
    return sorted(lines, key=lambda line: float(line["at"]))


def test_a_trace_tells_what_a_loss_has_cost() -> None:
    found = evaluate(SWIFT, CASE, _trace(), CASE.last)
    assert (found.step_s, found.cpu_s, found.peak_mb) == (1.0, 0.5, 2.0)
    assert (found.detected_s, found.new_s, found.full_s, found.lost) == (0.25, 3.0, 3.0, 0)


def test_repeated_iterations_are_lost_ones_and_no_new_ones() -> None:
    found = evaluate(SWIFT, CASE, _trace(lost=1), CASE.last)
    assert (found.new_s, found.lost) == (4.0, 1)


def test_where_workers_may_be_fewer_only_all_of_them_count_as_full() -> None:
    lines = _trace()
    for line in lines:
        if line["event"] == "end":
            line["workers"] = 3 if line["iteration"] < CASE.last else 4
    found = evaluate(replace(SWIFT, elastic=True), CASE, lines, CASE.last)
    assert (found.new_s, found.full_s) == (3.0, 7.0)


def test_an_elastic_worker_that_starts_anew_has_lost_nothing_unless_all_begin_again() -> None:
    elastic = replace(SWIFT, elastic=True)
    at = CASE.kill_iteration + 1.0
    anew = [{"event": "end", "rank": 0, "at": at + number, "iteration": number} for number in range(3)]
    assert evaluate(elastic, CASE, [*_trace(), *anew[:1]], CASE.last).lost == 0
    assert evaluate(elastic, CASE, [*_trace(), *anew], CASE.last).lost == 2


def test_a_kill_that_did_not_strike_is_an_error() -> None:
    with pytest.raises(CommandError, match="no worker was killed"):
        evaluate(SWIFT, CASE, [line for line in _trace() if line["event"] != "kill"], CASE.last)


def test_weights_are_equal_only_if_all_that_were_compared_are() -> None:
    plain = replace(FAST, digests={7: {0: "a", 1: "b", 2: "c"}})
    assert equal(replace(FAST, digests={7: {0: "a", 1: "b"}}), plain, 7)
    assert not equal(replace(FAST, digests={7: {0: "a", 1: "a"}}), plain, 7)
    assert not equal(replace(FAST, digests={}), plain, 7)


# --------------------------------------------------------------------------------------------------- tables


def _cells(seconds: Mapping[str, float]) -> list[Cell]:
    return [
        Cell(1, CASE, PLAIN.name, replace(FAST, detected_s=None, new_s=None, full_s=None, lost=None)),
        *(Cell(1, CASE, name, replace(FAST, new_s=new, full_s=new)) for name, new in seconds.items()),
    ]


def test_a_cell_is_the_same_after_it_was_kept() -> None:
    for cell in (*_cells({SWIFT.name: 1.0}), Cell(2, CASE, SWIFT.name, None, "it failed", 3.5)):
        assert Cell.from_json(json.loads(json.dumps(cell.to_json()))) == cell


def _judged(cells: list[Cell], *cases: Case) -> dict[str, tuple[str, bool | None]]:
    """Of the targets that compare with others: what was measured, and whether it is met."""
    words = {
        "swift_ft as it is / the fastest other": "as it is",
        "settings / the fastest other": "any setting",
        "settings / torchft": "torchft",
    }
    found = judge(cells, cases)
    return {
        short: (one.measured, one.met) for one in found for long, short in words.items() if long in one.name
    }


def test_targets_take_the_fastest_peer_and_the_worst_row() -> None:
    slower = Case("data", "spare", 25)
    cells = _cells({SWIFT.name: 1.0, TUNED_TORCHFT.name: 4.0, "dlrover": 5.0, "torchrun + DCP": 9.0})
    others = {SWIFT.name: 1.0, TUNED_TORCHFT.name: 0.5, "torchrun + DCP": 0.8}
    more = [replace(one, case=slower) for one in _cells(others)]
    met, missed = _judged(cells, CASE), _judged([*cells, *more], CASE, slower)
    assert met == dict.fromkeys(("as it is", "any setting", "torchft"), ("0.250", True))
    assert missed == dict.fromkeys(("as it is", "any setting", "torchft"), ("2.000", False))


def test_a_step_is_judged_by_its_worst_repetition_and_the_page_shows_medians() -> None:
    """So the name of the target says it: its figure is above that of the page."""
    cells = [
        Cell(number, CASE, name, replace(FAST, step_s=step_s if name == SWIFT.name else 1.0))
        for number, step_s in enumerate((1.0, 1.2, 2.0), 1)
        for name in (PLAIN.name, SWIFT.name)
    ]
    judged = {one.name: one.measured for one in judge(cells, [CASE])}
    assert judged[f"four replicas: {report.STEP}, in the worst repetition"] == "2.00"


def test_the_page_says_how_long_it_takes_until_all_workers_train() -> None:
    page = peers_page.page(newest(read_runs())["peers"], "here")
    rows = page.partition("## Until all four workers train")[2].partition("## What is lost")[0]
    again = next(line for line in rows.splitlines() if line.startswith("| four replicas, no spare |"))
    assert "5.02" in again, "a system may go on sooner than with all of its workers"
    assert again.count("never") == 2


def test_our_fastest_setting_is_judged_apart() -> None:
    cells = _cells({SWIFT.name: 4.0, GUEST_SWIFT.name: 1.0, TUNED_TORCHFT.name: 4.0, "dlrover": 2.0})
    expected = {"as it is": ("2.000", False), "any setting": ("0.500", True), "torchft": ("0.250", True)}
    assert _judged(cells, CASE) == expected


def test_the_tables_say_why_a_figure_is_missing_and_the_page_what_is_worse() -> None:
    absent = System("a peer", {"data": "data_dcp.py"}, SWIFT.machine, needs=("no-such-peer", "1.0"))
    unable = System(
        "no spares",
        {"data": "data_dcp.py"},
        SWIFT.machine,
        cannot={"spare": "no: it has none"},
        fails={"a part": "No module named 'x'"},
    )
    broken = System("broken", {"data": "data_dcp.py"}, SWIFT.machine)
    faster = System("faster", {"data": "data_dcp.py"}, SWIFT.machine)
    cells = [
        *_cells({SWIFT.name: 1.0, faster.name: 0.25}),
        Cell(1, CASE, broken.name, None, "it ended with 1"),
    ]
    systems = [SWIFT, absent, unable, broken, faster]
    body = read_body(report.report(cells, [CASE], systems, judge(cells, [CASE]), 1))
    about, failing, figures = body.tables
    assert failing.rows == (("no spares", "a part", "No module named 'x'"),)
    by_name = {row[0]: dict(zip(figures.columns, row, strict=True)) for row in figures.rows}
    new = by_name[f"{report.NEW}, 1 after the checkpoint"]
    missing = "not installed: pip install no-such-peer==1.0"
    assert [row[1] for row in about.rows] == ["runs", missing, "runs", "runs", "runs"]
    assert (new["a peer"], new["no spares"], new["broken"]) == (
        missing,
        "no: it has none",
        "failed: it ended with 1",
    )
    assert by_name["weights equal, 1 after the checkpoint"]["faster"] == "yes"
    run = replace(newest(read_runs())["peers"], tables=body.tables)
    page = peers_page.page(run, "here", distance=1)
    marked = "| four replicas, a spare | 1.00 (1) | not installed | cannot | failed | 0.25 (1) |"
    assert marked in page.partition("## Until all four")[0], "until training goes on"
    assert "| four replicas, a spare | 0; same bits | not installed | cannot | failed |" in page
    assert f"| four replicas: {report.NEW} | 1.00 s (1), faster 0.25 s (1) |  |  |" in page
    assert f"{report.MEMORY} | 300 MiB (1)" not in page.partition("is ahead")[2], "alike"


def test_the_page_has_all_that_others_are_ahead_in() -> None:
    """Of each figure in the newest run that is lower elsewhere, whatever it is."""
    run = newest(read_runs())["peers"]
    page = peers_page.page(run, "here")
    for loss in peers_page.losses(run, 25):
        for row in (*report.RATIOS, *report.READ):
            ours = loss.number(row, SWIFT.name)
            others = [loss.number(row, name) for name in loss.figures[report.NEW] if name not in OURS]
            low = min((one.value for one in others if one and one.value is not None), default=None)
            if ours and ours.value is not None and low is not None and round(ours.value - low, 2) > 0:
                assert any(
                    line.startswith(f"| {loss.layout}: {row} | ")
                    for line in page.partition("is ahead")[2].splitlines()
                ), (loss.layout, row)


@pytest.mark.parametrize("module", ["benchmarks.peers.table", "docs.results"])
def test_the_commands_find_all_that_they_import(module: str) -> None:
    """As make runs them: the examples' folder is on the path of tests and scripts alone."""
    option = {"docs.results": "--check"}.get(module, "--help")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-m", module, option],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_the_picture_has_the_times_of_each_table() -> None:
    columns = ("", "swift_ft", "other", "absent")
    row = (
        f"{report.NEW}, 25 after the checkpoint",
        Figure(1.5, unit="s"),
        Figure(20.0, unit="s"),
        "no: it has none",
    )
    run = replace(newest(read_runs())["peers"], tables=(Table(columns, (row,), "**Four replicas; lost**"),))
    assert seconds(run) == {"Four replicas; lost": {"swift_ft": 1.5, "other": 20.0}}


def test_all_take_turns_and_those_that_cannot_are_left_out(tmp_path: Path) -> None:
    absent = System("a peer", {"data": "data_dcp.py"}, SWIFT.machine, needs=("no-such-peer", "1.0"))
    other = System("other", {"data": "data_dcp.py"}, SWIFT.machine)
    cases = [CASE, Case("pipeline", "spare", 1), Case("data", "again", 1)]
    order = [(case.layout, system.name) for case, system, _ in turns(cases, [SWIFT, absent, other], 1)]
    assert order[:3] == [("data", name) for name in (PLAIN.name, SWIFT.name, "other")]
    assert order[3:5] == [("pipeline", SWIFT.name), ("pipeline", PLAIN.name)]
    assert order[5:] == [("data", name) for name in ("other", PLAIN.name, SWIFT.name)]
