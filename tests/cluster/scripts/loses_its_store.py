"""``kills_others.py``, and then one of two replacements dies whose store the other one needs.

Both start in the same generation, the second one. So the one in slot 1 serves the store for
``init_process_group``. It dies, and then worker 2 comes to that call.
"""

import importlib
import os
import socket
from pathlib import Path

import torch.distributed as dist

from swift_ft.config.worker_context import WorkerContext
from tests.support.machines import die
from tests.support.waiting import wait_until

CONTEXT = WorkerContext.from_env()
FOLDER = Path(os.environ["SWIFT_TEST_FOLDER"])
init_process_group = dist.init_process_group


def die_once_the_other_has_started(backend: str) -> None:
    wait_until((FOLDER / "started").exists, "the other replacement has not started")
    die()


def come_late(backend: str) -> None:
    (FOLDER / "started").touch()
    wait_until(is_gone, "the store for init_process_group is still there")
    init_process_group(backend)


def is_gone() -> bool:
    """Whether nobody serves the store any more that this worker needs."""
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 1.0).close()
    except OSError:
        return True
    return False


if CONTEXT.started_in == 2:
    own = {1: die_once_the_other_has_started, 2: come_late}
    dist.init_process_group = own[int(os.environ["RANK"])]  # type: ignore[assignment]
importlib.import_module("kills_others")
