"""The identity of this machine: a name that outlives its launcher, and a restart of the host."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

_NODES = ("NODE_NAME", "SLURMD_NODENAME")
"""Variables with the node's name: of a pod, where its manifest gives it, and of a task of Slurm."""


def machine_identity(
    index: int,
    environ: Mapping[str, str] = os.environ,
    host_name: Callable[[], str] = socket.gethostname,
) -> str:
    """The name of this machine's hardware; empty if nothing tells it.

    Args:
        index: number of this machine among those that one launcher starts on this host.
        environ: the launcher's variables.
        host_name: tells what this host is called.
    """
    node = next((environ[name] for name in _NODES if environ.get(name)), "")
    # A pod has a name of its own: the next pod on its node has another one, or the same is on another node.
    if not node and "KUBERNETES_SERVICE_HOST" not in environ:
        node = host_name()
    return "" if node.partition(".")[0] in ("", "localhost") else f"{node}/{index}"
