"""``swift-recover reshape``: a running job goes on in another layout."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from swift_ft.cli.recover.change import declare_change, declare_script, planned, run_change, script_of
from swift_ft.cli.recover.running import following
from swift_ft.cli.verb import ExitCode, Verb
from swift_ft.config.run_plan import plan_from_json
from swift_ft.errors import UsageError
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.layout.degrees import parse_degrees
from swift_ft.recovery.next_world import resized, same_machines
from swift_ft.units import counted

_MOST_BYTES = 65_536
"""The longest plan: it becomes part of the journal, which every participant reads."""


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plan",
        required=True,
        metavar="PLAN",
        help="the layout: degrees (dp=2,tp=2,pp=2), or a JSON file, which may name machines or workers",
    )
    declare_change(parser)
    declare_script(parser)


def _run(args: argparse.Namespace) -> ExitCode:
    text = read_plan(args.plan)

    def plan(state: State) -> ev.ChangePlanned:
        count = machines_in(text, state.shape.workers_per_machine)
        other = count is not None and count != state.shape.machines
        machines = resized(state, count) if other and count is not None else same_machines(state)
        return planned(state, machines, command=script_of(args.script), plan=text, reason="another layout")

    with following(args.rdzv_endpoint, args.rdzv_id) as (run_id, follower):
        return run_change(run_id, follower, args, plan)


def read_plan(given: str) -> str:
    """The text of a plan: degrees as they are, or a JSON file's content.

    Raises:
        UsageError: if the file cannot be read, or holds no JSON object, or is too long.
    """
    if "=" in given and not Path(given).exists():
        return given.strip()
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the plan {given!r} is neither degrees (dp=2,tp=2) nor a file: {error}") from error
    if len(text.encode()) > _MOST_BYTES:
        raise UsageError(f"the plan {given} has more than {_MOST_BYTES} bytes")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UsageError(f"the plan {given} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"the plan {given} is no JSON object")
    return json.dumps(content, separators=(",", ":"))


def machines_in(text: str, workers_per_machine: int) -> int | None:
    """The number of machines that a plan names; None if it names none.

    Raises:
        UsageError: if its workers do not fill whole machines.
    """
    content = json.loads(text) if text.startswith("{") else {}
    if (machines := content.get("machines")) is not None:
        return _whole("machines", machines)
    workers = _workers_in(text, content) if content else parse_degrees(text).workers
    if workers is None:
        return None
    if workers % workers_per_machine:
        raise UsageError(
            f"the plan is for {counted(workers, 'worker')}, and each machine of the job has "
            f"{workers_per_machine}: choose a multiple of that"
        )
    return workers // workers_per_machine


def _workers_in(text: str, content: dict[str, Any]) -> int | None:
    """The number of workers that a JSON plan names, or that its pipelines have."""
    if (workers := content.get("workers")) is not None:
        return _whole("workers", workers)
    return plan_from_json(text).workers if "pipelines" in content else None


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"the plan's {name} is {value!r}, and not a whole number from 1 on")
    return value


VERB = Verb(
    description="Let a running job go on in another layout. Workers of that layout start beside those that "
    "train, and take their state over between two iterations: each what it needs, from whoever has it. "
    "The machines stay the same unless the plan names another number.",
    declare=_declare,
    run=_run,
)
