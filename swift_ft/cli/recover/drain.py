"""``swift-recover drain``: a machine hands over to a spare, and leaves the run."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from operator import is_not

from swift_ft.cli.recover.running import declare_run, following, machine_named, who_asks
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.coordination.follower import Follower
from swift_ft.errors import UsageError
from swift_ft.recovery import events as ev
from swift_ft.recovery.guests import guests_wanted
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import leaves_after_checkpoint
from swift_ft.units import format_seconds

LEFT = "left"
"""The outcome that was asked for."""


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "machine", metavar="MACHINE", help="its slot (a number), its name (m-9f3b91a7.0), or its host"
    )
    declare_run(parser)
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds to wait for the end (default 600)"
    )


def _run(args: argparse.Namespace) -> ExitCode:
    with following(args.rdzv_endpoint, args.rdzv_id) as (run_id, follower):
        return _drain(run_id, follower, args)


def _drain(run_id: str, follower: Follower, args: argparse.Namespace) -> ExitCode:
    machine = machine_named(follower.state, args.machine)
    slot = follower.state.slot_of(machine)
    began = time.monotonic()
    outcome = leave(follower, machine, timeout_s=args.timeout, tell=not args.json)
    took_s = time.monotonic() - began
    if args.json:
        facts = {"run": run_id, "machine": machine, "slot": slot, "outcome": outcome, "seconds": took_s}
        print_json(facts)
    return ExitCode.OK if outcome == LEFT else ExitCode.FINDINGS


def leave(follower: Follower, machine: str, *, timeout_s: float, tell: bool) -> str:
    """Ask a machine to leave, and wait until another one trains in its slot.

    Args:
        follower: of the run's journal.
        machine: by its name.
        timeout_s: how long to wait.
        tell: whether to print what is waited for, and the outcome.

    Returns:
        What came of it, in words: :data:`LEFT` if it has left.

    Raises:
        UsageError: if the run's script has no session.
    """
    slot = follower.state.slot_of(machine)
    if slot is not None and follower.state.generation and not follower.state.has_sessions:
        raise UsageError("the run's script has no session: all its workers would start again from nothing")
    began = time.monotonic()
    state = follower.append(ev.DrainRequested(machine=machine, asked_by=who_asks()))
    outcome = _wait(follower, state, machine, slot, timeout_s, tell=tell)
    if tell and outcome == LEFT:
        by = f", and {follower.state.membership.members[slot]} fills its slot" if slot is not None else ""
        print(f"{machine} has left after {format_seconds(time.monotonic() - began)}{by}")
    elif tell:
        sys.stderr.write(f"swift-recover: {machine} {outcome}\n")
    return outcome


def _wait(
    follower: Follower, state: State, machine: str, slot: int | None, timeout_s: float, *, tell: bool
) -> str:
    deadline = time.monotonic() + timeout_s
    told = ""
    while True:
        if machine in state.membership.fenced and (slot is None or state.phase == Phase.LIVE):
            return LEFT
        if state.phase == Phase.ENDED:
            return "stayed: the run has ended"
        if (left_s := deadline - time.monotonic()) <= 0:
            return f"has not left within {timeout_s:g} s: it {_what_for(state, machine)}"
        if tell and (words := _what_for(state, machine)) != told:
            told = words
            print(f"{machine} {told}", flush=True)
        follower.wait_for(partial(is_not, state), min(left_s, 1.0))
        state = follower.state


def _what_for(state: State, machine: str) -> str:
    """The step that the machine, or its replacement, has reached, in words."""
    if machine in state.membership.fenced:
        return "has left, and its replacement is being rebuilt"
    if state.all_finished or state.membership.exited:
        return "stays until the run ends: training is complete"
    if machine in leaves_after_checkpoint(state):
        return "waits for a checkpoint"
    if not any(spare not in state.membership.draining for spare in state.membership.spares):
        if guests_wanted(state):
            return "waits for a spare machine to take its place; if none comes, another machine does"
        return "waits for a spare machine to take its place: start one more swift-run"
    return "hands over"


VERB = Verb(
    description="Ask a machine of a running job to leave. All workers save a checkpoint, a spare takes the "
    "machine's place, and no completed iteration is lost. Without a spare it waits for one to join, or after "
    "--elastic-wait for another machine to run its workers, too.",
    declare=_declare,
    run=_run,
)
