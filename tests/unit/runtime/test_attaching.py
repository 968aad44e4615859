"""What the script may attach with models that ``fully_shard`` has sharded, and in which order."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

from swift_ft.errors import UnsupportedError, UsageError
from swift_ft.runtime.attachments import Attachments
from swift_ft.torch_adapters.fsdp import ShardedModels
from tests.support.shards import worker_of_mesh


class Parts:
    """What attaching needs of a worker's runtime."""

    def __init__(self, *stages: nn.Module) -> None:
        self.attached: list[str] = []
        self.sharded = ShardedModels(stages)
        self.replicas = SimpleNamespace(sharded=False, attach_fsdp=self._attach)
        self.pipeline = SimpleNamespace(modules=dict(enumerate(stages))) if stages else None
        self.completeness = SimpleNamespace(attach=lambda what, _: self.attached.append(what))
        self.settings = SimpleNamespace(check_data=False)

    def _attach(self, _: nn.Module, ranks: list[int]) -> None:
        self.replicas.sharded = True
        self.attached.append(f"the shards of {ranks}")

    @property
    def attachments(self) -> Attachments:
        return cast("Attachments", self)


def stage(mesh: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(module, mesh=mesh)
    return module


def refusal(parts: Parts, model: Any) -> str:
    """The one line with which ``attach_fsdp`` refuses a model."""
    with pytest.raises(UnsupportedError) as refused:
        Attachments.attach_fsdp(parts.attachments, model)
    assert "\n" not in str(refused.value)
    assert not parts.attached
    return str(refused.value)


def test_the_stage_of_a_pipeline() -> None:
    with worker_of_mesh(rank=3) as mesh:
        module = stage(mesh)
        parts = Parts(module)
        Attachments.attach_fsdp(parts.attachments, module)
        assert parts.attached == ["the shards of [1, 3]", "the FSDP model"]


def test_the_pipeline_comes_first() -> None:
    with worker_of_mesh() as mesh:
        parts = Parts()
        Attachments.attach_fsdp(parts.attachments, stage(mesh))
        with pytest.raises(UsageError, match=r"^Attach the pipeline first, and then the FSDP model .*\.$"):
            Attachments.attach_pipeline(parts.attachments, object(), cast("Any", None))


@pytest.mark.parametrize(
    ("counts", "asked", "dealt", "refused"),
    [
        ((3, 5), False, False, True),
        ((3, 5), True, False, False),
        ((3, 5), False, True, False),
        ((4, 4), False, False, False),
        ((), False, False, False),
    ],
)
def test_a_next_world_with_batches_that_do_not_follow_its_plan(
    counts: tuple[int, ...], asked: bool, dealt: bool, refused: bool
) -> None:
    stack = SimpleNamespace(planned_counts=counts, takes_counts=asked)
    parts: Any = SimpleNamespace(pipeline=SimpleNamespace(stack=stack))
    batches: Any = SimpleNamespace(by_session=dealt)
    words = r"3, 5 microbatches.*model\.counts"
    with pytest.raises(UsageError, match=words) if refused else nullcontext() as caught:
        Attachments.check_counts(parts, batches)
    assert caught is None or caught.value.fields["alike"], "all its workers say so: no machine is refused"
    parts.pipeline = None
    Attachments.check_counts(parts, batches)


def test_a_second_stage() -> None:
    with worker_of_mesh() as mesh:
        first, second = stage(mesh), stage(mesh)
        words = refusal(Parts(first, second), first)
        assert "there must be no second one: leave it out, and the workers of a sharded stage" in words


def test_a_model_that_is_no_stage() -> None:
    with worker_of_mesh() as mesh:
        words = refusal(Parts(stage(mesh)), stage(mesh))
        assert "attach_fsdp() takes the module of this worker's stage" in words


def test_a_stage_without_a_replica() -> None:
    with worker_of_mesh(replicas=1) as mesh:
        module = stage(mesh)
        words = refusal(Parts(module), module)
        assert words.startswith("Each shard of the stage is on one worker only: leave attach_fsdp() out.")


def test_a_model_without_a_replica() -> None:
    with worker_of_mesh(replicas=1) as mesh:
        words = refusal(Parts(), stage(mesh))
        assert "shard it within replicas (HSDP)" in words
        assert "Session(snapshot_every=...)" in words


@pytest.mark.parametrize("model", [nn.Linear(2, 2), 7])
def test_a_model_that_is_not_sharded(model: Any) -> None:
    assert refusal(Parts(), model).startswith("attach_fsdp() takes a model after torch.distributed.fsdp.")
