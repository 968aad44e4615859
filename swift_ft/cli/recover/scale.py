"""``swift-recover scale``: a running job goes on with another number of machines."""

from __future__ import annotations

import argparse
import time

from swift_ft.cli.recover.change import declare_change, facts_of, planned, show_planned, switch
from swift_ft.cli.recover.drain import LEFT, leave
from swift_ft.cli.recover.running import following
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.coordination.follower import Follower
from swift_ft.errors import UsageError
from swift_ft.recovery.next_world import check_changeable, resized
from swift_ft.recovery.scaling import leaves_next, machines_of
from swift_ft.units import counted


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("machines", type=int, metavar="MACHINES", help="with which the job goes on")
    declare_change(parser)
    parser.add_argument(
        "--same-workers",
        action="store_true",
        help="go on with as many workers: others run those of machines that leave, too. For fewer machines, "
        "and scripts that cannot train with fewer workers. Spares leave first",
    )


def _run(args: argparse.Namespace) -> ExitCode:
    with following(args.rdzv_endpoint, args.rdzv_id) as (run_id, follower):
        if args.same_workers:
            return _with_same_workers(run_id, follower, args)
        return _to_another_world(run_id, follower, args)


def _to_another_world(run_id: str, follower: Follower, args: argparse.Namespace) -> ExitCode:
    """More machines if spares wait, or fewer. Those that are left over leave the run."""
    began, state = time.monotonic(), follower.state
    check_changeable(state)
    before = state.membership.by_slot
    change = planned(state, resized(state, args.machines), reason=f"scale to {args.machines}")
    if change.machines == before:
        return _nothing_to_do(run_id, before, args)
    if args.dry_run:
        show_planned(change, as_json=args.json)
        return ExitCode.OK
    outcome = switch(follower, change, timeout_s=args.timeout, tell=not args.json)
    left, stays = list[str](), ""
    for machine in before if outcome.switched and not outcome.interrupted else ():
        if machine in follower.state.membership.spares and machine not in follower.state.membership.hosts:
            what = leave(follower, machine, timeout_s=args.timeout, tell=not args.json)
            left += [machine] if what == LEFT else []
            stays = stays or ("" if what == LEFT else f"{machine} {what}")
    if args.json:
        facts = {**facts_of(run_id, outcome), "left": left, "seconds": time.monotonic() - began}
        print_json(facts)
    return ExitCode.FINDINGS if stays else outcome.exit_code


def _nothing_to_do(run_id: str, machines: tuple[str, ...], args: argparse.Namespace) -> ExitCode:
    if args.json:
        print_json({"run": run_id, "world": None, "machines": machines, "switched": False, "left": []})
    else:
        print(f"the job trains on {counted(len(machines), 'machine')} already: {', '.join(machines)}")
    return ExitCode.OK


# ------------------------------------------------------------------------------------ with the same workers


def _with_same_workers(run_id: str, follower: Follower, args: argparse.Namespace) -> ExitCode:
    """Let machines leave, one after the other, while their workers stay."""
    _check_fewer(follower, args)
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


def _check_fewer(follower: Follower, args: argparse.Namespace) -> None:
    """Refuse what cannot be.

    Raises:
        UsageError: fewer machines than the job may have, or more than there are.
    """
    if args.dry_run:
        raise UsageError("--dry-run shows another world, and --same-workers stays in this one: omit one")
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
    description="Let a running job go on with so many machines: more if spares wait, or fewer. Workers of "
    "the next world start on all of them beside those that train, and take their state over between two "
    "iterations. Machines of the last slots go first, and leave the run then. With --same-workers all "
    "workers stay instead, and fewer machines run them.",
    declare=_declare,
    run=_run,
)
