"""Conformance: the private parts of stages and schedules that `torch_adapters/pipelining/` uses.

Real schedules of torch run in one process, whose group has one worker; all stages are on it.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
    schedules,
)
from torch.distributed.pipelining.schedules import _ComputationType, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase

from swift_ft.errors import CannotHelpError, UnsupportedError, UsageError
from swift_ft.logging import THROUGH_PIPELINE, Direction
from swift_ft.torch_adapters.pipelining.hook import PipelineHook
from swift_ft.torch_adapters.pipelining.interceptor import Message
from swift_ft.torch_adapters.pipelining.p2p_routes import Route, receives, sends, skips
from swift_ft.torch_adapters.pipelining.stage_metadata import prepare_stage, shapes_of
from swift_ft.torch_adapters.versions.first_messages import connect_to_others_only

MICROBATCHES = 4

SENDS_MASKS = hasattr(_PipelineStageBase, "_get_grad_send_meta")
TAKES_LOSS_KWARGS = "loss_kwargs" in inspect.signature(schedules.ScheduleGPipe.step).parameters


pytestmark = pytest.mark.usefixtures("one_process")


class Nothing:
    """Lets every message go its way, and notes what is computed."""

    iteration = 0

    def __init__(self) -> None:
        self.computed: list[tuple[int, int, Direction]] = []

    def on_send(self, message: Message) -> bool:
        raise AssertionError("stages on one worker send no message")

    def on_recv(self, message: Message) -> bool:
        raise AssertionError("stages on one worker receive no message")

    def on_wait(self) -> None: ...

    def on_received(self, message: Message) -> None:
        raise AssertionError("stages on one worker receive no message")

    def on_received_elsewhere(self, message: Message, checksum: int) -> None: ...

    def on_compute(self, stage: int, microbatch: int, direction: Direction) -> None:
        self.computed.append((stage, microbatch, direction))


def stages(count: int) -> list[PipelineStage]:
    torch.manual_seed(0)
    made = [PipelineStage(nn.Linear(3, 3), index, count, torch.device("cpu")) for index in range(count)]
    for stage in made:
        connect_to_others_only(stage)
    return made


def schedule(kind: str) -> Any:
    if kind == "single":
        return Schedule1F1B(stages(1)[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    return ScheduleInterleaved1F1B([*stages(2)], MICROBATCHES, loss_fn=nn.functional.mse_loss)


@pytest.mark.parametrize("kind", ["single", "runtime"])
def test_the_hook_sees_every_computation_and_resets(kind: str) -> None:
    plain, hooked, interceptor = schedule(kind), schedule(kind), Nothing()
    shapes: list[Any] = []
    hook = PipelineHook(hooked, interceptor, shapes.append)
    assert hook.microbatches == MICROBATCHES
    batch, target = torch.ones(8, 3), torch.zeros(8, 3)
    losses: tuple[list[Any], list[Any]] = ([], [])
    for _ in range(2):
        hook.begin()
        for one, own in zip((plain, hooked), losses, strict=True):
            one.step(batch, target=target, losses=own)
        hook.reset()
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    count = len(hook.stages)
    assert sorted(interceptor.computed) == sorted(
        [(s, m, d) for s in range(count) for m in range(MICROBATCHES) for d in THROUGH_PIPELINE] * 2
    )
    assert len(shapes) == 1
    assert json.loads(json.dumps(shapes[0])).keys() == {str(index) for index in range(count)}


@pytest.mark.parametrize("kind", ["single", "runtime"])
def test_the_schedule_is_called_inside_of_a_step_only(kind: str) -> None:
    hooked, interceptor, inside = schedule(kind), Nothing(), [False]
    PipelineHook(hooked, interceptor, lambda _: None, in_step=lambda: inside[0])
    batch, target = torch.ones(8, 3), torch.zeros(8, 3)
    with pytest.raises(UsageError, match="inside of `with step:`"):
        hooked.step(batch, target=target)
    inside[0] = True
    with pytest.raises(UnsupportedError, match=r"schedule.eval\(\) has no place in the log"):
        hooked.eval(batch, target=target)
    assert interceptor.computed == []
    hooked.step(batch, target=target)
    assert interceptor.computed != []


@pytest.mark.parametrize("kind", ["single", "runtime"])
def test_microbatches_are_counted_on_over_the_calls_in_a_step(kind: str) -> None:
    hooked, interceptor, said = schedule(kind), Nothing(), list[str]()
    hook = PipelineHook(hooked, interceptor, lambda _: None, on_several=lambda: said.append("several"))
    batch, target = torch.ones(8, 3), torch.zeros(8, 3)
    for calls in (1, 3, 2):
        hook.begin()
        interceptor.computed.clear()
        for _ in range(calls):
            hooked.step(batch, target=target)
        assert sorted({microbatch for _, microbatch, _ in interceptor.computed}) == [
            *range(calls * MICROBATCHES)
        ]
    assert said == ["several", "several"]


@pytest.mark.parametrize("kind", ["single", "runtime"])
def test_microbatches_that_the_script_splits_itself(kind: str) -> None:
    """A schedule takes them since torch 2.14."""
    whole, split = schedule(kind), schedule(kind)
    if "arg_mbs" not in inspect.signature(split.step).parameters:
        return
    given: list[Any] = []
    hook = PipelineHook(split, Nothing(), lambda _: None, given.append)
    hook.begin()
    batch, target = torch.arange(24.0).reshape(8, 3), torch.ones(8, 3)
    losses: tuple[list[Any], list[Any]] = ([], [])
    whole.step(batch, target=target, losses=losses[0])
    args = [(part,) for part in batch.chunk(MICROBATCHES)]
    split.step(arg_mbs=args, target_mbs=[*target.chunk(MICROBATCHES)], losses=losses[1])
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    assert [given[0][0][number][0] is part for number, (part,) in enumerate(args)] == [True] * MICROBATCHES


class NeverAsked:
    """A replay that others take part in."""

    def step(self, iteration: int, inputs: Any, had: Any) -> Any:
        raise AssertionError


def test_others_cannot_help_where_a_step_has_several_calls() -> None:
    hooked = schedule("single")
    hook = PipelineHook(hooked, Nothing(), lambda _: None)
    batch, target = torch.ones(8, 3), torch.zeros(8, 3)
    hook.begin()
    hooked.step(batch, target=target)
    hook.shared = NeverAsked()
    with pytest.raises(CannotHelpError, match="several times in a step"):
        hooked.step(batch, target=target)


@pytest.mark.parametrize("kind", ["single", "runtime"])
def test_a_schedule_still_has_the_private_parts_that_the_hook_uses(kind: str) -> None:
    one = schedule(kind)
    assert one._n_microbatches == MICROBATCHES
    assert one._has_backward is True
    assert one._loss_fn is nn.functional.mse_loss
    assert one._internal_losses == []
    assert one.scale_grads in (True, False)
    plural = "" if kind == "single" else "s"
    assert getattr(one, f"_stage{plural}")
    for direction in ("forward", "backward"):
        assert getattr(one, f"_stage{plural}_{direction}_initialized") is False
    assert callable(getattr(one, f"_initialize_stage{plural}"))
    names = ["arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs"]
    more = ["loss_kwargs"] if TAKES_LOSS_KWARGS else []
    assert list(inspect.signature(one._step_microbatches).parameters) == names + more
    assert list(inspect.signature(one._check_inputs).parameters) == names[:4]
    assert list(inspect.signature(one._update_losses).parameters) == ["stages", "losses"]
    assert list(inspect.signature(one._compute_loss).parameters) == ["output", "target", *more]


@pytest.mark.skipif(not TAKES_LOSS_KWARGS, reason="since torch 2.13 a step takes arguments for the loss")
@pytest.mark.parametrize("kind", ["single", "runtime"])
def test_arguments_of_the_loss_reach_it(kind: str) -> None:
    plain, hooked = schedule(kind), schedule(kind)
    PipelineHook(hooked, Nothing(), lambda _: None).begin()
    losses: tuple[list[Any], list[Any]] = ([], [])
    for one, own in zip((plain, hooked), losses, strict=True):
        more = {"loss_kwargs": {"reduction": "sum"}}
        one.step(torch.ones(8, 3), target=torch.zeros(8, 3), losses=own, **more)
    mean: list[Any] = []
    schedule(kind).step(torch.ones(8, 3), target=torch.zeros(8, 3), losses=mean)
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    assert torch.allclose(torch.stack(losses[0]), 6 * torch.stack(mean))  # two samples of three numbers each


def test_a_runtime_schedule_lists_its_actions() -> None:
    one = schedule("runtime")
    assert isinstance(one, _PipelineScheduleRuntime)
    for name in ("fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "backward_counter"):
        getattr(one, name).clear()
    actions = one.pipeline_order_with_comms[one.rank]
    kinds = {part.computation_type for action in actions for part in action.sub_actions or (action,)}
    assert {_ComputationType.FORWARD, _ComputationType.FULL_BACKWARD} <= kinds
    for name in ("SEND_F", "SEND_B", "RECV_F", "RECV_B", "BACKWARD_WEIGHT"):
        assert name in _ComputationType.__members__
    source = inspect.getsource(_PipelineScheduleRuntime._step_microbatches)
    assert "fwd_recv_ops.pop(" in source  # where the hook notices that the schedule waits
    assert "bwd_recv_ops.pop(" in source


def test_a_stage_can_be_prepared_from_shapes_alone() -> None:
    first = schedule("runtime")
    first.step(torch.ones(8, 3), target=torch.zeros(8, 3))
    shapes = shapes_of(first._stages)
    assert shapes is not None
    middle = PipelineStage(nn.Linear(3, 3), 1, 3, torch.device("cpu"))
    middle.stage_index_to_group_rank = {0: 0, 1: 1, 2: 2}
    meta = shapes[0] | {"inputs": shapes[1]["inputs"], "input_grads": shapes[1]["input_grads"]}
    prepare_stage(middle, meta, microbatches=MICROBATCHES, has_backward=True)
    for microbatch in range(MICROBATCHES):
        ((route, buffer),) = receives(middle, microbatch, Direction.FORWARD)
        assert route == Route(Direction.FORWARD, 0, 1, 0)
        assert buffer.shape == (2, 3)
        ((route, buffer),) = receives(middle, microbatch, Direction.BACKWARD)
        assert route == Route(Direction.BACKWARD, 2, 1, 0)
    assert sends(middle, Direction.FORWARD) == [Route(Direction.FORWARD, 1, 2, 0)]
    assert sends(middle, Direction.BACKWARD) == [Route(Direction.BACKWARD, 1, 0, 0)]


class Skipping(nn.Module):
    """Three stages. The first one makes a number that only the last one uses, and maybe a mask."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.one, self.two, self.three = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, scale = x > 0, x.sum(-1, keepdim=True)
        y = self.two(self.one(x))
        y = self.three(y * mask) * mask if self.masked else self.three(y)
        result: torch.Tensor = y * scale
        return result


