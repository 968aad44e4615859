"""A machine's identity: what a node, a task or a host is called, and nothing where that would mislead."""

from __future__ import annotations

import pytest

from swift_ft.host.identity import machine_identity


@pytest.mark.parametrize(
    ("environ", "host", "identity"),
    [
        ({}, "node17.cluster", "node17.cluster/2"),
        ({"SLURMD_NODENAME": "node17"}, "node17.cluster", "node17/2"),
        ({"NODE_NAME": "gpu-4", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "train-0", "gpu-4/2"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "train-0", ""),  # a pod's name is not its node's
        ({"NODE_NAME": ""}, "node17", "node17/2"),
        ({}, "localhost.localdomain", ""),
        ({}, "", ""),
    ],
)
def test_the_name_of_the_hardware(environ: dict[str, str], host: str, identity: str) -> None:
    assert machine_identity(2, environ, lambda: host) == identity


def test_machines_of_one_host_differ() -> None:
    assert len({machine_identity(index, {}, lambda: "node17") for index in range(4)}) == 4
