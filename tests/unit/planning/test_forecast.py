"""How each machine would recover, and what that would cost (paper §3, §5.3, §5.4)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.costs.chain_profile import ChainProfile
from swift_ft.costs.job import Job, Measured, ScriptGroup, Worker
from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.schedule_orders import Schedule
from swift_ft.errors import UsageError
from swift_ft.planning.forecast import Protection, forecast
from swift_ft.planning.grouping.groups import evaluate_groups
from swift_ft.planning.layout.makespan import StageTime, makespan_ns
from swift_ft.planning.layout.shared_makespan import shared_makespan_ns
from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.plan import RecoveryMode, make_plan

PROTECTION = {RecoveryMode.REPLICA: Protection.REPLICATION, RecoveryMode.REPLAY: Protection.LOGGING}


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
def test_the_forecast_is_what_the_planner_decides(job: Job, data: st.DataObject) -> None:
    """For any lost machine, at any time, and for any progress of the survivors."""
    slot = data.draw(st.integers(0, job.machines - 1))
    committed = data.draw(st.integers(0, 50))
    at = committed + data.draw(st.integers(1, 50))
    statuses = {}
    for rank, worker in enumerate(job.workers):
        lost = rank in job.ranks(slot)
        ahead = not lost and data.draw(st.booleans())
        statuses[rank] = StatusReported(
            rank=rank,
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
    plan = make_plan(statuses, workers_per_machine=job.per_machine, committed=committed)
    predicted = forecast(job).machines[slot]
    assert predicted.protection == PROTECTION.get(plan.mode, Protection.CHECKPOINT)
    if predicted.protection == Protection.LOGGING:
        loaded = {rank // job.per_machine for rank, task in plan.tasks.items() if task.load is not None}
        assert predicted.rolled_back == tuple(sorted(loaded))


@given(jobs())
@settings(max_examples=400, deadline=None)
def test_section_3_in_its_own_words(job: Job) -> None:
    """A replica on another machine; else a pipeline and its logs; else the checkpoint."""
    for predicted in forecast(job).machines:
        here = job.ranks(predicted.machine)
        elsewhere = {w.holds for rank, w in enumerate(job.workers) if rank not in here}
        several = len({w.holds for w in job.workers}) < len(job.workers)
        if all(job.workers[rank].holds in elsewhere for rank in here):
            expected = {Protection.REPLICATION}
        elif not all(worker.stages for worker in job.workers):
            expected = {Protection.CHECKPOINT}
        elif several:  # depends on whether the needed messages were logged: `make_plan` decides, see above
            expected = {Protection.LOGGING, Protection.CHECKPOINT}
        elif any(job.group(slot) != job.group(predicted.machine) for slot in range(job.machines)):
            expected = {Protection.LOGGING}
        else:
            expected = {Protection.CHECKPOINT}
        assert predicted.protection in expected, predicted.why


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
    answer = forecast(Job(chain((0.2, 0.3, 0.4), 50), 1, 20))
    middle = answer.machines[1]
    assert middle.protection == Protection.LOGGING
    assert (middle.load_s, middle.transfer_s) == (2.0, 0.0)
    assert middle.again_s == pytest.approx(10 * 0.3)
    assert middle.expected_s == pytest.approx(5.0)
    assert middle.checkpoint_s == pytest.approx(2.0 + 10 * 1.0)
    assert answer.logging is not None
    assert answer.logging.worth_it
    assert answer.logging.log_bytes == 20 * 4 * 50
    assert not answer.unknown


@pytest.mark.parametrize("groups", [(0, 0, 1, 2), (0, 1, 1, 1), (0, 0, 1, 1)])
def test_replay_costs_what_the_grouping_planner_says(groups: tuple[int, ...]) -> None:
    """§5.3: R(G) of each machine's group, and the bytes of all boundaries between groups."""
    compute_s = (0.1, 0.2, 0.15, 0.3)
    answer = forecast(Job(chain(compute_s, 50), 1, 20, groups))
    together = [[slot for slot in range(4) if groups[slot] == g] for g in dict.fromkeys(groups)]
    profile = ChainProfile(compute_s, (100,) * 3)
    plan = evaluate_groups(profile, together, checkpoint_interval=20, bandwidth=1_000.0)
    assert [machine.again_s for machine in answer.machines] == pytest.approx(
        list(plan.per_machine_recovery_s)
    )
    assert answer.logging is not None
    assert answer.logging.log_bytes == plan.log_bytes


