"""The model of a job's control plane: what must hold whatever single steps cost."""

from dataclasses import replace

import pytest

from benchmarks.scale.model import Costs, Tree, checkpoint, recovery
from benchmarks.scale.simulated import tree_of

COSTS = Costs(
    store_op_s=20e-6,
    round_trip_s=100e-6,
    store_op_cpu_s=20e-6,
    hop_s=100e-6,
    send_s=10e-6,
    receive_s=15e-6,
    per_byte_s=2e-9,
    decode_s=5e-6,
    encode_s=2e-6,
    apply_s=5e-6,
    plan_s=9e-6,
    wake_s=30e-6,
    report_s=(0.01, 0.05),
)
FREE = replace(
    COSTS,
    **dict.fromkeys(("store_op_s", "store_op_cpu_s", "send_s", "receive_s", "per_byte_s", "wake_s"), 0.0),  # type: ignore[arg-type]
    **dict.fromkeys(("decode_s", "encode_s", "apply_s", "plan_s"), 0.0),  # type: ignore[arg-type]
)


def test_the_tree_is_the_one_of_the_project() -> None:
    small, two, large = tree_of(32), tree_of(64), tree_of(1024)
    assert set(small.parents) == {None}
    assert [slot for slot, parent in enumerate(two.parents) if parent is None] == [0]
    assert two.served[:2] == (64, 1)
    assert (large.served[0], large.served[32]) == (1024, 32)


def test_a_recovery_takes_as_long_as_its_waits_where_nothing_costs() -> None:
    outcome = recovery(tree_of(64), FREE)
    hops_and_waits = 0.05 + FREE.seen_s + 0.03  # the slowest report, the loss, and the way up and down
    assert FREE.report_s[0] < outcome.wall_s < hops_and_waits
    assert outcome.cpu_s == 0.0
    assert list(outcome.phases.values()) == sorted(outcome.phases.values())


def test_each_event_is_written_once_and_merged_by_the_heads() -> None:
    outcome = recovery(tree_of(256), COSTS)
    assert outcome.blocks <= 2 + 2 + 1  # the loss, the survivors', the newcomer's, which comes later or not


def test_a_machine_without_heads_writes_a_block_of_its_own() -> None:
    flat = Tree.of((None,) * 64)
    assert recovery(flat, COSTS).blocks == 2 + 64 + 1
    assert recovery(flat, COSTS).operations > 64 * recovery(tree_of(64), COSTS).operations / 2


def test_the_cost_of_a_participant_grows_with_the_job_and_that_of_the_store_does_not() -> None:
    small, large = recovery(tree_of(64), COSTS), recovery(tree_of(512), COSTS)
    assert large.cpu_s / 512 > 4 * small.cpu_s / 64
    assert large.operations / 512 <= small.operations / 64


def test_two_cores_are_slower_than_one_for_each() -> None:
    assert recovery(tree_of(256), COSTS, cores=2).wall_s > recovery(tree_of(256), COSTS).wall_s


def test_the_same_seed_gives_the_same_outcome() -> None:
    assert recovery(tree_of(64), COSTS, seed=3) == recovery(tree_of(64), COSTS, seed=3)


@pytest.mark.parametrize("machines", [64, 256])
def test_parts_of_a_checkpoint_are_merged_on_the_way(machines: int) -> None:
    outcome = checkpoint(tree_of(machines), COSTS, spread_s=2.0)
    assert 2.0 / 2 / COSTS.parts_linger_s <= outcome.blocks <= 2.0 / COSTS.parts_linger_s + 3
    assert outcome.wall_s < 2.0 + 3 * COSTS.parts_linger_s
