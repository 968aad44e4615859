"""What a machine has set in the rendezvous store is with another one, too, and stays when it is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from swift_ft.coordination import key_holding
from swift_ft.coordination.journal import Journal
from swift_ft.coordination.kept_keys import KeptKeys
from swift_ft.coordination.key_holding import KeyHolding
from swift_ft.coordination.relay.lines import Line, LocalLine, local_pair
from swift_ft.coordination.relay.outgoing import Outgoing
from swift_ft.coordination.relay.relay import Relay
from swift_ft.coordination.relay.upstream import Upstream
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.protocol import step_all
from swift_ft.torch_adapters.rendezvous_store import TCPStore, serve_store
from tests.support.relays import MemoryLog
from tests.support.waiting import wait_until


class Agents:
    """Agents of a job with three machines and a spare, each with its keys and a real relay."""

    def __init__(self) -> None:
        self.kept = {f"m{slot}": KeptKeys() for slot in range(4)}
        self.relays = {name: _relay(name, kept) for name, kept in self.kept.items()}
        self.lines: list[Line] = []
        self.unreachable: set[str] = set()
        self.refused = 0
        self.holding = {name: KeyHolding(kept, self._connect) for name, kept in self.kept.items()}
        self.state = State()
        self.happens(
            ev.JobOpened(machines=3),
            *(ev.MachineJoined(machine=name, address=f"{name}:1") for name in self.kept),
        )

    def happens(self, *events: ev.Event) -> None:
        before, self.state = self.state, step_all(self.state, events)
        for name, holding in self.holding.items():
            if name not in self.state.membership.fenced:
                holding.look(before, self.state, name)

    def _connect(self, address: str) -> Line:
        name = address.partition(":")[0]
        if name in self.unreachable:
            self.refused += 1
            raise ConnectionRefusedError(address)
        ours, theirs = local_pair()
        threading.Thread(target=self.relays[name].serve, args=(LocalLine(ours),), daemon=True).start()
        self.lines.append(LocalLine(theirs))
        return self.lines[-1]

    def close(self) -> None:
        for relay in self.relays.values():
            relay.close()
        for line in self.lines:
            line.close()


def _relay(name: str, kept: KeptKeys) -> Relay:
    outgoing = Outgoing()
    upstream = Upstream(Journal(MemoryLog(), by=name), None, outgoing)
    return Relay(upstream, outgoing, by=name, append_s=30.0, kept=kept)


def put_back(kept: KeptKeys) -> TCPStore:
    store = serve_store("127.0.0.1", 0)
    kept.put_back(store)
    kept.put_back_others(store)
    return store


def has(kept: KeptKeys, key: str) -> bool:
    return put_back(kept).check([key])


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setattr(key_holding, "_AGAIN_S", 0.05)
    made = Agents()
    yield made
    made.close()


def test_the_next_machine_holds_all_that_was_set(agents: Agents) -> None:
    """Before and after it was reached; what was deleted is gone there, too."""
    m0, m1 = agents.kept["m0"], agents.kept["m1"]
    m0.put("shapes", "8x32")
    m0.put("offer", "here")
    wait_until(lambda: has(m1, "shapes"), "the keys at the holder")
    m0.put("offer", None)
    m0.put("large", "x" * (3 << 20))
    wait_until(lambda: has(m1, "large") and not has(m1, "offer"), "the change at the holder")
    assert KeptKeys.missing(put_back(m1), ["m0", "m2"]) == ["m2"]
    assert not has(agents.kept["m2"], "shapes"), "one holder is enough"


def test_a_lost_machines_keys_stay_with_its_holder_and_with_the_next_one(agents: Agents) -> None:
    """Also after the holder itself is lost."""
    m0, m1, m2 = (agents.kept[f"m{slot}"] for slot in range(3))
    m0.put("shapes", "8x32")
    wait_until(lambda: has(m1, "shapes"), "the keys at the holder")
    agents.happens(ev.MachineLost(machine="m0", reason="killed"))
    wait_until(lambda: has(m2, "shapes"), "the keys at the next one")
    agents.happens(ev.MachineLost(machine="m1", reason="killed"))
    assert KeptKeys.missing(put_back(m2), ["m0", "m1"]) == []
    assert put_back(m2).get("shapes") == b"8x32"


def test_a_machine_that_is_lost_with_its_holder_is_missed(agents: Agents) -> None:
    agents.kept["m0"].put("shapes", "8x32")
    wait_until(lambda: has(agents.kept["m1"], "shapes"), "the keys at the holder")
    agents.happens(
        ev.MachineLost(machine="m0", reason="killed"), ev.MachineLost(machine="m1", reason="killed")
    )
    assert KeptKeys.missing(put_back(agents.kept["m2"]), ["m0", "m1"]) == ["m0"]


def test_another_holder_replaces_the_one_before(agents: Agents) -> None:
    """An old value would be set again beside the new one."""
    m0, m2 = agents.kept["m0"], agents.kept["m2"]
    m2.put("phase", "1")
    wait_until(lambda: has(m0, "phase"), "the keys at the holder")
    agents.happens(ev.MachineLost(machine="m0", reason="killed"))  # the spare gets its slot
    wait_until(lambda: has(agents.kept["m3"], "phase"), "the keys at the new holder")
    assert not has(agents.kept["m1"], "phase")


def test_a_spare_that_is_lost_is_not_missed(agents: Agents) -> None:
    agents.happens(ev.MachineJoined(machine="m9", address="m9:1"))
    agents.happens(ev.MachineLost(machine="m9", reason="killed"))
    assert KeptKeys.missing(put_back(agents.kept["m0"]), ["m9"]) == []


def test_a_holder_that_is_out_of_reach_is_tried_again(agents: Agents) -> None:
    agents.kept["m0"].put("first", "1")
    wait_until(lambda: has(agents.kept["m1"], "first"), "the keys at the holder")
    agents.unreachable.add("m1")
    for line in list(agents.lines):
        line.close()
    agents.kept["m0"].put("shapes", "8x32")
    wait_until(lambda: agents.refused > 0, "an attempt")
    assert not has(agents.kept["m1"], "shapes")
    agents.unreachable.clear()
    wait_until(lambda: has(agents.kept["m1"], "shapes"), "the keys at the holder")


def test_what_a_lost_machine_had_set_gives_way_to_what_a_living_one_has_set(agents: Agents) -> None:
    """Its replacement goes on with the same names."""
    m0, m1 = agents.kept["m0"], agents.kept["m1"]
    m0.put("address", "before")
    wait_until(lambda: has(m1, "address"), "the keys at the holder")
    agents.happens(ev.MachineLost(machine="m0", reason="killed"))
    agents.kept["m3"].put("address", "now")
    store = serve_store("127.0.0.1", 0)
    for kept in agents.kept.values():
        if kept is not m0:
            kept.put_back(store)
    for kept in agents.kept.values():
        kept.put_back_others(store)
    assert store.get("address") == b"now"
    assert KeptKeys.missing(store, ["m0"]) == []
