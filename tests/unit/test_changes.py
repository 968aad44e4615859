"""The fragments in changes/ are of the kinds that a release puts together, and read as sentences."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from docs.house import ROOT

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
FOLDER = ROOT / SETTINGS["directory"]
NAME = re.compile(
    rf"(?:\d+|\+[a-z0-9-]+)\.(?:{'|'.join(kind['directory'] for kind in SETTINGS['type'])})\.md"
)
IGNORED = SETTINGS["ignore"]


def problem_of(path: Path) -> str:
    """The reason why a release would not take a fragment, or nobody could read it; empty if there is none."""
    if not NAME.fullmatch(path.name):
        return "its name is not one of those in changes/README.md: a release would leave it out"
    text = path.read_text().strip()
    return "" if text.endswith((".", ").")) else "it does not end as a sentence does"


def test_the_changelog_has_a_place_for_a_release() -> None:
    assert (ROOT / SETTINGS["filename"]).read_text().count(SETTINGS["start_string"]) == 1


def test_fragments() -> None:
    problems = {path.name: problem_of(path) for path in FOLDER.iterdir() if path.name not in IGNORED}
    assert not {name: problem for name, problem in problems.items() if problem}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("+a-change.added.md", "It can do more.\n", ""),
        ("12.fixed.md", "It went wrong.", ""),
        ("a-change.added.md", "It can do more.", "name"),
        ("+a-change.better.md", "It can do more.", "name"),
        ("+a-change.added.md", "more", "sentence"),
    ],
)
def test_what_a_release_would_not_take(name: str, text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = problem_of(path)
    assert says in found
    assert bool(says) == bool(found)
