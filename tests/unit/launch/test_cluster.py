"""The supervisor of a whole cluster on one host, without the cluster."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from immutables import Map

from swift_ft.launch.cluster import Cluster, _why_none_is_left
from swift_ft.recovery.job_state import State
from swift_ft.recovery.membership import Membership


def without_cluster(**facts: Any) -> Any:
    cluster: Any = Cluster.__new__(Cluster)
    vars(cluster).update(facts)
    return cluster


def test_networks_are_removed_though_the_store_cannot_be_closed() -> None:
    read, write = os.pipe()
    networks = Mock()
    service = SimpleNamespace(close=Mock(side_effect=OSError("no")))
    with pytest.raises(OSError, match="no"):
        without_cluster(_service=service, _lifeline_w=write, _networks=networks).close()
    networks.remove.assert_called_once()
    assert os.read(read, 1) == b""
    os.close(read)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ({}, "all machines ended before the job did"),
        ({"m-1.0": "its disk"}, "all machines ended before the job did: its disk"),
        (
            {f"m-{number}.0": f"disk {number}" for number in (3, 1, 2, 4)},
            "all machines ended before the job did: disk 1; disk 2; and 2 more",
        ),
    ],
)
def test_a_run_without_a_machine_says_why(refused: dict[str, str], words: str) -> None:
    state = State(membership=Membership(refused=Map(refused)))
    assert _why_none_is_left(state) == words


def test_a_store_that_ends_with_the_machines_is_no_more_killed() -> None:
    """By then its pid may be another process's."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    service = Mock()
    config = SimpleNamespace(shutdown_s=60.0)
    cluster = without_cluster(_service=service, _agents={pid: 0}, _job=SimpleNamespace(settings=config))
    cluster._wait_for_the_rest()
    assert pid in [call.args[0] for call in service.note_end.call_args_list]
