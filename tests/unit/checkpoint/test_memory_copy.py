"""A copy of a state in one block of memory brings the state back, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from swift_ft.checkpoint.memory_copy import Block, digest_of, load_block, size_of, write_block
from swift_ft.checkpoint.state_payload import StatePayload, tensors_in
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import TopologyMismatchError


def made(width: int = 7) -> tuple[TrainingState, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 2).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return TrainingState({"model": model, "optimizer": optimizer}), model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model[2](model[1](model[0](x)).to(torch.bfloat16)).float().square().sum().backward()  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()


def values(state: TrainingState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.named_tensors().items()}


def test_there_and_back() -> None:
    state, model, optimizer = made()
    train(model, optimizer, 3)
    block, before = write_block(state, None), values(state)
    assert block.length == size_of(state)
    train(model, optimizer, 2)
    load_block(state, block)
    assert before.keys() == values(state).keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in values(state).items())
    digest, data = digest_of(block), block.data.data_ptr()
    train(model, optimizer, 2)
    again = write_block(state, block)
    assert (again.data.data_ptr(), digest_of(again) == digest) == (data, False)


def test_in_a_new_process() -> None:
    state, model, optimizer = made()
    train(model, optimizer, 3)
    block = write_block(state, None)
    other, _, _ = made()
    load_block(other, Block(block.data[: block.length].clone(), block.length))
    train(model, optimizer, 2)
    load_block(state, block)
    assert all(torch.equal(values(state)[name], tensor) for name, tensor in values(other).items())


def test_before_the_first_update() -> None:
    state, model, optimizer = made()
    block = write_block(state, None)
    train(model, optimizer, 2)
    load_block(state, block)
    assert not optimizer.state


def test_another_model() -> None:
    block = write_block(made()[0], None)
    with pytest.raises(TopologyMismatchError, match="does not fit this model"):
        load_block(made(width=8)[0], block)


class Scaled(nn.Module):
    """Keeps scales beside its tensors, in a tensor that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scales = torch.zeros(0, dtype=torch.uint8)

    def get_extra_state(self) -> torch.Tensor:
        return self.scales

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scales = state


def test_what_a_module_keeps_beside_its_tensors_may_grow() -> None:
    inner = [Scaled(), Scaled()]
    state = TrainingState({"model": nn.Sequential(*inner)})
    block = write_block(state, None)
    for size, one in enumerate(inner, 3):
        one.scales = torch.arange(size, dtype=torch.uint8)
    grown = write_block(state, None)
    assert sorted(path[2] for path in dict(tensors_in(state.to_save())) if path[0] == "models") == [
        f"{number}.linear.{kind}" for number in (0, 1) for kind in ("bias", "weight")
    ]
    load_block(state, block)
    assert [one.scales.numel() for one in inner] == [0, 0]
    load_block(state, grown)
    assert [one.scales.tolist() for one in inner] == [[0, 1, 2], [0, 1, 2, 3]]


def test_a_model_without_what_was_kept_beside_tensors_is_another_one() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

    kept, plain = TrainingState({"model": Scaled()}), TrainingState({"model": Plain()})
    with pytest.raises(TopologyMismatchError, match=r"model._extra_state.*is there and not here"):
        load_block(plain, write_block(kept, None))
    with pytest.raises(TopologyMismatchError, match=r"model._extra_state.*is here and not there"):
        load_block(kept, write_block(plain, None))


class OnGpu:
    """A tensor that says that it is on a GPU."""

    is_cuda = True

    def __init__(self, value: torch.Tensor, number: int) -> None:
        self.device = torch.device("cuda", number)
        self._value = value

    def detach(self) -> torch.Tensor:
        return self._value


class Event:
    """A point of a stream."""

    waited: list[str]

    def record(self, stream: str) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.waited.append(self.stream)


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_copy_waits_for_each_device_that_it_comes_from(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs on a stream of its own device, of which none needs to be the current one."""
    state = made()[0]
    block = write_block(state, None)
    payload = StatePayload.of(state.to_save())
    tensors = {path: OnGpu(t, 3 + n % gpus) for n, (path, t) in enumerate(payload.tensors.items())}
    on_gpus = SimpleNamespace(
        header=payload.header, plain=payload.plain, kinds=payload.kinds, tensors=tensors
    )
    monkeypatch.setattr(StatePayload, "of", lambda _: on_gpus)
    monkeypatch.setattr(Event, "waited", [], raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    again = write_block(state, block)
    assert Event.waited == []
    again.finish()
    assert sorted(Event.waited) == [f"cuda:{3 + number}" for number in range(gpus)]
    again.finish()
    assert len(Event.waited) == gpus
    assert digest_of(again) == digest_of(block)
