"""The gate before a slot: a machine passes its health checks, or stays out and says why.

The checks run in a process of their own: one that crashes, hangs or starts an accelerator takes no launcher
with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from swift_ft.errors import KeptOutError, UsageError, first_line
from swift_ft.launch.health.clocks import doubt_of
from swift_ft.launch.health.facts import ClockReading, HealthCheck, HealthFacts
from swift_ft.observe.waits import waiting

_logger = logging.getLogger(__name__)

_CLOCK = "clock"
_TEMPORARY = "/tmp"
_LIMIT_S = 120.0
_KILLED_S = 5.0
"""A killed process that has not ended by then is left behind."""
_MOST_BYTES = 1 << 16
"""Of a result: a pipe takes as much without a reader."""
_MOST_WORDS = 1000
"""Of what one check says, in characters."""


class UnhealthyMachineError(KeptOutError):
    """A machine has failed a health check, and takes no part."""


def check_names(names: str) -> None:
    """Check what ``--health-checks`` names, before anything is started.

    Raises:
        UsageError: for a name that is neither a check that ships nor ``package.module:function``.
    """
    for name in _each(names):
        if ":" not in name and name not in _SHIPPED:
            raise UsageError(
                f"--health-checks: there is no check {name!r}: write {', '.join(_SHIPPED)}, or "
                "package.module:function for one of your own."
            )


def reads_clocks(names: str) -> bool:
    """Whether the clocks of other machines have to be read for checks: one of the user's own may use them."""
    return any(name == _CLOCK or ":" in name for name in _each(names))


def pass_gate(names: str, facts: HealthFacts, limit_s: float = _LIMIT_S) -> None:
    """Run health checks.

    Args:
        names: of the checks, with commas between them.
        facts: what they are told.
        limit_s: how long all of them may take.

    Raises:
        UnhealthyMachineError: the machine failed one. The message says which, and why.
    """
    code, said, failed = _run_apart(names, facts, limit_s)
    if code is None:
        raise _unhealthy(facts, f"its health checks ({names}) did not end within {limit_s:g} s")
    if code:
        last = said[-1] if said else "without a word"
        raise _unhealthy(facts, f"its health checks ended with code {code}: {last}")
    if failed is None:
        raise _unhealthy(facts, f"its health checks ({names}) ended without a result")
    if failed:
        raise _unhealthy(facts, "; ".join(f"{name}: {why}" for name, why in failed.items()))
    if _CLOCK in _each(names) and (doubt := doubt_of(facts.clocks)):
        _logger.warning(
            "machine %s takes part, but %s. Too few others agree to tell which of the two is wrong.",
            facts.machine,
            doubt,
            extra={"event": "clock_in_doubt"},
        )


def _run_apart(
    names: str, facts: HealthFacts, limit_s: float
) -> tuple[int | None, list[str], dict[str, str] | None]:
    """Run checks in a process of their own.

    Returns:
        its exit code, None if it did not end in time; the lines of its stderr; and the checks that have
        failed, None if it did not name them.
    """
    # Not the standard output: libraries in C, and exit handlers, may write there after the last line.
    result, results = os.pipe()
    request = json.dumps({"names": list(_each(names)), "facts": asdict(facts), "results": results})
    command = [sys.executable, "-m", "swift_ft.launch.health.gate"]
    try:
        # Without `with`, which waits for the end of a process that may have none: a mount that is dead or a
        # driver that hangs holds it in the kernel, and a SIGKILL with it.
        checks = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(results,),
        )
        try:
            with waiting("the health checks of this machine", limit_s):
                said = checks.communicate(request, timeout=limit_s)[1]
        except BaseException as error:
            checks.kill()
            with (
                contextlib.suppress(subprocess.TimeoutExpired),
                waiting("the health checks, which were killed, to end", _KILLED_S),
            ):
                checks.communicate(timeout=_KILLED_S)
            if isinstance(error, subprocess.TimeoutExpired):
                return None, [], None
            raise
        return checks.returncode, said.strip().splitlines(), _failed_of(result)
    finally:
        os.close(result)
        os.close(results)


def _failed_of(result: int) -> dict[str, str] | None:
    """The result that the process of the checks has written; None if there is none."""
    os.set_blocking(result, False)  # a process that it has left behind may hold the other end
    try:
        failed = json.loads(os.read(result, _MOST_BYTES))
    except (OSError, ValueError):
        return None
    return {str(name): str(why) for name, why in failed.items()} if isinstance(failed, dict) else None


def run_checks(names: Sequence[str], facts: HealthFacts) -> dict[str, str]:
    """Maps each check that fails to its reason. One that raises has failed."""
    failed = {}
    for name in names:
        try:
            why = _find(name)(facts)
        except (Exception, SystemExit) as error:
            why = f"{type(error).__name__}: {first_line(error)}"
        if why:
            failed[name] = str(why)[:_MOST_WORDS]
    return failed


_SHIPPED = ("memory", "disk", "product", "devices", "links", _CLOCK)


def _find(name: str) -> HealthCheck:
    if ":" not in name:
        # It brings torch, which a launcher that checks nothing need not wait for.
        from swift_ft.launch.health.checks import SHIPPED

        return SHIPPED[name]
    found: HealthCheck = pkgutil.resolve_name(name)
    return found


def _each(names: str) -> Iterator[str]:
    return (name.strip() for name in names.split(",") if name.strip())


def _unhealthy(facts: HealthFacts, why: str) -> UnhealthyMachineError:
    back = ", after its loss" if facts.after_loss else ""
    return UnhealthyMachineError(
        f"machine {facts.machine} stays out{back}: {why}. Repair it, or start it without that health check."
    )


def facts_of(
    machine: str,
    others: Sequence[str],
    workers: int,
    *,
    after_loss: bool,
    clocks: Sequence[ClockReading] = (),
) -> HealthFacts:
    """The facts of this machine."""
    # As it was given: Python would look for another folder that can be written, and the disk would be fine.
    folder = os.environ.get("TMPDIR") or _TEMPORARY
    return HealthFacts(machine, after_loss, folder, tuple(others), workers, tuple(clocks))


def main() -> None:
    """Run the checks that standard input asks for, and write what has failed into a pipe, as JSON."""
    request: dict[str, Any] = json.load(sys.stdin)
    facts, results = request["facts"], request["results"]
    os.set_inheritable(results, False)
    facts["others"] = tuple(facts["others"])
    facts["clocks"] = tuple(ClockReading(*reading) for reading in facts["clocks"])
    failed = run_checks(request["names"], HealthFacts(**facts))
    os.write(results, json.dumps(failed).encode())


if __name__ == "__main__":
    main()
