"""The pipelines of a LayerStack after a loss for which no machine comes, of the machines that are left.

They are those of `reconfigure` (Oobleck §5.1): a pipeline goes on with the machines that it has left, borrows
some from others where it would be too short, and merges with others where none can lend any. There are as
many pipelines as before where the machines suffice for them, so that the next loss can be answered, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
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

    def dealt(self, each: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The machines by slot, and the number of stages of each pipeline, ``each`` workers a machine."""
        return tuple(chain(*self.machines)), tuple(len(machines) * each for machines in self.machines)


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
    members = {slot: machine for slot, machine in state.membership.members.items() if machine in own}
    pipelines = state.layouts.pipelines
    return pipelines_of(state, pipelines, sizes_of(state) if pipelines else Sizes(0, 0), members)


def pipelines_of(
    state: State, pipelines: Sequence[Sequence[int]], sizes: Sizes, members: Mapping[int, str]
) -> NextPipelines | None:
    """Some pipelines without the slots that no machine fills; None where they have to be alike.

    Args:
        state: what the present workers have reported.
        pipelines: the ranks of each; empty if there is one only.
        sizes: their work.
        members: the machines of slots.
    """
    statuses, each = state.round.statuses, state.shape.workers_per_machine
    before = _slots_of_pipelines(state, pipelines)
    if before is None or any(len(status.stages) != 1 for status in statuses.values()):
        return None
    lost = {slot for slots in before for slot in slots if slot not in members}
    least = -(-max(status.min_stages for status in statuses.values()) // each)
    try:
        after = reconfigure(before, lost, min_nodes=least, tolerate=len(before) - 1)
    except UsageError as error:
        return NextPipelines(reason=str(error))
    if len(after) != len(before) and not sizes.microbatches:
        return NextPipelines(
            reason=f"only {len(after)} of {len(before)} pipelines can follow, and the script does not give "
            "model.microbatches to its schedule, so each iteration would have fewer samples"
        )
    if sizes.microbatches % len(after) and not takes_unlike(state):
        return NextPipelines(
            reason=f"{len(after)} pipelines cannot have equally many of {sizes.microbatches} microbatches, "
            "and nothing says that the script's batches follow unlike numbers: give GlobalBatches to "
            "Session(state), or deal by model.counts"
        )
    most = sizes.layers // each
    formed = ([members[slot] for slot in slots] for slots in after)
    return NextPipelines(tuple(tuple(_by_layers(state, machines)[:most]) for machines in formed))


def sizes_of(state: State) -> Sizes:
    """The work of a job whose pipelines are replicas, as its workers have reported it."""
    layouts, statuses = state.layouts, state.round.statuses
    layers = sum(len(layouts.placed[rank]) for rank in layouts.pipelines[0])
    reported = [[statuses[rank].microbatches for rank in ranks] for ranks in layouts.pipelines]
    counts = [max(one) for one in reported]
    return Sizes(layers, sum(counts) if all(counts) else 0)


def takes_unlike(state: State) -> bool:
    """Whether the script's batches follow unlike numbers of microbatches.

    One that gives each pipeline an equal part of the batch would train with another average of gradients.
    """
    return any(status.takes_unlike for status in state.round.statuses.values())


def is_plan_for(text: str, stages: Sequence[int], sizes: Sizes) -> bool:
    """Whether a text is a plan of pipelines with so many stages, for this work."""
    try:
        plan = plan_from_json(text)
    except UsageError:
        return False
    cuts = [len(pipeline.cut) for pipeline in plan.pipelines]
    return cuts == [*stages] and (plan.layers, sum(plan.microbatches)) == sizes


def _slots_of_pipelines(state: State, pipelines: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """The slots of each pipeline, by stage; None if there is one pipeline only, or two share a slot."""
    found = [[*dict.fromkeys(map(state.slot_of_rank, ranks))] for ranks in pipelines]
    every = [slot for slots in found for slot in slots]
    return found if found and len({*every}) == len(every) else None


def _by_layers(state: State, machines: Sequence[str]) -> list[str]:
    """Machines in the order of the first layers that they hold: most of these then stay where they are.

    One that holds none stays behind the machine before it.
    """
    placed, slots, places = state.layouts.placed, state.membership.slots, dict[str, tuple[int, int]]()
    place = 0, 0
    for machine in machines:
        if (slot := slots.get(machine)) is not None:
            place = min(min(placed[rank]) for rank in state.ranks_of(slot)), slot
        places[machine] = place
    return sorted(machines, key=places.__getitem__)
