"""Variables of the script that its signal handlers set, as a flag to end at: read from the handlers' code.

These are global variables and those of the function around a handler, as far as it assigns them, and the
attributes that it assigns of ``self`` or of what a variable holds.
"""

from __future__ import annotations

import dis
import functools
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from swift_ft.program.own_code import is_of_program


@dataclass(frozen=True)
class SetByHandler:
    """The variables that one handler sets.

    Attributes:
        code: the handler's.
        of_file: the variables of its file, and the names of those among them.
        cells: of variables that it shares with the function that it was made in, by name.
        objects: those that it can get at, of which it may set the attributes.
        attributes: the names of these.
    """

    code: CodeType
    of_file: tuple[dict[str, Any], frozenset[str]]
    cells: dict[str, CellType]
    objects: tuple[Any, ...]
    attributes: frozenset[str]

    def sets(self, owner: Any, name: str) -> bool:
        """Whether it sets a variable of an object, or of a file; a file may be given by its variables."""
        variables, names = self.of_file
        of_owner = owner if isinstance(owner, dict) else getattr(owner, "__dict__", None)
        if of_owner is variables:
            return name in names
        return name in self.attributes and any(owner is one for one in self.objects)

    def sets_local(self, function: CodeType, name: str) -> bool:
        """Whether it sets a local variable of a function, in which it was made."""
        return name in self.cells and self.code in function.co_consts


def set_by_handlers() -> list[SetByHandler]:
    """Of each handler of the script's own that is in place now."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return [found for handler in handlers if (found := _set_by(handler)) is not None]


def _set_by(handler: Any) -> SetByHandler | None:
    own: list[Any] = []
    while not isinstance(handler, FunctionType):
        if isinstance(handler, functools.partial):
            own += handler.args
            handler = handler.func
        elif isinstance(handler, MethodType):
            own.append(handler.__self__)
            handler = handler.__func__
        elif isinstance(call := vars(type(handler)).get("__call__"), FunctionType):
            own.append(handler)
            handler = call
        else:
            return None  # none, or one of Python's
    code = handler.__code__
    if not is_of_program(code.co_filename):
        return None
    cells = dict(zip(code.co_freevars, handler.__closure__ or (), strict=True))
    found: dict[str, set[str]] = {}
    for one in dis.get_instructions(code):
        found.setdefault(one.opname, set()).add(str(one.argval))
    held = [handler.__globals__[name] for name in code.co_names if name in handler.__globals__]
    return SetByHandler(
        code,
        (handler.__globals__, frozenset(found.get("STORE_GLOBAL", ()))),
        {name: cell for name, cell in cells.items() if name in found.get("STORE_DEREF", ())},
        (*own, *held, *_contents(cells)),
        frozenset(found.get("STORE_ATTR", ())),
    )


def _contents(cells: dict[str, CellType]) -> Iterator[Any]:
    for cell in cells.values():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty still
            continue
