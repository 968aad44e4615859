"""The habits that make docstrings hard to read become rarer, never more frequent."""

from __future__ import annotations

from collections import Counter

import pytest

from docs.house import PACKAGE
from docs.prose import HABITS, find, found_in, limits


def habits_of(source: str) -> list[str]:
    """The habits that are found in a file of this text."""
    return [found.habit for found in found_in(PACKAGE / "any.py", source)]


def test_no_habit_is_more_frequent_than_before() -> None:
    findings, allowed = find(), limits()
    assert allowed.keys() == HABITS.keys()
    counts = Counter(found.habit for found in findings)
    grown = {
        habit: f"{counts[habit]}, at most {allowed[habit]}"
        for habit in HABITS
        if counts[habit] > allowed[habit]
    }
    assert not grown, "see `python -m docs.prose --list HABIT`, and name the thing instead"


@pytest.mark.parametrize(
    ("source", "habits"),
    [
        ('"""What a worker does."""', ["question", "module-question"]),
        ('"""A worker\'s work."""', []),
        ('"""When a worker works."""', ["module-question"]),
        ('class A:\n    """Who reads."""', ["question"]),
        ('class A:\n    """Whether it reads."""', ["question"]),
        ('def f():\n    """Whether it reads."""', []),
        ('LIMIT_S = 1.0\n"""How long it may take."""', ["question"]),
        ('"not below an assignment"\nf()\n"""How long it may take."""', []),
        ('def f():\n    """Reads.\n\n    Args:\n        ranks: of the others.\n    """', ["of-the"]),
        ('def f():\n    """Reads.\n\n    Args:\n        ranks: of the others, ascending.\n    """', []),
        ('def f():\n    """None if it is no member."""', ["is-no"]),
        ('def f():\n    """None if there is no member, or it is no longer one."""', []),
        ('def f():\n    """Waits for so long, and begins anew."""', ["anew"]),
        ('def f():\n    """Waits so long as it is there."""', []),
        ('x = "What is no docstring"', []),
    ],
)
def test_habits(source: str, habits: list[str]) -> None:
    assert sorted(habits_of(source)) == sorted(habits)


def test_a_finding_says_where() -> None:
    (found,) = found_in(
        PACKAGE / "any.py", 'def f():\n    """Reads.\n\n    Args:\n        ranks: of the others.\n    """'
    )
    assert (found.path.name, found.line, found.text) == ("any.py", 5, "ranks: of the others.")
