"""Small faults for a source in Python, one after the other.

A statement is left out, two are exchanged, a condition is turned around, a comparison is another one, a
number is one more, True is False, an operand of `and` or `or` is missing.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

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
NOTHING = re.compile("(?!)")

Change = Callable[[Any], None]


class Mutant(NamedTuple):
    """A source with a fault, and the fault in words."""

    name: str
    source: ast.Module


def mutants(
    source: str, skipped: Container[int] = (), *, outside: re.Pattern[str] = NOTHING
) -> Iterator[Mutant]:
    """All faults, each in a source of its own.

    Args:
        source: without a fault.
        skipped: numbers of lines that stay as they are.
        outside: in statements whose order others may see; neighbours among them are exchanged.
    """
    tree = ast.parse(source)
    for number, node in enumerate(ast.walk(tree)):
        if getattr(node, "lineno", None) in skipped:
            continue
        for what, change in changes(node, outside):
            other = copy.deepcopy(tree)
            change(next(twin for at, twin in enumerate(ast.walk(other)) if at == number))
            yield Mutant(what, ast.fix_missing_locations(other))


def changes(node: ast.AST, outside: re.Pattern[str]) -> Iterator[tuple[str, Change]]:
    """What can be changed in a node, in words, and how."""
    for field in ("body", "orelse", "finalbody"):
        statements = getattr(node, field, None)
        if isinstance(statements, list) and not isinstance(node, ast.Module | ast.ClassDef):
            yield from changed_statements(field, statements, outside)
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


def changed_statements(
    field: str, statements: list[ast.stmt], outside: re.Pattern[str]
) -> Iterator[tuple[str, Change]]:
    """Statements that are left out or exchanged."""
    acts = [not isinstance(s, NO_ACTS) and not is_text(s) and not only_records(s) for s in statements]
    seen = [act and bool(outside.search(ast.unparse(s))) for act, s in zip(acts, statements, strict=True)]
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
    """Whether a statement is a text, such as a docstring."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def only_records(statement: ast.stmt) -> bool:
    """What is recorded of a recovery changes nothing; tests of its spans look at it."""
    inner = statement.body if isinstance(statement, ast.If) else [statement]
    return all(ast.unparse(one).startswith(("self._recorder.", "began = self._recorder.")) for one in inner)


def negate(node: Any) -> None:
    """A condition is turned around."""
    node.test = ast.UnaryOp(ast.Not(), node.test)


def drop_operand(place: int) -> Change:
    """Without one operand. Python wants two of them, so a last one is there twice."""

    def change(node: Any) -> None:
        node.values.pop(place)
        if len(node.values) == 1:
            node.values.append(copy.deepcopy(node.values[0]))

    return change


def flip(node: Any) -> None:
    """True is False."""
    node.value = not node.value


def one_more(node: Any) -> None:
    """A number is one more."""
    node.value += 1


def compare_otherwise(node: Any) -> None:
    """A comparison is another one."""
    node.ops = [OTHERS[type(node.ops[0])]()]


def leave_out(field: str, place: int) -> Change:
    """A statement is not there."""

    def change(node: Any) -> None:
        getattr(node, field)[place] = ast.Pass()

    return change


def exchange(field: str, place: int) -> Change:
    """A statement comes after the next one."""

    def change(node: Any) -> None:
        statements = getattr(node, field)
        statements[place], statements[place + 1] = statements[place + 1], statements[place]

    return change
