"""A job with heads forms, and one of its machines dies before it has."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.follower import Follower
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.runs import newest_run
from swift_ft.coordination.store_client import connect
from swift_ft.errors import RendezvousLostError
from swift_ft.recovery.membership import Membership
from tests.support.cluster import ClusterRun, assert_identical, training
from tests.support.hosts import Hosts
from tests.support.waiting import wait_until

MACHINES, ITERATIONS = 4, 20
FLAGS = ("--nnodes", str(MACHINES), "--relay-fanout", "2")


def membership(hosts: Hosts) -> Membership:
    """Which machines there are, by the journal; none before the store answers."""
    host, _, port = hosts.endpoint.rpartition(":")
    client = partial(connect, StoreAddress.tcp(host, int(port)))
    try:
        return Follower(
            open_journal(partial(client, newest_run(client, "hosts")), by="test")
        ).state.membership
    except RendezvousLostError:
        return Membership()


def test_the_machine_through_which_another_one_joins_is_killed(hosts: Hosts, references: Any) -> None:
    """Of four machines the fourth would join through the second, which dies before it has come."""
    hosts.script = training(hosts.folder, iterations=ITERATIONS)
    for node, name in enumerate(("first", "second", "third")):
        hosts.start(name, node, *FLAGS)
        wait_until(lambda node=node: membership(hosts).arrivals == node + 1, f"the {name} machine to join")  # type: ignore[misc]
    os.killpg(hosts.processes["second"].pid, signal.SIGKILL)
    wait_until(lambda: membership(hosts).fenced, "the loss in the journal")
    hosts.start("fourth", 3, *FLAGS)
    hosts.start("fifth", 1, *FLAGS)
    assert hosts.end() == {"first": 0, "second": -signal.SIGKILL, "third": 0, "fourth": 0, "fifth": 0}
    reference = references("--iterations", str(ITERATIONS), machines=MACHINES)
    assert_identical(ClusterRun(hosts.folder, 0, "", {}), reference)
