"""Waits have a deadline and say what for: by construction, and when they take long."""

from __future__ import annotations

import ast
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_ft.observe import waits
from swift_ft.observe.waits import Announcements, wait_in_words, waiting

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "swift_ft"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "testing")

REASONS = {
    "a fault of a test, which is a wait": (
        "faults/strikes.py:freeze",
        "faults/strikes.py:suspend",
        "faults/strikes.py:Slowness.__call__",
    ),
    "its callers announce it": (
        "checkpoint/checkpointer.py:Checkpointer.wait",
        "coordination/etcd/client.py:EtcdClient._call",
        "coordination/follower.py:Follower.wait_for",
        "coordination/participant.py:Participant.wait_for",
        "launch/health/checks.py:disk",  # in a process of its own
        "launch/processes/standby.py:Standby.receive",
        "logging/writing/disk_budget.py:DiskBudget.wait_until_fits",
        "logging/writing/copier.py:BufferPool.wait_for_room",
        "torch_adapters/abortable_waits.py:AbortableWaits._ended_or_lost",
        "torch_adapters/abortable_waits.py:_Ending.wait",
        "torch_adapters/abortable_waits.py:wait_for_works",
        "torch_adapters/rendezvous_store.py:KeysInFolder.wait",
        "torch_adapters/rendezvous_store.py:RendezvousStore.wait",
        "torch_adapters/rendezvous_store.py:RendezvousStore.wait.rest",
        "coordination/restoring.py:Restorer._publish",
        "coordination/restoring.py:_wait",
        "torch_adapters/transports.py:_first_collective",
        "torch_adapters/transports.py:_first_messages",
    ),
    "the agent watches the rendezvous store, and says that it does not answer": (
        "coordination/background_writer.py:BackgroundWriter._work",
        "coordination/restoring.py:JournalCopy.epoch",
        "torch_adapters/rendezvous_store.py:RendezvousStore._patiently",
    ),
    "the launchers' consoles announce it: it follows from the journal": (
        "cli/run.py:_find_run",
        "coordination/participant.py:Participant._wait",
        "coordination/participant.py:Participant.wait_for_finish",
        "launch/agent/agent.py:MachineAgent._join",
        "launch/machine.py:_wait_until_opened",
        "runtime/checkpoints/checkpointing.py:Saver.finish",
        "runtime/checkpoints/commits.py:Commits.wait",
        "cli/recover/change.py:_Wait.until_over",
        "cli/recover/drain.py:_wait",
    ),
    "a spare audits, and nobody waits for it": (
        "launch/agent/audits.py:AuditProcess.read",
        "offline/replay.py:_plan",
    ),
    "an idle thread or process waits for work, and nobody for it": (
        "host/alarms.py:Alarms._next",
        "launch/schedulers/requests.py:MachineRequests._run",
        "launch/processes/script_end.py:_watch",  # it announces the wait of others
        "cli/console.py:_Narration.run",
        "cli/event_hook.py:EventHook._run_all",
        "launch/log_handlers.py:EventPipe.receive",
        "cli/live.py:_Looks._look",
        "cli/live.py:_Looks.news",
        "cli/store.py:main",
        "coordination/agent_channel.py:AgentChannel._beat",
        "coordination/agent_channel.py:receive",
        "coordination/background_writer.py:BackgroundWriter._next",
        "coordination/kept_keys.py:KeptKeys.wait_for_news",
        "coordination/key_holding.py:KeyHolding._run",
        "launch/rendezvous/store_service.py:_keep_serving",
        "coordination/etcd/block_log.py:EtcdBlockLog._watch",
        "coordination/etcd/block_log.py:EtcdBlockLog.read",
        "coordination/etcd/client.py:EtcdClient.watch",
        "coordination/relay/lines.py:LocalLine.receive",
        "coordination/relay/relay.py:Relay._give_signs_of_life",
        "coordination/relay/relay.py:Relay._pass_on_notes",
        "coordination/relay/relay.py:Relay._write",
        "coordination/relay/upstream.py:Upstream._is_to_meet",
        "coordination/relay/subscriber.py:Subscriber._send_all",
        "runtime/slowness/part.py:LinkMeter._run",
        "runtime/data/check.py:BatchBoard._read",
        "runtime/memory/memory_checkpoints.py:MemoryCheckpoints._pause",
        "runtime/memory/memory_checkpoints.py:MemoryCheckpoints._run",
        "runtime/slowness/part.py:StallWatch._run",
        "runtime/slowness/straggler_watch.py:StragglerWatch._run",
        "coordination/awaited_keys.py:AwaitedKeys._all_are_there",
        "launch/detection/store_watch.py:StoreWatch._ask",
        "launch/detection/store_watch.py:StoreWatch._watch",
        "launch/agent/agent.py:MachineAgent._handle",
        "launch/agent/agent.py:MachineAgent._turn",
        "launch/cluster.py:Cluster._next_end",
        "launch/cluster.py:Cluster._wait_for_any",
        "launch/processes/output_tail.py:OutputTail._run",
        "launch/detection/sentinel.py:Sentinel._report",
        "launch/processes/standby.py:_serve",
        "launch/rendezvous/store_service.py:_wait_for_others",
        "launch/rendezvous/store_service.py:_wait_until_over",
        "logging/writing/uploader.py:SegmentUploader._upload_until_closed",
        "network/channel.py:Channel._read",  # of a socket that does not block
        "network/port.py:Newcomer._advance",  # as above
        "network/port.py:Port._accept",  # as above
        "network/port.py:Port._run",
        "logging/writing/writer.py:LogWriter._next",
        "torch_adapters/abortable_waits.py:_serve",
        "observe/waits.py:_Speaker._run",
    ),
    "at most ten seconds, or for a process that was killed": (
        "cli/console.py:LauncherConsole.close",
        "launch/schedulers/requests.py:MachineRequests.close",
        "launch/agent/run_end.py:_within",
        "cli/live.py:_Looks.close",
        "cli/event_hook.py:EventHook.close",
        "cli/event_hook.py:_kill",
        "cli/event_hook.py:EventHook._run",
        "launch/detection/worker_channels.py:WorkerChannels.hears_within",
        "launch/cluster.py:Cluster._kill_agents",
        "launch/cluster.py:_end_group",
        "launch/signals.py:ending_with_a_line",
        "launch/processes/strays.py:kill_strays",
        "launch/cluster.py:Cluster._wait_for_the_rest",
        "launch/processes/context.py:StandbyContext._wait_for_report",
        "launch/detection/sentinel.py:Sentinel._dial",
        "launch/detection/sentinel.py:Sentinel.close",
        "launch/rendezvous/store_service.py:StoreService.__init__",
        "launch/rendezvous/store_service.py:StoreService.close",
        "launch/processes/worker.py:_run_script",
        "network/client.py:_receive",
        "network/port.py:Port.close",
        "logging/writing/writer.py:LogWriter.close",
        "runtime/checkpoints/checkpointing.py:Saver.request",
        "torch_adapters/ddp.py:DataParallelHook.drain",
    ),
    "it never blocks, though the method's name says so of others": (
        "launch/detection/sentinel.py:Sentinel._obey",
        "launch/processes/standby.py:_has_packet",
    ),
    "the key is known to be there": (
        "launch/rendezvous/bootstrap.py:Bootstrap.place_of_next",
        "launch/rendezvous/job_secret.py:found_secret",
        "checkpoint/store_claim.py:check_next_world",
        "checkpoint/store_claim.py:claim_store",
        "runtime/data/part.py:check_remade",
        "runtime/peer_files.py:PeerFiles.find",
        "runtime/memory/agreement.py:Agreement.address",
        "runtime/memory/agreement.py:Agreement.verdict",
        "runtime/memory/interval.py:Interval.look",
        "runtime/pipeline/published_shapes.py:PublishedShapes.find",
        "runtime/pipeline/script_partners.py:ScriptPartners._of",
        "runtime/program_check.py:check_program",
        "runtime/hooks/module_changes.py:ModuleChanges.put",
        "runtime/replicas/own_variables.py:OwnVariables._kept_by",
        "runtime/replicas/own_variables.py:OwnVariables._noted",
        "runtime/replicas/own_variables.py:OwnVariables._seeded_unlike",
        "runtime/replicas/replicas.py:Replicas._published_layout",
        "runtime/replicas/replicas.py:Replicas.reset",
        "runtime/state_proof.py:StateProof._compare_with_predecessor",
    ),
    "a part of a training step, which an abort ends": (
        "torch_adapters/gathering.py:gather",
        "torch_adapters/ddp.py:DataParallelHook._wait_for_buffers",
        "torch_adapters/ddp_buffers.py:BufferSync.adopt",
        "torch_adapters/ddp_buffers.py:BufferSync.wait",
        "torch_adapters/directed_group.py:DirectedGroup._meet",
        "torch_adapters/directed_group.py:DirectedGroup.recv",
        "torch_adapters/lasting_work.py:_wait",
        "torch_adapters/present_members.py:PresentMembers.recv",
    ),
    "a second at most, or as long as the abort of a device": (
        "launch/agent/guests.py:_Question.took_s",
        "launch/processes/stacks.py:StackFile.ask",
        "host/under_way.py:UnderWay.over",
        "torch_adapters/transports.py:AbortedCommunicators._abort_all",
    ),
    "a fault of a test": (
        "runtime/fault_injector.py:FaultInjector._strike",
        "storage/troubles.py:Troubles._meet",
    ),
}
"""Functions that wait outside of ``with waiting(...)``, by the reason why they may."""

