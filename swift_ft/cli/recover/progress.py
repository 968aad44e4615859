"""Progress bars for long work of swift-recover, and durations in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from swift_ft.offline.estimate import Estimate
from swift_ft.units import format_seconds


def in_all(estimate: Estimate) -> str:
    """The length of a recovery in words."""
    return f"{'about' if estimate.complete else 'at least'} {format_seconds(estimate.seconds)}"


@contextmanager
def progress(what: str, total_bytes: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show how far a long piece of work is, on stderr, if that is a terminal.

    Args:
        what: is done.
        total_bytes: of the work; None if it is not known.

    Yields:
        A function that notes so many more bytes as done. Any thread may call it.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda count: bar.advance(task, count)


@contextmanager
def file_progress(what: str) -> Iterator[Callable[[int], None]]:
    """As :func:`progress`, for many small files whose number is not known before.

    Yields:
        A function that notes so many more files as read. Any thread may call it.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}: {task.completed} files"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda count: bar.advance(task, count)


@contextmanager
def step_progress(what: str) -> Iterator[Callable[[int, int, int], None]]:
    """As :func:`progress`, for workers that do a number of steps side by side.

    Args:
        what: they do.

    Yields:
        A function that takes a rank, and how many of how many steps it has done.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    tasks: dict[int, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def show(rank: int, done: int, total: int) -> None:
            if rank not in tasks:
                tasks[rank] = bar.add_task(f"{what} worker {rank}", total=total)
            bar.update(tasks[rank], completed=done)

        yield show