with_and_without_mask = pytest.mark.parametrize(
    "masked",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not SENDS_MASKS, reason="since torch 2.13 stages of its tracer send masks: integers and bools"
            ),
        ),
    ],
)


def traced_stages(*, masked: bool) -> list[Any]:
    cuts = dict.fromkeys(("two", "three"), SplitPoint.BEGINNING)
    pipe = pipeline(Skipping(masked=masked), mb_args=(torch.ones(2, 3),), split_spec=cuts)
    stages: list[Any] = [pipe.build_stage(index, torch.device("cpu")) for index in range(3)]
    given = {"shape": [2, 3], "stride": [3, 1], "dtype": "float32", "requires_grad": False}
    shapes = {"inputs": [given], "outputs": None, "input_grads": None, "output_grads": None}
    for stage in stages:
        stage.stage_index_to_group_rank = {0: 0, 1: 1, 2: 2}
        prepare_stage(stage, shapes, microbatches=MICROBATCHES, has_backward=True)
    return stages


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@with_and_without_mask
def test_both_ends_of_a_traced_connection_give_it_the_same_key(masked: bool) -> None:
    """A connection that skips a stage stands in another place among the outputs than among the inputs."""
    stages = traced_stages(masked=masked)
    assert [skips(stage) for stage in stages] == [{2}, set(), {0}]
    for direction in THROUGH_PIPELINE:
        sent = [route for stage in stages for route in sends(stage, direction)]
        received = [route for stage in stages for route, _ in receives(stage, 0, direction)]
        assert len(set(sent)) == len(sent)
        assert sorted(sent, key=str) == sorted(received, key=str)
        assert any(abs(route.source - route.destination) == 2 for route in sent)
    two = Route(Direction.FORWARD, 0, 2, 1) in sends(stages[0], Direction.FORWARD)
    assert two is masked  # the mask beside the scale


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@with_and_without_mask
def test_a_traced_stage_can_be_prepared_from_shapes_alone(masked: bool) -> None:
    known, fresh = traced_stages(masked=masked), traced_stages(masked=masked)
    for stage, other in zip(known, fresh, strict=True):
        shapes = shapes_of([stage])
        assert shapes is not None
        other.args_recv_info.clear()
        other.grad_recv_info.clear()
        again = json.loads(json.dumps(shapes[stage.stage_index]))
        prepare_stage(other, again, microbatches=MICROBATCHES, has_backward=True)
        for direction in THROUGH_PIPELINE:
            assert sends(other, direction) == sends(stage, direction)
            ours, theirs = (receives(s, MICROBATCHES - 1, direction) for s in (other, stage))
            assert [(route, b.shape) for route, b in ours] == [(route, b.shape) for route, b in theirs]


def test_a_stage_still_has_the_functions_that_are_wrapped() -> None:
    (stage,) = stages(1)
    for name in ("get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"):
        assert len(inspect.signature(getattr(stage, name)).parameters) == 1
    assert next(iter(inspect.signature(stage.forward_one_chunk).parameters)) == "fwd_chunk_id"
    assert {"loss", "full_backward"} <= inspect.signature(stage.backward_one_chunk).parameters.keys()
    for name in ("bwd_cache", "backward_state", "dw_runner", "output_chunks"):
        getattr(stage, name).clear()
    for name in ("set_local_fwd_input", "set_local_bwd_input", "get_local_bwd_output"):
        assert callable(getattr(stage, name))
    assert callable(stage.clear_runtime_states)
    assert callable(stage.perform_reduce_grad)
    assert stage.dw_builder is None
    assert callable(schedules._batch_p2p)
