"""``swift-recover move``: a spare takes over from a machine, prepared while that one trains on."""

from __future__ import annotations

import argparse

from swift_ft.cli.recover.change import declare_change, planned, run_change
from swift_ft.cli.recover.running import following, machine_named
from swift_ft.cli.verb import ExitCode, Verb
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.next_world import moved


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "machine", metavar="MACHINE", help="its slot (a number), its name (m-9f3b91a7.0), or its host"
    )
    parser.add_argument(
        "--to", metavar="MACHINE", help="the spare (default: the one that has waited longest)"
    )
    declare_change(parser)


def _run(args: argparse.Namespace) -> ExitCode:
    def plan(state: State) -> ev.ChangePlanned:
        machine = machine_named(state, args.machine)
        to = None if args.to is None else machine_named(state, args.to)
        machines = moved(state, machine, to)
        spare = next(new for new in machines if new not in state.membership.slots)
        return planned(state, machines, reason=f"{machine} moves to {spare}")

    with following(args.rdzv_endpoint, args.rdzv_id) as (run_id, follower):
        return run_change(run_id, follower, args, plan)


VERB = Verb(
    description="Let a spare take over from a machine of a running job. Its workers are prepared while the "
    "job trains; between two iterations they take the state over. Nothing is computed twice. The machine "
    "waits as a spare afterwards: swift-recover drain lets it leave.",
    declare=_declare,
    run=_run,
)
