"""Spares audit: they compute again what machines have computed between two checkpoints (``--audit``)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    EXAMPLES,
    ClusterRun,
    assert_identical,
    once,
    one_line,
    recover,
    run_cluster,
    training,
)

SCRIPT = Path(__file__).parent / "scripts" / "computes_wrong.py"
MACHINES = {"train_swift": 3, "train_hybrid": 4, "talks": 3, "train_tied": 3}
SMALLER = ["--layers=4", "--microbatches=4"]
ITERATIONS = 14
CLEAN = {"what": "nothing", "rank": -2}

Reference = Callable[..., ClusterRun]


@pytest.fixture(scope="session")
def unaudited(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Undisturbed runs of examples, without audits."""

    def run(folder: Path, example: str, *args: str) -> ClusterRun:
        script = training(folder, EXAMPLES / f"{example}.py", iterations=ITERATIONS)
        return run_cluster(folder, *SMALLER, *args, machines=MACHINES.get(example, 2), script=script)

    return once(tmp_path_factory, run)


@pytest.fixture
def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ClusterRun]:
    """Runs an example with a spare that audits. Worker 0 waits for it before iteration 7."""

    def run(
        *flags: str,
        example: str = "train_swift",
        waits: str = "judged",
        then: str = "",
        struck: int | None = 1,
        args: tuple[str, ...] = (),
        inject: str = "",
        **wrong: Any,
    ) -> ClusterRun:
        told = {"example": example, "iteration": 5, "waits": {7: waits, 12: then} if waits else {}, **wrong}
        monkeypatch.setenv("WRONG", json.dumps(told))
        found = run_cluster(
            tmp_path,
            *SMALLER,
            *args,
            flags=["--audit", *flags],
            machines=MACHINES.get(example, 2),
            script=training(tmp_path, SCRIPT, iterations=ITERATIONS),
            inject=inject,
        )
        times = len([*tmp_path.glob("struck-*")])
        assert times == struck if struck is not None else times
        return found

    return run


def ended(run: ClusterRun) -> list[dict[str, Any]]:
    """The ends of audits, without what they have not found."""
    return [{name: value for name, value in e.items() if value} for e in run.events("AuditEnded")]


def differences(run: ClusterRun) -> list[tuple[int, int]]:
    """The worker and the iteration of each difference that an audit has found."""
    ends = run.events("AuditEnded")
    return [(event["rank"], event["iteration"]) for event in ends if event["iteration"] is not None]


def assert_nothing_found(run: ClusterRun) -> None:
    """Checks that no audit has found a difference, nor a reason why it could not look for one."""
    assert differences(run) == []
    assert [event for event in ended(run) if "problem" in event] == []


def gone_back_to(run: ClusterRun) -> int:
    (doubted,) = run.events("CheckpointsDoubted")
    iteration: int = doubted["iteration"]
    return iteration


def replicas_are_known_until(run: ClusterRun) -> int:
    """The checkpoint before the last step that came out as recorded; 3 if that after 0 was not audited."""
    first = [e for e in run.events("AuditEnded") if e["until"] == 3 and e["iteration"] is None]
    return 0 if {slot for event in first for slot in event["slots"]} == {0, 1} else 3


@pytest.mark.parametrize(
    ("example", "args"),
    [
        ("train_swift", ()),
        ("train_ddp", ()),
        pytest.param("train_elastic", (), marks=pytest.mark.thorough),
        pytest.param("train_hybrid", (), marks=pytest.mark.thorough),
        pytest.param("train_swift", ("--schedule=Interleaved1F1B", "--layers=6"), marks=pytest.mark.thorough),
    ],
)
def test_what_was_computed_right_is_marked(
    example: str, args: tuple[str, ...], audited: Callable[..., ClusterRun], unaudited: Reference
) -> None:
    run = audited(example=example, args=args, waits="marked", struck=0, **CLEAN)
    assert_identical(run, unaudited(example, *args))
    slots = {slot for event in run.events("AuditEnded") for slot in event["slots"]}
    assert slots == {*range(MACHINES.get(example, 2))}
    assert_nothing_found(run)
    status = json.loads(recover("status", str(run.store), "--json").stdout)
    assert status["wrong"] == []
    (mark, *_) = status["audits"]
    assert "for all machines" in mark
    assert int(mark.split()[1].rstrip(":")) in status["checkpoints"]


