"""The pipelines of a LayerStack after a loss for which no machine comes, of the machines that are left.

They are those of `reconfigure` (Oobleck §5.1): a pipeline goes on with the machines that it has left, borrows
some from others where it would be too short, and merges with others where none can lend any. There are as
many pipelines as before where the machines suffice for them, so that the next loss can be answered, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from swift_ft.config.run_plan import plan_from_json
from swift_ft.errors import UsageError
from swift_ft.recovery.job_state import State
from swift_ft.recovery.layout.losses import reconfigure


class NextPipelines(NamedTuple):
    """The pipelines of the next world, or why there are none.

    Attributes:
        machines: of each pipeline, in the order of its stages.
        reason: why there are none.
    """

    machines: tuple[tuple[str, ...], ...] = ()
    reason: str = ""


class Sizes(NamedTuple):
    """The work that a plan deals to pipelines.

    Attributes:
        layers: how many the model has.
        microbatches: of all pipelines in an iteration; 0 if the script does not take them from a plan.
    """

    layers: int
    microbatches: int


def next_pipelines(state: State, own: Collection[str]) -> NextPipelines | None:
    """The pipelines of the machines that are left; None where pipelines have to be alike.

    These are pipelines with several stages on a worker, whose schedules do not take any number of
    microbatches, and those that share a machine.

    Args:
        own: the machines that are left, without guests.
    """
    before, statuses = _slots_of_pipelines(state), state.round.statuses
    if before is None or any(len(status.stages) != 1 for status in statuses.values()):
        return None
    membership, each = state.membership, state.shape.workers_per_machine
    lost = {slot for slots in before for slot in slots if membership.members.get(slot) not in own}
    least = -(-max(status.min_stages for status in statuses.values()) // each)
    try:
        after = reconfigure(before, lost, min_nodes=least, tolerate=len(before) - 1)
    except UsageError as error:
        return NextPipelines(reason=str(error))
    if len(after) != len(before) and not sizes_of(state).microbatches:
        return NextPipelines(
            reason=f"only {len(after)} of {len(before)} pipelines can follow, and the script does not give "
            "model.microbatches to its schedule, so each iteration would have fewer samples"
        )
    most = sizes_of(state).layers // each
    return NextPipelines(
        tuple(tuple(membership.members[slot] for slot in _by_layers(state, slots)[:most]) for slots in after)
    )


def sizes_of(state: State) -> Sizes:
    """The work of a job whose pipelines are replicas, as its workers have reported it."""
    layouts, statuses = state.layouts, state.round.statuses
    layers = sum(len(layouts.placed[rank]) for rank in layouts.pipelines[0])
    reported = [[statuses[rank].microbatches for rank in ranks] for ranks in layouts.pipelines]
    counts = [max(one) for one in reported]
    return Sizes(layers, sum(counts) if all(counts) else 0)


def is_plan_for(text: str, stages: Sequence[int], sizes: Sizes) -> bool:
    """Whether a text is a plan of pipelines with so many stages, for this work."""
    try:
        plan = plan_from_json(text)
    except UsageError:
        return False
    cuts = [len(pipeline.cut) for pipeline in plan.pipelines]
    return cuts == [*stages] and (plan.layers, sum(plan.microbatches)) == sizes


def _slots_of_pipelines(state: State) -> list[list[int]] | None:
    """The slots of each pipeline, by stage; None if there is one pipeline only, or two share a slot."""
    pipelines = [[*dict.fromkeys(map(state.slot_of_rank, ranks))] for ranks in state.layouts.pipelines]
    every = [slot for slots in pipelines for slot in slots]
    return pipelines if pipelines and len({*every}) == len(every) else None


def _by_layers(state: State, slots: Sequence[int]) -> list[int]:
    """Slots in the order of the first layers that they hold: most of these then stay where they are."""
    placed = state.layouts.placed
    return sorted(slots, key=lambda slot: (min(min(placed[rank]) for rank in state.ranks_of(slot)), slot))
