"""The Trainer's own checkpoints: after a loss, the repeated step gives them the names that it gave before.

An interrupted step may have written some already. ModelCheckpoint would see the file and call the next one
``...-v1.ckpt``; and it may have removed the one that was the best until then. So what exists is what the
state says, with what was there when fit() began, and a file is removed once the step that removed it is
complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

from swift_ft.integrations.lightning.host import part

_ModelCheckpoint = part("callbacks").ModelCheckpoint

_MOST = 400
"""Names of files that were there at the beginning. Of more, a repeated step may count versions up."""


class SavedFiles:
    """See the module.

    Args:
        trainer: whose checkpoints these are.
        remove: removes one, on worker 0.

    Attributes:
        there: what was there when fit() began; None if that is too much to be remembered.
    """

    def __init__(self, trainer: Any, remove: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._remove = remove
        self._saved: list[str] = []
        self._removed: list[str] = []
        self.there: list[str] | None = None

    def found(self) -> list[str] | None:
        """The files that this worker finds there, as fit() begins."""
        names: list[str] = []
        for callback in self._trainer.checkpoint_callbacks:
            if (
                isinstance(callback, _ModelCheckpoint)
                and callback.dirpath
                and callback._fs.exists(callback.dirpath)
            ):
                names += [PurePath(path).name for path in callback._fs.ls(callback.dirpath, detail=False)]
        return names if len(names) <= _MOST else None

    def begin(self) -> None:
        """The loop begins."""
        for callback in self._trainer.checkpoint_callbacks:
            if isinstance(callback, _ModelCheckpoint):
                callback.file_exists = partial(self._exists, callback.file_exists)

    def save(self, path: Any) -> None:
        """A checkpoint is saved there in this step."""
        if (name := os.fspath(path)) not in self._saved:
            self._saved.append(name)

    def remove(self, path: Any) -> None:
        """A checkpoint is to be removed, once this step is complete."""
        self._removed.append(os.fspath(path))

    def step_begins(self) -> None:
        """Remove what the step before has removed: it is complete."""
        for path in self._removed:
            self._remove(path)
        self._saved = [path for path in self._saved if path not in self._removed]
        self._removed = []

    def place(self) -> dict[str, list[str]]:
        """The files that are saved, and those to be removed."""
        return {"saved": [*self._saved], "removed": [*self._removed]}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._saved, self._removed = [*place["saved"]], [*place["removed"]]

    def _exists(self, really: Callable[[Any, Any], bool], path: Any, trainer: Any) -> bool:
        if self.there is None:
            return really(path, trainer)
        known = os.fspath(path) in self._saved or PurePath(path).name in self.there
        return bool(trainer.strategy.broadcast(known))
