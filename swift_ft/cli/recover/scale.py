"""``swift-recover scale``: a running job goes on with fewer machines, and no completed iteration is lost."""

from __future__ import annotations

import argparse
import time

from swift_ft.cli.recover.drain import LEFT, leave
from swift_ft.cli.recover.running import declare_run, following
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.coordination.follower import Follower
from swift_ft.errors import UsageError
from swift_ft.recovery.scaling import leaves_next, machines_of


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("machines", type=int, metavar="MACHINES", help="with which the job goes on")
    declare_run(parser)
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds for each to leave (default 600)"
    )


def _run(args: argparse.Namespace) -> ExitCode:
    with following(args.rdzv_endpoint, args.rdzv_id) as (run_id, follower):
        _check(follower, args)
        began, left = time.monotonic(), list[str]()
        outcome = LEFT
        while outcome == LEFT and len(machines_of(follower.state)) > args.machines:
            machine = leaves_next(follower.state)
            outcome = leave(follower, machine, timeout_s=args.timeout, tell=not args.json)
            left += [machine] if outcome == LEFT else []
        remaining = machines_of(follower.state)
    if args.json:
        seconds = time.monotonic() - began
        print_json({"run": run_id, "left": left, "machines": remaining, "seconds": seconds})
    elif outcome == LEFT:
        print(f"the job goes on with {len(remaining)} machines: {', '.join(remaining)}")
    return ExitCode.OK if outcome == LEFT else ExitCode.FINDINGS


def _check(follower: Follower, args: argparse.Namespace) -> None:
    """Refuse what cannot be.

    Raises:
        UsageError: fewer machines than the job may have, or more than there are.
    """
    shape, present = follower.state.shape, len(machines_of(follower.state))
    least = shape.min_machines or 1
    if args.machines < least:
        raise UsageError(
            f"the job needs at least {least} machines, not {args.machines}: see swift-run --nnodes"
        )
    if args.machines > present:
        more = args.machines - present
        raise UsageError(
            f"the job has {present} machines: start {more} more with swift-recover join, on a host each; "
            "they take over stages by themselves"
        )


VERB = Verb(
    description="Let a running job go on with so many machines. Spares leave first, then those of the last "
    "slots, one after the other: all workers save a checkpoint, another machine runs the leaving one's "
    "workers, too, and no completed iteration is lost. To have more, start them: see swift-recover join.",
    declare=_declare,
    run=_run,
)
