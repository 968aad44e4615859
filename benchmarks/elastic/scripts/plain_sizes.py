"""DDP or FSDP2 under torchrun, between two DCP checkpoints. The first may be of any number of workers.

The model, the data and the optimizer are those of train_ddp.py and train_fsdp.py.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from gpt import Batches, Config, argument_parser, build_stage, loss_fn
from instrument import Trace
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from train_plain import load_checkpoint, save_checkpoint

parser = argument_parser(__doc__)
parser.add_argument("--sharded", action="store_true", help="FSDP2 instead of DDP")
parser.add_argument("--checkpoint-dir", type=Path, required=True)
parser.add_argument("--trace", metavar="FILE")
args = parser.parse_args()
config = Config.from_args(args)
dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()
trace = Trace(args.trace, rank)
whole = build_stage(0, 1, config)
model: nn.Module
if args.sharded:
    for block in (layer for name, layer in whole.named_children() if name.startswith("block")):
        fully_shard(block)
    fully_shard(whole)
    model = whole
else:
    model = DistributedDataParallel(whole)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = Batches(config)
first = load_checkpoint(args.checkpoint_dir, model, optimizer)
trace("loaded", first)
for iteration in range(first, args.iterations):
    x, y = (part.chunk(workers)[rank] for part in batches[iteration])
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    trace("finished", iteration)
save_checkpoint(args.checkpoint_dir, args.iterations - 1, model, optimizer)
dist.destroy_process_group()