EXCEPTIONS = frozenset(name for names in REASONS.values() for name in names)

# ------------------------------------------------------------------------------------------ by construction

WAITS = frozenset(
    {"wait", "wait_for", "result", "join", "acquire", "communicate", "select", "recv", "accept"}
)
STORES = frozenset({"rendezvous", "_rendezvous", "_reader", "client"})
"""What a client of the rendezvous store is called: its ``get`` waits for the key."""


def last_name(node: ast.expr) -> str:
    """``c`` of ``a.b.c``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_wait(call: ast.Call) -> bool:
    """Whether a call may block, as far as its syntax shows."""
    if not isinstance(call.func, ast.Attribute):
        return False
    name, of = call.func.attr, last_name(call.func.value)
    bare = not call.args and not call.keywords
    if name == "join":
        return bare or "thread" in of  # str.join() has an argument
    if name == "get":
        return bare or of in STORES or any(keyword.arg == "timeout" for keyword in call.keywords)
    if (of, name) == ("os", "waitpid"):
        return "WNOHANG" not in ast.unparse(call)
    return name in WAITS or (of, name) == ("time", "sleep")


def is_announced(node: ast.With) -> bool:
    """Whether a block is that of ``with waiting(...)``."""
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any(last_name(call.func) == "waiting" for call in calls)


def silent_waits(source: str) -> Iterator[tuple[int, str]]:
    """Line and function of each wait outside of ``with waiting(...)``."""

    def visit(node: ast.AST, place: str, announced: bool) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            place, announced = f"{place}.{node.name}".lstrip("."), False
        if isinstance(node, ast.With) and is_announced(node):
            announced = True
        if isinstance(node, ast.Call) and is_wait(node) and not announced:
            yield node.lineno, place
        for child in ast.iter_child_nodes(node):
            yield from visit(child, place, announced)

    yield from visit(ast.parse(source), "", False)


def test_no_wait_is_silent() -> None:
    found: dict[str, str] = {}
    for path in FILES:
        for line, place in silent_waits(path.read_text()):
            name = f"{path.relative_to(PACKAGE)}:{place}"
            found.setdefault(name, f"{path.relative_to(ROOT)}:{line}: {place}")
    silent = [where for name, where in found.items() if name not in EXCEPTIONS]
    assert not silent, "wrap these in `with swift_ft.observe.waits.waiting(...)`:\n" + "\n".join(silent)
    assert not EXCEPTIONS - found.keys(), "these exceptions are no longer needed"


@pytest.mark.parametrize(
    "source",
    [
        "done.wait()",
        "with changed: changed.wait_for(lambda: ready, 60.0)",
        "thread.join()",
        "thread.join(timeout=5)",
        "inbox.get()",
        "inbox.get(timeout=1.0)",
        "self._rendezvous.get(key)",
        "future.result(3600)",
        "while not ready(): time.sleep(0.1)",
        "os.waitpid(-1, 0)",
        "with waiting('x'):\n    def f(): done.wait()",
    ],
)
def test_the_test_sees_waits(source: str) -> None:
    assert list(silent_waits(source))


@pytest.mark.parametrize(
    "source",
    [
        "with waiting('the store', 60.0): done.wait(60.0)",
        "with waiting('the store', 60.0), changed: changed.wait_for(ready, 60.0)",
        "', '.join(names)",
        "table.get(key)",
        "os.waitpid(pid, os.WNOHANG)",
    ],
)
def test_the_test_leaves_other_calls_alone(source: str) -> None:
    assert not list(silent_waits(source))


# --------------------------------------------------------------------------------------- when they take long


class Spoken(logging.Handler):
    """Collects what is logged, and shows when there is something."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, str]] = []
        self.spoke = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append((str(vars(record)["event"]), record.getMessage()))
        self.spoke.set()


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spoken]:
    """What is said, after 0.05 s already."""
    monkeypatch.setattr(waits, "FIRST_S", 0.05)
    handler, logger = Spoken(), logging.getLogger("swift_ft.observe.waits")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_a_long_wait_and_its_end_are_announced(spoken: Spoken) -> None:
    with waiting("a machine", 600.0, flag="--join-timeout"):
        assert spoken.spoke.wait(30.0)
    begun, *_, ended = spoken.messages
    assert begun[0] == "waiting"
    assert begun[1].startswith(
        "waits for a machine: 0 s so far, at most 10 min 0 s more (--join-timeout 600)"
    )
    assert ended[0] == "wait_over"
    assert ended[1].startswith("the wait for a machine is over after ")


