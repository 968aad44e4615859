"""``swift-recover``: what an operator asks of a run, alive or gone, with nothing but its store."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the end of a run closes connections: no warnings

from swift_ft.cli.common import OneLineParser
from swift_ft.cli.recover import (
    drain,
    export,
    gc,
    inspect,
    join,
    plan,
    replay,
    scale,
    status,
    timeline,
    verify,
)
from swift_ft.cli.verb import Verb, add_verbs, run_verb

VERBS: tuple[Verb, ...] = (
    status.VERB,
    verify.VERB,
    plan.VERB,
    timeline.VERB,
    inspect.VERB,
    replay.VERB,
    export.VERB,
    gc.VERB,
    join.VERB,
    drain.VERB,
    scale.VERB,
)

_EXIT_CODES = """\
exit codes:
  0    done, and all is well
  1    done, and something is damaged or cannot be recovered
  2    not done: one line says why, and what to do
  130  interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_verb(parser(), argv)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser(
        prog="swift-recover",
        description="Inspect, verify, plan and replay runs from their stores: a path, s3://... or hdfs://...",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_verbs(parser, VERBS)
    return parser
