"""Conformance: when schedules say that a stage has all its gradients, and what becomes of these.

One worker has all stages of the only pipeline, so averages are its own sums, scaled as torch scales them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from swift_ft.errors import UsageError
from swift_ft.torch_adapters.abortable_waits import AbortableWaits
from swift_ft.torch_adapters.device_waits import DeviceWaits
from swift_ft.torch_adapters.lasting_work import LastingWork
from swift_ft.torch_adapters.layer_stack import LayerStack
from swift_ft.torch_adapters.pipelining import batch_sizes, layer_averages
from swift_ft.torch_adapters.pipelining.hook import PipelineHook
from swift_ft.torch_adapters.pipelining.layer_averages import LayerAverages
from swift_ft.torch_adapters.versions.first_messages import connect_to_others_only
from tests.unit.torch_adapters.test_pipelining import Nothing

LAYERS = 6
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]
V_SHAPED = ("ZBVZeroBubble",)


pytestmark = pytest.mark.usefixtures("one_process")


class Job:
    """A stack, its schedule, and its averages."""

    def __init__(
        self, kind: str, microbatches: int, *, scale: bool, averages: bool, exact: bool = False
    ) -> None:
        torch.manual_seed(0)
        several = 1 if kind in ("GPipe", "1F1B") else 2
        self.stack = LayerStack(
            lambda _: nn.Linear(3, 3),
            LAYERS,
            stages_per_worker=several,
            v_shaped=kind in V_SHAPED,
            exact=exact,
        )
        stages = [
            PipelineStage(part, index, self.stack.num_stages, torch.device("cpu"))
            for index, part in zip(self.stack.stages, self.stack.parts, strict=True)
        ]
        for stage in stages:
            connect_to_others_only(stage)
        made: Any = get_schedule_class(kind)
        self.schedule = made(
            stages if several > 1 else stages[0],
            microbatches,
            loss_fn=nn.functional.mse_loss,
            scale_grads=scale,
        )
        self.averages = LayerAverages(self.stack, self.stack.begun, (microbatches,), scale=scale)
        self.averages.renew(dist.group.WORLD)  # type: ignore[arg-type]  # there is one
        if averages:
            self.hook = PipelineHook(self.schedule, Nothing(), lambda _: None)
            self.hook.average(self.averages)

    def step(
        self, iteration: int = 0, samples: int = 8
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """The output, the losses and the gradients."""
        if hasattr(self, "hook"):
            self.hook.begin()
            self.averages.begin(iteration)
        losses: list[torch.Tensor] = []
        output = self.schedule.step(torch.ones(samples, 3), target=torch.zeros(samples, 3), losses=losses)
        gradients = [p.grad.clone() for p in self.stack.parameters() if p.grad is not None]
        return output, losses, gradients


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("microbatches", "scale"), [(4, True), (4, False), (2, True)])
def test_gradients_are_scaled_as_torch_does(kind: str, microbatches: int, scale: bool) -> None:
    plain = Job(kind, microbatches, scale=scale, averages=False).step()
    averaged = Job(kind, microbatches, scale=scale, averages=True).step()
    assert len(plain[2]) == 2 * LAYERS
    assert_same(averaged, plain)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_each_microbatch_is_a_leaf_of_the_tree(kind: str) -> None:
    """Whatever the schedule computes when: all of them add up to the same bits."""
    output, losses, gradients = Job(kind, 8, scale=True, averages=True, exact=True).step()
    expected = Job("GPipe", 8, scale=True, averages=True, exact=True).step()[2]
    assert_same(gradients, expected)
    plain = Job(kind, 8, scale=True, averages=False).step()
    assert_same((output, losses), plain[:2])
    for gradient, of_torch in zip(gradients, plain[2], strict=True):
        torch.testing.assert_close(gradient, of_torch)


def test_other_numbers_of_microbatches() -> None:
    job = Job("1F1B", 4, scale=True, averages=True, exact=True)
    expected = job.step(0)[2]
    job.stack.zero_grad()
    job.hook.reset()
    job.hook.have_microbatches(2)
    job.averages.share([2])
    (_, losses, gradients) = job.step(1, samples=4)  # microbatches are as large as before
    assert len(losses) == 2
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("kind", ["GPipe", "1F1B"])
def test_microbatches_of_unlike_pipelines_have_equally_many_samples(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each counts as much as any other one. Here they have two, and elsewhere three."""
    job = Job(kind, 4, scale=True, averages=True)
    job.averages._with_others = True
    all_reduce = dist.all_reduce

    def with_another(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        compared.append(tensor.tolist())
        if len(tensor) > 1:
            others = torch.tensor(batch_sizes.sizes_of([(torch.ones(elsewhere, 3),)] * 2, None))
            tensor.copy_(torch.maximum(tensor, others))
        return all_reduce(tensor, *args, **options)

    monkeypatch.setattr(dist, "all_reduce", with_another)
    compared: list[list[float]] = []
    elsewhere = 3
    job.step(0)  # with equally many, it is as torch has it
    job.averages.share((4, 2))
    elsewhere = 2
    job.step(1)
    assert compared == [[0], [2, -2, 2, -2]]
    elsewhere = 3
    with pytest.raises(UsageError, match=r"pipelines have 4, 2 microbatches, of 2 to 3 samples"):
        job.step(2)


@pytest.mark.parametrize("kind", ["GPipe", "1F1B"])
def test_a_single_microbatch(kind: str) -> None:
    """Torch does not call scale_grads() then."""
    assert_same(
        Job(kind, 1, scale=True, averages=True).step(), Job(kind, 1, scale=True, averages=False).step()
    )


@pytest.mark.parametrize("kind", SCHEDULES)
def test_an_iteration_that_is_completed_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was interrupted when all averages were here: the script gets the same, and nothing is computed."""
    expected = Job(kind, 4, scale=True, averages=True).step(7)
    job = Job(kind, 4, scale=True, averages=True)
    job.averages._with_others = True  # of which each layer is held by one

    def interrupted(_: LayerAverages) -> None:
        raise RuntimeError("Connection closed by peer")

    with monkeypatch.context() as patch:
        patch.setattr(LayerAverages, "_wait_for_all", interrupted)
        with pytest.raises(RuntimeError, match="closed by peer"):
            job.step(7)
    job.hook.reset()
    job.stack.zero_grad()
    assert job.averages.completes(7)
    assert not job.averages.completes(8)
    job.averages.alone = True
    job.stack.on_layer(lambda number: pytest.fail(f"layer {number} computes"))
    assert_same(job.step(7), expected)
    job.averages.alone = False
    job.stack.on_layer(None)
    job.stack.zero_grad()
    job.hook.reset()
    assert_same(job.step(8), expected)
    assert not job.averages.completes(7)


def test_a_frozen_layer_and_one_without_gradients() -> None:
    job = Job("GPipe", 4, scale=True, averages=True)
    for parameter in job.stack.layer(0).parameters():
        parameter.requires_grad = False
    _, _, gradients = job.step()
    assert len(gradients) == 2 * (LAYERS - 1)
    assert all(p.grad is None for p in job.stack.layer(0).parameters())


class Enqueued:
    """An operation over NCCL: its wait returns at once."""

    def wait(self) -> bool:
        return True


class WithOthers(Job):
    """Its layers have another holder, whose sums are zero. The host could run ahead of its device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("GPipe", 2, scale=True, averages=True)
        self.averages._with_others = True
        self.waits = AbortableWaits()
        self.waits.silent = True
        monkeypatch.setattr(LastingWork, "waits", self.waits)
        monkeypatch.setattr(self.averages, "_operations", lambda *_: iter([None]))
        monkeypatch.setattr(layer_averages, "begin", lambda _: self._begin("sums"))
        monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: self._begin("all have theirs")[0])
        self.aborted_in = ""

    def _begin(self, what: str) -> list[Enqueued]:
        if what == self.aborted_in:
            self.waits.abort()
        return [Enqueued()]


@pytest.mark.parametrize(("aborted_in", "completes"), [("sums", False), ("all have theirs", True)])
def test_an_iteration_can_be_completed_only_of_sums_that_arrived(
    aborted_in: str, completes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No one may update with what an abort has left; nor may one update, and another one not be able to."""
    job = WithOthers(monkeypatch)
    job.aborted_in = aborted_in
    with pytest.raises(RuntimeError, match="aborted"):
        job.step(7)
    assert job.averages.completes(7) == completes


def test_after_all_have_theirs_a_loss_keeps_none_from_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    job = WithOthers(monkeypatch)
    job.waits.begun()
    job.step(7)
    job.waits.abort()
    DeviceWaits(job.waits, list).finish()
