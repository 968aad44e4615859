"""Whatever comes after the script's name is the script's, whatever options swift-run has."""

from __future__ import annotations

import pytest

from swift_ft.cli import run
from swift_ft.cli.recover.main import parser as recover_parser
from swift_ft.cli.script_arguments import parse_before_script


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--standalone"],
        ["--machines", "2", "-r", "3"],
        ["--machines=2", "-r3", "-m"],
        ["--stand", "--nproc-per", "2"],  # abbreviations of swift-run's own, as torchrun's users write them
        ["--standalone", "--"],
    ],
)
@pytest.mark.parametrize(
    "own",
    [[], ["--checkpoint", "a"], ["--metrics=b", "--", "x"], ["-m", "--standalone", "--help", "--nnode"]],
)
def test_the_scripts_own_arguments(options: list[str], own: list[str]) -> None:
    args = parse_before_script(run.parser(), [*options, "train.py", *own])
    assert (args.training_script, args.training_script_args) == ("train.py", own)
    assert args.module == ("-m" in options)
    assert args.machines == (2 if any("machines" in option for option in options) else None)
    assert args.nproc_per_node == ("2" if "--nproc-per" in options else "1")


def test_no_script() -> None:
    args = parse_before_script(run.parser(), ["--status", "job7"])
    assert (args.training_script, args.training_script_args) == (None, [])


@pytest.mark.parametrize("wrong", [["--checkpoint", "3"], ["--absent"], ["--machines"]])
def test_mistakes_before_the_script_are_told(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_before_script(run.parser(), [*wrong, "train.py"])
    assert end.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_a_replay_takes_them_after_two_dashes() -> None:
    words = ["replay", "store", "--machine", "1", "--out", "o", "--", "train.py", "--check", "a"]
    assert recover_parser(words).parse_args(words).script == ["train.py", "--check", "a"]
