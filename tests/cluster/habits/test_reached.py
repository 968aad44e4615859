"""State that a script reaches in a roundabout way is put back and handed over; a missing module is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.habits import assert_put_back, refusal

SCRIPT = Path(__file__).parent / "scripts" / "reached.py"
SOME = [
    "a hook",
    "behind a generator",
    "a target",
    "a recurrent state",
    "two files away",
    "a dictionary that averages",
    "behind a part",
    "a file with a part's name",
    "arguments that change",
    "by number",
]
OTHERS = [
    "named as a part",
    "a list with attributes",
    "a global of another file",
    "a remembered result",
    "beside a lock",
    "parsed arguments",
    "slots",
    "made anew",
    "a class of another file",
    "of a parameter",
    "of the wrapper",
    "a buffer that is not saved",
    "in a set",
    "by a weak reference",
]


@pytest.mark.parametrize("habit", [*SOME, *(pytest.param(one, marks=pytest.mark.thorough) for one in OTHERS)])
def test_replicas(habit: str, tmp_path: Path) -> None:
    faults = "kill machine=1 iteration=4 point=reduce committed=3; kill machine=0 iteration=6 point=reduce"
    assert_put_back(tmp_path, SCRIPT, habit, inject=faults)


def test_a_new_element_of_a_long_container(tmp_path: Path) -> None:
    """No look for all that there is, as at a checkpoint, comes before the loss."""
    loss = "kill machine=1 iteration=6 point=reduce"
    assert_put_back(tmp_path, SCRIPT, "a class that is seen first in step 5", inject=loss)


def test_a_module_outside_of_the_state(tmp_path: Path) -> None:
    line = refusal(tmp_path, SCRIPT, "a target outside")
    assert "target" in line
    assert 'Session({..., "target": target}, ...)' in line
