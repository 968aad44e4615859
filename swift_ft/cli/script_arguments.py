"""Whatever comes after the script's name is the script's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parse_before_script(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The options of a launcher, its script, and the script's arguments as they are.

    argparse would look for abbreviations of the launcher's options among these, and refuse an option of the
    script that could be two of them.

    Args:
        parser: its positional arguments are ``training_script`` and ``training_script_args``.
        argv: all arguments.
    """
    count = _through_script(parser, argv)
    args = parser.parse_args([*argv[:count]])
    args.training_script_args = [*(args.training_script_args or ()), *argv[count:]]
    return args


def _through_script(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """The number of arguments up to the script, which is among them; all if there is none."""
    at = 0
    while at < len(argv):
        word = argv[at]
        if word == "--":
            return min(at + 2, len(argv))
        if not word.startswith("-") or word == "-":
            return at + 1
        at += 2 if _takes_next(parser, word) else 1
    return len(argv)


def _takes_next(parser: argparse.ArgumentParser, word: str) -> bool:
    """Whether an option's value is the argument that follows it."""
    known = parser._option_string_actions
    if word in known:
        return known[word].nargs != 0
    if not word.startswith("--"):  # the value, if there is one, is in the same argument
        return False
    meant = [action for flag, action in known.items() if flag.startswith(word)]
    # Of an ambiguous one argparse says so, and of an unknown one.
    return "=" not in word and bool(meant) and all(action.nargs != 0 for action in meant)
