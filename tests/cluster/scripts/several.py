"""Data-parallel trainings whose steps have more than one of something. One worker dies where it is told to.

--die PLACE:ITERATION:RANK kills a worker there, in its first life.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.waiting import wait_until

KINDS = ("accumulate", "two optimizers", "two updates", "gan", "teacher", "two models", "reduced late")


class Both(nn.Module):
    """A generator and a discriminator, for one DDP model around both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, noise: Tensor, real: Tensor | None) -> Tensor:
        """The loss of the discriminator where there is real data, else that of the generator."""
        fake = self.generator(noise)
        judged: Tensor = self.discriminator(fake if real is None else fake.detach()).mean()
        return -judged if real is None else judged - self.discriminator(real).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store")
    parser.add_argument("--weights-out")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--die", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    inner: nn.Module = (
        Both() if args.kind == "gan" else nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    )
    teacher = nn.Sequential(nn.Linear(8, 4)).requires_grad_(False).eval()
    model = DistributedDataParallel(inner, bucket_cap_mb=0.0005, find_unused_parameters=args.kind == "gan")
    halves: list[list[nn.Parameter]] = [list(inner.parameters())]
    if args.kind == "gan":
        assert isinstance(inner, Both)
        halves = [list(inner.discriminator.parameters()), list(inner.generator.parameters())]
    elif args.kind == "two optimizers":
        halves = [halves[0][:2], halves[0][2:]]
    optimizers = [swift_ft.wrap_optimizer(torch.optim.AdamW(half, lr=1e-2), exact=True) for half in halves]
    state: dict[str, object] = {"model": model}
    state |= {f"optimizer {number}": optimizer for number, optimizer in enumerate(optimizers)}
    if args.kind == "two models":
        other = DistributedDataParallel(nn.Linear(8, 4))
        state["other"] = other
    session = swift_ft.Session(state, store=args.store, checkpoint_every=3)
    session.attach_ddp(model)

    def dies(place: str) -> None:
        mark = Path(os.environ["SWIFT_TEST_FOLDER"]) / "died"
        if args.die == f"{place}:{session.iteration}:{rank}" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_both_updates() -> None:
        """Nobody dies before both have updated twice: what is left to undo depends on it."""
        done = [Path(os.environ["SWIFT_TEST_FOLDER"]) / f"updated{number}" for number in range(2)]
        done[rank].touch()
        wait_until(lambda: all(mark.exists() for mark in done), "both to have updated")

    def data(iteration: int, part: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * iteration + 10 * part + rank)
        return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)

    for step in session.steps(8):
        with step:
            x, y = data(step.index, 0)
            x2, y2 = data(step.index, 1)
            if args.kind == "gan":
                model(y, x).backward()
                optimizers[0].step()
                dies("middle")
                for optimizer in optimizers:
                    optimizer.zero_grad()
                model(y2, None).backward()
                optimizers[1].step()
            elif args.kind == "two updates":
                for number, (inputs, targets) in enumerate([(x, y), (x2, y2)]):
                    (model(inputs) - targets).square().mean().backward()
                    if number == 1:
                        dies("middle")
                    optimizers[0].step()
                    optimizers[0].zero_grad()
                if not args.die.startswith("middle"):
                    if step.index == 5:
                        wait_for_both_updates()
                    dies("end")
                    dist.all_reduce(torch.ones(1))
            else:
                if args.kind == "accumulate":
                    with model.no_sync():
                        (model(x2) - y2).square().mean().backward()
                    dies("middle")
                targets = teacher(x) if args.kind == "teacher" else y
                (model(x) - targets).square().mean().backward()
                dies("before")
                for number, optimizer in enumerate(optimizers):
                    optimizer.step()
                    if number == 0:
                        dies("middle")
                if args.kind == "reduced late":
                    dies("end")
                    dist.all_reduce(torch.ones(1))
            for optimizer in optimizers:
                optimizer.zero_grad()
    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    torch.save(inner.state_dict(), f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
