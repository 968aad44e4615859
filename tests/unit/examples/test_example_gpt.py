"""The examples' model and data: what a replay and the comparison of two runs rely on."""

import pytest
import torch
from gpt import VOCABULARY, Batches, Config, argument_parser, build_stage, load_text, loss_fn
from torch import Tensor, nn

TINY = Config(layers=4, width=16, heads=2, sequence=12, microbatches=2, microbatch_size=3)


def build_model(num_stages: int, config: Config = TINY) -> list[nn.Module]:
    return [build_stage(index, num_stages, config) for index in range(num_stages)]


def state_of(stages: list[nn.Module]) -> dict[str, Tensor]:
    return {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}


def assert_same_state(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_weights_and_loss_and_gradients_do_not_depend_on_the_number_of_stages(num_stages: int) -> None:
    whole, split = build_model(1), build_model(num_stages)
    assert_same_state(state_of(whole), state_of(split))

    x, y = Batches(TINY)[0]
    losses = [loss_fn(nn.Sequential(*stages)(x), y) for stages in (whole, split)]
    assert torch.equal(*losses)

    for loss in losses:
        loss.backward()
    gradients = [
        {
            name: parameter.grad
            for stage in stages
            for name, parameter in stage.named_parameters()
            if parameter.grad is not None
        }
        for stages in (whole, split)
    ]
    assert len(gradients[0]) == sum(1 for stage in whole for _ in stage.parameters())
    assert_same_state(gradients[0], gradients[1])


def test_every_layer_is_on_exactly_one_stage_of_the_default_model() -> None:
    stages = build_model(4, Config(width=12, heads=6))
    names = [name for stage in stages for name, _ in stage.named_children()]
    assert names == ["embedding", *(f"block{index}" for index in range(8)), "head"]
    assert [len(list(stage.children())) for stage in stages] == [3, 2, 2, 3]


def test_a_stage_built_alone_and_late_has_the_weights_of_one_built_in_order() -> None:
    in_order = build_model(4)[2]
    torch.manual_seed(12345)
    torch.rand(7)
    assert_same_state(in_order.state_dict(), build_stage(2, 4, TINY).state_dict())


def test_building_a_stage_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    build_stage(0, 1, TINY)
    assert torch.equal(before, torch.get_rng_state())


def test_layers_differ_from_each_other_and_between_seeds() -> None:
    state = state_of(build_model(1))
    assert not torch.equal(state["block0.qkv.weight"], state["block1.qkv.weight"])
    other = state_of(build_model(1, Config(**{**TINY.__dict__, "seed": 1})))
    assert not torch.equal(state["block0.qkv.weight"], other["block0.qkv.weight"])


@pytest.mark.parametrize(("stage_index", "num_stages"), [(-1, 2), (2, 2), (0, 5), (0, 0)])
def test_a_stage_that_cannot_be_is_refused(stage_index: int, num_stages: int) -> None:
    with pytest.raises(ValueError, match="does not fit 4 layers"):
        build_stage(stage_index, num_stages, TINY)


def test_dropout_is_drawn_only_where_asked_for() -> None:
    x, _ = Batches(TINY)[0]
    plain = build_stage(0, 1, TINY)
    assert torch.equal(plain(x), plain(x))
    dropping = build_stage(0, 1, Config(**{**TINY.__dict__, "dropout": 0.5}))
    assert not torch.equal(dropping(x), dropping(x))


def test_the_model_cannot_see_the_byte_that_it_predicts() -> None:
    model = build_stage(0, 1, TINY)
    x, _ = Batches(TINY)[0]
    changed = x.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCABULARY
    assert torch.equal(model(x)[:, :6], model(changed)[:, :6])
    assert not torch.equal(model(x)[:, 6:], model(changed)[:, 6:])


def test_batches_have_the_promised_shape_and_targets_are_the_next_bytes() -> None:
    x, y = Batches(TINY)[0]
    assert x.shape == y.shape == (TINY.microbatches * TINY.microbatch_size, TINY.sequence)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    text = bytes(load_text().tolist())
    assert all(bytes([*row.tolist(), last]) in text for row, last in zip(x, y[:, -1].tolist(), strict=True))


def test_a_batch_is_a_function_of_seed_and_iteration_alone() -> None:
    batches, again = Batches(TINY), Batches(TINY)
    in_order = [batches[iteration][0] for iteration in range(4)]
    torch.manual_seed(99)
    backwards = [again[iteration][0] for iteration in reversed(range(4))]
    assert all(map(torch.equal, in_order, reversed(backwards)))
    assert not torch.equal(in_order[0], in_order[1])
    assert not torch.equal(in_order[0], Batches(Config(**{**TINY.__dict__, "seed": 1}))[0][0])
    with pytest.raises(IndexError, match="count from 0"):
        batches[-1]


def test_a_few_steps_of_training_make_the_loss_smaller() -> None:
    model = build_stage(0, 1, TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches, losses = Batches(TINY), []
    for iteration in range(20):
        x, y = batches[iteration]
        losses.append(loss_fn(model(x), y))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0].item() == pytest.approx(5.545, abs=0.1)  # ln 256: it knows nothing
    assert losses[-1] < 4.5


def test_every_field_of_the_configuration_is_an_option() -> None:
    options = "--layers 4 --width 16 --heads 2 --sequence 12 --microbatches 2 --microbatch-size 3"
    args = argument_parser("").parse_args(options.split())
    assert Config.from_args(args) == TINY
    assert Config.from_args(argument_parser("").parse_args([])) == Config()
