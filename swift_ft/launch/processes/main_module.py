"""Runs a script or a module as ``python`` does: it is the module ``__main__``, and stays it to the end.

What outlives the last line of a script needs that: a thread that saves an object of one of its classes looks
for this class in ``__main__``.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
import traceback
import zipimport
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType, TracebackType

from swift_ft.program.import_hook import KeptLoader
from swift_ft.program.kept_sources import kept_sources

_replaced: list[ModuleType] = []
"""The modules that were ``__main__`` before: a module whose last reference goes loses its names."""


def search_path(target: str, *, as_module: bool) -> list[str]:
    """The folders in which a program's imports will be looked for, by the rules of :func:`run_main`."""
    first = os.getcwd() if as_module else os.path.dirname(os.path.abspath(target))  # noqa: PTH100, PTH109, PTH120  (as python does)
    return [first, *sys.path]


def run_main(target: str, args: Sequence[str], *, as_module: bool = False) -> None:
    """Run a program to the end of its last line.

    Args:
        target: the script's path, or a module's name.
        args: its arguments.
        as_module: what ``-m`` says.

    Raises:
        BaseException: what the program raises.
    """
    sys.argv = [target, *args]
    main = ModuleType("__main__")
    if as_module:
        sys.path[:] = search_path(target, as_module=True)
        code = _of_spec(main, _find(target))
        sys.argv[0] = str(main.__file__)
    elif isinstance(importer := pkgutil.get_importer(target), zipimport.zipimporter):
        sys.path.insert(0, target)
        spec = importer.find_spec("__main__")
        if spec is None:
            raise ImportError(f"can't find '__main__' module in {target!r}")
        code = _of_spec(main, spec)
    else:
        sys.path[:] = search_path(target, as_module=False)
        code = _of_file(main, target)
    _replaced.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _find(name: str) -> ModuleSpec:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:  # a package
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"No module named {name}")
    return spec


def _of_spec(main: ModuleType, spec: ModuleSpec) -> CodeType:
    main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    main.__file__ = spec.origin
    main.__dict__["__cached__"] = spec.cached
    get_code = getattr(spec.loader, "get_code", None)
    code: CodeType | None = get_code(spec.name) if get_code is not None else None
    if code is None:
        raise ImportError(f"No code object available for {spec.name}")
    return code


def _of_file(main: ModuleType, path: str) -> CodeType:
    main.__file__ = path
    main.__dict__["__cached__"] = None
    if path.endswith(".pyc"):
        main.__loader__ = SourcelessFileLoader("__main__", path)
        code = main.__loader__.get_code("__main__")
        assert isinstance(code, CodeType)  # else it has raised
        return code
    if (sources := kept_sources()) is not None:
        kept = main.__loader__ = KeptLoader("__main__", path, sources)
        return kept.get_code("__main__")
    loader = SourceFileLoader("__main__", path)
    main.__loader__ = loader
    return compile(loader.get_data(path), path, "exec", dont_inherit=True)


def show_error(error: BaseException) -> None:
    """Show an error of a program as ``python`` does: by ``sys.excepthook``, with the program's own frames."""
    trace = error.__traceback__
    while trace is not None and _is_own(trace):
        trace = trace.tb_next
    if sys.excepthook is sys.__excepthook__:  # it would show the lines of a file that was edited since
        traceback.print_exception(type(error), error.with_traceback(trace), trace)
        return
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except Exception:  # the script's own hook
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exc()
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)


def _is_own(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file.startswith("<frozen ") or os.path.dirname(file) == os.path.dirname(__file__)  # noqa: PTH120  (code objects have strings)
