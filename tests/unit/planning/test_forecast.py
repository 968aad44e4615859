"""Which way each machine would come back, and what that would cost (paper §3, §5.3, §5.4)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.errors import UsageError
from swift_ft.planning.chain import ChainProfile
from swift_ft.planning.forecast import Protection, forecast
from swift_ft.planning.grouping import evaluate_groups
from swift_ft.planning.job import Job, Measured, Worker
from swift_ft.recovery.events import Reported
from swift_ft.recovery.plan import Way, make_plan

WAYS = {Way.REPLICA: Protection.REPLICATION, Way.REPLAY: Protection.LOGGING}


def pipeline(stages: int, *, looped: bool = False) -> tuple[Worker, ...]:
    return mesh(1, stages, looped=looped)


def mesh(
    replicas: int, stages: int, *, looped: bool = False, stage_first: bool = False
) -> tuple[Worker, ...]:
    """Pipelines that are replicas of each other, as a DeviceMesh numbers them."""
    places = [(r, s) for r in range(replicas) for s in range(stages)]
    if stage_first:
        places.sort(key=lambda place: (place[1], place[0]))
    pipelines = {r: places.index((r, 0)) for r in range(replicas)}
    held = [(s, s + stages) if looped else (s,) for _, s in places]
    return tuple(
        Worker(tuple(f"stage {s}" for s in own), own, pipelines[r])
        for (r, _), own in zip(places, held, strict=True)
    )


def data_parallel(replicas: int) -> tuple[Worker, ...]:
    return (Worker(("the model",)),) * replicas


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Pipelines, data parallelism, and both; several workers on a machine; groups where a session allows."""
    kind = draw(st.sampled_from(["pipeline", "data parallel", "mesh"]))
    if kind == "data parallel":
        workers = data_parallel(draw(st.integers(1, 6)))
    elif kind == "pipeline":
        workers = pipeline(draw(st.integers(2, 8)), looped=draw(st.booleans()))
    else:
        shape = draw(st.integers(2, 3)), draw(st.integers(2, 4))
        workers = mesh(*shape, looped=draw(st.booleans()), stage_first=draw(st.booleans()))
    divisors = [n for n in range(1, len(workers) + 1) if len(workers) % n == 0]
    per_machine = draw(st.sampled_from(divisors))
    machines = len(workers) // per_machine
    groups: tuple[int, ...] = ()
    if kind == "pipeline" and draw(st.booleans()):
        groups = tuple(draw(st.lists(st.integers(0, 3), min_size=machines, max_size=machines)))
    return Job(workers, per_machine, draw(st.integers(1, 100)), groups)


