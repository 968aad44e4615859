"""Lightning's Trainer with FSDP2: ``configure_model`` shards within replicas, or over all workers."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.theirs.scripts.lightning_parts import data, leave

WORKERS = int(os.environ["WORLD_SIZE"])


class Classifier(LightningModule):  # type: ignore[misc]
    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.replicas = replicas
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def configure_model(self) -> None:
        if self.replicas > 1:
            mesh = init_device_mesh(
                "cpu", (self.replicas, WORKERS // self.replicas), mesh_dim_names=("dp_replicate", "dp_shard")
            )
        else:
            mesh = init_device_mesh("cpu", (WORKERS,))
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--replicas", type=int, default=1)
    args = parser.parse_args()
    out = Path(args.out)
    sizes = {"data_parallel_size": WORKERS, "tensor_parallel_size": 1}
    strategy: Any = ModelParallelStrategy(**sizes)
    if args.store:
        from swift_ft.integrations.lightning import SwiftModelParallelStrategy

        options = {} if args.replicas > 1 else {"snapshot_every": 2}
        strategy = SwiftModelParallelStrategy(store=args.store, checkpoint_every=100, **options, **sizes)
    torch.manual_seed(0)
    per_machine = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = Trainer(
        accelerator="cpu",
        devices=per_machine,
        num_nodes=WORKERS // per_machine,
        strategy=strategy,
        max_epochs=3,
        val_check_interval=0.5,
        log_every_n_steps=1,
        enable_progress_bar=False,
        logger=CSVLogger(out, name="logs"),
        callbacks=[ModelCheckpoint(dirpath=out / "best", monitor="val_loss", save_top_k=2)],
    )
    model = Classifier(args.replicas)
    train = DataLoader(data(1, 64 * WORKERS), batch_size=16, shuffle=True)
    trainer.fit(model, train, DataLoader(data(2, 32 * WORKERS), batch_size=16))
    leave(
        trainer,
        out,
        model={name: tensor.to_local() for name, tensor in model.state_dict().items()},
        optimizer=[
            {key: getattr(value, "to_local", lambda value=value: value)() for key, value in state.items()}
            for state in trainer.optimizers[0].state.values()
        ],
        scheduler=trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    )


if __name__ == "__main__":
    main()