def test_a_replica_sends_its_state() -> None:
    workers = measured(data_parallel(4), iteration_s=1.0, state_bytes=4_000, link_bytes_per_s=1_000.0)
    answer = forecast(Job(workers, 2, 100))
    assert [machine.protection for machine in answer.machines] == [Protection.REPLICATION] * 2
    assert answer.machines[0].expected_s == pytest.approx(2 * 4.0)  # two workers, over one link
    assert answer.machines[0].rolled_back == ()
    assert "a replica is on machine 1" in answer.machines[0].why
    assert answer.logging is None


def test_replicas_of_the_shards_of_a_stage() -> None:
    """Two stages of two replicas of two shards, a machine for each replica of a stage."""
    workers = tuple(
        Worker((f"stage {rank // 4}, shard {rank % 2} of 2",), (rank // 4,), rank % 4) for rank in range(8)
    )
    groups = tuple(ScriptGroup(tuple(range(first, first + 4)), True, 5, "reduce_scatter") for first in (0, 4))
    answer = forecast(Job(workers, 2, 100, script=groups))
    assert [machine.protection for machine in answer.machines] == [Protection.REPLICATION] * 4
    assert answer.machines[3].why == (
        "stage 1, shard 0 of 2, stage 1, shard 1 of 2: a replica is on machine 2"
    )
    assert {group.way for group in answer.script} == {"replayed together"}


def test_a_copy_in_memory_is_nearer_than_the_checkpoint() -> None:
    measured = Measured(iteration_s=2.0, state_bytes=1_000, save_bytes_per_s=10.0, link_bytes_per_s=500.0)
    job = Job((Worker((), measured=measured),) * 3, 1, 100, snapshot_every=10)
    for machine in forecast(job).machines:
        assert machine.protection == Protection.MEMORY
        assert (machine.load_s, machine.transfer_s, machine.again_s) == (0.0, 2.0, 10.0)
        assert machine.checkpoint_s == 100.0 + 100.0
        assert machine.rolled_back == (0, 1, 2)
        assert f"machine {(machine.machine + 1) % 3} holds a copy, at most 10 iterations old" in machine.why
    assert {m.protection for m in forecast(replace(job, snapshot_every=None)).machines} == {
        Protection.CHECKPOINT
    }


def test_a_copy_in_memory_is_in_another_failure_domain() -> None:
    job = Job((Worker(()),) * 4, 1, 100, snapshot_every=10, domains=("a", "a", "b", "b"))
    whys = [machine.why for machine in forecast(job).machines]
    assert [next(slot for slot in range(4) if f"machine {slot} holds" in why) for why in whys] == [2, 3, 0, 1]


def test_replicas_on_the_same_machine_do_not_count() -> None:
    answer = forecast(Job(mesh(2, 2, stage_first=True), 2, 100))
    assert [machine.protection for machine in answer.machines] == [Protection.LOGGING] * 2
    assert answer.machines[1].why.startswith("stage 1: no replica elsewhere")
    assert answer.machines[1].rolled_back == (1,)


def test_a_machine_with_one_worker_without_a_replica() -> None:
    """Stage 1 has no replica elsewhere. For its replay all replicas of stage 0 would roll back, too."""
    answer = forecast(Job((*pipeline(3), Worker(("stage 0",))), 2, 100)).machines[0]
    assert answer.protection == Protection.CHECKPOINT
    assert answer.rolled_back == (0, 1)


def test_logging_that_is_not_worth_it() -> None:
    """§5.4: the copies do not fit into the bubble."""
    workers = tuple(
        replace(worker, measured=replace(worker.measured, bubble_s=0.001)) for worker in chain((0.5,) * 3, 50)
    )
    advice = forecast(Job(workers, 1, 20)).logging
    assert advice is not None
    assert not advice.worth_it
    assert any("slow training down" in reason for reason in advice.reasons)


def test_without_a_spare_another_machine_computes_for_two() -> None:
    """The first one of the others, as in a job where no machine has a guest."""
    answer = forecast(Job(chain((0.7, 0.5, 0.2), 50), 1, 20))
    assert [machine.host for machine in answer.machines] == [1, 0, 0]
    assert [machine.hosted_s for machine in answer.machines] == pytest.approx([1.2, 1.2, 1.0])
    line = next(line for line in str(answer).splitlines() if line.startswith("Without a spare"))
    assert line.endswith(
        "of machine 0 machine 1; of machines 1 and 2 machine 0. An iteration then takes 1.20 s or longer."
    )


def test_without_a_spare_layers_are_shared_anew() -> None:
    """Fourteen equal layers on two machines, seven on each, and no iteration is faster than now."""
    layers = (LayerProfile(1_000, 2_000, 0),) * 14
    answer = forecast(replace(Job(chain((0.7, 0.5, 0.2), 50), 1, 20), layers=layers))
    assert [machine.shared_s for machine in answer.machines] == pytest.approx([1.0, 1.0, 1.0])
    assert "Then layers move, and it takes 1.00 s or longer." in str(answer)
    slow = forecast(replace(Job(chain((1.0, 1.0, 0.8), 50), 1, 20), layers=layers))
    assert [machine.shared_s for machine in slow.machines] == pytest.approx([1.4, 1.4, 1.4])


def test_by_the_schedule_itself() -> None:
    """Six equal layers, 1F1B, two microbatches: what two stages of one machine add to the iteration."""
    layers = (LayerProfile(100_000_000, 200_000_000, 0),) * 6
    job = Job(chain((0.6, 0.6, 0.6), 50), 1, 20, layers=layers, layout=(2, 2, 2), microbatches=3)
    answer = forecast(replace(job, schedule=Schedule.ONE_F_ONE_B))
    now = makespan_ns([StageTime(200_000_000, 400_000_000)] * 3, 3)
    then = shared_makespan_ns([StageTime(200_000_000, 400_000_000)] * 3, "bbc", 3)
    assert answer.machines[0].hosted_s == pytest.approx(1.0 + (then - now) / 1e9)
    shared_s, hosted_s = answer.machines[0].shared_s, answer.machines[0].hosted_s
    assert shared_s is not None
    assert hosted_s is not None
    assert shared_s < hosted_s
    assert not answer.machines[0].is_bound
    assert "or longer" not in str(answer)


def test_of_two_pipelines_the_one_that_has_lost_a_machine() -> None:
    """Its guest is on another one of its machines, and its layers move among these only."""
    layers = (LayerProfile(100_000_000, 200_000_000, 0),) * 6
    one = chain((0.6, 0.6, 0.6), 50)
    both = tuple(
        replace(worker, holds=(f"layers of stage {rank % 3}",), pipeline=rank - rank % 3)
        for rank, worker in enumerate(one * 2)
    )
    job = Job(both, 1, 20, layers=layers, layout=(2, 2, 2, 3, 1, 2), microbatches=3)
    answer = forecast(replace(job, schedule=Schedule.ONE_F_ONE_B))
    assert [machine.host for machine in answer.machines] == [1, 0, 0, 4, 3, 3]
    assert {machine.protection for machine in answer.machines} == {Protection.REPLICATION}
    now = makespan_ns([StageTime(n * 100_000_000, n * 200_000_000) for n in (3, 1, 2)], 3)
    then = shared_makespan_ns([StageTime(n * 100_000_000, n * 200_000_000) for n in (3, 1, 2)], "bbc", 3)
    assert answer.machines[3].hosted_s == pytest.approx(1.0 + (then - now) / 1e9)
    alone = forecast(replace(job, workers=one, layout=(2, 2, 2), schedule=Schedule.ONE_F_ONE_B))
    quicker_s = (now - makespan_ns([StageTime(200_000_000, 400_000_000)] * 3, 3)) / 1e9
    for slot in range(3):  # an iteration takes as long as the slower pipeline: less is added to that
        hosted_s, shared_s = alone.machines[slot].hosted_s, alone.machines[slot].shared_s
        assert hosted_s is not None
        assert shared_s is not None
        assert answer.machines[slot].hosted_s == pytest.approx(max(1.0, hosted_s - quicker_s))
        assert answer.machines[slot].shared_s == pytest.approx(max(1.0, shared_s - quicker_s))
        assert answer.machines[slot].rerouted is None


def test_microbatches_go_to_the_other_pipeline() -> None:
    """First with the layers where they are, then with layers that have moved as well."""
    layers = (LayerProfile(100_000_000, 200_000_000, 0),) * 6
    both = tuple(
        replace(worker, holds=(f"layers of stage {rank % 3}",), pipeline=rank - rank % 3)
        for rank, worker in enumerate(chain((0.6, 0.6, 0.6), 50) * 2)
    )
    job = Job(both, 1, 20, layers=layers, layout=(2,) * 6, microbatches=8, schedule=Schedule.ONE_F_ONE_B)
    apart = forecast(job).machines[4]
    answer = forecast(replace(job, shares_microbatches=True))
    machine = answer.machines[4]
    assert apart.rerouted is None
    stages = [StageTime(200_000_000, 400_000_000)] * 3
    now = makespan_ns(stages, 8)
    assert machine.rerouted is not None
    other, own = machine.rerouted
    assert (other + own, other > own) == (16, True)
    then = max(makespan_ns(stages, other), shared_makespan_ns(stages, "aba", own))
    assert machine.rerouted_s == pytest.approx(1.0 + (then - now) / 1e9)
    assert machine.hosted_s == apart.hosted_s
    assert machine.hosted_s is not None
    assert machine.rerouted_s is not None
    assert machine.shared_s is not None
    assert apart.shared_s is not None
    assert machine.shared_s < apart.shared_s < machine.hosted_s
    assert machine.shared_s <= machine.rerouted_s < machine.hosted_s
    assert "Once microbatches go to other pipelines, it takes" in str(answer)


def test_a_machine_that_computes_for_two_pipelines_bounds_the_forecast() -> None:
    """Pipelines of one machine each: the guest is beside another pipeline's worker."""
    layers = (LayerProfile(100_000_000, 200_000_000, 0),) * 2
    workers = tuple(
        replace(worker, holds=("all layers",), stages=(0,), pipeline=rank)
        for rank, worker in enumerate(chain((0.6, 0.6), 50))
    )
    job = Job(workers, 1, 20, layers=layers, layout=(2, 2), microbatches=2, schedule=Schedule.GPIPE)
    answer = forecast(replace(job, shares_microbatches=True)).machines[0]
    assert (answer.host, answer.rerouted) == (1, None)
    assert answer.hosted_s == pytest.approx(1.2)


def test_a_machine_alone_has_no_host() -> None:
    answer = forecast(Job(data_parallel(2), 2, 20))
    assert [(machine.host, machine.hosted_s) for machine in answer.machines] == [(None, None)]
    assert "Without a spare" not in str(answer)


def test_nothing_is_measured_yet() -> None:
    """Before training: the protection, its reasons, and the missing measurements."""
    answer = forecast(Job(pipeline(3), 1, 20))
    assert {machine.protection for machine in answer.machines} == {Protection.LOGGING}
    assert {machine.expected_s for machine in answer.machines} == {None}
    assert answer.logging is None
    assert answer.unknown == ("Not all is measured yet: ask again after the first ten iterations.",)
    assert "?" in str(answer)


def test_the_forecast_as_json_and_as_a_table() -> None:
    answer = forecast(Job(chain((0.2, 0.3, 0.4), 50), 1, 20))
    data = json.loads(json.dumps(answer.to_dict()))
    assert data["machines"][1]["protection"] == "logging"
    assert data["machines"][1]["expected_s"] == pytest.approx(5.0)
    assert all(fact["source"].startswith(("measured", "assumed")) for fact in data["facts"])
    lines = str(answer).splitlines()
    assert lines[2].startswith("1        logging     5.00 s")
    assert "Logging is worth it." in lines


def test_impossible_jobs_are_refused() -> None:
    with pytest.raises(UsageError, match="do not fill machines of 2"):
        Job(pipeline(3), 2, 20)
    with pytest.raises(UsageError, match="groups are given for 3 machines"):
        Job(pipeline(3), 1, 20, (0, 0))


def test_what_becomes_of_what_a_script_communicates() -> None:
    """Stage 1 is on two machines, whose workers share it: both go back, and nobody else."""
    workers = tuple(Worker((f"part {rank}",), (stage,)) for rank, stage in enumerate((0, 1, 1, 2)))
    groups = (
        ScriptGroup((0, 1, 2, 3), together=False, nbytes=4),
        ScriptGroup((1, 2), together=True, nbytes=6_300_000, why="train.py:7 (main) calls allreduce"),
    )
    answer = forecast(Job(workers, 1, 20, script=groups))
    assert [one.protection for one in answer.machines] == [Protection.LOGGING] * 4
    assert [one.rolled_back for one in answer.machines] == [(0,), (1, 2), (1, 2), (3,)]
    lines = str(answer).splitlines()
    assert "The script's group of workers 0, 1, 2 and 3: 4 B/iteration, logged" in lines
    told = "The script's group of workers 1 and 2: 6.30 MB/iteration, replayed together"
    assert f"{told} (train.py:7 (main) calls allreduce)" in lines
    assert answer.to_dict()["script"][1]["members"] == (1, 2)


def test_a_script_for_which_there_is_only_the_checkpoint() -> None:
    call = "train.py:9 (main) calls alltoall"
    everybody = ScriptGroup((0, 1, 2), together=True, nbytes=8, why=call)
    answer = forecast(Job(pipeline(3), 1, 20, script=(everybody,)))
    assert [one.protection for one in answer.machines] == [Protection.CHECKPOINT] * 3
    assert call in answer.machines[0].why
    assert f"workers 0, 1 and 2: 8 B/iteration, all return to the checkpoint ({call})" in str(answer)
