"""Tells the user's own code from Python's, a library's and this package's."""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

_PACKAGE = __name__.partition(".")[0]
_RUNTIME = f"{Path(__file__).parents[1]}/"
_NOT_PROGRAMS = (_RUNTIME, f"{Path(torch.__file__).parent}/")
_LIBRARIES = _NOT_PROGRAMS + tuple(
    f"{path}/"
    for path in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
        site.getusersitepackages(),
    )
)
_INSTALLED = ("/site-packages/", "/dist-packages/")
"""Parts of a path: a library may also be in another environment, which ``PYTHONPATH`` names."""


@cache
def is_own_file(filename: str) -> bool:
    """Whether a source file is the user's own. Asked for each function on the stack in each step."""
    installed = any(part in filename for part in _INSTALLED)
    return not installed and not filename.startswith(("<", *_LIBRARIES))


def is_of_runtime(filename: str) -> bool:
    """Whether a source file is of this package."""
    return filename.startswith(_RUNTIME)


def is_class_of_runtime(kind: type) -> bool:
    """Whether a class is one of this package's."""
    return kind.__module__.partition(".")[0] == _PACKAGE


def is_of_program(filename: str) -> bool:
    """Whether a source file is the user's own, or of the package that was started by ``-m``.

    That may be installed, as in an image of a container: it is the program all the same.
    """
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    started = "" if spec is None or file is None else _package_around(spec.name, file)
    return is_own_file(filename) or (bool(started) and filename.startswith(started))


@cache
def _package_around(name: str, file: str) -> str:
    """The folder of the outermost package of a module; a module of its own is its file.

    Empty for Python's, torch's and this package's.
    """
    outermost = Path(file).parents[name.count(".") - 1] if "." in name else Path(file)
    if f"{outermost}/".startswith(_NOT_PROGRAMS):
        return ""
    return f"{outermost}/" if "." in name else file


@cache
def is_own_module(name: str) -> bool:
    """Whether a module, by its name, was read from a file of the user's program."""
    file: str | None = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and is_of_program(file)


def is_own_class(kind: type) -> bool:
    """Whether a class was defined in a file of the program, or made of one that was (``fully_shard``)."""
    return _any_own(kind.__mro__)


@cache
def _any_own(classes: tuple[type, ...]) -> bool:
    return any(is_own_module(one.__module__) for one in classes)


class CodeLine(NamedTuple):
    """A line of a stack.

    Attributes:
        file: path of its source.
        number: from 1 on.
        function: that it is in.
        module: the name of the one with that function.
    """

    file: str
    number: int
    function: str
    module: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number} ({self.function})"


def place_in(stack: Iterable[CodeLine]) -> str:
    """The innermost line of the user's own code, and the function of a library that it called.

    Args:
        stack: from the innermost line outwards.
    """
    called = ""
    for line in stack:
        if is_own_file(line.file):
            return f"at {line}" + (f", in {called}" if called else "")
        called = called or f"{line.module}.{line.function}"
    return f"in {called}"
