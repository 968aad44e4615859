"""Ends with an error: whether the faults of a plan alone can have brought one about.

The journal of the run tells (``--events-out``). Faults take machines, connections, time and files. They make
no replica differ from another, and neither the script nor the runtime raises an error of its own for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from swift_ft.faults import Action, Fault
from swift_ft.faults.fault import OF_CHANGES, OF_FILES, OF_STORES
from swift_ft.recovery.causes import Cause
from swift_ft.torch_adapters.step_failures import TRANSPORTS

Event = Mapping[str, Any]

_OWN_CAUSES = frozenset(
    {"", Cause.SCRIPT, Cause.DATA, Cause.NATIVE, Cause.MEMORY, Cause.DEVICE, Cause.RUNTIME}
)
"""Of a script's error that no fault of a machine, a network or a store is to blame for."""
_OF_THE_FAULT = "(injected)"
"""In the text of each error that a fault of a store raises."""
_OF_THE_NETWORK = (
    *(name.lower() for name in TRANSPORTS),
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "nccl",
)
_OF_THE_END = ("the job has ended", "(--exit-timeout)")
"""Of a worker that another one's end has ended, and of one that took too long for it."""
_TAKE_NOTHING = frozenset({Action.CLOCK, Action.SLOW, Action.LAG, *OF_CHANGES})


def take_nothing(faults: Collection[Fault]) -> bool:
    """Whether there are faults, and each leaves all machines, connections and files as they are.

    One that stops a machine for some seconds is none of these: it may count as lost.
    """
    return bool(faults) and all(fault.action in _TAKE_NOTHING for fault in faults)


def beyond_faults(events: Iterable[Event], struck: Iterable[Fault]) -> str:
    """The reason of the first event by which a run ended that no fault can have caused; empty without one.

    Args:
        events: of the journal, as ``--events-out`` has them.
        struck: the faults that have struck the run.
    """
    actions = frozenset(fault.action for fault in struck)
    return next((reason for event in events if (reason := _beyond(event, actions))), "")


def _beyond(event: Event, actions: frozenset[Action]) -> str:
    match event["event"]:
        case "JobClosed" if _is_proof(event):
            return str(event["reason"])
        case "ScriptFailed" if _is_own_error(event, actions):
            return str(event["reason"])
        case "StepDiffered":
            return f"iteration {event['iteration']} came out unlike, computed twice: {event['tensors']}"
        case "AuditEnded" if event["iteration"] is not None:
            return f"iteration {event['iteration']} came out unlike in an audit: {event['tensors']}"
    return ""


def _is_proof(closed: Event) -> bool:
    """Whether the runtime has ended the job since somebody computes what is wrong, or for its own failure.

    A worker ends a job only where replicas differ, or a machine has computed a step wrong.
    """
    by: str = closed["by"]
    return by.startswith("worker ") or closed["cause"] == Cause.RUNTIME.value


def _is_own_error(failed: Event, actions: frozenset[Action]) -> bool:
    reason = failed["reason"]
    if _OF_THE_FAULT in reason:
        return False
    if failed["usage"]:
        # A script that is refused for what it does is refused undisturbed, too, or else a loss breaks it.
        of_store = failed["cause"] == Cause.STORE and not actions.isdisjoint(OF_STORES | OF_FILES)
        return bool(actions) and not of_store
    if failed["cause"] not in _OWN_CAUSES:
        return False
    if Action.RAISE in actions and "InjectedError" in reason:
        return False
    if Action.VANISH in actions and "No such file or directory" in reason:  # of the store
        return False
    return not any(text in reason.lower() for text in (*_OF_THE_NETWORK, *_OF_THE_END))
