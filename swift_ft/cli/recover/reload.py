"""``swift-recover reload``: a running job goes on with a changed script, or other arguments."""

from __future__ import annotations

import argparse
from dataclasses import replace

from swift_ft.cli.recover.change import declare_change, declare_script, planned, run_change, script_of
from swift_ft.cli.recover.running import following
from swift_ft.cli.verb import ExitCode, Verb
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.next_world import same_machines


def _declare(parser: argparse.ArgumentParser) -> None:
    declare_change(parser)
    declare_script(parser)


def _run(args: argparse.Namespace) -> ExitCode:
    command = script_of(args.script)

    def plan(state: State) -> ev.ChangePlanned:
        reason = f"reload: {' '.join(command)}" if command else "reload"
        machines = same_machines(state)
        return replace(planned(state, machines, command=command, reason=reason), reload=True)

    with following(args.rdzv_endpoint, args.rdzv_id) as (run_id, follower):
        return run_change(run_id, follower, args, plan)


VERB = Verb(
    description="Let a running job go on with a changed script, or other arguments, on the same machines and "
    "with the same layout. Workers of the new script start beside those that train, and take their state "
    "over between two iterations. If they fail before that, the job trains on as it was.",
    declare=_declare,
    run=_run,
)
