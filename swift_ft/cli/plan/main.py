"""``swift-plan``: who computes what on any set of machines, and what has to move when the set changes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from swift_ft.cli.common import OneLineParser
from swift_ft.cli.first_help import add_version
from swift_ft.cli.verb import add_verbs, run_verb

VERBS = {
    "layers": "layers.json from the shapes of a transformer",
    "templates": "the best cut into stages, for each number of nodes",
    "instantiate": "the pipelines that use all nodes, and their shares of the batch",
    "reconfigure": "the pipelines after a loss, or with more nodes",
    "reshard": "what has to move from one layout to another",
    "size": "how many machines, and which",
    "devices": "pipelines of unlike devices",
    "compare": "one pipeline under all schedules",
}
"""A line for each verb: a module of this folder, which is imported when it is asked for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    given = sys.argv[1:] if argv is None else argv
    return run_verb(parser(given), given)


def parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The command line; with ``argv`` only the arguments of the verb that they name."""
    parser = OneLineParser(
        prog="swift-plan",
        description="Plan layouts: stages and replicas for any set of machines, and what moves between them.",
    )
    add_version(parser)
    add_verbs(parser, __package__, VERBS, argv)
    return parser
