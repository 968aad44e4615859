"""Shared by all tests: which are run, the import path of what they start, what is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support")  # before it is imported: its assertions show their values

from tests.support.choice import chosen  # noqa: E402
from tests.support.missing import missing_parts  # noqa: E402

_ROOT = Path(__file__).parents[1]

os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(_ROOT), str(_ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--thorough``: all tests."""
    parser.addoption(
        "--thorough", action="store_true", help="run all tests, not a choice (tests/support/choice.py)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not chosen, and say how much that is."""
    if not config.getoption("--thorough"):
        run, left_out = chosen(items, config.args)
        items[:] = run
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists in red the tests that were skipped because something installable is missing."""
    skipped = terminalreporter.stats.get("skipped", [])
    parts = missing_parts(report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple))
    if parts:
        terminalreporter.section("PARTS ARE MISSING", red=True, bold=True)
        for part, count in parts.items():
            terminalreporter.line(f"{count} tests were skipped because parts are missing: {part}", red=True)
