"""The faults of a plan that have struck a run, and those that have not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_ft.faults import Action, Fault
from swift_ft.faults.fault import OF_FILES, OF_STORES
from swift_ft.testing.chaos.run_folder import logs_of

_DAMAGES = (Action.FLIP, Action.TRUNCATE)


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
    missed |= _without_effect([fault for fault in plan if str(fault) not in missed], output, folder)
    return tuple(str(fault) for fault in plan if str(fault) in missed)


def _without_effect(faults: Sequence[Fault], output: str, folder: Path) -> set[str]:
    """Faults of a store that came to their point, and changed nothing.

    Those that no call has met were there, and then they were over. Of files, all may be gone when one is to
    be struck.
    """
    # The words of swift_ft.storage.troubles, and of swift_ft.runtime.fault_injector.
    met = {str(one): f"the first call that '{one}' meets" for one in faults if one.action in OF_STORES}
    idle = {str(one): f"'{one}' found nothing to strike" for one in faults if one.action in OF_FILES}
    if not (met or idle):
        return set()
    texts = _texts(output, folder)

    def said(lines: Mapping[str, str]) -> set[str]:
        return {fault for fault, line in lines.items() if any(line in text for text in texts)}

    return (met.keys() - said(met)) | said(idle)


def damaged_by(plan: Sequence[Fault], output: str, folder: Path) -> set[str]:
    """The files that faults of a plan have damaged, by their paths in the store.

    Args:
        plan: the faults.
        output: all that the launcher has printed.
        folder: the run's.
    """
    # The words of swift_ft.runtime.fault_injector.
    words = [f"'{fault}' has struck " for fault in plan if fault.action in _DAMAGES]
    texts = _texts(output, folder) if words else []
    return {path for one in words for text in texts for path in re.findall(re.escape(one) + r"(\S+)", text)}


def _texts(output: str, folder: Path) -> list[str]:
    """All that the processes of a run have printed and logged."""
    logs = (path for path in logs_of(folder).rglob("*") if path.is_file())
    return [output, *(path.read_text(errors="replace") for path in logs)]
