"""The end of each tool, and verbs of a command (``swift-recover``, ``swift-plan``): arguments, exit codes."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from swift_ft.errors import SwiftError


class ExitCode(IntEnum):
    """Exit codes. Scripts may rely on these numbers."""

    OK = 0
    """It did what was asked, and all is well."""
    FINDINGS = 1
    """It did what was asked, and found damage or a loss that cannot be recovered."""
    USAGE = 2
    """It did nothing: one line on stderr says why, and what to do."""
    INTERRUPTED = 130
    """Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb of a command.

    Attributes:
        description: a paragraph for the verb's own ``--help``.
        declare: adds the verb's arguments; ``--json`` is there already.
        run: does it, prints the result, and returns the exit code.
    """

    description: str
    declare: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], ExitCode]


def add_verbs(
    parser: argparse.ArgumentParser, package: str, verbs: Mapping[str, str], argv: Sequence[str] | None
) -> None:
    """Add the verbs to a command's parser.

    Args:
        parser: the command's.
        package: has a module for each verb, with its ``VERB``. It is imported for the verb that is asked for:
            some need torch, which takes seconds.
        verbs: names, and one line for each in the list of verbs.
        argv: the arguments that are to be read; None for the arguments of all verbs.
    """
    subparsers = parser.add_subparsers(metavar="VERB", required=True)
    named = next((word for word in argv or () if not word.startswith("-")), None)
    for name, line in verbs.items():
        if argv is not None and name != named:
            subparsers.add_parser(name, help=line)
            continue
        verb = load_verb(package, name)
        own = subparsers.add_parser(name, help=line, description=verb.description)
        verb.declare(own)
        own.add_argument("--json", action="store_true", help="print JSON, for programs")
        own.set_defaults(run=verb.run)


def load_verb(package: str, name: str) -> Verb:
    """The verb of a module."""
    verb: Verb = importlib.import_module(f"{package}.{name}").VERB
    return verb


def run_verb(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Run the verb that the arguments name. Returns the exit code."""

    def run() -> int:
        args = parser.parse_args(argv)
        return int(args.run(args))

    return ended(parser.prog, run)


def ended(tool: str, action: Callable[[], int | None]) -> int:
    """Do what a tool is for; an error becomes one line on stderr.

    Args:
        tool: its name.
        action: returns the exit code, or None if all is well.

    Returns:
        The exit code.
    """
    try:
        return action() or ExitCode.OK
    except SwiftError as error:
        sys.stderr.write(f"{tool}: {' '.join(str(error).split())}\n")
        return ExitCode.USAGE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def print_json(content: Any) -> None:
    """Print a result for programs, on one line."""
    sys.stdout.write(json.dumps(content) + "\n")
