"""``kills_others.py``, and then one of two replacements dies whose store the other one needs.

Both start in the same generation, the second one. So the one in slot 1 serves the store for
``init_process_group``. It dies before worker 2 comes to that call.
"""

import importlib
import os
import signal
import time
from pathlib import Path

import torch.distributed as dist

from swift_ft.worker_context import WorkerContext

CONTEXT = WorkerContext.from_env()
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
init_process_group = dist.init_process_group


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    raise TimeoutError(f"{path} did not appear")


def die_once_the_other_has_started(backend: str) -> None:
    wait_for(FOLDER / "started")
    (FOLDER / "dies").touch()
    os.kill(CONTEXT.agent_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def come_late(backend: str) -> None:
    (FOLDER / "started").touch()
    wait_for(FOLDER / "dies")
    time.sleep(0.5)
    init_process_group(backend)


if CONTEXT.started_in == 2:
    own = {1: die_once_the_other_has_started, 2: come_late}
    dist.init_process_group = own[int(os.environ["RANK"])]  # type: ignore[assignment]
importlib.import_module("kills_others")
