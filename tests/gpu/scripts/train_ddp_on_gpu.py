"""The GPT of `examples/` with data parallelism on GPUs; over gloo its replicas may share one."""

from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, argument_parser, build_stage, loss_fn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_ft
from tests.gpu.scripts.train_pipeline_on_gpu import chosen_device, deterministic


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--device-type", default="cuda", help="cpu tries this script without a GPU")
    parser.add_argument("--sync-batch-norm", action="store_true", help="normalise over all replicas")
    args = parser.parse_args()
    config = Config.from_args(args)
    deterministic()

    dist.init_process_group(args.backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = chosen_device(args.device_type, rank)
    module = build_stage(0, 1, config)
    if args.sync_batch_norm:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(
            nn.Sequential(module, nn.BatchNorm1d(config.sequence))
        )
    model = DistributedDataParallel(module.to(device), bucket_cap_mb=0.01)
    optimizer = swift_ft.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), exact=True)
    batches = Batches(config)

    state = {"model": model, "optimizer": optimizer}
    session = swift_ft.Session(state, store=args.store, checkpoint_every=args.checkpoint_every)
    session.attach_ddp(model)
    for step in session.steps(args.iterations):
        with step:
            x, y = (part.chunk(world_size)[rank].to(device) for part in batches[step.index])
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"iteration {step.index}: loss {loss.item():.3f}", flush=True)

    assert {parameter.device for parameter in model.parameters()} == {device}
    if args.weights_out:
        Path(args.weights_out).mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.cpu() for name, tensor in model.module.state_dict().items()}
        torch.save(weights, f"{args.weights_out}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
