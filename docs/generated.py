"""The command line of the scripts that write documents from the code: write them, or check them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def write_or_check(module: str, description: str | None, documents: Callable[[], Mapping[Path, str]]) -> int:
    """Write what is old; with ``--check``, only name it.

    Args:
        module: whose command this is, ``docs.support``.
        description: what its ``--help`` says.
        documents: what each file has to be.

    Returns:
        The exit code: 1 if a file that was only checked is old.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is old")
    check = parser.parse_args().check
    new = documents()
    old = [path for path, text in new.items() if not path.exists() or path.read_text() != text]
    for path in old:
        if not check:
            path.write_text(new[path])
        print(f"{path.relative_to(_ROOT)} {f'is old: run python -m {module}' if check else 'written'}")
    return 1 if check and old else 0
