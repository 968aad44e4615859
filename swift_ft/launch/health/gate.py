"""The gate before a slot: a machine passes its health checks, or stays out and says why.

The checks run in a process of their own: one that crashes, hangs or starts an accelerator takes no launcher
with it.
"""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from swift_ft.errors import UsageError, first_line
from swift_ft.launch.health.facts import HealthCheck, HealthFacts
from swift_ft.observe.waits import waiting

_LIMIT_S = 120.0


class UnhealthyMachineError(UsageError):
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


def pass_gate(names: str, facts: HealthFacts, limit_s: float = _LIMIT_S) -> None:
    """Run health checks, if any are named.

    Args:
        names: of the checks, with commas between them.
        facts: what they are told.
        limit_s: how long all of them may take.

    Raises:
        UnhealthyMachineError: the machine failed one. The message says which, and why.
    """
    if not names:
        return
    request = json.dumps({"names": list(_each(names)), "facts": asdict(facts)})
    command = [sys.executable, "-m", "swift_ft.launch.health.gate"]
    try:
        with waiting("the health checks of this machine", limit_s):
            done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise _unhealthy(facts, f"its health checks ({names}) did not end within {limit_s:g} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        last = said[-1] if said else "without a word"
        raise _unhealthy(facts, f"its health checks ended with code {done.returncode}: {last}")
    if failed := json.loads(done.stdout.splitlines()[-1]):
        raise _unhealthy(facts, "; ".join(f"{name}: {why}" for name, why in failed.items()))


def run_checks(names: Sequence[str], facts: HealthFacts) -> dict[str, str]:
    """Maps each check that fails to its reason. One that raises has failed."""
    failed = {}
    for name in names:
        try:
            why = _find(name)(facts)
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
        if why:
            failed[name] = why
    return failed


_SHIPPED = ("memory", "disk", "product", "devices", "links")


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


def facts_of(machine: str, log_dir: str, others: Sequence[str], *, after_loss: bool) -> HealthFacts:
    """The facts of this machine."""
    return HealthFacts(machine, after_loss, log_dir or tempfile.gettempdir(), tuple(others))


def main() -> None:
    """Run the checks that standard input asks for, and print what has failed as JSON."""
    request: dict[str, Any] = json.load(sys.stdin)
    facts = request["facts"]
    facts["others"] = tuple(facts["others"])
    print(json.dumps(run_checks(request["names"], HealthFacts(**facts))))


if __name__ == "__main__":
    main()
