"""A model's tensors by the names that DCP gives them, and what loading them has to do."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from swift_ft.torch_core import model_state as names
from swift_ft.torch_core.model_state import load_model_state, made_later, model_state, unmade_buffers


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def assert_same(module: nn.Module) -> None:
    """As DCP says, in its order, and the live tensors."""
    theirs: dict[str, Any] = get_model_state_dict(module)
    ours = model_state(module)
    assert [*ours] == [*theirs]
    assert all(ours[name].data_ptr() == theirs[name].data_ptr() for name in theirs)


def ask_once(monkeypatch: pytest.MonkeyPatch, module: nn.Module) -> None:
    model_state(module)
    monkeypatch.setattr(names, "get_model_state_dict", lambda _: pytest.fail("DCP was asked again"))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", [lambda m: m, DistributedDataParallel], ids=["plain", "ddp"])
def test_names_are_those_of_dcp(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = wrap(network())
    assert_same(module)
    ask_once(monkeypatch, module)
    assert_same(module)


@pytest.mark.usefixtures("one_process")
def test_a_model_of_which_a_part_is_wrapped() -> None:
    """DCP then has an order of its own."""
    module = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2))
    for _ in range(3):
        assert_same(module)


def test_a_model_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = network()
    ask_once(monkeypatch, module)
    monkeypatch.undo()
    module[2] = nn.Linear(4, 2)  # the same names
    assert_same(module)
    module.append(nn.Linear(2, 2))
    assert_same(module)


class Doubled(nn.Linear):
    """Saves something else than what it has."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}twice"] = 2 * self.weight.detach()


def test_a_model_that_saves_copies() -> None:
    module = Doubled(2, 2)
    for factor in (1.0, 3.0):
        nn.init.constant_(module.weight, factor)
        assert model_state(module)["twice"].eq(2 * factor).all()


def test_names_do_not_keep_a_model_alive() -> None:
    model_state(module := network())
    assert module in names._names
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_what_is_filled_in_place_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    own = model_state(module)
    monkeypatch.setattr(names, "set_model_state_dict", lambda *_: pytest.fail("it was loaded once more"))
    load_model_state(module, model_state(module), own)


def test_what_is_elsewhere_is_loaded() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    values = {name: torch.full_like(tensor, 7.0) for name, tensor in model_state(module).items()}
    load_model_state(module, values, model_state(module))
    assert all(tensor.eq(7.0).all() for tensor in module.state_dict().values())


def test_what_is_missing_is_an_error() -> None:
    module = network()
    values = model_state(module)
    del values["0.weight"]
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        load_model_state(module, values, model_state(module))


@pytest.mark.parametrize("kind", ["before", "after", "override"])
def test_a_model_with_code_of_its_own_is_loaded(kind: str) -> None:
    calls = []

    class Careful(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            calls.append("override")
            super()._load_from_state_dict(*args)

    module = nn.Sequential(Careful(2, 2) if kind == "override" else nn.Linear(2, 2))
    if kind == "before":
        module[0].register_load_state_dict_pre_hook(lambda *_: calls.append("before"))
    if kind == "after":
        module[0].register_load_state_dict_post_hook(lambda *_: calls.append("after"))
    load_model_state(module, model_state(module), model_state(module))
    assert calls == [kind]


class Fused(nn.Module):
    """One weight that is saved as two, under names that the module does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(2, 4, bias=False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.calls = 0
        self.register_state_dict_post_hook(self._split)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._merge)  # type: ignore[no-untyped-call]

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        first, second = state.pop(f"{prefix}both.weight").chunk(2)
        state |= {f"{prefix}first.weight": first.clone(), f"{prefix}second.weight": second.clone()}

    def _merge(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.calls += 1
        parts = [state.pop(f"{prefix}{name}.weight") for name in ("first", "second")]
        state[f"{prefix}both.weight"] = torch.cat(parts)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize("wrap", [lambda m: m, checkpoint_wrapper], ids=["plain", "ac"])
def test_a_model_whose_hooks_rename_what_it_saves(wrap: Any) -> None:
    """DCP cannot name it. What the model has is saved, live, and loaded by the same names."""
    fused = Fused()
    module = nn.Sequential(wrap(fused), nn.Linear(2, 2))
    with pytest.raises(AttributeError):
        get_model_state_dict(module)
    own = model_state(module)
    assert own.keys() == {"0.both.weight", "0.scale", "0._extra_state", "1.weight", "1.bias"}
    assert own["0.both.weight"].data_ptr() == fused.both.weight.data_ptr()
    values = {
        name: torch.full_like(value, 7.0) for name, value in own.items() if isinstance(value, torch.Tensor)
    }
    load_model_state(module, {**values, "0._extra_state": {"calls": 5}}, own)
    assert fused.both.weight.eq(7.0).all()
    assert module[1].get_parameter("bias").eq(7.0).all()
    assert fused.calls == 5
    with pytest.raises(RuntimeError, match=r"0\.scale"):
        load_model_state(module, {name: value for name, value in own.items() if name != "0.scale"}, own)


def test_a_hook_that_renames_nothing_leaves_the_names_of_dcp() -> None:
    module = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert_same(module)


class Late(nn.Module):
    """Has buffers that its first forward pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("centre", None)
        self.register_buffer("unsaved", None, persistent=False)
        self.register_buffer("there", torch.zeros(1))


def averaged(module: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(module)


def checkpointed_part(module: nn.Module) -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(module), nn.Linear(2, 2))


def parallel_part(module: nn.Module) -> nn.Module:
    return nn.Sequential(DistributedDataParallel(module), nn.Linear(2, 2))


def compiled_part(module: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(module)
    return nn.Sequential(compiled, nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", [nn.Sequential, averaged, checkpointed_part, parallel_part, compiled_part])
def test_names_of_buffers_that_are_made_later(wrap: Any) -> None:
    """Those that DCP gives them once they are made."""
    module = wrap(Late())
    unmade = unmade_buffers(module)
    before = {*get_model_state_dict(module)}
    (key,) = found = made_later(module, unmade)
    part, name = found[key]
    assert (type(part), name) == (Late, "centre")
    part.centre = torch.ones(2)
    assert {*get_model_state_dict(module)} - before == {key}
    assert made_later(module, unmade) == found, "it was None as the run began"
    assert made_later(module, {}) == {}
