"""Attributes of a model's configuration, a library's object, go back and travel as a script's own do."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from torch import nn

from swift_ft.checkpoint.step.reach import leads_nowhere
from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.training_state import TrainingState


class _Library:
    """The beginning of a class of transformers."""

    def __init__(self) -> None:
        self.temperature, self.layers = 1.0, ["full"]


def kind_of(name: str, module: str) -> type[_Library]:
    """A class of a library that is not installed here, and one that derives from it."""
    base = type(name, (_Library,), {"__module__": module})
    return type("LlamaConfig", (base,), {"__module__": f"{module}.of_llama"})


class Process:
    """One of the script, with a session that has started."""

    def __init__(self, kind: type[Any]) -> None:
        self.model: Any = nn.Linear(1, 1)
        vars(self.model).update(config=kind(), configs=[kind()])
        self.state = TrainingState({"model": self.model})
        self.rollback = Rollback(self.state)
        self.rollback.watch()

    def change(self) -> None:
        """A step."""
        self.model.config.temperature *= 0.5
        self.model.configs[0].layers.append("sliding")

    @property
    def values(self) -> tuple[float, list[str]]:
        return self.model.config.temperature, self.model.configs[0].layers


@pytest.mark.parametrize("name", ["PretrainedConfig", "PreTrainedConfig"])
def test_it_goes_back_and_travels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Library, "__module__", "transformers.configuration_utils")
    kind = kind_of(name, "transformers.configuration_utils")
    pair = MappingProxyType({"one": Process(kind), "other": Process(kind)})
    pair["one"].rollback.begin(0)
    pair["one"].change()
    pair["one"].rollback.back()
    assert pair["one"].values == (1.0, ["full"])
    pair["one"].change()
    there = id(pair["other"].model.config)
    pair["other"].state.take_over(pair["one"].state.to_save())
    assert pair["other"].values == (0.5, ["full", "sliding"])
    assert id(pair["other"].model.config) == there


@pytest.mark.parametrize(
    ("name", "module"), [("PretrainedConfig", "another"), ("BatchEncoding", "transformers.tokens")]
)
def test_others_are_left_alone(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Library, "__module__", module)
    kind = kind_of(name, module)
    assert leads_nowhere(kind)
    process = Process(kind)
    process.rollback.begin(0)
    process.change()
    process.rollback.back()
    assert process.values == (0.5, ["full", "sliding"])
