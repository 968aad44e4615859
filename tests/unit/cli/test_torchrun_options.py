"""Torchrun's options, as swift-run reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.cli import run
from swift_ft.cli.torchrun_options import check_program
from swift_ft.config.exit_codes import EXIT_USAGE
from swift_ft.errors import UsageError


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nnodes", "two"], "--nnodes 'two': give a number of machines"),
        (["--nnodes", "1:2:3"], "--nnodes '1:2:3': give a number of machines"),
        (["--nnodes", "3:2"], "--nnodes '3:2': give a number of machines"),
        (["--local-ranks-filter", "a"], "--local-ranks-filter 'a': give local ranks, separated by commas"),
        (["--nproc-per-node", "x"], "Unsupported nproc_per_node value: x"),
        (["--tee", "9"], "9 does not match"),
        (["--rdzv-conf", "a"], "'a' must have a value"),
        (["--max-restarts", "-1"], "max_restarts must be >= 0"),
        (["--log-dir", __file__], f"--log-dir {__file__}: this folder cannot be used"),
    ],
)
def test_a_wrong_option_is_named_in_one_line(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--standalone", "--log-dir", str(tmp_path), *flags, __file__]) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swift-run: ")
    assert words in line


def test_a_program_has_to_be_there_and_to_be_one(tmp_path: Path) -> None:
    check_program("sh")
    program = tmp_path / "program"
    with pytest.raises(UsageError, match="There is no program"):
        check_program(str(program))
    program.touch()
    with pytest.raises(UsageError, match="may not be executed: give its path, and use chmod"):
        check_program(str(program))
    program.chmod(0o700)
    check_program(str(program))
