"""The checks of a worker's core find each fault that is planted in it, one after the other.

Faults are planted in its source: a statement is left out, two are exchanged, a condition is turned around, a
comparison is another one, a number is one more, True is False, an operand of `and` or `or` is missing.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from swift_ft.faults import failpoints
from swift_ft.runtime.worker import core
from swift_ft.runtime.worker.core import WorkerCore
from tests.unit.runtime.worker.checks import CHECKS

SOURCE = Path(core.__file__).read_text()
OTHERS = {ast.Eq: ast.NotEq, ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.In: ast.NotIn}
NO_ACTS = (
    ast.Assert,
    ast.Pass,
    ast.Return,
    ast.Raise,
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.ClassDef,
)

OUTSIDE = re.compile(
    r"yield|hit\(|status\.\w+ =|self\.(parts|_links|_job|_hooks|_checkpoints|_replays|_layers)"
)
"""In statements whose order others may see."""

SAME = {
    "`if state.generation > 1:` before `live = status.known and (not self._replays.behind)`": "a failpoint",
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

Change = Callable[[Any], None]


class Mutant(NamedTuple):
    name: str
    source: ast.Module

    def core(self) -> type[WorkerCore]:
        names: dict[str, Any] = {"__name__": core.__name__}
        exec(compile(self.source, self.name, "exec"), names)
        faulty: type[WorkerCore] = names["WorkerCore"]
        return faulty


def mutants() -> Iterator[Mutant]:
    """All faults, each in a source of its own."""
    tree = ast.parse(SOURCE)
    made = next(
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    first_lines = range((made.end_lineno or 0) + 1)
    for number, node in enumerate(ast.walk(tree)):
        if getattr(node, "lineno", None) in first_lines:
            continue  # what is set there is set again before it is used
        for what, change in changes(node):
            other = copy.deepcopy(tree)
            change(next(twin for at, twin in enumerate(ast.walk(other)) if at == number))
            yield Mutant(what, ast.fix_missing_locations(other))


def changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """What can be changed in a node, in words, and how."""
    for field in ("body", "orelse", "finalbody"):
        statements = getattr(node, field, None)
        if isinstance(statements, list) and not isinstance(node, ast.Module | ast.ClassDef):
            yield from changed_statements(field, statements)
    match node:
        case ast.If() if only_records(node):
            return
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield f"not {words(test)}", negate
        case ast.BoolOp(values=values):
            for place, value in enumerate(values):
                yield f"without {words(value)} in {words(node)}", drop_operand(place)
        case ast.Constant(value=bool(value)):
            yield f"{value} is {not value} in line {node.lineno}", flip
        case ast.Constant(value=int(value)):
            yield f"{value} is {value + 1} in line {node.lineno}", one_more
        case ast.Compare(ops=[op]) if type(op) in OTHERS:
            yield f"{OTHERS[type(op)].__name__} in {words(node)}", compare_otherwise


def changed_statements(field: str, statements: list[ast.stmt]) -> Iterator[tuple[str, Change]]:
    acts = [not isinstance(s, NO_ACTS) and not is_text(s) and not only_records(s) for s in statements]
    seen = [act and bool(OUTSIDE.search(ast.unparse(s))) for act, s in zip(acts, statements, strict=True)]
    for place, act in enumerate(acts):
        if act:
            yield f"without {words(statements[place])}", leave_out(field, place)
        if all(seen[place : place + 2]) and place + 1 < len(seen):
            first, then = map(words, statements[place : place + 2])
            yield f"{then} before {first}", exchange(field, place)


def words(node: ast.AST) -> str:
    """The first line of a node."""
    return f"`{ast.unparse(node).splitlines()[0]}`"


def is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def only_records(statement: ast.stmt) -> bool:
    """What is recorded of a recovery changes nothing; tests of its spans look at it."""
    inner = statement.body if isinstance(statement, ast.If) else [statement]
    return all(ast.unparse(one).startswith(("self._recorder.", "began = self._recorder.")) for one in inner)


def negate(node: Any) -> None:
    node.test = ast.UnaryOp(ast.Not(), node.test)


def drop_operand(place: int) -> Change:
    return lambda node: node.values.pop(place)


def flip(node: Any) -> None:
    node.value = not node.value


def one_more(node: Any) -> None:
    node.value += 1


def compare_otherwise(node: Any) -> None:
    node.ops = [OTHERS[type(node.ops[0])]()]


def leave_out(field: str, place: int) -> Change:
    def change(node: Any) -> None:
        getattr(node, field)[place] = ast.Pass()

    return change


def exchange(field: str, place: int) -> Change:
    def change(node: Any) -> None:
        statements = getattr(node, field)
        statements[place], statements[place + 1] = statements[place + 1], statements[place]

    return change


def finds(mutant: Mutant) -> bool:
    """Whether a check fails, in whatever way."""
    try:
        faulty = mutant.core()
        for check in CHECKS:
            check(faulty)
    except (Exception, pytest.fail.Exception):
        return True
    finally:
        failpoints.listen(None)
    return False


def test_each_fault_is_found() -> None:
    planted = list(mutants())
    assert len(planted) >= 60
    survivors = [mutant.name for mutant in planted if not finds(mutant)]
    assert sorted(survivors) == sorted(SAME)


def test_a_source_without_a_fault_passes() -> None:
    assert not finds(Mutant("as it is", ast.parse(SOURCE)))
