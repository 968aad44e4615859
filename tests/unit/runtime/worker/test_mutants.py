"""The checks of a worker's core find each fault that is planted in its source, one after the other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swift_ft.faults import failpoints
from swift_ft.runtime.worker import core, world_change
from swift_ft.runtime.worker.core import WorkerCore
from tests.support.mutants import Mutant, mutants
from tests.unit.runtime.worker.checks import CHECKS

SOURCE = Path(core.__file__).read_text()
CHANGE = Path(world_change.__file__).read_text()
OUTSIDE = re.compile(
    r"yield|hit\(|status\.\w+ =|self\.(parts|_links|_job|_hooks|_checkpoints|_replays|_layers)"
)
"""In statements whose order others may see."""

SAME = {
    "`if state.generation > 1:` before `live = status.known and (not self._replays.behind)`": "a failpoint",
    "`saves = last if begun or self._checkpoints.regular(last) else None` before `hit(Point.END, last)`": (
        "a failpoint"
    ),
    "`self.status.parts_done = None` before `self.status.dirty, self.status.updated = (None, ())`": (
        "fields of one value"
    ),
    "`job = self._job` before `self._hooks.check()`": "a name",
    "`if self.step.replayed and failure is None and (not self._replays.joint):` before "
    "`self._links.abort()`": ("a look at what the other does not change"),
    "`state = self._job.state` before `self.parts.pause()`": "a look at what the other does not change",
    "`pending = self._job.state.layouts.pending` before `self.parts.pause()`": (
        "a look at what the other does not change"
    ),
    "`if plan.new_layout is not None and (not (yield Call(self._layers.move, state))):` before "
    "`if shared is not None and self.rank in shared.helpers:`": "no plan has both",
}
"""Faults after which a worker does the same, by their names, and why."""


def planted() -> Iterator[Mutant]:
    """All faults but for what the constructors set: that is set again before it is used."""
    for source in (SOURCE, CHANGE):
        made = next(
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        )
        yield from mutants(source, range((made.end_lineno or 0) + 1), outside=OUTSIDE)


def core_of(mutant: Mutant) -> type[WorkerCore]:
    """With a fault of its own, or with a faulty change of worlds."""
    names: dict[str, Any] = {"__name__": core.__name__}
    exec(compile(mutant.source, mutant.name, "exec"), names)
    if "WorkerCore" not in names:
        change = names["WorldChange"]
        exec(SOURCE, names)
        names["WorldChange"] = change
    faulty: type[WorkerCore] = names["WorkerCore"]
    return faulty


def finds(mutant: Mutant) -> bool:
    """Whether a check fails, in whatever way."""
    try:
        faulty = core_of(mutant)
        for check in CHECKS:
            check(faulty)
    except (Exception, pytest.fail.Exception):
        return True
    finally:
        failpoints.listen(None)
    return False


def test_each_fault_is_found() -> None:
    faults = list(planted())
    assert len(faults) >= 400
    survivors = [mutant.name for mutant in faults if not finds(mutant)]
    assert sorted(survivors) == sorted(SAME)


def test_a_source_without_a_fault_passes() -> None:
    assert not finds(Mutant("as it is", ast.parse(SOURCE)))
