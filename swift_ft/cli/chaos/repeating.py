"""The commands that repeat a run of ``swift-chaos``, made from its arguments as they were understood."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_OF_PLANS = ("plans", "seed", "plan", "most", "faults")


@dataclass(frozen=True, slots=True)
class Repeats:
    """Commands with the same options but for those of the plans.

    Attributes:
        parser: the tool's.
        args: as it has read them.
        script: and its arguments.
        spares: that each run had. Their default depends on options that a plan takes the place of.
    """

    parser: argparse.ArgumentParser
    args: argparse.Namespace
    script: Sequence[str]
    spares: int

    def of_plan(self, plan: str, seed: int) -> str:
        """A plan itself: its seed may draw another one, from the points of another undisturbed run.

        Args:
            plan: as ``--plan`` has it.
            seed: chooses the habits, where there are any.
        """
        habits = {"seed": seed} if self.args.habits else {}
        return self._command({"plan": plan, **habits, "spares": self.spares})

    def _command(self, replaced: Mapping[str, object]) -> str:
        words = ["swift-chaos"]
        given = {name: value for name, value in self._given() if name not in _OF_PLANS}
        for name, value in {**replaced, **given, **replaced}.items():
            words += _words(f"--{name.replace('_', '-')}", value)
        return shlex.join([*words, "--", *self.script])

    def _given(self) -> Iterator[tuple[str, object]]:
        """The options that are not at their defaults, in the order of the parser."""
        for action in self.parser._actions:
            value = getattr(self.args, action.dest, None)
            if action.option_strings and value is not None and value != action.default:
                yield action.dest, value


def _words(flag: str, value: object) -> list[str]:
    if value is True:
        return [flag]
    text = f"{value:f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]
