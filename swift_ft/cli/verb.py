"""Verbs of a command (``swift-recover``, ``swift-plan``): arguments, exit codes, JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
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
        name: on the command line.
        help: one line for the list of verbs.
        description: a paragraph for the verb's own ``--help``.
        declare: adds the verb's arguments; ``--json`` is there already.
        run: does it, prints the result, and returns the exit code.
    """

    name: str
    help: str
    description: str
    declare: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], ExitCode]


def add_verbs(parser: argparse.ArgumentParser, verbs: Sequence[Verb]) -> None:
    """Add the verbs to a command's parser."""
    subparsers = parser.add_subparsers(metavar="VERB", required=True)
    for verb in verbs:
        own = subparsers.add_parser(verb.name, help=verb.help, description=verb.description)
        verb.declare(own)
        own.add_argument("--json", action="store_true", help="print JSON, for programs")
        own.set_defaults(run=verb.run)


def run_verb(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run the verb that the arguments name; an error becomes one line on stderr.

    Returns:
        The exit code.
    """
    try:
        args = parser.parse_args(argv)
        return int(args.run(args))
    except SwiftError as error:
        sys.stderr.write(f"{parser.prog}: {' '.join(str(error).split())}\n")
        return ExitCode.USAGE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def print_json(content: Any) -> None:
    """Print a result for programs, on one line."""
    sys.stdout.write(json.dumps(content) + "\n")
