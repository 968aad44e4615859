"""Shared by all tests: which are run, the import path of what they start, what is missing."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.support")  # before it is imported: its assertions show their values

from tests.support.choice import BUDGET_S, TURNS, chosen, in_order_of_files, overdue, turn_on  # noqa: E402
from tests.support.durations import Recorder, durations_in, last_runs_in  # noqa: E402
from tests.support.missing import missing_parts  # noqa: E402

_SAME = "swift_same"
_ROOT = Path(__file__).parents[1]

os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(_ROOT), str(_ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many tests are run, and whether their durations are recorded."""
    parser.addoption(
        "--thorough", action="store_true", help="run all tests, not a choice (tests/support/choice.py)"
    )
    parser.addoption(
        "--budget",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help="of tests of clusters and stores, choose as many as take so long (default: %(default)s)",
    )
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write how long tests took into tests/durations.json, and when into tests/last_runs.json",
    )
    parser.addoption(
        "--turn",
        type=int,
        choices=range(TURNS),
        default=turn_on(datetime.now(UTC).date()),
        help="slow tests take turns: run those of this one (default: today's, %(default)s)",
    )
    parser.addoption(
        "--due",
        type=float,
        metavar="SECONDS",
        help="run the cases that have not passed for a week, for so many seconds of tests, and record them",
    )
    parser.addoption(
        "--within",
        type=float,
        metavar="MINUTES",
        help="begin no test later, and say which ones were not run",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record durations, if that is asked for, and let xdist run files in the order of the collection."""
    if config.getoption("--record-durations") or config.getoption("--due"):
        config.pluginmanager.register(Recorder(config))
    if (minutes := config.getoption("--within")) is not None:
        config.option.until = time.time() + 60 * minutes
    vars(config.option).update(getattr(config, "workerinput", {}).get(_SAME, {}))
    if hasattr(config.option, "loadscopereorder"):
        # Else a file with many quick tests is before one that takes long.
        config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All workers of xdist go by one clock."""
    options = vars(node.config.option)
    node.workerinput[_SAME] = {name: options[name] for name in ("turn", "until") if name in options}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not chosen, and put the files in order where several workers share them."""
    durations = durations_in()
    cache = getattr(config, "cache", None)  # None with -p no:cacheprovider
    left_out: list[pytest.Item] = []
    if (due_s := config.getoption("--due")) is not None:
        today = datetime.now(UTC).date()
        items[:], left_out = overdue(items, last_runs_in(), durations, budget_s=due_s, today=today)
    elif not config.getoption("--thorough"):
        items[:], left_out = chosen(
            items,
            config.args,
            durations=durations,
            failed=cache.get("cache/lastfailed", {}) if cache else (),
            budget_s=config.getoption("--budget"),
            turn=config.getoption("--turn"),
        )
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):
        items[:] = in_order_of_files(items, durations)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Says whose turn it is, so that the choice can be repeated on another day."""
    if config.getoption("--thorough") or config.getoption("--due") is not None:
        return None
    turn = config.getoption("--turn")
    return f"slow tests take turns: this is turn {turn} of 0 to {TURNS - 1} (--turn {turn} repeats it)"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no test after the time that was given."""
    until = getattr(item.config.option, "until", None)
    if until is not None and time.time() > until:
        pytest.skip(f"not run: {item.config.getoption('--within'):g} minutes are over (--within)")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists in red the tests that were skipped because something installable is missing."""
    skipped = terminalreporter.stats.get("skipped", [])
    parts = missing_parts(report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple))
    if parts:
        terminalreporter.section("PARTS ARE MISSING", red=True, bold=True)
        for part, count in parts.items():
            terminalreporter.line(f"{count} tests were skipped because parts are missing: {part}", red=True)
