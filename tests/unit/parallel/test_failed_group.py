"""What a group that could not be formed leaves behind."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = """
import os, sys
import torch.distributed as dist
from swift_ft.process_group import GenerationGroup
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
alone = GenerationGroup(store, rank=0, world=2, timeout_s=0.2)
alone._backend = "gloo"
try:
    alone.join(1)
except (RuntimeError, dist.DistError):
    os.environ["FAILED"] = "1"
hook = sys.excepthook
whole = GenerationGroup(store, rank=0, world=1, timeout_s=20)
whole._backend = "gloo"
whole.join(2)
assert sys.excepthook is hook
print(os.environ["FAILED"], dist.group.WORLD.group_name)
"""


def test_the_next_group_has_the_name_that_a_newcomer_expects() -> None:
    """torch numbers groups, and counts those that failed."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["1", "0"], done.stderr[-2000:]