@pytest.mark.parametrize("example", ["train_swift", "train_ddp"])
def test_a_script_that_begins_otherwise_on_a_spare(example: str, audited: Callable[..., ClusterRun]) -> None:
    """It looks for what it has left when it ran before, and a spare begins as the machine did."""
    run = audited(example=example, waits="marked", struck=0, what="resumes", rank=-2)
    assert run.code == 0, run.output[-3000:]
    slots = {slot for event in run.events("AuditEnded") for slot in event["slots"]}
    assert slots == {*range(MACHINES.get(example, 2))}
    assert_nothing_found(run)


@pytest.mark.thorough
@pytest.mark.parametrize("example", ["talks", "train_tied"])
def test_what_scripts_send_each_other_is_no_difference(
    example: str, audited: Callable[..., ClusterRun]
) -> None:
    """What has arrived is in the logs, of each kind of message."""
    run = audited(example=example, waits="marked", struck=0, **CLEAN)
    assert run.code == 0, run.output[-3000:]
    assert {slot for event in run.events("AuditEnded") for slot in event["slots"]} == {0, 1, 2}
    assert_nothing_found(run)


@pytest.mark.parametrize(
    ("wrong", "rank", "places"),
    [
        ({"what": "product", "rank": 1, "live": True, "times": [1, 2, 3]}, 1, "stage 1 -> "),
        pytest.param({"what": "message", "rank": 1}, 1, "stage 1 -> 2", marks=pytest.mark.thorough),
        pytest.param({"what": "received", "rank": 1}, 1, "stage 1 -> 2", marks=pytest.mark.thorough),
        pytest.param({"what": "received", "rank": 2}, 2, "stage 2 -> 1", marks=pytest.mark.thorough),
        pytest.param({"what": "product", "rank": 2}, 2, "stage 2 -> 1", marks=pytest.mark.thorough),
        pytest.param(
            {"what": "parameter", "rank": 0},
            0,
            "models.model.0.embedding.token.weight",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_machine_that_was_wrong_is_named_and_leaves(
    wrong: dict[str, Any], rank: int, places: str, audited: Callable[..., ClusterRun]
) -> None:
    """Each time, and once: in a product, a message before its checksum and after it has come, a parameter."""
    run = audited("--on-corruption", "drain", then="recovered", **wrong)
    assert run.code == 0, run.output[-3000:]
    assert differences(run) == [(rank, 5)] * 2
    assert f"machine {rank} has computed iteration 5 wrong: " in run.output
    found = [event["tensors"] for event in run.events("AuditEnded") if event["iteration"] is not None]
    assert all(places in tensors for tensors in found), found
    (asked,) = run.events("DrainRequested")
    joined = {event["machine"]: event["preferred_slot"] for event in run.events("MachineJoined")}
    assert joined[asked["machine"]] == rank
    status = json.loads(recover("status", str(run.store), "--json").stdout)
    assert f"machine {rank} was wrong" in status["wrong"][0]


def test_a_link_that_was_wrong_is_no_machine_s_fault(audited: Callable[..., ClusterRun]) -> None:
    """The sender's log has what it was to carry, and the receiver has computed with something else."""
    run = audited("--on-corruption", "drain", waits="all", what="link", rank=1, live=True)
    assert run.code == 0, run.output[-3000:]
    found = [event for event in run.events("AuditEnded") if event["iteration"] is not None]
    sent = [(event["slot"], event["rank"], event["iteration"], event["changed"]) for event in found]
    assert sorted(sent) == [(0, 0, 5, True), (0, 0, 5, True), (1, 0, 5, True), (1, 0, 5, True)]
    assert "what machine 0 has sent arrived as something else" in run.output
    assert "has computed iteration 5 wrong" not in run.output
    assert run.events("DrainRequested") == []


def test_a_link_that_was_wrong_for_the_script_is_no_machine_s_fault(
    audited: Callable[..., ClusterRun],
) -> None:
    """The script computes with a loss that was broadcast, and arrived as something else."""
    run = audited("--on-corruption", "drain", example="talks", waits="all", what="result", rank=1, live=True)
    assert run.code == 0, run.output[-3000:]
    found = [event for event in run.events("AuditEnded") if event["iteration"] is not None]
    assert {(event["iteration"], event["changed"]) for event in found} == {(5, True)}
    assert [event["slot"] for event in found].count(1) == 2
    assert "has sent arrived as something else" in run.output
    assert "has computed iteration 5 wrong" not in run.output
    assert run.events("DrainRequested") == []


def test_all_go_back_to_the_last_audited_checkpoint(
    audited: Callable[..., ClusterRun], unaudited: Reference
) -> None:
    """What a parameter was changed to in the middle of a step is gone: the bits are those of a right run."""
    run = audited("--on-corruption", "back", what="parameter", rank=1)
    assert differences(run) == [(1, 5)] * 2
    assert gone_back_to(run) == 3
    assert_identical(run, unaudited("train_swift"))


def test_a_job_that_ends_meanwhile_goes_on_from_what_is_not_in_doubt(
    tmp_path: Path, audited: Callable[..., ClusterRun], unaudited: Reference
) -> None:
    """What was given up is in the store still, and a resumed run knows no more than the store."""
    run = audited("--on-corruption", "back", what="parameter", rank=1, ends=4)
    assert run.code == 1
    assert "it ends while all compute again" in run.output
    assert gone_back_to(run) == 3
    assert 6 in {event["iteration"] for event in run.events("CheckpointCommitted")}
    status = json.loads(recover("status", str(run.store), "--json").stdout)
    assert max(status["checkpoints"]) == 3
    resumed = run_cluster(
        tmp_path,
        *SMALLER,
        flags=["--resume"],
        machines=MACHINES["train_swift"],
        script=training(tmp_path, EXAMPLES / "train_swift.py", iterations=ITERATIONS),
    )
    assert_identical(resumed, unaudited("train_swift"))


WORN = {"what": "product", "rank": 1, "live": True, "worn": True, "every": True, "times": [*range(1, 20)]}


@pytest.mark.parametrize(
    ("example", "first"), [("train_swift", 5), pytest.param("train_ddp", 3, marks=pytest.mark.thorough)]
)
def test_a_machine_that_is_worn_has_no_part_in_what_comes_after(
    example: str, first: int, audited: Callable[..., ClusterRun], unaudited: Reference
) -> None:
    """With the only spare in its place nobody would audit what it computes until a checkpoint."""
    run = audited("--on-corruption", "back", example=example, struck=None, **{**WORN, "iteration": first})
    assert differences(run) == [(1, first)] * 2
    assert gone_back_to(run) == (3 if example == "train_swift" else replicas_are_known_until(run))
    (left,) = run.events("MachineLost")
    assert left["on_request"]
    joined = {event["machine"]: event["preferred_slot"] for event in run.events("MachineJoined")}
    assert joined[left["machine"]] == 1
    assert len(joined) == MACHINES.get(example, 2) + 1, "it does not come back"
    assert_identical(run, unaudited(example))


@pytest.mark.thorough
def test_a_spare_that_may_round_otherwise_audits_no_stage(audited: Callable[..., ClusterRun]) -> None:
    run = audited(waits="marked", struck=0, threads=2, **CLEAN)
    assert run.code == 0, run.output[-3000:]
    problems = [event["problem"] for event in ended(run)]
    assert problems
    assert all("it computes on " in problem and "2 threads" in problem for problem in problems), problems


@pytest.mark.thorough
def test_none_leaves_of_machines_that_are_rebuilt_together(audited: Callable[..., ClusterRun]) -> None:
    """Replicas of a stage: no log has what they give each other."""
    wrong = {"what": "product", "rank": 0, "live": True, "times": [1, 2, 3]}
    run = audited("--on-corruption", "drain", example="train_hybrid", **wrong)
    assert run.code == 0, run.output[-3000:]
    found = [event["slots"] for event in run.events("AuditEnded") if event["iteration"] is not None]
    assert len(found) == 2
    assert len(found[0]) > 1
    assert found[0] == found[1]
    assert "one of machines 0 and " in run.output
    assert run.events("DrainRequested") == []


@pytest.mark.thorough
def test_two_spares_decide_together(audited: Callable[..., ClusterRun]) -> None:
    run = audited("--spares", "2", what="message", rank=0)
    assert differences(run) == [(0, 5)] * 2
    ends = run.events("AuditEnded")
    first, second = (event["machine"] for event in ends if event["iteration"] is not None)
    assert first != second
    assert "machine 0 has computed iteration 5 wrong" in run.output


@pytest.mark.thorough
def test_the_job_ends_if_that_is_asked_for(audited: Callable[..., ClusterRun]) -> None:
    run = audited("--on-corruption", "stop", what="message", rank=1)
    assert run.code == 1
    assert "machine 1 has computed iteration 5 wrong" in one_line(run)


@pytest.mark.thorough
def test_a_spare_that_is_wrong_is_named(audited: Callable[..., ClusterRun], unaudited: Reference) -> None:
    run = audited("--on-corruption", "drain", what="product", rank=0, audits=True, times=[2])
    assert differences(run) == [(0, 5)]
    assert "has computed iteration 5 wrong in an audit" in run.output
    (asked,) = run.events("DrainRequested")
    assert asked["machine"] == next(event["machine"] for event in run.events("AuditEnded"))
    assert_identical(run, unaudited("train_swift"))


@pytest.mark.thorough
def test_what_is_not_deterministic_names_no_machine(audited: Callable[..., ClusterRun]) -> None:
    run = audited("--on-corruption", "stop", what="product", rank=0, times=[1, 2, 3], struck=3)
    assert run.code == 0, run.output[-3000:]
    assert differences(run) == [(0, 5)] * 2
    assert "Nothing shows that a machine is at fault" in run.output


@pytest.mark.parametrize("machine", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_a_spare_that_is_needed_stops_at_once(
    machine: int, tmp_path: Path, audited: Callable[..., ClusterRun], unaudited: Reference
) -> None:
    """The audit stands still in the middle, for good: unless it is ended, a process is left."""
    run = audited(
        waits="auditing",
        stands=1,
        struck=0,
        inject=f"kill machine={machine} iteration=7 point=backward",
        **CLEAN,
    )
    assert (tmp_path / "auditing").exists()
    assert_identical(run, unaudited("train_swift"))
    begun = run.events("AuditBegun")[0]  # the machine that was killed may come back, and audit
    assert run.events("AuditEnded") == []
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replay"
    joined = [event["machine"] for event in run.events("MachineJoined")]
    assert begun["machine"] in joined
    (lost,) = run.events("MachineLost")
    assert lost["machine"] != begun["machine"]


OF_A_REPLICA = {"example": "train_ddp", "iteration": 3, "what": "product"}
"""A replica's gradients are audited in the step after a checkpoint."""


@pytest.mark.parametrize(
    "rank",
    [
        1,
        pytest.param(0, marks=pytest.mark.thorough),
    ],
)
def test_a_replica_that_was_wrong_is_named(rank: int, audited: Callable[..., ClusterRun]) -> None:
    """Its gradients enter the average, so all replicas stay equal and none of their digests shows it."""
    run = audited("--on-corruption", "stop", rank=rank, live=True, times=[1, 2, 3], **OF_A_REPLICA)
    assert run.code == 1
    assert differences(run) == [(rank, 3)] * 2
    assert f"machine {rank} has computed iteration 3 wrong: the gradient of " in one_line(run)


@pytest.mark.thorough
def test_all_replicas_go_back(audited: Callable[..., ClusterRun], unaudited: Reference) -> None:
    """A fault that comes once: the bits are those of a right run."""
    run = audited("--on-corruption", "back", rank=1, **OF_A_REPLICA)
    assert differences(run) == [(1, 3)] * 2
    assert gone_back_to(run) == replicas_are_known_until(run)
    assert_identical(run, unaudited("train_ddp"))


@pytest.mark.thorough
def test_a_spare_that_is_wrong_about_a_replica(
    audited: Callable[..., ClusterRun], unaudited: Reference
) -> None:
    run = audited("--on-corruption", "drain", rank=0, audits=True, times=[2], **OF_A_REPLICA)
    assert differences(run) == [(0, 3)]
    assert "has computed iteration 3 wrong in an audit" in run.output
    assert_identical(run, unaudited("train_ddp"))


@pytest.mark.parametrize(
    ("example", "variable", "habit"),
    [
        ("replica_habits", "HABIT", "accumulates"),
        pytest.param("replica_habits", "HABIT", "logs", marks=pytest.mark.thorough),
        pytest.param("replica_habits", "HABIT", "twice", marks=pytest.mark.thorough),
        pytest.param("running_statistics", "STATISTICS", "ddp", marks=pytest.mark.thorough),
        pytest.param("running_statistics", "STATISTICS", "own", marks=pytest.mark.thorough),
    ],
)
def test_replicas_as_people_write_them(
    example: str,
    variable: str,
    habit: str,
    tmp_path: Path,
    audited: Callable[..., ClusterRun],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, habit)
    run = audited(example=example, waits="marked", struck=0, **CLEAN)
    assert run.code == 0, run.output[-3000:]
    assert {slot for event in run.events("AuditEnded") for slot in event["slots"]} == {0, 1}
    assert_nothing_found(run)
    assert not [*tmp_path.glob("saved-by-audit-*")]
    assert bool([*tmp_path.glob("saved-by-run-*")]) == (habit == "logs")


@pytest.mark.thorough
def test_gradients_that_follow_from_what_others_give(
    audited: Callable[..., ClusterRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No spare can compute them on its own: it says so, and names nobody."""
    monkeypatch.setenv("HABIT", "counts")
    run = audited(example="replica_habits", waits="marked", struck=0, **CLEAN)
    assert run.code == 0, run.output[-3000:]
    assert {event["problem"].partition(" calls ")[2][:9] for event in ended(run)} == {"allreduce"}
    assert [event for event in ended(run) if "iteration" in event or "slots" in event] == []


@pytest.mark.thorough
def test_workers_of_one_machine(audited: Callable[..., ClusterRun]) -> None:
    run = audited(
        "--nproc-per-node",
        "2",
        "--on-corruption",
        "stop",
        rank=3,
        live=True,
        times=[1, 2, 3],
        **OF_A_REPLICA,
    )
    assert differences(run) == [(3, 3)] * 2
    assert "machine 1 has computed iteration 3 wrong: the gradient of " in one_line(run)


@pytest.mark.thorough
def test_a_replica_with_variables_of_its_own_is_named(
    audited: Callable[..., ClusterRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spare is given those that the machine has noted: the checkpoint has another replica's."""
    monkeypatch.setenv("HABIT", "logs")
    wrong = {**OF_A_REPLICA, "example": "replica_habits", "live": True, "times": [1, 2, 3]}
    run = audited("--on-corruption", "stop", rank=1, **wrong)
    assert differences(run) == [(1, 3)] * 2, ended(run)
    assert "machine 1 has computed iteration 3 wrong: the gradient of " in one_line(run)


@pytest.mark.thorough
def test_gradients_that_follow_from_a_replica_s_own_statistics(
    audited: Callable[..., ClusterRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has the first replica's: another one's gradients are others, and nobody is wrong."""
    monkeypatch.setenv("HABIT", "frozen")
    run = audited("--on-corruption", "stop", example="replica_habits", waits="all", struck=0, **CLEAN)
    assert run.code == 0, run.output[-3000:]
    problems = {event["slot"]: event["problem"] for event in run.events("AuditEnded") if event["begin"] == 3}
    assert (problems[0], "1.running_mean" in problems[1]) == ("", True), problems
    assert [event for event in ended(run) if "iteration" in event] == []


@pytest.mark.thorough
def test_replicas_that_were_undone(
    audited: Callable[..., ClusterRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after a checkpoint is interrupted after the update. An undo rounds: nobody is wrong."""
    monkeypatch.setenv("HABIT", "logs")
    run = audited(
        "--spares",
        "2",
        "--on-corruption",
        "stop",
        example="replica_habits",
        waits="all",
        struck=0,
        inject="kill machine=1 iteration=3 point=optimizer",
        **CLEAN,
    )
    assert run.code == 0, run.output[-3000:]
    (recovery,) = run.recoveries
    assert recovery["mode"] == "replica"
    assert [event for event in ended(run) if "iteration" in event] == []
    problems = [event["problem"] for event in run.events("AuditEnded") if event["begin"] == 3]
    assert len(problems) >= 2  # another spare may look again
    assert all("has begun with something else than the spare" in problem for problem in problems), problems


@pytest.mark.thorough
def test_an_audit_of_replicas_has_an_end(audited: Callable[..., ClusterRun]) -> None:
    """The script waits for somebody who is not there."""
    flags = ("--report-timeout", "6")
    run = audited(*flags, example="train_ddp", waits="marked", stands=0, struck=0, **CLEAN)
    assert run.code == 0, run.output[-3000:]
    problems = {event["problem"] for event in ended(run) if event["until"] == 3}
    assert problems == {"no iteration has ended within 12 s"}


@pytest.mark.thorough
def test_an_audit_of_stages_has_an_end(audited: Callable[..., ClusterRun]) -> None:
    flags = ("--report-timeout", "6")
    run = audited(*flags, waits="marked", stands=1, struck=0, **CLEAN)
    assert run.code == 0, run.output[-3000:]
    problems = {event["problem"] for event in ended(run) if event["until"] == 3}
    assert problems == {"no iteration has ended within 12 s"}


@pytest.mark.thorough
def test_shards_have_nothing_to_audit(audited: Callable[..., ClusterRun]) -> None:
    run = audited(example="train_fsdp", waits="", struck=0, **CLEAN)
    assert run.code == 0
    assert run.events("AuditBegun") == []
    assert run.output.count("--audit finds nothing to audit") == 1
