"""Shared by all tests: which are run, the import path of what they start, what is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support")  # before it is imported: its assertions show their values

from tests.support.choice import BUDGET_S, chosen, in_order_of_files  # noqa: E402
from tests.support.durations import Recorder, durations_in  # noqa: E402
from tests.support.missing import missing_parts  # noqa: E402

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
        help="write how long tests of clusters and stores took into tests/durations.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record durations, if that is asked for, and let xdist run files in the order of the collection."""
    if config.getoption("--record-durations"):
        config.pluginmanager.register(Recorder(config))
    if hasattr(config.option, "loadscopereorder"):
        # Else a file with many quick tests is before one that takes long.
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not chosen, and put the files in order where several workers share them."""
    durations = durations_in()
    cache = getattr(config, "cache", None)  # None with -p no:cacheprovider
    if not config.getoption("--thorough"):
        items[:], left_out = chosen(
            items,
            config.args,
            durations=durations,
            failed=cache.get("cache/lastfailed", {}) if cache else (),
            budget_s=config.getoption("--budget"),
        )
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):
        items[:] = in_order_of_files(items, durations)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists in red the tests that were skipped because something installable is missing."""
    skipped = terminalreporter.stats.get("skipped", [])
    parts = missing_parts(report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple))
    if parts:
        terminalreporter.section("PARTS ARE MISSING", red=True, bold=True)
        for part, count in parts.items():
            terminalreporter.line(f"{count} tests were skipped because parts are missing: {part}", red=True)
