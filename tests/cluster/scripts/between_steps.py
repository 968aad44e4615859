"""The example trainings with what real ones do between two steps. One worker dies in it, if it is told to.

--die FUNCTION:ITERATION:RANK kills a worker just before it communicates there, in its first life.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import Batches, Config, build_stage, loss_fn
from placement import add_device_options, join
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.support.script import script_parser


class Best:
    """The smallest loss so far, and how many there were."""

    def __init__(self) -> None:
        self.loss, self.improved, self.count = float("inf"), False, 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def main() -> None:
    parser = script_parser(__doc__)
    add_device_options(parser)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--die", default="")
    parser.add_argument("--stop-after", type=int, default=100, help="validations")
    parser.add_argument("--wrong", default="", help="what a script must not do")
    args = parser.parse_args()
    config = Config.from_args(args)
    folder = Path(os.environ["SWIFT_TEST_FOLDER"])
    device = join(args)
    rank, size = dist.get_rank(), dist.get_world_size()
    last = size - 1
    if args.ddp:
        inner = build_stage(0, 1, config).to(device)
        module: torch.nn.Module = DistributedDataParallel(inner)
    else:
        module = inner = build_stage(rank, size, config).to(device)
        stage = PipelineStage(module, rank, size, device)
        schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss_fn)
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(module.parameters(), lr=1e-3))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    best = Best()
    batches = Batches(config, device)
    state = {"model": module, "optimizer": optimizer, "plateau": plateau, "best": best}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    if args.ddp:
        session.attach_ddp(module)
    else:
        session.attach_pipeline(schedule)
    seen: dict[str, list[object]] = {}
    loss = torch.zeros((), device=device)

    def dies(function: str) -> None:
        mark = folder / "died"
        if args.die == f"{function}:{session.iteration}:{rank}" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def note(name: str, what: object) -> None:
        seen.setdefault(name, []).append([session.iteration, what])

    def validate() -> float:
        """Of data that no step has."""
        module.eval()
        x, y = batches[1000 + session.iteration]
        losses: list[torch.Tensor] = []
        with torch.no_grad():
            if args.ddp:
                x, y = (part.chunk(size)[rank] for part in (x, y))
                losses = [loss_fn(inner(x), y)]
            else:
                schedule.eval(*[x] if rank == 0 else [], target=y, losses=losses)
        total = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
        dies("validate")
        dist.all_reduce(total)
        if args.wrong == "state":
            plateau.step(total)
        if args.wrong == "result":
            total += rank
        module.train()
        return total.item()

    def judge(loss: float) -> None:
        """The learning rate, the best loss, and whether to go on."""
        note("loss", loss)
        plateau.step(loss)
        best.improved = loss < best.loss
        best.loss = min(best.loss, loss)
        best.count += 1
        if best.count == args.stop_after:
            session.stop()

    def save_best() -> None:
        if best.improved and rank == 0:
            (folder / "best.json").write_text(json.dumps([session.iteration, best.loss]))
        dies("save_best")
        dist.barrier()

    def save() -> None:
        dies("save")
        name = "model" if args.ddp else f"stage {rank}"
        dcp.save({name: inner.state_dict()}, checkpoint_id=folder / f"own-{session.iteration}")

    def log() -> None:
        mean = loss.clone()
        dies("log")
        dist.all_reduce(mean)
        note("log", mean.item())

    session.between(validate, every=2, then=judge)
    session.between(save_best, every=2)
    session.between(save, every=4)
    session.between(log, on_loss="skip")
    for step in session.steps(args.iterations):
        with step:
            x, y = batches[step.index]
            losses: list[torch.Tensor] = []
            if args.ddp:
                x, y = (part.chunk(size)[rank] for part in (x, y))
                losses = [loss_fn(module(x), y)]
                losses[0].backward()
            else:
                schedule.step(*[x] if rank == 0 else [], target=y, losses=losses, return_outputs=False)
            loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)
            optimizer.step()
            optimizer.zero_grad()
        if args.wrong == "outside":
            dist.all_reduce(loss)
    Path(args.weights_out).mkdir(parents=True, exist_ok=True)
    rates = [torch.tensor(group["lr"], dtype=torch.float64) for group in optimizer.param_groups]
    facts = {"rate": rates[0], "best": torch.tensor([best.loss, best.count], dtype=torch.float64)}
    torch.save({**inner.state_dict(), **facts}, f"{args.weights_out}/rank{rank}.pt")
    (folder / f"seen{rank}.json").write_text(json.dumps(seen))
    assert last == size - 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
