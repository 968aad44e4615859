"""A measured run as it stands in ``benchmarks/results/``: one JSON file for each, described in its README."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.lib.figures import Cell, cell_from_json, cell_to_json

FOLDER = Path(__file__).resolve().parents[1] / "results"
_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})-([a-z0-9-]+?)-(\d+)")
_WIDTH = 110  # of a line of JSON: a row of a table, or a figure of it


@dataclass(frozen=True, slots=True)
class Host:
    """The machine and the software that figures depend on.

    Attributes:
        cores: processor cores that the benchmark could use.
        cpu: their model.
        memory_gib: memory of the machine.
        system: operating system and architecture.
        python: version of Python; None where several were measured.
        torch: version of torch; None where several were measured.
        load: load average at the end; None if it was not noted.
        beside: what else ran, in words; empty if it was not noted.
        gpu: model of the GPU; empty without one.
    """

    cores: int
    cpu: str
    memory_gib: int
    system: str
    python: str | None
    torch: str | None
    load: float | None = None
    beside: str = ""
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Figures by row and column.

    Attributes:
        columns: their names; the first is that of the rows' names, and often empty.
        rows: as many cells as columns each.
        text: what is said before the table; empty for most.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was asked of a figure, and whether it is met.

    Attributes:
        name: what is measured.
        limit: what is asked, ``<= 1.15``; empty if nothing is.
        measured: the figure, or words.
        met: whether it is met; None if nothing is asked.
    """

    name: str
    limit: str
    measured: Cell
    met: bool | None


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run of one benchmark.

    Attributes:
        subject: what is measured, a key of ``subjects.SUBJECTS``.
        date: of the day on which it began, ``2026-11-26``.
        number: counts the runs of one subject on one day, from 1.
        host: where it ran.
        until: the day on which it ended, if that was another one.
        commit: the code that was measured, as ``git describe`` names it; None if it was not noted.
        recorded: the commit with which the figures came into the repository, where ``commit`` was not noted.
        command: with its arguments; None if it was not noted, or there was none.
        repetitions: of each figure. With 1 no figure is a median. None if the benchmark does not repeat.
        discarded: whether it measured code that was tried and not kept. It is never today's figure then.
        about: how it was measured; Markdown.
        tables: the figures.
        targets: what was asked of them.
        notes: what else is to be known of this run; Markdown.
    """

    subject: str
    date: str
    number: int
    host: Host
    until: str | None = None
    commit: str | None = None
    recorded: str | None = None
    command: str | None = None
    repetitions: int | None = None
    discarded: bool = False
    about: str = ""
    tables: tuple[Table, ...] = ()
    targets: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """The name of its file, without ``.json``."""
        return f"{self.date}-{self.subject}-{self.number}"

    def cell(self, row: str, column: str, occurrence: int = 1) -> Cell:
        """What stands in a table of this run.

        Args:
            row: its name, the first cell.
            column: its name.
            occurrence: 2 for the second row of this name.

        Raises:
            LookupError: if there is no such row or column.
        """
        found = [
            dict(zip(table.columns, cells, strict=True))
            for table in self.tables
            for cells in table.rows
            if cells[0] == row
        ]
        if len(found) < occurrence or column not in found[occurrence - 1]:
            raise LookupError(f"{self.name} has no figure for {row!r}, {column!r}")
        return found[occurrence - 1][column]


# -------------------------------------------------------------------------------------------------- files


def read_runs(folder: Path = FOLDER) -> list[Run]:
    """All runs, oldest first.

    Raises:
        ValueError: if a file is not a run; the message names it.
    """
    runs = [_read(path) for path in folder.glob("*.json")]
    return sorted(runs, key=lambda run: (run.date, run.subject, run.number))


def newest(runs: list[Run]) -> dict[str, Run]:
    """The newest run of each subject, without those of code that was not kept."""
    return {run.subject: run for run in runs if not run.discarded}


def write_run(run: Run, folder: Path = FOLDER) -> Path:
    """Writes a run into its file, and returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run.name}.json"
    path.write_text(_json(_to_json(run)) + "\n")
    return path


