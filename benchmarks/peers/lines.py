"""How many lines of a training script a system asks to be changed."""

from __future__ import annotations

import ast
from difflib import SequenceMatcher


def changed_lines(plain: str, other: str) -> int:
    """Lines that differ between two scripts: added, removed, or written otherwise.

    A passage that is written otherwise counts as its longer version. Blank lines, comments and docstrings do
    not count, nor does how a statement is spread over lines: both are formatted anew first.
    """
    before, after = _lines(plain), _lines(other)
    blocks = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(end - start, there - here) for tag, start, end, here, there in blocks if tag != "equal")


def _lines(source: str) -> list[str]:
    """Statements and heads of blocks, one a line."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return [line for line in ast.unparse(tree).splitlines() if line.strip()]
