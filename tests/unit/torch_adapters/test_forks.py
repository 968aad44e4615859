"""Process groups in forked children."""

from __future__ import annotations

import subprocess
import sys

# A group is in a cycle that nothing refers to when the process is forked, and the child collects garbage.
FORKS = """
import gc, os, sys
import torch.distributed as dist
from swift_ft.torch_adapters.lasting_group import LastingGroup

gc.disable()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = LastingGroup(dist.new_group([0]))
cycle = [group.end()]
dist.destroy_process_group(cycle[0])
cycle.append(cycle)
del cycle
if (pid := os.fork()) == 0:
    gc.collect()
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_child_frees_no_group_of_its_parent() -> None:
    """It has none of the threads that the group waits for."""
    ended = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, timeout=120, check=False)
    assert ended.returncode == 7, ended.stderr.decode()
