"""The version of swift_ft that is installed here. Nothing is imported that takes time."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Such as ``0.1.0``; ``not installed`` where it runs from a checkout."""
    try:
        return version("swift-ft")
    except PackageNotFoundError:
        return "not installed"
