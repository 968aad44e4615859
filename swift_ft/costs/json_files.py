"""Reading and writing files of people and tools: what is wrong with one is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swift_ft.errors import UsageError


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        UsageError: if it cannot be read, or is not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file") from None


def write_text(path: Path, text: str) -> None:
    """Write a file. It appears whole; a pipe or a terminal is written as it is.

    Raises:
        UsageError: if it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        target = path.resolve()
        draft = target.with_name(f"{target.name}.tmp")
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


def load_object(text: str, source: str) -> dict[str, Any]:
    """The JSON object in a text.

    Args:
        text: what was read.
        source: where from; errors begin with it.

    Raises:
        UsageError: if it is not valid JSON, or no object.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{source}: expected a JSON object at the top")
    return data


def whole(value: Any) -> Any:
    """A whole number written as a float (``5e8``) as an int; any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
