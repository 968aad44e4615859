"""``swift-recover join``: one more machine for a running job, started by hand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

from swift_ft.cli.recover.running import declare_run, following
from swift_ft.cli.verb import ExitCode, Verb
from swift_ft.errors import UsageError
from swift_ft.launch.rendezvous.setup import COMMON_FLAGS


def _declare(parser: argparse.ArgumentParser) -> None:
    declare_run(parser)
    parser.add_argument(
        "launch",
        nargs=argparse.REMAINDER,
        metavar="-- [FLAGS] SCRIPT ...",
        help="the script and its arguments, as in the job; before them, flags of swift-run for this machine",
    )


def _run(args: argparse.Namespace) -> ExitCode:
    launch = args.launch[1:] if args.launch[:1] == ["--"] else args.launch
    if not launch:
        raise UsageError(
            "name the job's script: swift-recover join --rdzv-endpoint HOST:PORT -- train.py ..."
        )
    with following(args.rdzv_endpoint, args.rdzv_id) as (run_id, follower):
        setup = follower.state.shape.setup
    command = [sys.executable, "-m", "swift_ft.cli.run", *_flags(setup)]
    command += ["--rdzv-endpoint", args.rdzv_endpoint, "--rdzv-id", args.rdzv_id, *launch]
    sys.stderr.write(f"joins {run_id}: {' '.join(command[1:])}\n")
    os.execv(sys.executable, command)


def _flags(setup: tuple[str, ...]) -> Iterator[str]:
    """The flags of swift-run that all machines of a job must have in common, as the job has them.

    What reaches the rendezvous store can write there. A flag that runs a command is not taken from it.
    """
    for entry in setup:
        name, _, value = entry.partition(": ")
        if name in COMMON_FLAGS and value not in ("None", "False", ""):
            yield name
            if value != "True":
                yield value


VERB = Verb(
    description="Become a machine of a running job: for an empty slot, or as a spare. The number of "
    "machines and all flags that they must have in common are the job's; name its script and arguments.",
    declare=_declare,
    run=_run,
)
