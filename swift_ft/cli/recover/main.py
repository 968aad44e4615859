"""``swift-recover``: what an operator asks of a run, alive or gone, with nothing but its store."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the end of a run closes connections: no warnings

from swift_ft.cli.common import OneLineParser
from swift_ft.cli.first_help import add_version
from swift_ft.cli.verb import add_verbs, run_verb

VERBS = {
    "status": "show where a run stands, and what it would lose now",
    "verify": "read all checkpoints and logs, and say what damage would cost",
    "plan": "show what would happen if machines died now",
    "timeline": "show recoveries, lost time, and who held what",
    "inspect": "show what a log segment holds, and verify it",
    "replay": "rebuild a lost machine's state from checkpoint and logs, without the job",
    "export": "write a bundle for a bug report",
    "gc": "delete what no recovery needs",
    "join": "start one more machine for a running job",
    "drain": "let a machine hand over to a spare and leave a running job",
    "move": "let a spare take over from a machine, prepared while that one trains on",
    "scale": "go on with more machines, or with fewer",
    "reshape": "go on in another layout",
    "reload": "go on with a changed script, or other arguments",
}
"""A line for each verb: a module of this folder, which is imported when it is asked for."""

_EXIT_CODES = """\
exit codes:
  0    done, and all is well
  1    done, and something is damaged or cannot be recovered
  2    not done: one line says why, and what to do
  130  interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    given = sys.argv[1:] if argv is None else argv
    return run_verb(parser(given), given)


def parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The command line; with ``argv`` only the arguments of the verb that they name."""
    parser = OneLineParser(
        prog="swift-recover",
        description="Inspect, verify, plan and replay runs from their stores: a path, s3://... or hdfs://...",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    add_verbs(parser, __package__, VERBS, argv)
    return parser
