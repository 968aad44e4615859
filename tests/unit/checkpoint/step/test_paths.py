"""Each thing that a script reaches has a path of its own: what is saved of one is put into no other."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState
from tests.support.own_modules import own_module

NET = """
import torch
from torch import nn
STEP = 0
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
"""
COUNTS = """
STEP = 0
class Made:
    calls = 0
"""
OF_A_SCHEDULER = (
    COUNTS
    + """
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        pass
"""
)
SOURCES = {"net": NET, "first": COUNTS, "second": COUNTS, "rates": OF_A_SCHEDULER, "beside": COUNTS}

tracker = {"count": 0, "of": sys}
"""Also the name of a variable of a function below."""


@pytest.fixture
def files(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(own_module(tmp_path, name, source)) for name, source in SOURCES.items()
        }


class Process:
    """A process of the script, with parts that have the names of their files."""

    def __init__(self, files: dict[str, Any]) -> None:
        for file in files.values():
            file.STEP = 0
            if hasattr(file, "Made"):
                file.Made.calls = 0
        self.net = files["net"].Net()
        self.net.held = [files["first"].Made(), files["second"].Made()]
        self.state = TrainingState({"net": self.net, "rates": files["rates"].Made()})
        self.rollback = Rollback(self.state)
        self.rollback.watch()

    @property
    def paths(self) -> list[str]:
        return [*self.rollback.variables.paths]


@pytest.mark.parametrize(
    ("file", "holder", "name"),
    [
        ("net", "", "STEP"),
        ("rates", "", "STEP"),
        ("first", "Made", "calls"),
        ("second", "Made", "calls"),
    ],
)
def test_another_process_is_given_it(file: str, holder: str, name: str, files: dict[str, Any]) -> None:
    """A global of a file that is called as a part of the state, and variables of classes of one name."""
    owner = getattr(files[file], holder) if holder else files[file]
    one = Process(files)
    setattr(owner, name, 3)
    saved = one.state.to_save()
    other = Process(files)
    other.state.take_over(saved)
    assert getattr(owner, name) == 3
    assert not hasattr(other.net, name)
    values = (files["first"].Made.calls, files["second"].Made.calls, files["net"].STEP, files["rates"].STEP)
    assert sum(values) == 3


def test_no_two_have_one_path(files: dict[str, Any]) -> None:
    def make() -> type:
        return type("Local", (), {"__module__": __name__, "count": 0})

    local = [make()(), make()()]
    bound = functools.partial(local[0].__init__, [files["beside"].Made()], key=[files["beside"].Made()])
    process = Process(files)
    process.rollback.variables.look()  # at what is here
    assert [path for path in process.paths if ".Local" in path and "(2)" in path]
    assert len({*process.paths}) == len(process.paths)
    cells = [path for path, _ in process.rollback.variables.cells]
    assert len({*cells}) == len(cells)
    assert bound


def test_a_variable_that_hides_another_one() -> None:
    """Of the file that the loop is in. Both are mixed, so that each entry is a variable of its own."""
    tracker = {"count": 0, "of": torch}
    rollback = Rollback(TrainingState({"model": nn.Linear(1, 1)}))
    rollback.watch()
    tracker["count"] = 1
    globals()["tracker"]["count"] = 2
    saved = rollback.carried.to_save()
    assert saved["tracker"] == {"count": 1}
    assert saved["(global) tracker"] == {"count": 2}
    globals()["tracker"]["count"] = 0


WAYS = {
    "as a whole": "import only_imported",
    "a part": "from only_imported import STEP",
    "within the package": "from . import only_imported",
}
OF_ITS_OWN = "def count():\n    def inner():\n        {}\n    return inner"


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_only_a_function_has_imported(tmp_path: Path, way: str) -> None:
    """Nothing that the loop holds leads there."""
    rollback = Rollback(TrainingState({"model": nn.Linear(1, 1)}))
    prefix = "a_package." if "package" in way else ""
    name = f"{prefix}only_imported"
    with (
        own_module(tmp_path, f"{prefix}imports", OF_ITS_OWN.format(WAYS[way])),
        own_module(tmp_path, name, COUNTS),
    ):
        rollback.begin(0)
        sys.modules[name].STEP = 1  # type: ignore[attr-defined]
        rollback.back()
        assert vars(sys.modules[name])["STEP"] == 0


def test_an_object_that_is_made_later_has_the_name_of_a_file(files: dict[str, Any]) -> None:
    """As one that is made at the top of an epoch: its values are not taken for the file's."""
    process = Process(files)
    process.rollback.carried.take_over({"beside": {"STEP": 4}})
    assert files["beside"].STEP == 0


class Plain(nn.Module):
    """Reached through a variable of the loop's, too."""

    count = 0


def test_words(files: dict[str, Any]) -> None:
    model = Plain()
    rollback = Rollback(TrainingState({"model": model}))
    rollback.watch()
    Plain.count = 1
    files["beside"].STEP = 1
    saved = rollback.carried.to_save()
    Plain.count = 0
    assert saved[f"(class) {__name__}.Plain"] == {"count": 1}
    assert saved["(module) beside"] == {"STEP": 1}
