"""The files of a store that swift_ft itself writes: a script may have others beside them."""

from __future__ import annotations

import re

from swift_ft.storage.store import TEMPORARY_SUFFIX

_OWN = re.compile(
    r"(run\.json|runs/[^/]+/(run|layers)\.json|workers/rank-\d{5}\.json|probe)(\.[0-9a-f]{12}\.tmp)?"
    r"|(checkpoints/\d{8}|log/rank-\d{5}|runs/[^/]+/(journal|workers))/.*"
)
_OWN_FOLDER = re.compile(
    r"workers|checkpoints(/\d{8}(/.*)?)?|log(/rank-\d{5}(/.*)?)?|runs(/[^/]+(/(journal|workers)(/.*)?)?)?"
)


def is_own(path: str) -> bool:
    """Whether swift_ft writes a file, or its draft.

    Args:
        path: of the file, in its store.
    """
    return _OWN.fullmatch(path) is not None


def is_own_folder(path: str) -> bool:
    """Whether swift_ft makes a folder.

    Args:
        path: of the folder, in its store.
    """
    return _OWN_FOLDER.fullmatch(path) is not None


def is_finished(path: str) -> bool:
    """The same, but for drafts: they are still written to, or left by a writer that died.

    Args:
        path: of the file, in its store.
    """
    return is_own(path) and not path.endswith(TEMPORARY_SUFFIX)
