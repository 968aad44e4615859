"""``swift-plan``: who computes what on any set of machines, and what has to move when the set changes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from swift_ft.cli.common import OneLineParser
from swift_ft.cli.plan import compare, devices, instantiate, layers, reconfigure, reshard, size, templates
from swift_ft.cli.verb import Verb, add_verbs, run_verb

VERBS: tuple[Verb, ...] = (
    layers.VERB,
    templates.VERB,
    instantiate.VERB,
    reconfigure.VERB,
    reshard.VERB,
    size.VERB,
    devices.VERB,
    compare.VERB,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_verb(parser(), argv)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser(
        prog="swift-plan",
        description="Plan layouts: stages and replicas for any set of machines, and what moves between them.",
    )
    add_verbs(parser, VERBS)
    return parser
