"""An optimizer that updates within DDP's backward pass refuses what comes too late for that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import UnsupportedError, UsageError
from swift_ft.optim import UndoableOptimizer, wrap_optimizer
from swift_ft.runtime.replicas.replicas import Replicas
from swift_ft.torch_adapters.ddp import DataParallelHook

pytestmark = pytest.mark.usefixtures("one_process")

Make = Callable[[Any], Optimizer]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def fused(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def of_a_tensor(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.1), foreach=False)


class Training:
    """DDP whose averages go to a wait-free optimizer, as a session has it."""

    def __init__(
        self, net: nn.Module, make: Make, parameters: Sequence[nn.Parameter], **options: Any
    ) -> None:
        self.model = DistributedDataParallel(net, **options)
        self.optimizer: UndoableOptimizer = wrap_optimizer(make(parameters), wait_free=True)
        self._own = {*parameters}
        self.early = 0
        self.hook = DataParallelHook(
            self.model, self._update, lambda _: None, on_backward_ended=self.optimizer.backward_ended
        )

    def _update(self, parameters: Sequence[torch.Tensor]) -> None:
        self.early += self.optimizer.update([p for p in parameters if p in self._own])

    def loss(self, iteration: int) -> Any:
        self.hook.begin(iteration, updates_early=self.optimizer.wait_free)
        return self.model(torch.full((2, 4), 1.0 + iteration)).square().mean()


def clip(training: Training) -> None:
    nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)


def clip_before_each_step(training: Training) -> None:
    def before(*_: Any) -> None:
        clip(training)

    training.optimizer.register_step_pre_hook(before)


def drop_one(training: Training) -> None:
    next(training.model.parameters()).grad = None


def set_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 0.5


def fill_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"].fill_(0.5)


def step_scheduler(training: Training) -> None:
    torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5).step()


CHANGES: dict[str, tuple[Make, Callable[[Training], None], str]] = {
    "clipping": (sgd, clip, "gradients have changed since"),
    "clipping in a hook of the step": (sgd, clip_before_each_step, "gradients have changed since"),
    "a gradient that is left out": (sgd, drop_one, "gradients have changed since"),
    "a rate": (sgd, set_rate, "'lr' of their group has changed since"),
    "a rate in a tensor": (of_a_tensor, fill_rate, "'lr' of their group has changed since"),
    "a scheduler before the step": (sgd, step_scheduler, "has changed since"),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(("make", "change", "words"), CHANGES.values(), ids=CHANGES)
def test_changes_after_the_updates(
    make: Make, change: Callable[[Training], None], words: str, view: bool
) -> None:
    net = layers()
    training = Training(net, make, [*net.parameters()], gradient_as_bucket_view=view)
    training.loss(0).backward()
    assert training.early == 8
    change(training)
    with pytest.raises(UsageError, match=f"{words}.* Leave wait_free out"):
        training.optimizer.step()


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
@pytest.mark.parametrize("make", [sgd, fused])
def test_a_scaler(make: Make) -> None:
    """Its factor of 65,536 was in all gradients. A fused optimizer would divide by it in the step."""
    net = layers()
    training = Training(net, make, [*net.parameters()])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(training.loss(0)).backward()
    with pytest.raises(UsageError, match=r"GradScaler.* Leave wait_free out"):
        scaler.step(training.optimizer)


def test_a_scaler_that_skips_the_step() -> None:
    net = layers()
    training = Training(net, sgd, [*net.parameters()])
    nothing: Any = None
    state = TrainingState({"model": training.model, "optimizer": training.optimizer})
    replicas: Any = Replicas(state, nothing, nothing, nothing, nothing, 0)
    replicas._hook = SimpleNamespace(begin=lambda *_, **__: None, buffers=SimpleNamespace(due=True))
    for iteration in range(2):
        replicas.begin(iteration)
        scaler = torch.amp.GradScaler("cpu", enabled=iteration > 0)
        scaler.scale(training.loss(iteration) * (torch.inf if iteration else 1)).backward()
        assert training.optimizer.waits_for_step
        scaler.step(training.optimizer)
        training.optimizer.zero_grad()
        if iteration == 0:
            replicas.completed()
    with pytest.raises(UsageError, match=r"no optimizer.step\(\) followed.* leave wait_free out"):
        replicas.completed()


@pytest.mark.parametrize("view", [False, True])
def test_what_is_allowed_gives_the_bits_of_whole_steps(view: bool) -> None:
    """Also where gradients of another optimizer are clipped, which lie in the same buckets."""
    net = layers()
    plain = copy.deepcopy(net)
    training = Training(net, sgd, [*net[:2].parameters()], gradient_as_bucket_view=view)
    other = torch.optim.AdamW(net[2:].parameters(), lr=0.1)
    optimizers = sgd(plain[:2].parameters()), torch.optim.AdamW(plain[2:].parameters(), lr=0.1)
    for iteration in range(4):
        training.loss(iteration).backward()
        plain(torch.full((2, 4), 1.0 + iteration)).square().mean().backward()
        for model, both in ((net, (training.optimizer, other)), (plain, optimizers)):
            nn.utils.clip_grad_norm_(model[2:].parameters(), 1e-3)
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        training.optimizer.param_groups[0]["lr"] = optimizers[0].param_groups[0]["lr"] = 0.1 / (iteration + 2)
    assert training.early == 4 * 4
    for ours, expected in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, expected)


def test_a_group_in_which_the_script_keeps_something() -> None:
    """No update has used it."""
    net = layers()
    training = Training(net, sgd, [*net.parameters()])
    (group,) = training.optimizer.param_groups
    group["n"] = 0
    for iteration in range(2):
        training.loss(iteration).backward()
        group["n"] += 1
        training.optimizer.step()
        training.optimizer.zero_grad()
    assert training.early == 2 * 8


def test_the_rates_of_updates_that_the_script_makes_itself() -> None:
    """It knows what it does, and when."""
    net = layers()
    optimizer = wrap_optimizer(sgd(net.parameters()), wait_free=True)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.update([*net[:2].parameters()])
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert len(optimizer.updated) == 8


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5, sparse=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(x.long().flatten() % 7))
        return out


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    net = Words()
    plain = DistributedDataParallel(copy.deepcopy(net))  # which sums up the rows of a batch in the same order
    training = Training(net, lambda p: torch.optim.SGD(p, lr=0.1), [*net.parameters()])
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    for iteration in range(3):
        training.loss(iteration).backward()
        plain(torch.full((2, 4), 1.0 + iteration)).square().mean().backward()
        for optimizer in (training.optimizer, expected):
            optimizer.step()
            optimizer.zero_grad()
    assert training.early == 3 * 3
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    training.loss(3).backward()
    net.table.weight.grad.mul_(0.5)  # type: ignore[union-attr]  # after a backward
    with pytest.raises(UsageError, match="gradients have changed since"):
        training.optimizer.step()


def test_parameters_that_no_replica_may_have_used() -> None:
    """A plain optimizer leaves them alone, and a weight decay would change them."""
    net = layers()
    training = Training(net, sgd, [*net.parameters()], find_unused_parameters=True)
    with pytest.raises(UnsupportedError, match="by gradients of 0: leave out wait_free") as caught:
        training.loss(0)
    assert caught.value.fields["alike"], "all workers say so in the same step"


@pytest.mark.parametrize("attached", ["before", "between"])
def test_an_optimizer_that_is_wrapped_at_any_time(attached: str) -> None:
    """In place, by a script that has attached its model before, or has even made some steps."""
    net = layers()
    plain = copy.deepcopy(net)
    optimizer, expected = sgd(net.parameters()), sgd(plain.parameters())
    if attached == "between":
        wrap_optimizer(optimizer)
    model = DistributedDataParallel(net)
    store: Any = SimpleNamespace(check=lambda _: True)
    group: Any = SimpleNamespace(follow=lambda *_, **__: None)
    proof: Any = SimpleNamespace(explain_by=lambda _: None)
    state = TrainingState({"model": model, "optimizer": optimizer})
    replicas = Replicas(state, store, store, group, proof, 0)
    replicas._own_buffers_published = True  # all that else would be written
    replicas.attach_ddp(model)
    for iteration in range(4):
        if iteration == (0 if attached == "before" else 2):
            wrap_optimizer(optimizer, wait_free=True)
        replicas.begin(iteration)
        wait_free = attached == "before" or iteration > 1
        for one, steps in ((model, optimizer), (plain, expected)):
            one(torch.full((2, 4), 1.0 + iteration)).square().mean().backward()
            assert getattr(steps, "waits_for_step", False) == (wait_free and steps is optimizer)
            steps.step()
            steps.zero_grad()
        replicas.completed()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    replicas.begin(4)
    model(torch.ones(2, 4)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(UsageError, match="gradients have changed since"):
        optimizer.step()
