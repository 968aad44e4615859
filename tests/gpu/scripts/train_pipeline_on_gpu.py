"""The GPT of `examples/` in a pipeline whose stages compute on GPUs.

With `--messages device` messages are CUDA tensors, and every worker needs its own GPU (NCCL). With
`--messages host` stages compute on a GPU that they may share, and messages cross in host memory: gloo's send
and recv hand the tensor's address to the socket, so they cannot take a CUDA tensor. This exercises weights,
optimizer state, checkpoints and a replay on the GPU; it does not exercise the copier, which only sees CUDA
messages (`test_stage.py` does), nor NCCL.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, argument_parser, build_stage, loss_fn
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import swift_ft


class OnDevice(nn.Module):
    """A stage that computes on a device; its inputs and outputs are in host memory."""

    def __init__(self, part: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.part = part
        self.device = device

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x.to(self.device))
        return y.cpu()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--checkpoint-every", type=int, default=20)
    parser.add_argument("--messages", choices=["host", "device"], default="host")
    parser.add_argument("--device-type", default="cuda", help="cpu tries this script without a GPU")
    args = parser.parse_args()
    config = Config.from_args(args)
    deterministic()

    direct = args.messages == "device"
    dist.init_process_group("nccl" if direct else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = chosen_device(args.device_type, rank)

    model = build_stage(rank, world_size, config).to(device)
    if direct:
        stage = PipelineStage(model, rank, world_size, device)
    else:
        stage = PipelineStage(OnDevice(model, device), rank, world_size, torch.device("cpu"))
    schedule = get_schedule_class(args.schedule)(stage, config.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(config)

    state = {"model": model, "optimizer": optimizer}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_pipeline(schedule)
    for step in session.steps(args.iterations):
        with step:
            x, y = (part.to(device) if direct else part for part in batches[step.index])
            losses: list[Tensor] = []
            schedule.step(*[x] if rank == 0 else [], target=y, losses=losses, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            if losses:  # on the last stage
                print(f"iteration {step.index}: loss {sum(losses) / len(losses):.3f}", flush=True)

    assert {parameter.device for parameter in model.parameters()} == {device}
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {moment.device for moment in moments} == {device}
    if args.weights_out:
        Path(args.weights_out).mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        torch.save(weights, f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


def chosen_device(kind: str, rank: int) -> torch.device:
    """The worker's GPU, which it may share, or the host."""
    if kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def deterministic() -> None:
    """The same bits in every run. Attention in plain matrix products: its fused kernels may differ."""
    swift_ft.deterministic()
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


if __name__ == "__main__":
    main()
