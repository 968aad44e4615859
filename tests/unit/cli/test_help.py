"""What ``swift-run --help`` shows: options by topic with their defaults, and examples that work."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest

from swift_ft.cli.run import parser
from swift_ft.config.option import flag_of
from swift_ft.config.run_config import RunConfig


@pytest.fixture(scope="module")
def help_text() -> str:
    return parser().format_help()


def part(text: str, heading: str) -> str:
    """What stands under a heading."""
    return text.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]


def flat(text: str) -> str:
    return " ".join(text.split())


def test_each_option_stands_under_its_topic(help_text: str) -> None:
    for field in dataclasses.fields(RunConfig):
        assert f"  {flag_of(field.name)}" in part(help_text, field.metadata["option"].topic)


def test_options_of_torchrun_stand_apart(help_text: str) -> None:
    assert "--nproc-per-node" in part(help_text, "torchrun's options")
    assert "--spares" not in part(help_text, "torchrun's options")


@pytest.mark.parametrize(
    ("flag", "default"),
    [("--nnodes", "1:1"), ("--max-restarts", "0"), ("--rdzv-backend", "static"), ("--shutdown-timeout", "5")],
)
def test_defaults_that_torchrun_does_not_mention(flag: str, default: str, help_text: str) -> None:
    entry = re.split(r"\n  -|\n\n", help_text.partition(f"\n  {flag} ")[2])[0]
    assert flat(entry).endswith(f"(default: {default})")


def test_a_default_is_said_once(help_text: str) -> None:
    entries = re.split(r"\n  (?=-)", help_text.partition("\nexamples:\n")[0])
    twice = [entry for entry in entries if len(re.findall(r"\(default|; default", flat(entry))) > 1]
    assert not twice


def test_examples_are_commands_that_work(help_text: str) -> None:
    examples = part(help_text.replace("\\\n", "").replace("\n\n  ", "\n  "), "examples")
    commands = [line.strip() for line in examples.splitlines() if line.startswith("    swift-run")]
    assert len(commands) == 7
    for command in commands:
        args = parser().parse_args(shlex.split(command)[1:])
        assert args.training_script == "train.py" or args.status == "job7"
