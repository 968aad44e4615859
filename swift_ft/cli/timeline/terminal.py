"""Tables in a terminal: as such where there is room for whole words, else row by row."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from swift_ft.cli.timeline.tables import ReportTable

_WORD = re.compile(r"[0-9.]+ (?:s|ms|min|h|d|%|[kMGTP]?B)(?!\S)|\S+")
"""A number belongs to its unit."""
_LONGEST_WORD = 24
"""A longer word, such as a name of a host, may be broken."""
_FRAME = 3
"""Of each column: a line and two blanks; one line more at the end."""
_INDENT = 2


def print_table(console: Console, table: ReportTable) -> None:
    """Print a table, no wider than the terminal.

    Words and numbers with their units stay whole. Where that is too wide, each row is printed as a list of
    its cells: a table with words cut to two letters tells nobody anything.
    """
    columns = range(len(table.columns))
    least, most = [_least(table, at) for at in columns], [_most(table, at) for at in columns]
    room = console.width - _FRAME * len(least) - 1
    if sum(least) > room:
        _print_rows(console, table)
        return
    shown = Table(title=table.title, title_justify="left")
    for column, width in zip(table.columns, _widths(least, most, room), strict=True):
        shown.add_column(column, justify="right" if column in table.numbers else "left", width=width)
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def _widths(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """The widths of columns: the narrowest one that lacks something gets the next place."""
    widths = list(least)
    for _ in range(room - sum(least)):
        lacking = [at for at, width in enumerate(widths) if width < most[at]]
        if not lacking:
            break
        widths[min(lacking, key=lambda at: widths[at])] += 1
    return widths


def _most(table: ReportTable, at: int) -> int:
    lines = [line for row in table.rows for line in row[at].splitlines()]
    return max(map(cell_len, [*lines, table.columns[at]]), default=1)


def _least(table: ReportTable, at: int) -> int:
    """The least width of a column: its longest word, or the longest part where cells have lines."""
    cells = [row[at] for row in table.rows]
    parts = [part for cell in cells for part in (cell.splitlines() if "\n" in cell else _WORD.findall(cell))]
    longest = max(map(cell_len, [*parts, *table.columns[at].split()]), default=0)
    return max(1, min(longest, _LONGEST_WORD))


def _print_rows(console: Console, table: ReportTable) -> None:
    console.print(table.title)
    for row in table.rows:
        cells = [(name, cell) for name, cell in zip(table.columns, row, strict=True) if cell]
        for number, (name, cell) in enumerate(cells):
            text = ", ".join(cell.splitlines())
            said = f"{name}: {text}" if name else text
            indent = min(_INDENT * (2 if number else 1), console.width - 1)
            console.print(Padding(said, (0, 0, 0, max(0, indent))))
