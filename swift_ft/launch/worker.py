"""What runs inside a worker process: the user's script, under the eyes of the agent."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import runpy
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from swift_ft.config import EXIT_USAGE
from swift_ft.data_parallel import join_without_sync
from swift_ft.errors import GaveUpError, UsageError
from swift_ft.launch.control import WorkerLine
from swift_ft.recovery.failures import is_broken_communication

__all__ = ["WorkerJob", "run_worker", "worker_line"]

_FOLLOWS_S = 1.0
"""A broken connection may follow from what another worker fails of: that one tells first, and is named."""


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What a worker runs.

    Attributes:
        env: variables that differ from the agent's own environment.
        target: the script's path, or a module's name.
        args: the script's arguments.
        kind: ``script``, ``module`` (``-m``) or ``program`` (``--no-python``).
        beat_s: seconds between heartbeats to the agent.
        joins: the other workers of the job are in the middle of their work.
    """

    env: dict[str, str]
    target: str
    args: tuple[str, ...]
    kind: str = "script"
    beat_s: float = 0.5
    joins: bool = False

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> WorkerJob:
        """The inverse of :meth:`to_dict`."""
        return cls(**{**data, "args": tuple(data["args"])})


_line: WorkerLine | None = None


def worker_line() -> WorkerLine | None:
    """The line of this process to its agent; None outside of a worker."""
    return _line


def run_worker(job: WorkerJob, line: socket.socket) -> NoReturn:
    """Run the script and end the process with its exit code."""
    global _line
    os.environ.update(job.env)
    if job.kind == "program":
        os.set_inheritable(line.fileno(), True)  # its closing still tells the agent of the program's end
        os.execvp(job.target, [job.target, *job.args])
    if job.joins:  # whatever the script forms before its session must wait for nobody
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        join_without_sync()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # torch was imported before, in the standby
    # The agent's death is the machine's death: nothing is cleaned up, nothing more is sent.
    _line = WorkerLine(line, beat_s=job.beat_s, on_agent_lost=lambda: os._exit(1))
    code = _run_script(job, _line)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # daemon threads may be blocked in the store: no interpreter shutdown


def _run_script(job: WorkerJob, line: WorkerLine) -> int:
    sys.argv = [job.target, *job.args]
    try:
        if job.kind == "module":
            sys.path.insert(0, os.getcwd())  # noqa: PTH109  (what `python -m` does)
            runpy.run_module(job.target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(job.target)))  # noqa: PTH100, PTH120  (as python does)
            runpy.run_path(job.target, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code:
            detail = f": {error.code}" if isinstance(error.code, str) else ""
            line.tell(failed=f"the script exited with code {code}{detail}", exit_code=code)
        return code
    except UsageError as error:
        print(f"swift_ft: {error}", file=sys.stderr)
        line.tell(failed=str(error), exit_code=EXIT_USAGE, usage=True)
        return EXIT_USAGE
    except GaveUpError as error:
        print(f"swift_ft: {error}", file=sys.stderr)
        line.tell(failed=str(error), exit_code=1)
        return 1
    except BaseException as error:
        traceback.print_exc()
        if is_broken_communication(error):
            time.sleep(_FOLLOWS_S)
        line.tell(failed=f"{type(error).__name__}: {error}"[:2000], exit_code=1)
        return 1
    _run_exit_handlers()
    return 0


def _run_exit_handlers() -> None:
    """What the interpreter would do at its end, short of joining threads that wait for the store."""
    import atexit

    atexit._run_exitfuncs()
