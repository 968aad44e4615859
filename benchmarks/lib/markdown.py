"""Measured runs as Markdown, and what a benchmark prints read back into tables and verdicts.

A benchmark prints its figures once, for people. Its file is read from the same text, so the two cannot
differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.lib.figures import cell_from_text, cell_text
from benchmarks.lib.runs import Run, Table, Verdict

VERDICTS = {None: "", True: "met", False: "**missed**"}
TARGET_COLUMNS = ("target", "asked", "measured", "")


@dataclass(frozen=True, slots=True)
class Body:
    """What a benchmark prints: attributes as those of a ``Run``."""

    about: str
    tables: tuple[Table, ...]
    targets: tuple[Verdict, ...]
    notes: tuple[str, ...]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def target_rows(targets: Sequence[Verdict]) -> list[list[str]]:
    """Targets, met or missed."""
    return [[one.name, one.limit, cell_text(one.measured), VERDICTS[one.met]] for one in targets]


def table_in_markdown(one: Table) -> str:
    """A recorded table, behind what is said of it."""
    rows = [[*map(cell_text, cells)] for cells in one.rows]
    return "\n\n".join(part for part in (one.text, table(one.columns, rows)) if part)


def run_in_markdown(run: Run) -> str:
    """All that a run has measured."""
    parts = [run.about]
    parts += map(table_in_markdown, run.tables)
    if run.targets:
        parts.append(table(TARGET_COLUMNS, target_rows(run.targets)))
    return "\n\n".join(part for part in (*parts, *run.notes) if part)


def read_body(text: str) -> Body:
    """Reads what a benchmark prints.

    Text before the first table is said about all of it, text before another table belongs to that table, and
    text behind the last one is a note.
    """
    about: list[str] = []
    said: list[str] = []
    tables: list[Table] = []
    targets: list[Verdict] = []
    for block in _blocks(text):
        if not block.startswith("|"):
            said.append(block)
            continue
        head, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        )
        if not (tables or targets):
            about, said = said, []
        if tuple(head) == TARGET_COLUMNS:
            targets += (_verdict(row) for row in rows)
        else:
            cells = tuple((row[0] or None, *map(cell_from_text, row[1:])) for row in rows)
            tables.append(Table(tuple(head), cells, "\n\n".join(said)))
            said = []
    if not (tables or targets):
        about, said = said, []
    return Body("\n\n".join(about), tuple(tables), tuple(targets), tuple(said))


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs, each in one line, and tables."""
    for block in text.strip().split("\n\n"):
        if block.startswith("|"):
            yield block.strip()
        elif block.strip():
            yield " ".join(block.split())


def _verdict(row: Sequence[str]) -> Verdict:
    name, limit, measured, judged = row
    met = {words: met for met, words in VERDICTS.items()}[judged]
    return Verdict(name, limit, cell_from_text(measured), met)
