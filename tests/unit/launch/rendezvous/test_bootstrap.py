"""The store for ``init_process_group``: one for each start of workers, and never a lost machine's."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from immutables import Map
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from swift_ft.launch.rendezvous.bootstrap import Bootstrap
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.membership import Membership
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore, Store, TCPStore


def job(members: dict[int, str], started_in: dict[int, int]) -> State:
    slots = Map({machine: slot for slot, machine in members.items()})
    membership = Membership(members=Map(members), slots=slots, started_in=Map(started_in))
    return State(phase=Phase.AGREEING, membership=membership)


BOTH = job({0: "a.0", 1: "b.0", 2: "c.0"}, {0: 1, 1: 2, 2: 2})
WITHOUT_B = job({0: "a.0", 2: "c.0"}, {0: 1, 1: 2, 2: 2})


@pytest.fixture
def store() -> RendezvousStore:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect() -> Store:
        return TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=30))

    return RendezvousStore(connect)


def usable(port: int) -> bool:
    client = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
    client.set("key", "value")
    return client.get("key") == b"value"


def test_the_lowest_slot_serves_and_the_others_find_it(store: RendezvousStore) -> None:
    b, c = Bootstrap(store, "127.0.0.1"), Bootstrap(store, "127.0.0.1")
    served = b.place("b.0", 2, lambda: BOTH)
    assert c.place("c.0", 2, lambda: BOTH) == served
    assert usable(served.master_port)
    assert b.server == c.server == "b.0"


def test_a_slow_rendezvous_store_does_not_lead_to_a_second_one(store: RendezvousStore) -> None:
    """Others may use the first one already, which would end with the second one's start."""

    class Slow(RendezvousStore):
        def __init__(self) -> None:
            super().__init__(store._connect)

        def wait(self, keys: object, timeout: timedelta) -> None:
            raise DistStoreError("wait timeout")

    slow = Bootstrap(Slow(), "127.0.0.1")
    served = slow.place("b.0", 2, lambda: BOTH)
    assert Bootstrap(store, "127.0.0.1").place("c.0", 2, lambda: BOTH) == served
    assert usable(served.master_port)


def test_nobody_waits_for_a_lost_machine(store: RendezvousStore) -> None:
    """The store that it served before it died is not used, and the next slot serves one."""
    lost = Bootstrap(store, "127.0.0.1").place("b.0", 2, lambda: BOTH)
    c = Bootstrap(store, "127.0.0.1")
    served = c.place("c.0", 2, lambda: WITHOUT_B)
    assert served.master_port != lost.master_port
    assert usable(served.master_port)
    assert c.server == "c.0"


def test_a_machine_that_is_lost_while_it_is_waited_for(store: RendezvousStore) -> None:
    states, c = iter([BOTH]), Bootstrap(store, "127.0.0.1")
    served = c.place("c.0", 2, lambda: next(states, WITHOUT_B))
    assert usable(served.master_port)


@pytest.mark.parametrize(
    "now",
    [
        replace(BOTH, phase=Phase.ENDED),
        job({0: "a.0", 1: "b.0"}, {0: 1, 1: 2, 2: 2}),  # the slot was lost
        job({0: "a.0", 1: "b.0", 2: "c.0"}, {0: 3, 1: 3, 2: 3}),  # all start again
    ],
)
def test_a_wait_ends_when_the_machine_has_something_else_to_do(store: RendezvousStore, now: State) -> None:
    states = iter([BOTH])
    with pytest.raises(RendezvousStateError):
        Bootstrap(store, "127.0.0.1").place("c.0", 2, lambda: next(states, now))


def test_a_store_that_was_made_ready_is_served_once(store: RendezvousStore) -> None:
    """In an old store, restarted workers would read the addresses of dead ones."""
    b = Bootstrap(store, "127.0.0.1")
    b.prepare()
    first = b.place("b.0", 2, lambda: BOTH)
    assert usable(first.master_port)
    again = b.place("b.0", 3, lambda: job({1: "b.0"}, {1: 3}))
    assert first.master_port != again.master_port
    assert usable(again.master_port)
