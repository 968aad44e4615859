"""Runs a command beside this process, and leaves none of its processes behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
_GRACE_S = 15.0

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reports the connections that a run's end closes


class CommandError(Exception):
    """A command failed; the message holds the end of its output."""


@contextlib.contextmanager
def started(command: Sequence[str], output: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command while the block runs. When the block ends, no process of the command is left.

    SIGTERM ends the block, too: from the main thread, and unless the program handles the signal itself.

    Args:
        command: what to run.
        output: file for what it prints.
        env: variables to add to our own.
    """
    with _sigterm_raises(), output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": _import_path(), **env},
            start_new_session=True,  # a terminal's Ctrl-C reaches us alone, and we end it in order
        )
        try:
            yield process
        finally:
            _end(process)


def finished(command: Sequence[str], output: Path, *, within_s: float | None = None, **env: str) -> None:
    """Runs a command to its end.

    Args:
        command: what to run.
        output: file for what it prints.
        within_s: how long it may take; None for no limit.
        env: variables to add to our own.

    Raises:
        CommandError: if its exit code is not 0, or it takes longer.
    """
    with started(command, output, **env) as process:
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"{process.args!r} has not ended within {within_s} s") from error
    check(process, output)


def check(process: subprocess.Popen[bytes], output: Path) -> None:
    """Raises a :class:`CommandError` if a command that has ended did not end well."""
    if process.returncode:
        tail = "\n".join(output.read_text(errors="replace").splitlines()[-15:])
        raise CommandError(f"exit code {process.returncode} of {process.args!r}\n{tail}")


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """In the block SIGTERM raises :class:`SystemExit`: by default it would end us alone, at once."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks a command to end; kills it and all that it started if it does not."""
    if process.poll() is not None:
        return
    offspring = descendants(process.pid)
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):
        process.kill()
        process.wait()
    for pid in offspring:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """All processes below one, parents first, from ``/proc``; none on systems without it."""
    found = []
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def swift_run(*args: str) -> list[str]:
    """The command ``swift-run --standalone`` with further arguments."""
    return [sys.executable, "-m", "swift_ft.cli.run", "--standalone", *args]


def torchrun(*args: str) -> list[str]:
    """The command ``torchrun --standalone`` with further arguments."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *args]


def _import_path() -> str:
    """Our own PYTHONPATH behind the project's root and the examples: benchmarks' scripts import both."""
    return os.pathsep.join([str(ROOT), str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
