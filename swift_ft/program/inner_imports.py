"""Files that the functions of a file import for themselves, as those do that import each other."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cache, cached_property
from types import CodeType, FunctionType, ModuleType
from typing import Any

_IMPORT = dis.opmap["IMPORT_NAME"]
_CACHE = type(cache(len))
_MOST_WRAPPED = 8


@cache
def imported_within(module: ModuleType) -> frozenset[str]:
    """Names of what a module's functions import, and more: a relative one is tried in each package around.

    Args:
        module: a file. Functions that it gets later are not looked at.
    """
    packages = _packages_around(module.__package__ or "")
    found: set[str] = set()
    for code in _codes_of(module):
        bases: list[str] = []
        for one in dis.get_instructions(code):
            if one.opname == "IMPORT_NAME":
                bases = [one.argval, *(f"{package}.{one.argval}".rstrip(".") for package in packages)]
                found.update(bases)
            elif one.opname == "IMPORT_FROM":
                found.update(f"{base}.{one.argval}" for base in bases)
    return frozenset(found)


def _packages_around(package: str) -> list[str]:
    parts = package.split(".") if package else []
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    """Of its functions, its classes' and those within them, as far as they import anything."""
    todo = [code for value in vars(module).values() for code in _code_in(value, module.__name__)]
    while todo:
        code = todo.pop()
        todo += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        if _IMPORT in code.co_code[::2]:
            yield code


def _code_in(value: Any, file: str) -> Iterator[CodeType]:
    if isinstance(value, type) and value.__module__ == file:
        for one in vars(value).values():
            if isinstance(one, property):
                yield from (*_code_of(one.fget), *_code_of(one.fset))
            elif isinstance(one, cached_property):
                yield from _code_of(one.func)
            else:
                yield from _code_of(one)
    elif isinstance(value, FunctionType) or type(value) is _CACHE:
        yield from (code for code in _code_of(value) if value.__module__ == file)


def _code_of(function: Any) -> Iterator[CodeType]:
    """Of a function, and of what it wraps, as a decorator and ``functools.cache`` do."""
    for _ in range(_MOST_WRAPPED):
        if isinstance(function, staticmethod | classmethod):
            function = function.__func__
        if isinstance(function, FunctionType):
            yield function.__code__
        elif type(function) is not _CACHE:
            return
        function = vars(function).get("__wrapped__")
