"""An end with an error is a finding where the journal shows that no fault can have caused it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.faults import parse_faults
from swift_ft.recovery.causes import Cause
from swift_ft.storage.store import Store
from swift_ft.testing.chaos.endings import beyond_faults
from swift_ft.testing.chaos.judging import End, judged
from swift_ft.testing.chaos.trial import Outcome, Training
from tests.unit.testing.chaos.saved import save, state_of

KILL = "kill machine=1 iteration=3 point=between"


def failed(reason: str, cause: str = "", *, usage: bool = False) -> dict[str, Any]:
    return {"event": "ScriptFailed", "by": "agent 1", "reason": reason, "cause": cause, "usage": usage}


def closed(reason: str, cause: str = "", by: str = "agent 1") -> dict[str, Any]:
    return {"event": "JobClosed", "by": by, "reason": reason, "cause": cause}


def committed(iteration: int) -> dict[str, Any]:
    return {"event": "CheckpointCommitted", "by": "worker 0", "iteration": iteration}


def injected(fault: str = KILL) -> dict[str, Any]:
    return {"event": "FaultInjected", "by": "worker 1", "fault": fault}


@pytest.mark.parametrize(
    "event",
    [
        closed("replicas differ after iteration 7: worker 0 and worker 1 ...", "machine", by="worker 1"),
        closed("machine 1 has computed iteration 3 wrong", "machine", by="worker 0"),
        closed("no plan", "swift_ft"),
        failed("worker 0: KeyError: 'weight'", "script"),
        failed("iteration 3 got another batch than before", usage=True),
        failed("the store /s cannot be written", "store", usage=True),
        failed("worker 0: the script exited with code 3"),
        *(failed("worker 0: ValueError: x", cause) for cause in ("data", "native code", "out of memory")),
        *(failed("worker 0: RuntimeError: x", cause) for cause in ("device", "swift_ft")),
    ],
    ids=lambda event: f"{event['event']} {event['cause']} {event['by']}",
)
def test_no_fault_causes_it(event: dict[str, Any]) -> None:
    assert beyond_faults([injected(), event], parse_faults(KILL)) == event["reason"]


@pytest.mark.parametrize(
    ("plan", "event"),
    [
        (KILL, closed("too few machines are left", "machine")),
        (KILL, closed("the store was lost", "store", by="launcher")),
        (KILL, failed("worker 0: DistBackendError: ncclRemoteError", "network")),
        (
            KILL,
            failed("worker 0: RuntimeError: [gloo/transport/tcp/pair.cc:5] closed", "script"),
        ),
        (KILL, failed("worker 0: ConnectionResetError: [Errno 104] Connection reset by peer", "script")),
        (KILL, failed("worker 0: The job has ended: too few machines are left")),
        (
            "full machine=1 iteration=3",
            failed("worker 1: OSError: [Errno 28] No space (injected): '/s'", "script"),
        ),
        *(
            (f"{action} worker=1 iteration=3", failed("/s cannot be written", "store", usage=True))
            for action in ("denied", "vanish")
        ),
        (
            "full machine=1 iteration=3",
            failed("/s cannot be written (OSError: No space (injected))", usage=True),
        ),
        ("raise worker=1 iteration=3", failed("worker 1: InjectedError: injected: raise worker=1", "script")),
        (
            "vanish worker=1 iteration=3",
            failed("worker 1: FileNotFoundError: [Errno 2] No such file or directory: 's'", "script"),
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else one["reason"][:40],
)
def test_a_fault_may_have_caused_it(plan: str, event: dict[str, Any]) -> None:
    assert not beyond_faults([injected(plan), event], parse_faults(plan))


@pytest.mark.parametrize(("name", "way"), [("StepDiffered", "computed twice"), ("AuditEnded", "in an audit")])
def test_no_fault_makes_a_machine_compute_something_else(name: str, way: str) -> None:
    """Whoever ends the job for it, in whatever words."""
    differed = {"event": name, "by": "agent 1", "iteration": 3, "tensors": "weight"}
    ended = closed("machine 1 is in doubt", "machine")
    found = beyond_faults([injected(), differed, ended], parse_faults(KILL))
    assert found.startswith("iteration 3 came out unlike")
    assert way in found
    assert name == "StepDiffered" or not beyond_faults([{**differed, "iteration": None}, ended], ())


def test_an_error_that_another_fault_raises_is_none_of_a_kill() -> None:
    event = failed("worker 1: InjectedError: of the script's own", "script")
    assert beyond_faults([event], parse_faults(KILL))


def test_a_script_that_is_refused_undisturbed_is_no_finding() -> None:
    """As one with planted habits may be: no fault has struck, and the line is for its user."""
    assert not beyond_faults([failed("name a store", usage=True)], ())


def test_all_causes_are_thought_of() -> None:
    """A new one is of machines and networks, or of the program."""
    of_faults = {Cause.MACHINE, Cause.NETWORK, Cause.STORE, Cause.SCHEDULER, Cause.SIGNAL, Cause.INJECTED}
    excused = {cause for cause in Cause if not beyond_faults([failed("x", cause)], ())}
    assert excused == of_faults


def end_of(
    folder: Path, code: int, *events: dict[str, Any], missed: tuple[str, ...] = (), plan: str = KILL
) -> tuple[Outcome, str]:
    """The outcome of a run that left a checkpoint, and its reason."""
    store = folder / "store"
    CheckpointFolder(Store(str(store))).commit(4, {}, "run", {})
    report = {"events": [{**event, "position": place} for place, event in enumerate(events)]}
    end = End(code, "swift-run: the reason\n", 1.0, [], report, missed)
    training = Training((), (), "{folder}/store", 10)
    outcome, reason, _ = judged(training, folder, parse_faults(plan), end, None)
    return outcome, reason


def test_the_end_of_a_run_by_its_faults_is_good(tmp_path: Path) -> None:
    assert end_of(tmp_path, 1, committed(4), injected(), closed("too few", "machine")) == (
        Outcome.ENDED,
        "swift-run: the reason",
    )


def test_the_end_of_a_run_by_an_error_of_its_own_is_not(tmp_path: Path) -> None:
    outcome, reason = end_of(tmp_path, 1, injected(), closed("replicas differ", "machine", by="worker 1"))
    assert outcome == Outcome.CRASHED
    assert reason == "no fault of the plan can have caused this: replicas differ"


@pytest.mark.parametrize(
    ("plan", "outcome"),
    [
        (
            "clock worker=0 iteration=3; slow worker=0 iteration=3; lag worker=0 iteration=3; "
            "reload machine=0 iteration=3; move machine=0 iteration=3",
            Outcome.CRASHED,
        ),
        (f"clock worker=0 iteration=3; {KILL}", Outcome.ENDED),
        ("suspend machine=0 iteration=3 seconds=1", Outcome.ENDED),
    ],
)
def test_faults_that_take_nothing_away_end_no_run(tmp_path: Path, plan: str, outcome: Outcome) -> None:
    """Whoever closes the job. Those that have not struck do not count."""
    events = (committed(4), closed("too few machines are left", "machine", by="launcher"))
    assert end_of(tmp_path, 1, *events, plan=plan)[0] == outcome
    if outcome == Outcome.CRASHED:
        _, reason = end_of(tmp_path, 1, *events, plan=f"{plan}; {KILL}", missed=(KILL,))
        assert reason == "its faults have taken nothing away: swift-run: the reason"


def test_a_launcher_that_a_signal_ends_has_crashed(tmp_path: Path) -> None:
    assert end_of(tmp_path, -11, injected()) == (Outcome.CRASHED, "swift-run was killed by signal 11")


def test_a_run_that_ends_before_any_fault_shows_nothing(tmp_path: Path) -> None:
    outcome, reason = end_of(tmp_path, 1, closed("too few", "machine"), missed=(KILL,))
    assert (outcome, reason) == (Outcome.NOT_STRUCK, "it ended before any fault: swift-run: the reason")
    assert not outcome.is_good


def test_an_end_that_no_event_explains_is_not_good(tmp_path: Path) -> None:
    """The launcher itself has failed, or has left no report: nothing says that a fault is to blame."""
    outcome, reason = end_of(tmp_path, 1)
    assert outcome == Outcome.CRASHED
    assert reason.endswith("its faults may have no part in this: swift-run: the reason")


FLIP = "flip worker=0 iteration=3 point=between"
ENDED = (injected(), closed("too few", "machine"))


@pytest.mark.parametrize(
    ("damaged", "struck", "outcome"),
    [
        ((4,), (), Outcome.UNLOADABLE),
        ((4,), ("checkpoints/00000004/rank-00000.g00001/a.distcp",), Outcome.ENDED),
        ((4,), ("checkpoints/00000002/rank-00000.g00001/a.distcp",), Outcome.UNLOADABLE),
        ((4,), ("log/rank-00000/g00001-s000001",), Outcome.UNLOADABLE),
        ((4, 2), ("checkpoints/00000004/committed.json",), Outcome.UNLOADABLE),
        (
            (4, 2),
            ("checkpoints/00000004/committed.json", "checkpoints/00000002/committed.json"),
            Outcome.ENDED,
        ),
        ((2,), (), Outcome.ENDED),
    ],
)
def test_the_last_checkpoint_loads_unless_a_fault_has_damaged_it(
    tmp_path: Path, damaged: tuple[int, ...], struck: tuple[str, ...], outcome: Outcome
) -> None:
    """Of whatever else it may have struck."""
    for iteration in (0, 2, 4):
        save(tmp_path / "store", state_of(), iteration=iteration)
    for iteration in damaged:
        (file,) = (tmp_path / "store" / "checkpoints" / f"{iteration:08d}").rglob("*.distcp")
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    events = [*map(committed, (0, 2, 4)), *ENDED]
    report = {"events": [{**event, "position": place} for place, event in enumerate(events)]}
    said = "".join(f"[machine 0] swift_ft: '{FLIP}' has struck {path}\n" for path in struck)
    end = End(1, f"{said}swift-run: the reason\n", 1.0, [], report)
    plan = parse_faults(f"{KILL}; {FLIP}")
    found, reason, _ = judged(Training((), (), "{folder}/store", 10), tmp_path, plan, end, None)
    assert found == outcome, reason


@pytest.mark.parametrize("is_struck", [True, False])
def test_a_run_whose_only_checkpoint_a_fault_has_cut_has_ended(tmp_path: Path, is_struck: bool) -> None:
    """The fault has taken it, no fault of ours: but the line says so."""
    save(tmp_path / "store", state_of(), iteration=4)
    (file,) = (tmp_path / "store" / "checkpoints" / "00000004").rglob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    events = [{**event, "position": place} for place, event in enumerate((committed(4), *ENDED))]
    said = f"swift_ft: '{FLIP}' has struck {file.relative_to(tmp_path / 'store')}\n" if is_struck else ""
    end = End(1, f"{said}swift-run: the reason\n", 1.0, [], {"events": events})
    plan = parse_faults(f"{KILL}; {FLIP}")
    found, reason, _ = judged(Training((), (), "{folder}/store", 10), tmp_path, plan, end, None)
    assert found == (Outcome.ENDED if is_struck else Outcome.UNLOADABLE)
    assert is_struck == reason.startswith("faults have damaged each checkpoint that there was: ")


def test_a_committed_checkpoint_is_there(tmp_path: Path) -> None:
    """An older one is not as good."""
    assert end_of(tmp_path, 1, committed(4), *ENDED)[0] == Outcome.ENDED
    assert end_of(tmp_path, 1, committed(4), committed(6), *ENDED)[0] == Outcome.UNLOADABLE


@pytest.mark.parametrize(
    ("events", "missed", "began", "outcome", "reason"),
    [
        (ENDED, "", 0, Outcome.ENDED, "before its first checkpoint: swift-run: the reason"),
        (ENDED[1:], KILL, 0, Outcome.NOT_STRUCK, "it ended before any fault: swift-run: the reason"),
        (
            (injected(), failed("KeyError: 'x'", "script")),
            "",
            0,
            Outcome.CRASHED,
            "no fault of the plan can have caused this: KeyError: 'x'",
        ),
        ((committed(4), *ENDED), "", 0, Outcome.UNLOADABLE, "swift-run: the reason"),
        ((committed(4), *ENDED[1:]), KILL, 0, Outcome.UNLOADABLE, "swift-run: the reason"),
        (ENDED, "", 900, Outcome.UNLOADABLE, "swift-run: the reason"),
    ],
    ids=["by its faults", "by itself", "by the script", "it had one", "it had one, no fault", "it may have"],
)
@pytest.mark.parametrize("has_store", [True, False])
def test_a_run_without_a_checkpoint(
    tmp_path: Path,
    has_store: bool,
    events: tuple[dict[str, Any], ...],
    missed: str,
    began: int,
    outcome: Outcome,
    reason: str,
) -> None:
    """One that ends early had none yet: its cause counts. A journal without its beginning cannot tell."""
    report = {"events": [{**event, "position": began + place} for place, event in enumerate(events)]}
    end = End(1, "swift-run: the reason\n", 1.0, [], report, (missed,) if missed else ())
    training = Training((), (), "{folder}/store" if has_store else "", 10)
    found = judged(training, tmp_path, parse_faults(KILL), end, None)
    assert found == (outcome, reason, {})
