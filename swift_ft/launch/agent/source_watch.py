"""Says at once that a program's files were edited, and not only when a machine is lost."""

from __future__ import annotations

import logging
import os
import time

from swift_ft.program.kept_sources import KeptSources, stat_of
from swift_ft.units import some

_logger = logging.getLogger(__name__)

_PAUSE_S = 2.0
_MOST_NAMED = 3


class SourceWatch:
    """Looks at the files of a program now and then, and says once of each that it has changed.

    Args:
        sources: what is kept of them.
        unkept: a main file that is not kept, as an archive is not; None if there is none.
    """

    def __init__(self, sources: KeptSources, unkept: str | None = None) -> None:
        self._sources = sources
        self._unkept, self._stat = unkept, _stat_of(unkept) if unkept is not None else None
        self._said: set[str] = set()
        self._due_at = 0.0
        self._generation = 0

    def look(self, generation: int) -> None:
        """Look, if it is time to: every few seconds, and when a generation begins."""
        if time.monotonic() < self._due_at and generation == self._generation:
            return
        self._due_at, self._generation = time.monotonic() + _PAUSE_S, generation
        changed = [
            kept.path for kept in self._sources.all() if kept.path not in self._said and kept.has_changed()
        ]
        self._said.update(changed)
        if changed:
            _logger.warning(
                "%s changed since this run began. It goes on with what it began with, also in workers that "
                "this launcher starts later. A machine that is started anew with the changed files will be "
                "refused. To use them, end the run and continue with --resume.",
                _named(changed),
                extra={"event": "source_changed", "paths": changed},
            )
        self._look_at_unkept()

    def _look_at_unkept(self) -> None:
        if self._unkept is None or self._unkept in self._said or _stat_of(self._unkept) == self._stat:
            return
        self._said.add(self._unkept)
        _logger.warning(
            "%s has changed since this run began, and could not be kept, since it is no plain script: until "
            "it is put back, no machine here can replace a lost one.",
            self._unkept,
            extra={"event": "source_lost", "path": self._unkept},
        )


def _stat_of(path: str) -> object:
    try:
        return stat_of(path)
    except OSError:
        return None


def _named(paths: list[str]) -> str:
    return f"{some(paths, _MOST_NAMED, word=os.path.relpath)} {'has' if len(paths) == 1 else 'have'}"
