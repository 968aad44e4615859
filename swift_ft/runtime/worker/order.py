"""The order in which a worker calls its parts, and why.

``ORDER`` holds for all moments. Only what ends runs backwards (``BACKWARDS``): what began last lets go first.
``BEFORE`` lists the pairs whose order matters, each with its reason; a test checks them against ``ORDER``.
"""

from __future__ import annotations

from typing import NamedTuple

ORDER = (
    "data",
    "device",
    "state",
    "layers",
    "replicas",
    "log",
    "pipeline",
    "memory",
    "checkpoints",
    "hooks",
    "measures",
    "slowness",
    "sending",
    "worlds",
    "policy",
    "verify",
    "own gradients",
)
"""Names of parts. One that is not here comes after them."""

BACKWARDS = frozenset({"interrupted", "close"})
"""Moments at which the last part is called first."""


class Pair(NamedTuple):
    """Two parts whose order matters.

    Attributes:
        moment: a method of :class:`swift_ft.runtime.worker.part.Part`.
        first: the part that is called first.
        then: the one that is called after it.
        why: what goes wrong otherwise.
    """

    moment: str
    first: str
    then: str
    why: str


BEFORE = (
    Pair("start", "device", "state", "what an update waits for comes before its begin is noted"),
    Pair("start", "state", "pipeline", "what a trial run of a stage changes is put back"),
    Pair("begin", "state", "replicas", "all parameters are shards before others look at them"),
    Pair("completed", "state", "measures", "a step that no recovery could repeat ends the script, uncounted"),
    Pair("completed", "log", "measures", "the log has measured the step"),
    Pair(
        "interrupted",
        "replicas",
        "state",
        "averages that are still under way may update parameters, so what the step has changed is known only "
        "when none is",
    ),
    Pair(
        "put_back",
        "state",
        "replicas",
        "parameters that copies have put back do not count as updated",
    ),
    Pair("prepare", "replicas", "hooks", "an undo leads to the iteration whose functions are called again"),
    Pair("prepare", "replicas", "sending", "the state that is packed is that after the undo"),
    Pair("prepare", "hooks", "sending", "what functions of the script changed is put back first"),
    Pair("close", "measures", "checkpoints", "the threads that end there write the profile"),
    Pair("close", "checkpoints", "log", "until then old segments of the log are deleted"),
)
"""The pairs that matter in ``ORDER``: all others could be called in any order."""


def place_of(name: str) -> int:
    """The place of a part in the order, from 0."""
    return ORDER.index(name) if name in ORDER else len(ORDER)
