"""Layers that leave one worker and come to another one, with all that optimizers keep of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.layered_state import LayeredState
from swift_ft.checkpoint.saved_form import place_of
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import CheckpointError, TopologyMismatchError, UnsupportedError, UsageError
from swift_ft.recovery.layout.stage_layers import layers_of
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.layer_stack import LayerStack
from tests.support.loose_parameter import Temperature

COUNT, WORKERS = 7, 3
EVEN = (2, 2, 3)


class Noted(nn.Identity):
    """Keeps something beside tensors."""

    kept = -1

    def get_extra_state(self) -> dict[str, int]:
        return {"kept": self.kept}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.kept = state["kept"]


def build(number: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if number % 2 else Noted())


class Outer(nn.Module):
    """Has a module under the name that torch's wrappers use for it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def first_in(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Sequential], nn.Module]:
    """Wraps the first module of a layer."""
    return lambda layer: nn.Sequential(wrap(layer[0]), *[*layer][1:])


Wrap = Callable[[nn.Sequential], nn.Module]
WRAPPERS: dict[str, Wrap] = {
    "none": lambda layer: layer,
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "checkpointed": checkpoint_wrapper,
    "compiled, then checkpointed": lambda layer: checkpoint_wrapper(compiled(layer)),
    "checkpointed, then compiled": lambda layer: compiled(checkpoint_wrapper(layer)),
    "compiled twice": lambda layer: compiled(Outer(compiled(layer))),
    "a compiled part": first_in(compiled),
    "a checkpointed part": first_in(checkpoint_wrapper),
    "a parametrized part": first_in(weight_norm),
    "in a list": lambda layer: nn.ModuleList([layer]),
    "in a module": Outer,
}


def built(wrapper: str) -> Callable[[int], nn.Module]:
    """Makes layers in a wrapper."""
    return lambda number: WRAPPERS[wrapper](build(number))


