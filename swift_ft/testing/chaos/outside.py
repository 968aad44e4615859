"""Files that a script writes where all runs share them: beside itself, and in the folder that they run in."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

_MOST = 50_000
"""Files of one folder that are looked at. A script may be run from where all the data is."""
_NOT_OF_SCRIPTS = frozenset({"__pycache__", ".git"})
_OF_AN_INSTALLATION = "pyvenv.cfg"

Seen = dict[Path, dict[str, tuple[int, int, int]] | None]
"""By folder, what tells of each file whether it has changed; None for a folder of too many."""


def look_at(folders: Collection[Path], but: Path) -> Seen:
    """Note the files in some folders, and below.

    Args:
        folders: of files that all runs share.
        but: a folder of files that each run has for itself, and that are compared.
    """
    real, apart = {folder.resolve() for folder in folders}, but.resolve()
    outermost = [one for one in real if not any(other in one.parents for other in real)]
    return {folder: _files(folder, apart) for folder in sorted(outermost)}


def changed(before: Seen, but: Path) -> frozenset[str]:
    """The files that have changed since, or are new; and the folders of which that cannot be said."""
    found = set()
    for folder, then in before.items():
        now = _files(folder, but.resolve())
        if then is None or now is None:
            found.add(f"{folder} (more than {_MOST} files, not looked at)")
        else:
            found |= {name for name, facts in now.items() if then.get(name) != facts}
    return frozenset(found)


def _files(folder: Path, apart: Path) -> dict[str, tuple[int, int, int]] | None:
    found: dict[str, tuple[int, int, int]] = {}
    for entry in _entries(folder, apart):
        try:
            facts = entry.stat(follow_symlinks=False)
        except OSError:  # it is gone since
            continue
        found[entry.path] = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
        if len(found) > _MOST:
            return None
    return found


def _entries(folder: Path, apart: Path) -> Iterator[os.DirEntry[str]]:
    """The files below a folder, but for those of Python, of git and of installations."""
    try:
        with os.scandir(folder) as entries:
            inside = list(entries)
    except OSError:  # not ours to read
        return
    if any(entry.name == _OF_AN_INSTALLATION for entry in inside):
        return
    for entry in inside:
        if not entry.is_dir(follow_symlinks=False):
            yield entry
        elif entry.name not in _NOT_OF_SCRIPTS and Path(entry.path) != apart:
            yield from _entries(Path(entry.path), apart)
