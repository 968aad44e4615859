"""What is shown of the script's operations to whoever verifies a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swift_ft.errors import UsageError
from swift_ft.runtime.script.script_phases import ScriptPhase, ScriptPhases
from swift_ft.torch_adapters.lasting_group import LastingGroup
from swift_ft.torch_adapters.lasting_work import LastingWork
from swift_ft.torch_adapters.script_operations import Operation
from swift_ft.torch_core import outputs
from swift_ft.torch_core.outputs import Output

Shown = list[tuple[str, bool, list[float]]]


@pytest.fixture
def shown() -> Iterator[Shown]:
    """The place, whether it was received, and the first number of each tensor."""
    found: Shown = []

    def note(output: Output) -> None:
        found.append((output.place, output.received, [float(t[0]) for t in output.tensors.values()]))

    outputs.listen("test", note)
    yield found
    outputs.listen("test", None)


@pytest.fixture
def phases() -> ScriptPhases:
    phases = ScriptPhases()
    phases.begin_step()
    return phases


def begun(
    phases: ScriptPhases, name: str, given: float, *, into: torch.Tensor | None = None
) -> Callable[[], None]:
    """Begins an operation of two workers. What it gives comes into a tensor of its own, or into the same."""
    own = torch.tensor([given])
    args = [[own], [own]] if into is None else [[into], [own]]
    end = phases.begin(Operation.of(name, "0", (0, 1), args))
    assert end is not None
    return end


def test_what_is_given_and_what_has_come_are_shown(phases: ScriptPhases, shown: Shown) -> None:
    into = torch.zeros(1)
    end = begun(phases, "allgather", 1.0, into=into)
    assert shown == [("allgather on group 0", False, [1.0])]
    into.fill_(3.0)
    end()
    assert shown[1:] == [("the result of allgather on group 0, operation 1 of the step", True, [3.0])]


def test_results_have_the_place_in_which_operations_began(phases: ScriptPhases, shown: Shown) -> None:
    """The script may wait for them in any order, and in another one when the step is run again."""
    places = []
    for order in ((0, 1), (1, 0)):
        phases.begin_step()
        ends = [begun(phases, "allreduce", 1.0), begun(phases, "allreduce", 2.0)]
        del shown[:]
        for number in order:
            ends[number]()
        places.append({place: values for place, _, values in shown})
    assert places[0] == places[1]
    assert [*places[0].values()] == [[1.0], [2.0]]


@pytest.mark.parametrize("name", ["reduce", "gather", "send", "barrier"])
def test_what_fills_no_tensor_everywhere_shows_no_result(
    name: str, phases: ScriptPhases, shown: Shown
) -> None:
    """Of a reduce only one worker gets the sum: what is left in the others' memory is anything."""
    own = torch.ones(1)
    args: dict[str, Sequence[Any]] = {
        "send": [[own], 1, 0],
        "reduce": [[own]],
        "gather": [[[own]], [own]],
        "barrier": [],
    }
    end = phases.begin(Operation.of(name, "0", (0, 1), args[name]))
    assert end is not None
    end()
    assert not [place for place, received, _ in shown if received]


def test_between_two_steps_nothing_is_shown(phases: ScriptPhases, shown: Shown) -> None:
    phases.phase = ScriptPhase.HOOK
    begun(phases, "allreduce", 1.0)()
    assert shown == []


def test_what_nobody_looks_at_is_noted_by_its_name(phases: ScriptPhases) -> None:
    end = phases.begin_unseen("allreduce", 2)
    assert end is not None
    end()
    phases.begin_step()
    with pytest.raises(UsageError, match="waits for allreduce, which began in a step that is over"):
        end()
    phases.end_step(failed=False)
    with pytest.raises(UsageError, match="calls allreduce between two steps"):
        phases.begin_unseen("allreduce", 2)
    assert phases.begin_unseen("allreduce", 1) is not None
    phases.phase = ScriptPhase.OVER
    assert phases.begin_unseen("allreduce", 2) is not None


def test_what_somebody_looks_at_is_begun_with_its_tensors(phases: ScriptPhases) -> None:
    outputs.listen("test", lambda _: None)
    assert phases.begin_unseen("allreduce", 2) is None
    outputs.listen("test", None)
    assert phases.begin_unseen("allreduce", 2) is not None
    phases.steps = phases  # a log, say
    assert phases.begin_unseen("allreduce", 2) is None


def test_the_number_of_an_operation_counts_those_that_nobody_has_seen(phases: ScriptPhases) -> None:
    """Somebody looks from the second one on."""
    assert phases.begin_unseen("allreduce", 2) is not None
    places: list[str] = []
    outputs.listen("test", lambda output: places.append(output.place))
    begun(phases, "allreduce", 1.0)()
    outputs.listen("test", None)
    assert places[1] == "the result of allreduce on group 0, operation 2 of the step"


def test_a_group_makes_an_operation_for_those_who_look(
    phases: ScriptPhases, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = dist.group.WORLD
    assert native is not None
    group = LastingGroup(native)
    monkeypatch.setattr(LastingGroup, "members", (0, 1))
    monkeypatch.setattr(LastingGroup, "interceptor", phases)
    made: list[str] = []
    of = Operation.of

    def noted(name: str, *args: Any) -> Operation:
        made.append(name)
        return of(name, *args)

    monkeypatch.setattr(Operation, "of", noted)
    group.allreduce([torch.ones(1)]).wait()
    late = group.allreduce([torch.ones(1)])
    assert made == []
    outputs.listen("test", lambda _: None)
    group.allreduce([torch.ones(1)]).wait()
    outputs.listen("test", None)
    assert made == ["allreduce"]
    kept = group.allreduce([torch.ones(1)]).get_future()
    kept.wait()
    LastingWork.by_future.settle()
    phases.begin_step()
    with pytest.raises(UsageError, match="which began in a step that is over"):
        late.wait()