def made(model: LayerStack, *, two_groups: bool = False) -> TrainingState:
    """The state of a worker that has trained for two steps."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups if two_groups else model.parameters(), lr=1e-2)
    for step in range(2):
        for number in model.layers:
            generator = torch.Generator().manual_seed(100 * step + number)
            for inner in model.layer(number).modules():
                if isinstance(inner, Noted):
                    inner.kept = number
            for parameter in model.layer(number).parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
    return TrainingState({"model": model, "optimizer": optimizer})


def on_each(
    as_worker: Callable[..., None], make: Callable[[], TrainingState], workers: int = WORKERS
) -> list[TrainingState]:
    """The states that the script of each worker makes, by rank."""
    states = []
    for rank in range(workers):
        as_worker(rank)
        torch.manual_seed(0)
        states.append(make())
    return states


def tensors_of(states: list[TrainingState]) -> dict[str, torch.Tensor]:
    """All tensors of all workers, by name; each is on one of them."""
    found: dict[str, torch.Tensor] = {}
    for state in states:
        model = state.modules["model"]
        own = {**state.named_tensors(), **dict(model.named_buffers())}
        noted = {name: inner for name, inner in model.named_modules() if isinstance(inner, Noted)}
        own |= {f"{name} beside tensors": torch.tensor(inner.kept) for name, inner in noted.items()}
        assert not found.keys() & own.keys()
        found |= {name: tensor.detach().clone() for name, tensor in own.items()}
    return found


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def assert_trained(states: list[TrainingState]) -> None:
    """Each parameter of a model is in its optimizer, once."""
    for state in states:
        held = [parameter for _, parameter in state.parameters]
        assert len(held) == len({*held})
        assert {*held} == {*state.modules["model"].parameters()}


@pytest.mark.parametrize("two_groups", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_all_layers_move(wrapper: str, two_groups: bool, as_worker: Callable[..., None]) -> None:
    states = on_each(as_worker, lambda: made(LayerStack(built(wrapper), COUNT), two_groups=two_groups))
    before = tensors_of(states)
    new = (4, 1, 2)
    layered = [LayeredState(state) for state in states]
    holder = {layer: rank for rank, one in enumerate(layered) for layer in one.layers}
    arriving = [
        [layered[holder[layer]].take([layer]) for layer in one.layers_in(new) if holder[layer] != rank]
        for rank, one in enumerate(layered)
    ]
    for one, payloads in zip(layered, arriving, strict=True):
        one.prepare(new, payloads)
        one.give(new, payloads)
    assert [one.layers for one in layered] == [tuple(layers_of(new, stage)) for stage in range(WORKERS)]
    assert_equal(tensors_of(states), before)
    assert_trained(states)
    for state in states:  # each parameter is in the group in which it was
        (optimizer,) = state.optimizers.values()
        dims = [{p.dim() > 1 for p in group["params"]} for group in optimizer.param_groups]
        assert dims == ([{True}, {False}] if two_groups else [{True, False}])
        assert {*optimizer.state} == {p for group in optimizer.param_groups for p in group["params"]}


def saved_by(folder: CheckpointFolder, states: list[TrainingState]) -> None:
    """Commits a checkpoint of iteration 20."""
    parts, digests, layers = {}, {}, {}
    for rank, state in enumerate(states):
        path = folder.part(20, rank, 1)
        saved: list[str] = []
        checkpointer = Checkpointer(folder, state)
        checkpointer.save(20, path, saved.append)
        assert checkpointer.wait(30)
        parts[rank], digests[path] = path, saved[0]
        layers[rank] = LayeredState(state).layers
    folder.commit(20, parts, "run", digests, layers)


@pytest.mark.parametrize(
    ("workers", "two_groups", "wrapper"),
    [
        *((workers, two_groups, "none") for workers in (2, 3, 5) for two_groups in (False, True)),
        *((5, True, wrapper) for wrapper in WRAPPERS if wrapper != "none"),
    ],
)
def test_a_checkpoint_of_another_layout_is_loaded(
    workers: int, two_groups: bool, wrapper: str, as_worker: Callable[..., None], tmp_path: Path
) -> None:
    folder = CheckpointFolder(Store(str(tmp_path)))
    states = on_each(as_worker, lambda: made(LayerStack(built(wrapper), COUNT), two_groups=two_groups))
    saved_by(folder, states)
    before = tensors_of(states)
    new = {2: (3, 4), 3: (1, 1, 5), 5: (1, 1, 2, 1, 2)}[workers]
    loaded = []
    for rank in range(workers):
        as_worker(rank, workers)
        loaded.append(made(LayerStack(built(wrapper), COUNT), two_groups=two_groups))
        Checkpointer(folder, loaded[-1]).load(20, rank, new)
    assert_equal(tensors_of(loaded), before)
    assert_trained(loaded)


@pytest.mark.parametrize(("before", "after"), [("none", "checkpointed"), ("checkpointed", "compiled")])
def test_a_script_that_wraps_its_layers_otherwise(
    before: str, after: str, as_worker: Callable[..., None], tmp_path: Path
) -> None:
    """A resume has the parameters, and what optimizers keep of them."""
    folder = CheckpointFolder(Store(str(tmp_path)))
    states = on_each(as_worker, lambda: made(LayerStack(built(before), COUNT)))
    saved_by(folder, states)
    as_worker(0, 1)
    whole = made(LayerStack(built(after), COUNT))
    Checkpointer(folder, whole).load(20, 0, (COUNT,))
    assert_trained([whole])
    found = {place: whole.optimizers["optimizer"].state[p] for p, place in whole.parameter_names().items()}
    for state in states:
        for parameter, place in state.parameter_names().items():
            expected = state.optimizers["optimizer"].state[parameter]
            assert all(torch.equal(found[place][field], value) for field, value in expected.items())


def test_names_of_an_earlier_version() -> None:
    """It wrote those of some wrappers, which are left out now."""
    assert place_of("model", "7._checkpoint_wrapped_module.0.weight") == ("model", "7.0.weight")
    assert place_of("model", "7._orig_mod._orig_mod.0.weight") == ("model", "7.0.weight")
    assert place_of("model", "7.module.my_orig_mod.weight") == ("model", "7.module.my_orig_mod.weight")


def test_a_stack_inside_of_another_module(as_worker: Callable[..., None]) -> None:
    def within() -> TrainingState:
        model = LayerStack(build, COUNT)
        return TrainingState({"model": Outer(model), **made(model).optimizers})

    states = on_each(as_worker, within)
    layered = [LayeredState(state) for state in states]
    before = {**layered[1].take([2]).tensors}
    layered[0].give((3, 1, 3), [layered[1].take([2])])
    assert_trained(states[:1])
    now = layered[0].take([2]).tensors
    assert now.keys() == before.keys()
    assert all(torch.equal(now[path], before[path]) for path in before)


def test_a_parameter_in_no_module_stays_in_its_optimizer(as_worker: Callable[..., None]) -> None:
    as_worker(0)
    model, own = LayerStack(build, COUNT), Temperature()
    optimizer = torch.optim.SGD([*model.parameters(), own.value], lr=1.0)
    state = TrainingState({"model": model, "own": own, "optimizer": optimizer})
    LayeredState(state).give((1, 3, 3), [])
    held = [parameter for _, parameter in state.parameters]
    assert {*held} == {own.value, *model.parameters()}


def test_no_parameter_of_an_optimizer_is_left_out(as_worker: Callable[..., None]) -> None:
    """An optimizer that has lost one would go on, and the weight would never change again."""
    as_worker(0)
    layered = LayeredState(made(LayerStack(build, COUNT)))
    with pytest.raises(TopologyMismatchError, match=r"optimizer is to update model/1\.0\.scale"):
        layered.arrange(EVEN, {"optimizer": {"model/1.0.scale": 0}})
    layered.arrange(EVEN, {"optimizer": {"model/6.0.scale": 0}})  # a layer that is elsewhere


def test_a_layer_that_no_part_has(as_worker: Callable[..., None], tmp_path: Path) -> None:
    folder = CheckpointFolder(Store(str(tmp_path)))
    as_worker(0)
    state = made(LayerStack(build, COUNT))
    saved: list[str] = []
    checkpointer = Checkpointer(folder, state)
    checkpointer.save(20, folder.part(20, 0, 1), saved.append)
    assert checkpointer.wait(30)
    folder.commit(20, {0: folder.part(20, 0, 1)}, "run", {folder.part(20, 0, 1): saved[0]}, {0: (0, 1)})
    with pytest.raises(CheckpointError, match="No part of the checkpoint has layer 2"):
        checkpointer.load(20, 0, (3, 2, 2))


def test_a_layer_that_is_made_otherwise(as_worker: Callable[..., None]) -> None:
    as_worker(0)
    payload = LayeredState(made(LayerStack(build, COUNT))).take([1])
    as_worker(1)
    other = LayeredState(made(LayerStack(lambda _: nn.Linear(2, 2), COUNT)))
    with pytest.raises(TopologyMismatchError, match="it must make the same layer on all workers"):
        other.prepare((1, 3, 3), [payload])


def test_an_average_of_the_model_goes_along(as_worker: Callable[..., None]) -> None:
    def averaged() -> TrainingState:
        model = LayerStack(build, COUNT)
        average = AveragedModel(model, avg_fn=lambda old, new, _: old + 0.5 * new)
        average.update_parameters(model)
        return TrainingState({**made(model).modules, "average": average})

    states = on_each(as_worker, averaged)
    layered = [LayeredState(state) for state in states]
    name = "module.2.0.weight"
    was = dict(states[1].modules["average"].named_parameters())[name].detach().clone()
    layered[0].give((3, 1, 3), [layered[1].take([2])])
    assert torch.equal(dict(states[0].modules["average"].named_parameters())[name], was)


def test_flags_and_modes_of_a_layer_go_along(as_worker: Callable[..., None]) -> None:
    states = on_each(as_worker, lambda: made(LayerStack(build, COUNT)))
    layered = [LayeredState(state) for state in states]
    there = layer_in(states[1], 2)
    there[0].weight.requires_grad_(False)
    there[1].eval()
    layered[0].give((3, 1, 3), [layered[1].take([2])])
    here = layer_in(states[0], 2)
    assert [p.requires_grad for p in here.parameters()] == [False, True]
    assert [module.training for module in here.modules()] == [True, True, False]


def test_an_optimizer_that_has_not_stepped_yet(as_worker: Callable[..., None]) -> None:
    """Who goes back to such a state keeps nothing of its own step."""
    as_worker(0)
    model = LayerStack(build, COUNT)
    fresh = TrainingState({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    stepped = made(LayerStack(build, COUNT))
    (optimizer,) = stepped.optimizers.values()
    assert optimizer.state
    LayeredState(stepped).give_whole(EVEN, [LayeredState(fresh).take([0, 1], rest=True)])
    assert not optimizer.state


def grouped_by_layer() -> TrainingState:
    """A state whose optimizer has a group for each layer, and the rate says which."""
    model = LayerStack(build, COUNT)
    groups = [{"params": model.layer(n).parameters(), "lr": 0.1 + n} for n in model.layers]
    state = made(model)
    state.optimizers["optimizer"] = torch.optim.AdamW(groups)
    return state


def test_a_layer_in_a_group_that_is_not_there_stays_where_it_is(as_worker: Callable[..., None]) -> None:
    states = on_each(as_worker, grouped_by_layer, 2)
    layered = [LayeredState(state) for state in states]
    with pytest.raises(TopologyMismatchError, match=r"model/2.0.weight in a group whose lr is 2.1, and no"):
        layered[0].prepare((3, 1, 3), [layered[1].take([2])])


@pytest.mark.parametrize("gone", [False, True])
def test_a_layer_gets_the_group_with_its_options(gone: bool, as_worker: Callable[..., None]) -> None:
    """It is another one than there, which only the options show; or it has become empty."""
    states = on_each(as_worker, grouped_by_layer, 2)
    layered = [LayeredState(state) for state in states]
    if not gone:  # worker 0 has a group with the rate of layer 2, as its second one
        states[0].optimizers["optimizer"].param_groups[1]["lr"] = 2.1
    else:
        states[0].optimizers["optimizer"].add_param_group({"params": [], "lr": 2.1})
    layered[0].give((3, 1, 3), [layered[1].take([2])])
    groups = states[0].optimizers["optimizer"].param_groups
    assert {*layer_in(states[0], 2).parameters()} <= {*groups[2 if gone else 1]["params"]}


def test_a_whole_state_sets_rates_of_layers(as_worker: Callable[..., None]) -> None:
    """Of groups that are unlike on workers, each gets the options of its own layer."""
    states = on_each(as_worker, grouped_by_layer, 2)
    for group in [group for state in states for group in state.optimizers["optimizer"].param_groups]:
        group["lr"] *= 0.5
    as_worker(0, 2)
    here = grouped_by_layer()  # layers 0, 1, 2
    arrived = [LayeredState(states[0]).take([0, 1], rest=True), LayeredState(states[1]).take([2], rest=True)]
    LayeredState(here).give_whole((3, 4), arrived)
    groups = here.optimizers["optimizer"].param_groups
    assert [group["lr"] for group in groups] == [0.05, 0.55, 1.05]
    assert [len(group["params"]) for group in groups] == [4 if n % 2 else 2 for n in range(3)]


def test_what_is_in_no_layer_comes_with_a_whole_state(as_worker: Callable[..., None]) -> None:
    """The count of an average, and another module; tensors stay the same ones."""

    def state_of(updates: int) -> TrainingState:
        as_worker(0)
        model = LayerStack(build, COUNT)
        average = AveragedModel(model)
        for _ in range(updates):
            average.update_parameters(model)
        other = nn.Linear(2, 2)
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0, momentum=0.9)
        for parameter in [*model.parameters(), *other.parameters()]:
            parameter.grad = torch.full_like(parameter, updates)
        optimizer.step()
        return TrainingState({"model": model, "average": average, "other": other, "optimizer": optimizer})

    source, target = state_of(3), state_of(1)
    weight = target.modules["other"].get_parameter("weight")
    layered = LayeredState(target)
    layered.give_whole(EVEN, [LayeredState(source).take([0, 1], rest=True)])
    assert target.modules["average"].get_buffer("n_averaged") == 3
    assert target.modules["other"].get_parameter("weight") is weight
    assert torch.equal(weight, source.modules["other"].get_parameter("weight"))
    assert_equal(tensors_of([target]), tensors_of([source]))


def layer_in(state: TrainingState, number: int) -> Any:
    """A layer of a state's stack."""
    (model,) = (module for module in state.modules.values() if isinstance(module, LayerStack))
    return model.layer(number)


