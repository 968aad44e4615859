"""Discovery of a program before it runs: its own modules, and the environment variables that it names.

Only text is read, and nothing is imported. So a module that is imported in the middle of a run is kept, too.
What is imported by a computed name is kept when the first worker loads it (`program/import_hook.py`).
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

from swift_ft.program.import_hook import KeptLoader, import_kept
from swift_ft.program.kept_sources import KeptSource, KeptSources, kept_sources, start_keeping
from swift_ft.program.own_code import is_own_file

_MOST_BYTES = 4 << 20
"""Some 100,000 lines, which take seconds to read. The rest of a larger program is kept once it is loaded."""
_MAIN = "__main__"

_read_by_name: set[str] = set()  # variables of the environment; written once, before anything is forked


@dataclass(frozen=True, slots=True)
class _File:
    """A source file: where it is, its full name, and in which folders its package's modules are."""

    path: str
    name: str
    package: tuple[str, ...]


def keep_program(target: str, search: Sequence[str], *, as_module: bool) -> KeptSources:
    """Keep what a program is made of, and let imports come from there. Once, before anything is forked.

    A file that cannot be read or compiled is left out: Python says why when it runs.

    Args:
        target: the script's path, or a module's name.
        search: where its imports are looked for, in this order.
        as_module: what ``-m`` says.
    """
    sources = start_keeping()
    _read_by_name.clear()
    import_kept(sources)
    todo = list(_main_module(target, search)) if as_module else [_File(target, _MAIN, ())]
    seen: set[str] = set()
    left = _MOST_BYTES
    while todo and left > 0:
        file = todo.pop()
        path = os.path.abspath(file.path)  # noqa: PTH100  (a link is not followed)
        if path in seen:
            continue
        seen.add(path)
        try:
            source = KeptLoader(file.name, file.path, sources).get_data(file.path)
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        _read_by_name.update(_variables_in(tree))
        left -= len(source)
        todo += _imported_by(tree, file, search)
    return sources


def main_source(target: str, *, as_module: bool) -> KeptSource | None:
    """The kept source of a program's main file; None if it is not kept."""
    sources = kept_sources()
    if sources is None:
        return None
    if not as_module:
        return sources.get(os.path.abspath(target))  # noqa: PTH100  (a link is not followed)
    by_name = {kept.module: kept for kept in sources.all()}
    return by_name.get(f"{target}.{_MAIN}") or by_name.get(target)


def _main_module(name: str, search: Sequence[str]) -> Iterator[_File]:
    found = list(_find(name.split("."), search))
    yield from found
    if found and found[-1].name == name and found[-1].package:  # a package: its __main__ runs
        yield from _find([_MAIN], found[-1].package, name)


def _find(parts: Sequence[str], folders: Sequence[str], prefix: str = "") -> Iterator[_File]:
    """The own files that are loaded for a dotted name: its packages, and the module itself."""
    name = prefix
    for part in parts:
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(part, list(folders))
        if spec is None:
            return
        inside = tuple(spec.submodule_search_locations or ())
        if spec.origin is not None:
            own = is_own_file(os.path.abspath(spec.origin))  # noqa: PTH100  (a link is not followed)
            if not own or not isinstance(spec.loader, SourceFileLoader):
                return
            yield _File(spec.origin, name, inside)
        if not inside:
            return
        folders = inside


def _imported_by(tree: ast.AST, file: _File, search: Sequence[str]) -> Iterator[_File]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _find(alias.name.split("."), search)
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            folders, prefix = (search, "") if not node.level else _relative_to(file, node.level)
            for alias in node.names:  # each may be a module of the package
                yield from _find([*parts, alias.name], folders, prefix)


def _relative_to(file: _File, level: int) -> tuple[Sequence[str], str]:
    """The folder that a relative import searches, and the package name that its names begin with."""
    folder, name = Path(file.path).absolute().parent, file.name
    up = level - 1
    if not file.package:  # a module: its package is one name shorter
        name = name.rpartition(".")[0]
    for _ in range(up):
        folder, name = folder.parent, name.rpartition(".")[0]
    return [str(folder)], name


# ---------------------------------------------------------------------------------------- the environment


def environment_read_by() -> list[str]:
    """The variables that the program's own sources read by name, sorted.

    Of the sources that were found before it ran. What is loaded later by a computed name is kept sooner on
    one machine than on another, and would let them differ.
    """
    return sorted(_read_by_name)


def _variables_in(tree: ast.AST) -> Iterator[str]:
    """``os.environ["A"]``, ``os.environ.get("A")``, ``os.getenv("A")``, ``"A" in os.environ``."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=of, slice=ast.Constant(value=str(name))) if _is_environ(of):
                yield name
            case ast.Call(
                func=ast.Attribute(value=of, attr=method), args=[ast.Constant(value=str(name)), *_]
            ):
                if _is_environ(of) or method == "getenv":
                    yield name
            case ast.Call(func=ast.Name(id="getenv"), args=[ast.Constant(value=str(name)), *_]):
                yield name
            case ast.Compare(left=ast.Constant(value=str(name)), comparators=[of]) if _is_environ(of):
                yield name


def _is_environ(node: ast.AST) -> bool:
    match node:
        case ast.Name(id="environ") | ast.Attribute(attr="environ"):
            return True
    return False
