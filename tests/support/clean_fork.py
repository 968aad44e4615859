"""Forks of a process in which torch is imported and nothing has run.

A test process has run other tests: torch built with CUDA refuses a backward pass in a fork of a process that
has made one, since the threads of autograd are not in the fork, and a lock that a thread had when the process
was forked stays taken in the child.
"""

from __future__ import annotations

import multiprocessing

CLEAN_FORK = multiprocessing.get_context("forkserver")
CLEAN_FORK.set_forkserver_preload(
    [
        "torch.distributed.pipelining",
        "swift_ft.runtime.helpers.member",
        "swift_ft.launch.rendezvous.store_service",
    ]
)
