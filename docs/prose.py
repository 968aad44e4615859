"""A checker of the package's docstrings: habits that make them hard to read, counted.

    python -m docs.prose                    counts, and lowers the limits in docs/prose.json
    python -m docs.prose --check            fails if a habit is more frequent than its limit
    python -m docs.prose --list question    shows where a habit is left

A docstring names the thing and says its units, ranges and errors. The habits below do not. Their counts may
only fall; a unit test runs the check.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from docs.house import PACKAGE, ROOT

LIMITS = ROOT / "docs" / "prose.json"
"""The largest count that each habit may have."""


@dataclass(frozen=True, slots=True)
class Docstring:
    """A docstring in a file.

    Attributes:
        owner: ``module``, ``class``, ``function``, or ``attribute`` for a string below an assignment.
        line: its first line in the file, counted from 1.
        text: as it stands there, with its indentation.
    """

    owner: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A place where a habit is left."""

    habit: str
    path: Path
    line: int
    text: str


def _question(docstring: Docstring) -> Iterator[tuple[int, str]]:
    """``What a worker does``: the thing has no name. ``Whether`` is how a predicate's docstring begins."""
    first = docstring.text.lstrip().split("\n", 1)[0]
    words = "What|Who|How|Where|Which" + ("" if docstring.owner == "function" else "|Whether")
    if re.match(rf"(?:{words})\b", first) and not first.endswith("?"):
        yield 0, first


def _module_question(docstring: Docstring) -> Iterator[tuple[int, str]]:
    """The same, ``When`` and ``Why``, in a module's first line, which a reader of the map sees alone."""
    first = docstring.text.lstrip().split("\n", 1)[0]
    if docstring.owner == "module" and re.match(r"(?:What|Who|Whether|How|Where|Which|When|Why)\b", first):
        yield 0, first


def _of_the(docstring: Docstring) -> Iterator[tuple[int, str]]:
    """``ranks: of the others.`` in Args or Attributes: it repeats the name and says no fact."""
    yield from _lines(docstring, r"\s+\w+: of \w+(?: \w+){0,3}\.")


def _is_no(docstring: Docstring) -> Iterator[tuple[int, str]]:
    """``It is no member``: English says ``is not a``. ``There is no member`` is English."""
    but = r"(?!longer|more|less|safer|one\b)"
    yield from _lines(docstring, rf"(?i).*(?<!there )\b(?:is|are|was|were) no {but}\w+")


def _anew(docstring: Docstring) -> Iterator[tuple[int, str]]:
    """Words that read as translated: ``anew`` for ``again``, ``so long`` for a duration."""
    yield from _lines(docstring, r"(?i).*\b(?:anew|so long(?! as)|for so long)\b")


def _lines(docstring: Docstring, pattern: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(docstring.text.split("\n")):
        if re.match(pattern, line):
            yield number, line.strip()


HABITS: Mapping[str, Callable[[Docstring], Iterator[tuple[int, str]]]] = {
    "module-question": _module_question,
    "question": _question,
    "of-the": _of_the,
    "is-no": _is_no,
    "anew": _anew,
}


def docstrings(source: str) -> Iterator[Docstring]:
    """The docstrings of a file, those below assignments included."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        owner = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
        for number, statement in enumerate(node.body):
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            text = statement.value.value
            is_first, is_below = number == 0, isinstance(node.body[number - 1], ast.Assign | ast.AnnAssign)
            if isinstance(text, str) and (is_first or is_below):
                yield Docstring(owner if is_first else "attribute", statement.lineno, text)


def found_in(path: Path, source: str) -> Iterator[Finding]:
    """The habits that a file has left."""
    for docstring in docstrings(source):
        for habit, look in HABITS.items():
            for offset, text in look(docstring):
                yield Finding(habit, path.relative_to(ROOT), docstring.line + offset, text)


def find() -> list[Finding]:
    """The habits that the package has left, in the order of its files."""
    return [found for path in sorted(PACKAGE.rglob("*.py")) for found in found_in(path, path.read_text())]


def limits() -> dict[str, int]:
    """The largest count of each habit."""
    values: dict[str, int] = json.loads(LIMITS.read_text())
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 1 if a habit is more frequent than its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--list", metavar="HABIT", choices=HABITS, help="show where one is left")
    args = parser.parse_args(argv)
    findings, allowed = find(), limits()
    if args.list:
        for found in findings:
            if found.habit == args.list:
                print(f"{found.path}:{found.line}: {found.text}")
        return 0
    counts = {habit: sum(found.habit == habit for found in findings) for habit in HABITS}
    for habit, count in counts.items():
        print(f"{habit}: {count}, at most {allowed[habit]}")
    if not args.check:
        lowered = {habit: min(count, allowed[habit]) for habit, count in counts.items()}
        LIMITS.write_text(json.dumps(lowered, indent=2) + "\n")
    return int(any(count > allowed[habit] for habit, count in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