def test_two_models_of_different_depth_are_refused(as_worker: Callable[..., None]) -> None:
    as_worker(0)
    parts = {"one": LayerStack(build, COUNT), "other": LayerStack(build, COUNT + 1)}
    with pytest.raises(UnsupportedError, match=r"LayerStacks of \[7, 8\] layers"):
        LayeredState(TrainingState(parts))


# ------------------------------------------------------------------------------------------- the stack


def test_values_do_not_depend_on_the_worker(as_worker: Callable[..., None]) -> None:
    """Nor on the order in which layers are built, and the script's own random numbers go on as without."""
    as_worker(0, 1)
    torch.manual_seed(0)
    whole = LayerStack(build, COUNT).state_dict()
    for rank in range(WORKERS):
        as_worker(rank)
        torch.manual_seed(0)
        expected = torch.rand(1, generator=torch.Generator().manual_seed(0))
        for name, tensor in LayerStack(build, COUNT).state_dict().items():
            assert repr(tensor) == repr(whole[name])
        assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(("v_shaped", "stages"), [(False, [(0, 2), (1, 3)]), (True, [(0, 3), (1, 2)])])
def test_several_stages(
    v_shaped: bool, stages: list[tuple[int, int]], as_worker: Callable[..., None]
) -> None:
    x = torch.randn(3, 4)
    as_worker(0, 1)
    torch.manual_seed(0)
    whole = LayerStack(build, 8).eval()
    parts: dict[int, nn.Module] = {}
    for rank, own in enumerate(stages):
        as_worker(rank, 2)
        torch.manual_seed(0)
        model = LayerStack(build, 8, stages_per_worker=2, v_shaped=v_shaped).eval()
        assert (model.stages, model.num_stages) == (own, 4)
        parts |= dict(zip(model.stages, model.parts, strict=True))
        with pytest.raises(UsageError, match=r"model\.stages"):
            _ = model.stage
        with pytest.raises(UsageError, match=r"model\.parts"):
            model(x)
    y = x
    for stage in range(4):
        y = parts[stage](y)
    assert torch.equal(y, whole(x))