def _read(path: Path) -> Run:
    name = _NAME.fullmatch(path.stem)
    if name is None:
        raise ValueError(f"{path}: call it DATE-SUBJECT-NUMBER.json")
    try:
        data = _checked(Run, json.loads(path.read_text()) | {"number": int(name[3])})
        data["host"] = Host(**_checked(Host, data["host"]))
        data["tables"] = tuple(_table(table) for table in data.get("tables", ()))
        data["targets"] = tuple(_target(target) for target in data.get("targets", ()))
        data["notes"] = tuple(data.get("notes", ()))
        run = Run(**data)
        date.fromisoformat(run.date)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from error
    if run.name != path.stem:
        raise ValueError(f"{path}: it holds a run of {run.subject} of {run.date}: call it {run.name}.json")
    return run


def _checked(kind: type[Run | Host | Table | Verdict], data: Any) -> dict[str, Any]:
    """A JSON object that has no other keys than the class has attributes.

    Types are compared, too: those of attributes that are text, numbers or truth values.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{data!r} is not a JSON object with a {kind.__name__.lower()}")  # noqa: TRY004
    known = {one.name: str(one.type) for one in fields(kind)}
    if unknown := data.keys() - known.keys():
        raise ValueError(f"unknown keys {sorted(unknown)}: see benchmarks/results/README.md")
    for name, value in data.items():
        allowed = [_TYPES[word] for word in known[name].split(" | ") if word in _TYPES]
        if allowed and not isinstance(value, tuple(allowed)):
            raise ValueError(f"{name} is {value!r}, which is not {known[name]}")
    return dict(data)


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "None": type(None),
}


def _table(data: Any) -> Table:
    found = _checked(Table, data)
    columns = tuple(found["columns"])
    rows = tuple(tuple(map(cell_from_json, row)) for row in found["rows"])
    if any(len(row) != len(columns) for row in rows):
        raise ValueError(f"a row of the table {columns} has another number of cells")
    return Table(columns, rows, found.get("text", ""))


def _target(data: Any) -> Verdict:
    found = _checked(Verdict, data)
    return Verdict(found["name"], found["limit"], cell_from_json(found["measured"]), found["met"])


def _to_json(run: Run) -> dict[str, Any]:
    """Without what is empty: a reader sees what is known of a run."""
    data = {one.name: getattr(run, one.name) for one in fields(run) if one.name != "number"}
    data["host"] = {one.name: getattr(run.host, one.name) for one in fields(run.host)}
    data["host"] = {name: value for name, value in data["host"].items() if value not in ("",)}
    data["tables"] = [
        ({"text": table.text} if table.text else {})
        | {"columns": list(table.columns), "rows": [list(map(cell_to_json, row)) for row in table.rows]}
        for table in run.tables
    ]
    data["targets"] = [
        {"name": one.name, "limit": one.limit, "measured": cell_to_json(one.measured), "met": one.met}
        for one in run.targets
    ]
    data["notes"] = list(run.notes)
    kept = {"subject", "date", "commit", "command", "repetitions", "host"}
    return {name: value for name, value in data.items() if name in kept or value}


def _json(value: Any, indent: int = 0) -> str:
    """JSON in which what fits into a line is one: a row, a target, a figure."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + indent <= _WIDTH or not isinstance(value, dict | list) or not value:
        return line
    inner = " " * (indent + 1)
    lines: Iterator[str]
    if isinstance(value, dict):
        lines = (f"{inner}{json.dumps(key)}: {_json(one, indent + 1)}" for key, one in value.items())
        opening, closing = "{", "}"
    else:
        lines = (f"{inner}{_json(one, indent + 1)}" for one in value)
        opening, closing = "[", "]"
    return f"{opening}\n" + ",\n".join(lines) + f"\n{' ' * indent}{closing}"
