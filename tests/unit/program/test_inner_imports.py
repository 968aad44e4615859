"""What the functions of a file import for themselves."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

from swift_ft.program.inner_imports import imported_within


def at_once() -> None:
    import json.decoder  # noqa: F401


def some_of_it() -> None:
    from xml import dom  # noqa: F401


@functools.cache
def remembered() -> None:
    import wave  # noqa: F401


def decorated(function: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(function)
    def outer() -> Any:
        return function()

    return outer


@decorated
def behind_a_decorator() -> None:
    import zipimport  # noqa: F401


class Holder:
    """Has functions of all kinds."""

    @property
    def one(self) -> None:
        """Imports."""
        import sched  # noqa: F401

    @functools.cached_property
    def two(self) -> None:
        """Imports."""
        import plistlib  # noqa: F401

    @staticmethod
    def three() -> None:
        """Imports in a function of its own."""

        def inner() -> None:
            import quopri  # noqa: F401

        inner()


@pytest.mark.parametrize(
    "name", ["json.decoder", "xml.dom", "wave", "zipimport", "sched", "plistlib", "quopri"]
)
def test_each_kind_of_function(name: str) -> None:
    assert name in imported_within(sys.modules[__name__])


def test_what_a_file_imports_by_itself_is_among_its_variables() -> None:
    assert "pytest" not in imported_within(sys.modules[__name__])