def test_layers_that_return_tuples_and_what_begins_before_each(as_worker: Callable[..., None]) -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + y, y

    as_worker(0, 1)
    model, begun = LayerStack(lambda _: Both(), 3), list[int]()
    model.on_layer(begun.append)
    total, _ = model(torch.ones(1), torch.ones(1))
    assert (total.item(), begun) == (4.0, [0, 1, 2])


def test_a_copy_of_a_stack_in_a_group(as_worker: Callable[..., None]) -> None:
    """Groups cannot be copied, and an average of the model is a copy."""
    as_worker(0)
    model = LayerStack(build, COUNT, pipelines=3)
    model.on_layer(lambda _: None)
    copied = copy.deepcopy(model)
    assert copied.group is model.group
    assert copied.layers == model.layers
    assert {*copied.parameters()}.isdisjoint(model.parameters())
    assert [repr(t) for t in copied.state_dict().values()] == [repr(t) for t in model.state_dict().values()]


def test_a_whole_stack_is_not_compiled(as_worker: Callable[..., None]) -> None:
    as_worker(0)
    with pytest.raises(UsageError, match="in build_layer"):
        LayerStack(build, COUNT).compile()


def test_misuse(as_worker: Callable[..., None]) -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        LayerStack(build, COUNT)
    as_worker(0)
    with pytest.raises(UsageError, match="2 layers has too few for 3 stages"):
        LayerStack(build, 2)


def test_the_saved_buffers_of_layers(as_worker: Callable[..., None]) -> None:
    as_worker(0)
    state = made(LayerStack(build, COUNT))
    layer_in(state, 1).register_buffer("of_now", torch.zeros(1), persistent=False)
    names = [name for name, _ in LayeredState(state).saved_buffers()]
    assert names == [f"model.1.1.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")]
