"""What Lightning's Trainer remembers, as each worker gives it to all others."""

from __future__ import annotations

import copy
import importlib.util
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.integrations import needs

pytestmark = [needs("lightning"), pytest.mark.filterwarnings("ignore")]  # Lightning's own, of its host
if importlib.util.find_spec("lightning") is not None:
    import lightning.pytorch as pl
    from torchmetrics.aggregation import CatMetric

    from swift_ft.integrations.lightning import progress
    from swift_ft.integrations.lightning.progress import TrainerProgress


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One worker, which gives its part to itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Place:
    """Of files, and of batches: not what is tested here."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        self.there: list[str] | None = None

    def place(self) -> dict[str, Any]:
        return {}

    def go_to(self, place: dict[str, Any]) -> None: ...


def trainer(**options: Any) -> Any:
    made = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, **options
    )
    module = pl.LightningModule()
    module.net = nn.Linear(1, 1)
    module.seen, module.outputs = [], {"preds": [], "targets": []}
    module.of_tasks, module.sums, module.of_images = [[], []], {"sum": 0.0, "preds": []}, defaultdict(list)
    module.cat = CatMetric()
    made.strategy.connect(module)
    made.fit_loop._data_fetcher = Place()
    return made


def progress_of(of: Any) -> Any:
    nowhere: Any = Place()
    return TrainerProgress(of, nowhere, nowhere)


def given(one: Any, other: Any) -> None:
    """A replacement takes over what the others have been given."""
    other.load_state_dict(one.state_dict())
    other.catch_up()


def ours_in(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """Lightning's own lines left out."""
    return [record for record in caplog.records if record.name.startswith("swift_ft.")]


def test_a_list_that_is_too_large_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named once; a repeated step finds it as it was, and a replacement says that it lacks it."""
    monkeypatch.setattr(progress, "_LIMIT", 1 << 14)
    one, other = trainer(), trainer()
    ours, theirs = progress_of(one), progress_of(other)
    module = one.lightning_module
    outputs, seen = module.outputs, module.seen
    with caplog.at_level(logging.WARNING):
        for number in range(3_000):
            outputs["preds"].append(float(number))
            if number % 500 == 0:
                seen.append(number)
                ours.step_ends()
    assert [record.variable for record in ours_in(caplog)] == ["module.outputs"]
    assert len(ours._ranks["0"]) < 1 << 14
    ours.step_ends()
    outputs["preds"] += [-1.0, -2.0]  # by a step that is interrupted
    outputs["more"] = []
    seen.append(-1)
    caplog.clear()
    given(ours, ours)
    assert outputs == {"preds": [float(number) for number in range(3_000)], "targets": []}
    assert seen == [*range(0, 3_000, 500)]
    assert not ours_in(caplog)
    given(ours, theirs)
    assert other.lightning_module.seen == seen
    assert [record.variables for record in ours_in(caplog)] == [["outputs"]]


LARGE: dict[str, Callable[[Any, float], None]] = {
    "of_tasks": lambda module, value: module.of_tasks[int(value) % 2].append(value),
    "sums": lambda module, value: module.sums.update(
        sum=module.sums["sum"] + value, preds=[*module.sums["preds"], value]
    ),
    "of_images": lambda module, value: module.of_images[int(value) // 4].append(value),
}
EMPTY: dict[str, Any] = {
    "of_tasks": [[], []],
    "sums": {"sum": 0.0, "preds": []},
    "of_images": defaultdict(list),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_too_large_and_no_flat_list(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is cut as well where it is told how long it was; else it is named. What is small again travels."""
    monkeypatch.setattr(progress, "_LIMIT", 1 << 14)
    one, other = trainer(), trainer()
    ours, theirs = progress_of(one), progress_of(other)
    module = one.lightning_module
    for number in range(3_000):
        LARGE[name](module, float(number))
        if number % 500 == 0:
            ours.step_ends()
    ours.step_ends()
    assert [record.variable for record in ours_in(caplog)] == [f"module.{name}"]
    before = copy.deepcopy(getattr(module, name))
    for number in range(3_000, 3_002):
        LARGE[name](module, float(number))  # by a step that is interrupted
    caplog.clear()
    given(ours, ours)
    named = [record.variables for record in ours_in(caplog)]
    assert (getattr(module, name) == before) == (name != "of_images")
    assert named == ([[name]] if name == "of_images" else [])
    caplog.clear()
    given(ours, theirs)
    assert [record.variables for record in ours_in(caplog)] == [[name]]
    setattr(module, name, copy.deepcopy(EMPTY[name]))  # as an epoch begins
    LARGE[name](module, 1.0)
    ours.step_ends()
    caplog.clear()
    given(ours, theirs)
    assert getattr(other.lightning_module, name) == getattr(module, name)
    assert not ours_in(caplog)


def test_a_list_that_is_short_again_travels_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As predictions do, which an epoch's end clears."""
    monkeypatch.setattr(progress, "_LIMIT", 1 << 14)
    one, other = trainer(), trainer()
    ours, theirs = progress_of(one), progress_of(other)
    one.lightning_module.seen += [*range(5_000)]
    ours.step_ends()
    one.lightning_module.seen[:] = [7]
    ours.step_ends()
    given(ours, theirs)
    assert other.lightning_module.seen == [7]


def test_samples_of_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LIMIT", 1 << 14)
    one = trainer()
    ours, metric = progress_of(one), one.lightning_module.cat
    for number in range(400):
        metric.update(torch.tensor([float(number)]))
    ours.step_ends()
    assert len(ours._ranks["0"]) < 400 * len("swift_ft.tensor")  # it was left out
    metric.update(torch.tensor([-1.0]))
    given(ours, ours)
    assert metric.compute().tolist() == [float(number) for number in range(400)]


def test_times_are_of_each_hosts_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer and a checkpoint by time go on from what the lost worker had counted."""
    clock = SimpleNamespace(now=1e6)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)

    def begin(now: float) -> tuple[Any, Any, Any]:
        clock.now = now
        timer, saves = pl.callbacks.Timer(duration="00:01:00:00"), pl.callbacks.ModelCheckpoint("folder")
        made = trainer(callbacks=[timer, saves])
        for callback in (timer, saves):
            callback.on_train_start(made, made.lightning_module)
        return progress_of(made), timer, saves

    ours, timer, saves = begin(1e6)
    clock.now += 300
    saves._last_time_checked = clock.now
    clock.now += 40
    ours.step_ends()
    theirs, their_timer, their_saves = begin(50.0)
    clock.now += 2
    given(ours, theirs)
    assert their_timer.time_elapsed() == 340
    assert clock.now - their_saves._last_time_checked == 40
    clock.now += 10
    assert their_timer.time_elapsed() == 350
    clock.now = 1e6 + 400
    given(ours, ours)  # a survivor has counted on while the others were waiting
    assert timer.time_elapsed() == 400
