"""Every tool ends in the same way: Ctrl-C and an error are exit codes, and no traceback."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

import pytest

from swift_ft.cli import group, simulate
from swift_ft.cli.chaos import main as chaos
from swift_ft.cli.plan import main as plan
from swift_ft.cli.recover import main as recover
from swift_ft.cli.verb import ended
from swift_ft.errors import CheckpointError, SwiftError, UsageError

TOOLS: dict[str, Callable[[Sequence[str]], int]] = {
    "swift-group": group.main,
    "swift-sim": simulate.main,
    "swift-plan": plan.main,
    "swift-recover": recover.main,
    "swift-chaos": chaos.main,
}


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[str]:
    """Let every tool fail while it reads its arguments. Returns the names of those that did."""
    struck: list[str] = []

    def parse_args(parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        struck.append(parser.prog)
        raise error

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    return struck


@pytest.mark.parametrize("tool", TOOLS)
def test_ctrl_c_is_an_exit_code(
    tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    struck = raising(monkeypatch, KeyboardInterrupt())
    assert TOOLS[tool](["--seed", "1"]) == 130
    assert struck == [tool]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("error", [UsageError("two\nlines"), CheckpointError("two  lines")])
def test_an_error_is_one_line(
    tool: str, error: SwiftError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    struck = raising(monkeypatch, error)
    assert TOOLS[tool](["--seed", "1"]) == 2
    assert struck == [tool]
    assert capsys.readouterr().err == f"{tool}: two lines\n"


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1), (143, 143)])
def test_an_action_says_its_exit_code(returned: int | None, code: int) -> None:
    assert ended("swift-sim", lambda: returned) == code
