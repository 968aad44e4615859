"""Imports of a user's own modules: each comes from what is kept, on all workers of a launcher alike.

Tracebacks and ``inspect.getsource()``, which compilers of torch and Triton read, show what is kept, too.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from types import CodeType, ModuleType

from swift_ft.program.kept_sources import KeptSource, KeptSources
from swift_ft.program.own_code import is_own_file


class KeptLoader(SourceFileLoader):
    """Loads a module from what is kept of its file.

    Args:
        sources: what is kept.
    """

    def __init__(self, name: str, path: str, sources: KeptSources) -> None:
        super().__init__(name, path)
        self._sources = sources

    def _kept(self) -> KeptSource:
        path = os.path.abspath(self.path)  # noqa: PTH100  (a link is not followed)
        return self._sources.keep(path, self.name, lambda source: self.source_to_code(source, self.path))

    def get_data(self, path: str) -> bytes:
        """The kept bytes; for data files beside the module, those of the file."""
        return self._kept().source if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        """The code of the kept source. A ``.pyc`` is not read, for it may be that of an edited file."""
        kept = self._kept()
        _show_lines(self.path, kept)
        return kept.code


def _show_lines(name: str, kept: KeptSource) -> None:
    """Without a time of its last change, an entry is never read again from the file."""
    lines = decode_source(kept.source).splitlines(keepends=True)
    for known_as in {name, kept.path, kept.code.co_filename}:
        linecache.cache[known_as] = (len(kept.source), None, lines, known_as)


class _Finder:
    """Finds what is kept first, also where its file is gone; else what all other finders would find.

    Args:
        sources: what is kept.
    """

    def __init__(self, sources: KeptSources) -> None:
        self._sources = sources
        self._asking = threading.local()  # a finder may ask all others, as this one does

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in sys.builtin_module_names and (found := self._find_kept(name, path)) is not None:
            return found
        if name in vars(self._asking):
            return None
        setattr(self._asking, name, True)
        try:
            return self._find_elsewhere(name, path, target)
        finally:
            delattr(self._asking, name)

    def _find_elsewhere(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if type(spec.loader) is SourceFileLoader and spec.origin and is_own_file(spec.origin):
                    spec.loader = KeptLoader(name, spec.origin, self._sources)
                return spec
        return None

    def _find_kept(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        tail = name.rpartition(".")[2]
        if not self._sources.has_module(tail):
            return None
        for folder in sys.path if path is None else path:
            base = os.path.join(os.path.abspath(folder), tail)  # noqa: PTH100, PTH118  (imports are many)
            for file in (os.path.join(base, "__init__.py"), f"{base}.py"):  # noqa: PTH118
                if self._sources.get(file) is not None:
                    return spec_from_file_location(name, file, loader=KeptLoader(name, file, self._sources))
        return None


def import_kept(sources: KeptSources) -> None:
    """Let imports of this process, and of those that are forked from it, come from what is kept."""
    others = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    sys.meta_path[:] = [_Finder(sources), *others]
