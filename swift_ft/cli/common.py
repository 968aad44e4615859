"""Code that the tools share: errors of arguments in one line, units and limits in arguments, plots."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from swift_ft.errors import UsageError

T = TypeVar("T")


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage."""
        raise UsageError(message)


def unit(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wraps a parser of units so that argparse shows its message."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def at_most(most: int, least: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers: what is larger would take hours, or all memory.

    Args:
        most: the largest number.
        least: the smallest one; None where the tool itself says what is too small.
    """

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if value > most:
            raise argparse.ArgumentTypeError(f"{value} is too large to plan for: {most} at most")
        if least is not None and value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small: {least} at least")
        return value

    return parse


def pyplot() -> Any:
    """Matplotlib's pyplot, drawing to files only.

    Raises:
        UsageError: if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'swift-ft[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save_plot(figure: Any, path: Path) -> None:
    """Writes a figure; its format follows the name.

    Raises:
        UsageError: if it cannot be written.
    """
    try:
        figure.savefig(path, bbox_inches="tight", dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"the plot {path} cannot be written: {error}") from None