@given(jobs(), st.data())
@settings(max_examples=400, deadline=None)
def test_it_is_the_way_that_is_taken(job: Job, data: st.DataObject) -> None:
    """Whatever machine is lost, whenever, and however far the survivors were: as the planner decides then."""
    slot = data.draw(st.integers(0, job.machines - 1))
    committed = data.draw(st.integers(0, 50))
    at = committed + data.draw(st.integers(1, 50))
    standings = {}
    for rank, worker in enumerate(job.workers):
        lost = rank in job.ranks(slot)
        ahead = not lost and data.draw(st.booleans())
        standings[rank] = Reported(
            rank,
            generation=3,
            iteration=None if lost else at + ahead,
            live=not lost,
            stages=worker.stages,
            pipeline_known=True,
            holds=worker.holds,
            undoable=(0,) if ahead and worker.stages else (),
            pipeline=worker.pipeline,
            group=job.group(rank // job.per_machine),
        )
    taken = make_plan(standings, workers=job.per_machine, committed=committed)
    told = forecast(job).machines[slot]
    assert told.way == WAYS.get(taken.way, Protection.CHECKPOINT)
    if told.way == Protection.LOGGING:
        loaded = {rank // job.per_machine for rank, task in taken.tasks.items() if task.load is not None}
        assert told.rolled_back == tuple(sorted(loaded))


@given(jobs())
@settings(max_examples=400, deadline=None)
def test_section_3_in_its_own_words(job: Job) -> None:
    """A replica on another machine; else a pipeline and its logs; else the checkpoint."""
    for told in forecast(job).machines:
        here = job.ranks(told.machine)
        elsewhere = {w.holds for rank, w in enumerate(job.workers) if rank not in here}
        several = len({w.holds for w in job.workers}) < len(job.workers)
        if all(job.workers[rank].holds in elsewhere for rank in here):
            expected = {Protection.REPLICATION}
        elif not all(worker.stages for worker in job.workers):
            expected = {Protection.CHECKPOINT}
        elif several:  # as long as somebody logged what the replay needs: `make_plan` is asked above
            expected = {Protection.LOGGING, Protection.CHECKPOINT}
        elif any(job.group(slot) != job.group(told.machine) for slot in range(job.machines)):
            expected = {Protection.LOGGING}
        else:
            expected = {Protection.CHECKPOINT}
        assert told.way in expected, told.why


def measured(workers: tuple[Worker, ...], **facts: object) -> tuple[Worker, ...]:
    return tuple(replace(worker, measured=Measured(**facts)) for worker in workers)  # type: ignore[arg-type]


def chain(compute_s: tuple[float, ...], sent: int) -> tuple[Worker, ...]:
    """A worker on each machine, and as many bytes over every boundary in each direction."""
    last = len(compute_s) - 1
    return tuple(
        replace(
            worker,
            measured=Measured(
                iteration_s=1.0,
                compute_s=compute_s[i],
                bubble_s=1.0 - compute_s[i],
                sent={other: sent for other in (i - 1, i + 1) if 0 <= other <= last},
                state_bytes=4_000,
                save_bytes_per_s=2_000.0,
                link_bytes_per_s=1_000.0,
                copy_bytes_per_s=10_000.0,
            ),
        )
        for i, worker in enumerate(pipeline(len(compute_s)))
    )


def test_a_lost_stage_loads_and_replays() -> None:
    told = forecast(Job(chain((0.2, 0.3, 0.4), 50), 1, 20))
    middle = told.machines[1]
    assert middle.way == Protection.LOGGING
    assert (middle.load_s, middle.transfer_s) == (2.0, 0.0)
    assert middle.again_s == pytest.approx(10 * 0.3)
    assert middle.expected_s == pytest.approx(5.0)
    assert middle.checkpoint_s == pytest.approx(2.0 + 10 * 1.0)
    assert told.logging is not None
    assert told.logging.worth_it
    assert told.logging.log_bytes == 20 * 4 * 50
    assert not told.unknown


@pytest.mark.parametrize("groups", [(0, 0, 1, 2), (0, 1, 1, 1), (0, 0, 1, 1)])
def test_replay_costs_what_the_grouping_planner_says(groups: tuple[int, ...]) -> None:
    """§5.3: R(G) of each machine's group, and the bytes of all boundaries between groups."""
    compute_s = (0.1, 0.2, 0.15, 0.3)
    told = forecast(Job(chain(compute_s, 50), 1, 20, groups))
    together = [[slot for slot in range(4) if groups[slot] == g] for g in dict.fromkeys(groups)]
    profile = ChainProfile(compute_s, (100,) * 3)
    plan = evaluate_groups(profile, together, checkpoint_interval=20, bandwidth=1_000.0)
    assert [way.again_s for way in told.machines] == pytest.approx(list(plan.per_machine_recovery_s))
    assert told.logging is not None
    assert told.logging.log_bytes == plan.log_bytes


def test_a_replica_gives_its_state() -> None:
    workers = measured(data_parallel(4), iteration_s=1.0, state_bytes=4_000, link_bytes_per_s=1_000.0)
    told = forecast(Job(workers, 2, 100))
    assert [way.way for way in told.machines] == [Protection.REPLICATION] * 2
    assert told.machines[0].expected_s == pytest.approx(2 * 4.0)  # two workers, over one link
    assert told.machines[0].rolled_back == ()
    assert "a replica is on machine 1" in told.machines[0].why
    assert told.logging is None


def test_replicas_on_the_same_machine_do_not_count() -> None:
    told = forecast(Job(mesh(2, 2, stage_first=True), 2, 100))
    assert [way.way for way in told.machines] == [Protection.LOGGING] * 2
    assert told.machines[1].why.startswith("stage 1: no replica is elsewhere")
    assert told.machines[1].rolled_back == (1,)


def test_a_machine_with_one_worker_that_nobody_else_is_like() -> None:
    """Stage 1 has no replica elsewhere. For its replay all replicas of stage 0 would go back, too."""
    told = forecast(Job((*pipeline(3), Worker(("stage 0",))), 2, 100)).machines[0]
    assert told.way == Protection.CHECKPOINT
    assert told.rolled_back == (0, 1)


def test_logging_that_is_not_worth_it() -> None:
    """§5.4: the copies do not fit into the bubble."""
    workers = tuple(
        replace(worker, measured=replace(worker.measured, bubble_s=0.001)) for worker in chain((0.5,) * 3, 50)
    )
    advice = forecast(Job(workers, 1, 20)).logging
    assert advice is not None
    assert not advice.worth_it
    assert any("slow training down" in reason for reason in advice.reasons)


def test_nothing_is_measured_yet() -> None:
    """Before training: the ways, their reasons, and what is missing."""
    told = forecast(Job(pipeline(3), 1, 20))
    assert {way.way for way in told.machines} == {Protection.LOGGING}
    assert {way.expected_s for way in told.machines} == {None}
    assert told.logging is None
    assert told.unknown == ("Not all is measured yet: ask again after the first ten iterations.",)
    assert "?" in str(told)


def test_for_programs_and_for_people() -> None:
    told = forecast(Job(chain((0.2, 0.3, 0.4), 50), 1, 20))
    data = json.loads(json.dumps(told.to_dict()))
    assert data["machines"][1]["way"] == "logging"
    assert data["machines"][1]["expected_s"] == pytest.approx(5.0)
    assert all(fact["source"].startswith(("measured", "assumed")) for fact in data["facts"])
    lines = str(told).splitlines()
    assert lines[2].startswith("1        logging   5 s")
    assert "Logging is worth it." in lines


def test_jobs_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="on no machines of 2"):
        Job(pipeline(3), 2, 20)
    with pytest.raises(UsageError, match="groups are told for 3 machines"):
        Job(pipeline(3), 1, 20, (0, 0))
