"""Absurd numbers get one line, before anything is computed or allocated."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from swift_ft.cli import group, run, simulate
from swift_ft.cli.chaos import main as chaos
from swift_ft.cli.plan import main as plan
from swift_ft.cli.recover import main as recover

ABSURD = "999999999999999"
COSTS_NOTHING = {"--seed", "--port", "--machine", "--to-iteration", "--from-checkpoint", "machines"}
"""Numbers of things that are looked up, and refused there."""


def numbers() -> Iterator[tuple[str, argparse.ArgumentParser, argparse.Action]]:
    """All options of the planning tools and verbs that take a whole number."""
    parsers = {
        "swift-group": group.parser(),
        "swift-sim": simulate.parser(),
        "swift-chaos": chaos.parser(),
    }
    for name, made in (("swift-plan", plan.parser()), ("swift-recover", recover.parser())):
        assert made._subparsers is not None
        (verbs,) = made._subparsers._group_actions
        assert isinstance(verbs.choices, dict)
        parsers |= {f"{name} {verb}": own for verb, own in verbs.choices.items()}
    for name, parser in parsers.items():
        for action in parser._actions:
            takes = getattr(action.type, "__qualname__", "")
            if action.type is int or takes.startswith("at_most."):
                yield (
                    f"{name} {action.option_strings[0] if action.option_strings else action.dest}",
                    parser,
                    action,
                )


NUMBERS = {name: (parser, action) for name, parser, action in numbers()}


def test_there_are_numbers() -> None:
    assert {"swift-sim --machines", "swift-plan templates --nodes", "swift-group --points"} <= NUMBERS.keys()
    assert len(NUMBERS) > 25


@pytest.mark.parametrize("name", [name for name in NUMBERS if name.split()[-1] not in COSTS_NOTHING])
def test_each_number_has_a_limit(name: str) -> None:
    parser, action = NUMBERS[name]
    with pytest.raises(argparse.ArgumentError, match=f"{ABSURD} is too large"):
        parser._get_values(action, [ABSURD])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--machines 1000000000", "argument --machines: 1000000000 is too large to plan for: 200000 at most"),
        ("--machines 10 --trials 1000000000", "argument --trials: 1000000000 is too large to plan for"),
        ("--machines ten", "argument --machines: 'ten' is no whole number"),
    ],
)
def test_a_simulation_of_too_much(arguments: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = f"{arguments} --mtbf-per-machine 50000h --training-time 54d".split()
    assert simulate.main(given) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"swift-sim: {line}")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--standalone --machines 1000000000", "--machines must be at most 4096, not 1000000000"),
        ("--standalone --machines 2 --spares 1000000000", "--spares must be at most 4096"),
        ("--standalone --nproc-per-node 1000000000", "1 machines with 1000000000 workers each are too many"),
        ("--nnodes 1000000000 --rdzv-endpoint a:1 --rdzv-id x", "1000000000 machines with 1 workers each"),
    ],
)
def test_a_run_of_too_many(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([*flags.split(), __file__]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert words in said


@pytest.mark.parametrize(
    ("given", "standalone", "limit"), [(None, True, None), (None, False, 5), (0, False, None), (2, True, 2)]
)
def test_machines_of_one_host_are_left_out_only_on_request(
    given: int | None, standalone: bool, limit: int | None
) -> None:
    assert run._machine_failures(given, standalone=standalone) == limit
