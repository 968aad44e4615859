"""What workers do goes to the rendezvous store at most once a second, and at once if it is another thing."""

from __future__ import annotations

import json
import threading
from typing import Any

from torch._C._distributed_c10d import HashStore

from swift_ft.coordination.agent_channel import AgentChannel, channel_pair, receive
from swift_ft.coordination.progress import ProgressBoard, ProgressReader
from swift_ft.launch.progress_notes import ProgressNotes
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from tests.support.writers import AtOnce


class Machine:
    """An agent whose clock and store are the test's."""

    def __init__(self) -> None:
        held = HashStore()
        self.store = RendezvousStore(lambda: held)
        self.now = 100.0
        self.writes: list[str] = []
        self.notes = ProgressNotes(AtOnce(self), lambda: self.now)

    def set(self, key: str, value: str) -> None:
        self.writes.append(key)
        self.store.set(key, value)

    def show(self, *iterations: int, mode: str = "live", slot: int | None = 1) -> None:
        """Workers 2, 3, ... say where they are."""
        shown: dict[int, dict[str, Any]] = {
            2 + i: {"iteration": n, "mode": mode} for i, n in enumerate(iterations)
        }
        self.notes.look(slot, shown)

    def read(self, machines: int = 2) -> dict[int, Any]:
        return ProgressReader(self.store).read(machines)


def test_steps_that_are_fast_cost_the_store_one_value_a_second() -> None:
    machine = Machine()
    for iteration in range(20):
        machine.show(iteration, iteration)
        machine.now += 0.25
    assert machine.writes == ["progress/of/1"] * 5
    machine.show(20, 20)
    assert machine.read() == {rank: {"iteration": 20, "mode": "live"} for rank in (2, 3)}


def test_another_mode_is_published_at_once() -> None:
    machine = Machine()
    machine.show(5)
    machine.show(6)
    assert machine.read()[2]["iteration"] == 5
    machine.show(6, mode="waiting")
    assert machine.read()[2] == {"iteration": 6, "mode": "waiting"}


def test_a_spare_has_nothing_to_publish() -> None:
    machine = Machine()
    machine.show(5, slot=None)
    machine.show()
    assert not machine.writes
    assert machine.read() == {}


def test_machines_that_publish_later_are_found() -> None:
    machine = Machine()
    reader = ProgressReader(machine.store)
    machine.show(5, slot=1)
    assert reader.read(3) == {2: {"iteration": 5, "mode": "live"}}
    machine.store.set("progress/of/0", json.dumps({0: {"iteration": 4, "mode": "live"}}))
    assert sorted(reader.read(3)) == [0, 2]


def test_a_worker_tells_its_agent_with_a_heartbeat_and_at_once_in_another_mode() -> None:
    agent, worker = channel_pair()
    agent.settimeout(30)
    lost = threading.Event()
    channel = AgentChannel(worker, beat_s=3600, on_agent_lost=lost.set)
    board = ProgressBoard(channel, ProgressReader(Machine().store), 7)
    board.publish(3, "live", own_s=0.5)
    message = receive(agent)
    assert message is not None
    assert message["shown"]["rank"] == 7
    assert message["shown"]["facts"].items() >= {"iteration": 3, "mode": "live", "own_s": 0.5}.items()
    board.publish(4, "live")  # this waits for the next heartbeat
    board.publish(4, "waiting")
    message = receive(agent)
    assert message is not None
    assert message["shown"]["facts"]["mode"] == "waiting"
    agent.close()
    assert lost.wait(30)
    worker.close()
