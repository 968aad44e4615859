"""``--help`` of a first user, ``--version``, and ``dir(swift_ft)``: at once, without torch."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest

import swift_ft
from swift_ft.cli import group, run, simulate
from swift_ft.cli.chaos import main as chaos
from swift_ft.cli.first_help import SWIFT_CHAOS, SWIFT_RUN, SWIFT_SIM, FirstHelp
from swift_ft.cli.plan import main as plan
from swift_ft.cli.recover import main as recover

PARSERS = {
    "swift-run": run.parser,
    "swift-recover": lambda: recover.parser(["--version"]),
    "swift-plan": lambda: plan.parser(["--version"]),
    "swift-group": group.parser,
    "swift-sim": simulate.parser,
    "swift-chaos": chaos.parser,
}
MAINS = {
    "swift-run": "swift_ft.cli.start:run_and_exit",
    "swift-recover": "swift_ft.cli.recover.main:main",
    "swift-plan": "swift_ft.cli.plan.main:main",
    "swift-group": "swift_ft.cli.group:main",
    "swift-sim": "swift_ft.cli.simulate:main",
    "swift-chaos": "swift_ft.cli.chaos.main:main",
}
"""As pyproject.toml has them."""
LONG = {"swift-run": SWIFT_RUN, "swift-sim": SWIFT_SIM, "swift-chaos": SWIFT_CHAOS}


def without_torch(code: str, *argv: str) -> str:
    """The output of code in a process that can have no torch."""
    first = f"import sys; sys.modules['torch'] = None; sys.argv = {['command', *argv]!r}"
    done = subprocess.run(
        [sys.executable, "-c", f"{first}\n{code}"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def answer(command: str, flag: str) -> str:
    module, _, function = MAINS[command].partition(":")
    return without_torch(f"from {module} import {function}; {function}()", flag)


@pytest.mark.parametrize("command", MAINS)
def test_each_command_says_its_version_without_torch(command: str) -> None:
    assert answer(command, "--version") == f"{command} {version('swift-ft')}\n"


@pytest.mark.parametrize("command", PARSERS)
def test_it_says_so_among_other_flags_too(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--standalone", "--version"] if command == "swift-run" else ["--version"]
    with pytest.raises(SystemExit, match=r"^0$"):
        PARSERS[command]().parse_args(flags)
    assert capsys.readouterr().out == f"{command} {swift_ft.__version__}\n"


def test_a_version_is_asked_of_the_script_behind_its_name() -> None:
    args = run.parser().parse_args(["--standalone", "train.py", "--version", "--help"])
    assert args.training_script_args == ["--version", "--help"]


@pytest.mark.parametrize("command", LONG)
def test_a_first_user_gets_a_screen_and_the_rest_when_asked(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = answer(command, "--help")
    assert first == str(LONG[command])
    assert 15 <= len(first.splitlines()) <= 30
    assert all(len(line) <= 80 for line in first.splitlines())
    assert "--help-all shows all options" in first
    make: Callable[[], argparse.ArgumentParser] = PARSERS[command]
    for flag, shows in (("--help", first), ("--help-all", make().format_help())):
        with pytest.raises(SystemExit, match=r"^0$"):
            make().parse_args([flag])
        assert capsys.readouterr().out == shows


@pytest.mark.parametrize("command", LONG)
def test_what_a_first_user_is_told_exists(command: str) -> None:
    first: FirstHelp = LONG[command]
    options = PARSERS[command]()._option_string_actions
    assert set(first.flags) <= options.keys()
    for flag in first.flags:  # those that take a value are shown with one
        takes_value = options[flag].nargs != 0
        assert (f"{flag} " in str(first).replace(f"{flag}  ", "")) == takes_value or flag == "--standalone"


def test_commands_with_a_short_help_have_one() -> None:
    """All others fit a screen of fifty lines."""
    for command, make in PARSERS.items():
        assert (len(make().format_help().splitlines()) > 50) == (command in LONG), command


def test_dir_shows_what_there_is_and_imports_nothing() -> None:
    shown = without_torch("import swift_ft; print(*dir(swift_ft))").split()
    assert {*swift_ft.__all__, "data", "__version__"} <= set(shown)
    assert all(hasattr(swift_ft, name) for name in shown)