def test_a_wait_that_fails_is_not_called_over(spoken: Spoken) -> None:
    def wait_in_vain() -> None:
        with waiting("a store"):
            assert spoken.spoke.wait(30.0)
            raise TimeoutError

    with pytest.raises(TimeoutError):
        wait_in_vain()
    assert spoken.messages[-1][1].startswith("the wait for a store is given up after ")


def test_a_short_wait_is_silent(spoken: Spoken) -> None:
    for _ in range(100):
        with waiting("what is there already"):
            pass
    with waiting(lambda: "what takes long"):  # its announcement follows all that the others could have caused
        assert spoken.spoke.wait(30.0)
    assert {text.partition(":")[0].partition(" is over")[0] for _, text in spoken.messages} == {
        "waits for what takes long",
        "the wait for what takes long",
    }


def test_a_wait_that_fails_is_over(spoken: Spoken) -> None:
    def fail() -> None:
        with waiting("a store"):
            assert spoken.spoke.wait(30.0)
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011  (it has no message)
        fail()
    assert spoken.messages[-1][0] == "wait_over"


def test_announcements_come_ever_less_often() -> None:
    announcements = Announcements(100.0)
    assert [now for now in range(100, 1000) if announcements.due(now)] == [110, 120, 140, 180, 260, 420, 740]
    late = Announcements(0.0)
    assert late.due(55.0)  # its thread was held up: one announcement for those that were missed
    assert not late.due(79.0)
    assert late.due(80.0)


def test_words() -> None:
    assert wait_in_words("x", 10.4) == "waits for x: 10 s so far"
    assert wait_in_words("x", 130.0, float("inf")) == "waits for x: 2 min 10 s so far"
    assert wait_in_words("x", 10.0, 5.0) == "waits for x: 10 s so far, at most 0 s more"
