"""The faults of a plan that have struck a run, and those that have not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_ft.faults import Fault
from swift_ft.faults.fault import OF_STORES
from swift_ft.testing.chaos.run_folder import logs_of


def missed_of(report: Mapping[str, Any], plan: Sequence[Fault], output: str, folder: Path) -> tuple[str, ...]:
    """The faults that never struck, as text, in the order of the plan.

    Of a run that ended well the launcher says which came to their point. Of any other the journal does, as
    far as it has not been cut since; without a report what was printed does.

    Args:
        report: the events of a run.
        plan: its faults.
        output: all that the launcher has printed.
        folder: the run's.
    """
    events = report.get("events", ())
    if not report:  # the launcher was killed
        return tuple(str(fault) for fault in plan if str(fault) not in output)
    if report.get("ok") or (events and events[0]["position"] > 0):  # a snapshot took the place of the first
        missed = set(report.get("missed_faults", ()))
    else:
        missed = {str(fault) for fault in plan} - {
            event["fault"] for event in events if event["event"] == "FaultInjected"
        }
    of_stores = [fault for fault in plan if fault.action in OF_STORES and str(fault) not in missed]
    missed |= _unmet(of_stores, output, folder)
    return tuple(str(fault) for fault in plan if str(fault) in missed)


def _unmet(faults: Sequence[Fault], output: str, folder: Path) -> set[str]:
    """Faults that no call of a store has met: they were there, and then they were over."""
    # The words of swift_ft.storage.troubles.
    unmet = {str(fault): f"the first call that '{fault}' meets" for fault in faults}
    logs = (path for path in logs_of(folder).rglob("*") if path.is_file())
    for text in (output, *(path.read_text(errors="replace") for path in logs)) if unmet else ():
        unmet = {fault: line for fault, line in unmet.items() if line not in text}
    return set(unmet)
