"""The first page: its table counts the lines that the pages show, and it stays short."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from docs.house import ROOT
from tests.support.tutorial import Block, blocks_of

README = (ROOT / "README.md").read_text()
LONGEST = 800
"""Words, with those of its tables."""

_ROW = re.compile(r"^\| (?P<have>[^|]+) \| (?P<pages>[^|]+) \| (?P<old>\d+) → (?P<new>\d+) \|", re.MULTILINE)


def rows() -> list[tuple[Path, tuple[int, int]]]:
    """The first page that each row links to, and how many lines it says to go and to come."""
    found = []
    for row in _ROW.finditer(README):
        link = re.search(r"\]\(([^)]+)\)", row["pages"])
        assert link, row["have"]
        found.append((ROOT / link[1], (int(row["old"]), int(row["new"]))))
    return found


def lines_of_diffs(blocks: list[Block]) -> tuple[int, int]:
    """Lines that go and that come, in all diffs of a page."""
    lines = [line for block in blocks if block.language == "diff" for line in block.text.splitlines()]
    return tuple(sum(line.startswith(sign) for line in lines) for sign in "-+")  # type: ignore[return-value]


def lines_between(before: Block, after: Block) -> tuple[int, int]:
    """The same for two scripts, however far a line is indented."""
    old, new = ([line.strip() for line in block.text.splitlines()] for block in (before, after))
    difference = [line for line in difflib.ndiff(old, new) if line[2:].strip()]
    return tuple(sum(line.startswith(sign) for line in difference) for sign in "-+")  # type: ignore[return-value]


def counted(link: Path) -> tuple[int, int]:
    """How many lines a page changes. The tutorial has scripts for its first and its second part."""
    name, _, anchor = link.name.partition("#")
    blocks = blocks_of(link.with_name(name))
    if name == "tutorial.md":
        scripts = [block for block in blocks if block.language == "python"]
        return lines_between(*(scripts[2:] if anchor else scripts[:2]))
    return lines_of_diffs(blocks)


def test_the_table_has_its_rows() -> None:
    assert len(rows()) >= 9


@pytest.mark.parametrize(("link", "said"), rows(), ids=lambda value: getattr(value, "name", None))
def test_a_row_counts_the_lines_of_its_page(link: Path, said: tuple[int, int]) -> None:
    assert counted(link) == said


def test_it_stays_short() -> None:
    assert len(README.split()) <= LONGEST


def test_lines_are_counted() -> None:
    one, two = (Block("python", {}, text, 1, skipped=False) for text in ("a\nb\nc\n", "a\n\n  x\n  c\nd\n"))
    assert lines_between(one, two) == (1, 2)
    assert lines_of_diffs([Block("diff", {}, "+a\n b\n-c\n-d\n", 1, skipped=False)]) == (2, 1)
