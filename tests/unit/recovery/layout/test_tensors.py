"""How tensors are cut: unequal slices, padding, tied layers, experts, and the state of torch's optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch

from swift_ft.errors import UsageError
from swift_ft.recovery.layout.degrees import Degrees
from swift_ft.recovery.layout.mesh import Layout, held_by, tiles_of
from swift_ft.recovery.layout.tensors import Ranges, StateTensor, kept_for
from swift_ft.recovery.moves.plan import plan_moves
from tests.support.reshard import carried_out, sliced


def held(tensor: StateTensor, layout: Layout) -> dict[int, Ranges]:
    """By slot, the slice of a single tensor."""
    slices = held_by([tensor], tiles_of([tensor], layout))
    return {slot: by_name[tensor.name] for slot, by_name in sorted(slices.items())}


def test_slices_are_those_of_a_dtensor() -> None:
    tensor = StateTensor("w", (5,), 4, (0,), (("tp", 0),))
    assert list(held(tensor, Degrees(tp=4).layout(1)).values()) == [((0, 2),), ((2, 4),), ((4, 5),)]
    chunks = torch.arange(5).chunk(4)
    assert [len(chunk) for chunk in chunks] == [2, 2, 1]


def test_slices_of_given_lengths() -> None:
    tensor = StateTensor("w", (5, 2), 4, (0,), (("tp", 0),))
    layout = Layout((((0, 0),),), tp=3, lengths={("w", "tp"): (4, 0, 1)})
    assert held(tensor, layout) == {0: ((0, 4), (0, 2)), 2: ((4, 5), (0, 2))}
    with pytest.raises(UsageError, match="add up to 5"):
        tiles_of([tensor], Layout((((0, 0),),), tp=3, lengths={("w", "tp"): (4, 0, 2)}))


def test_a_padded_vocabulary_moves_without_its_padding() -> None:
    """50,257 tokens, padded to multiples of 128 per slice, as Megatron pads them."""
    words = StateTensor("embedding", (50_257, 8), 2, (0,), (("tp", 0),), pad_to=128)
    assert held(words, Degrees(tp=8).layout(1))[7] == ((44_800, 51_200), (0, 8))
    old, new = Degrees(tp=8).layout(1), Degrees(tp=2).layout(1)
    plan = plan_moves([words], (old, range(8)), (new, range(2)))
    assert plan.moved_bytes + plan.kept_bytes == words.nbytes


def test_a_tied_tensor_is_on_all_its_stages_and_once_where_they_meet() -> None:
    tied = StateTensor("embedding", (6,), 4, (0, 3))
    assert list(held(tied, Degrees(pp=4).layout(4))) == [0, 3]
    assert list(held(tied, Degrees(pp=1).layout(4))) == [0]
    apart, together = Degrees(pp=4).layout(4), Degrees(pp=1).layout(4)
    assert plan_moves([tied], (together, [0]), (apart, range(4))).moved_bytes == tied.nbytes
    assert plan_moves([tied], (apart, range(4)), (together, range(4))).moved_bytes == 0


def test_experts_are_grouped_and_other_tensors_replicated() -> None:
    layout = Degrees(ep=2, cp=2).layout(1)
    assert list(held(StateTensor("expert3", (6,), 4, (0,), expert=(3, 4)), layout)) == [2, 3]
    assert list(held(StateTensor("router", (6,), 4, (0,)), layout)) == [0, 1, 2, 3]
    stacked = StateTensor("experts", (4, 6), 4, (0,), (("ep", 0),))
    assert held(stacked, layout)[2] == ((2, 4), (0, 6))


def test_one_dimension_that_two_axes_cut() -> None:
    """FSDP over tensor parallelism: each slice is cut again among the replicas."""
    tensor = StateTensor("w", (8,), 4, (0,), (("tp", 0), ("dp", 0)))
    assert held(tensor, Degrees(dp=2, tp=2).layout(1)) == {
        0: ((0, 2),),
        1: ((4, 6),),
        2: ((2, 4),),
        3: ((6, 8),),
    }


def test_padded_slices_that_are_cut_again_do_not_overlap() -> None:
    """Five elements for two times two workers: all slices have two, and the last one is padding alone."""
    tensor = StateTensor("w", (5,), 4, (0,), (("ep", 0), ("sp", 0)), pad_to=1)
    slices = held(tensor, Degrees(ep=2, cp=2).layout(1))
    assert slices == {0: ((0, 2),), 1: ((2, 4),), 2: ((4, 6),), 3: ((6, 8),)}
    unequal = Layout((((0, 0),),), tp=2, lengths={("w", "tp"): (2, 3)})
    with pytest.raises(UsageError, match="cannot be padded"):
        tiles_of([StateTensor("w", (5,), 4, (0,), (("tp", 0),), pad_to=1)], unequal)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StateTensor("w", (0,), 4, (0,)), "must be positive"),
        (lambda: StateTensor("w", (1,), 4, ()), "no layer uses it"),
        (lambda: StateTensor("w", (1,), 4, (0,), (("pp", 0),)), "no axis 'pp'"),
        (lambda: StateTensor("w", (1,), 4, (0,), (("tp", 1),)), "no dimension 1"),
        (lambda: StateTensor("w", (1,), 4, (0,), expert=(2, 2)), "count from 0"),
        (lambda: StateTensor("w", (1,), 4, (0,), (("ep", 0),), expert=(0, 2)), "choose one"),
        (lambda: Degrees(pp=4).layout(3), "choose pp from 1 to 3"),
        (lambda: Layout(()), "one or more"),
        (lambda: Layout((((0, 2),),), tp=0), "one or more"),
        (lambda: Layout((((0, 1), (3, 4)),)), "not all layers in order"),
        (lambda: Layout((((0, 1),), ((0, 2),))), "different layers"),
        (lambda: tiles_of([StateTensor("w", (1,), 4, (9,))], Degrees().layout(3)), "none of its layers"),
    ],
)
def test_what_is_no_layout(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


# ------------------------------------------------------------------------------ optimizers of torch

OPTIMIZERS: list[type[torch.optim.Optimizer]] = [
    kind
    for _, kind in sorted(inspect.getmembers(torch.optim, inspect.isclass))
    if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]
ALL_OF_THE_STATE = {
    torch.optim.SGD: {"momentum": 0.9},
    torch.optim.Adam: {"amsgrad": True},
    torch.optim.AdamW: {"amsgrad": True},
    torch.optim.RMSprop: {"momentum": 0.9, "centered": True},
}


def trained(kind: type[torch.optim.Optimizer]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A parameter after two steps, and what the optimizer keeps for it."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.rand(6, 9, generator=generator))
    optimizer = kind([weight], **ALL_OF_THE_STATE.get(kind, {}))  # type: ignore[arg-type]
    for _ in range(2):
        gradient = torch.rand(6, 9, generator=generator)
        weight.grad = gradient.to_sparse() if kind is torch.optim.SparseAdam else gradient
        optimizer.step()
    state = {key: value for key, value in optimizer.state[weight].items() if isinstance(value, torch.Tensor)}
    return weight.detach(), state


@pytest.mark.parametrize(
    "kind", [k for k in OPTIMIZERS if k is not torch.optim.LBFGS], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("dimension", [0, 1])
def test_the_state_of_an_optimizer_is_cut_with_its_parameter(
    kind: type[torch.optim.Optimizer], dimension: int
) -> None:
    weight, state = trained(kind)
    assert state, "an optimizer whose state this test does not see"
    parameter = StateTensor("w", tuple(weight.shape), 4, (0,), (("tp", dimension),))
    tensors = [parameter, *(kept_for(parameter, k, v.shape, v.element_size()) for k, v in state.items())]
    values = {"w": weight.numpy(), **{f"w:{key}": value.numpy() for key, value in state.items()}}
    old, new = Degrees(tp=2).layout(1), Degrees(tp=3).layout(1)
    plan = plan_moves(tensors, (old, range(2)), (new, range(3)))
    after = carried_out(tensors, plan, sliced(tensors, values, old, range(2)), new)
    slices = weight.chunk(3, dimension)
    for slot, device in enumerate(plan.placement):
        mine = {name: torch.from_numpy(array) for name, (_, array) in after[device].items()}
        assert torch.equal(mine["w"], slices[slot])
        for key, whole in state.items():
            cut = whole.ndim == 2 and whole.shape[dimension] == weight.shape[dimension]
            assert torch.equal(mine[f"w:{key}"], whole.chunk(3, dimension)[slot] if cut else whole), key


def test_a_state_over_all_parameters_is_refused() -> None:
    parameter = StateTensor("w", (6, 9), 4, (0,))
    with pytest.raises(UsageError, match="keeps its state per parameter"):
        kept_for(parameter, "d", (600,), 4)
