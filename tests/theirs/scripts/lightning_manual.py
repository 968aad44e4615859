"""Lightning's Trainer with two optimizers by hand, metrics, bf16, a loader's process, early stopping."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from tests.theirs.scripts.lightning_parts import data, leave


class TwoHeads(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.classifier = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.encoder = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))
        self.accuracy = MulticlassAccuracy(4)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        out = self.classifier(x)
        loss = F.cross_entropy(out, y)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        rebuilt = F.mse_loss(self.encoder(x), x)
        second.zero_grad()
        self.manual_backward(rebuilt)
        second.step()
        self.untoggle_optimizer(second)
        self.lr_schedulers().step()
        self.accuracy(out, y)
        self.log("train_acc", self.accuracy, on_step=False, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.losses.append(rebuilt.detach())

    def on_train_epoch_end(self) -> None:
        self.log("rebuilt", torch.stack(self.losses).mean())
        self.losses.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.classifier(x), y))  # each worker's own

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.classifier.parameters(), lr=1e-2)
        second = torch.optim.SGD(self.encoder.parameters(), lr=1e-2, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.95)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    out = Path(args.out)
    options = {"find_unused_parameters": True}
    strategy: Any = DDPStrategy(**options)
    if args.store:
        from swift_ft.integrations.lightning import SwiftStrategy

        strategy = SwiftStrategy(store=args.store, checkpoint_every=4, **options)
    torch.manual_seed(0)
    per_machine = int(os.environ["LOCAL_WORLD_SIZE"])
    stop = EarlyStopping("val_loss", min_delta=10.0, patience=2)
    trainer = Trainer(
        accelerator="cpu",
        devices=per_machine,
        num_nodes=int(os.environ["WORLD_SIZE"]) // per_machine,
        strategy=strategy,
        precision="bf16-mixed",
        max_epochs=30,
        log_every_n_steps=2,
        enable_progress_bar=False,
        logger=CSVLogger(out, name="logs"),
        callbacks=[stop, ModelCheckpoint(dirpath=out / "all", save_top_k=-1, every_n_train_steps=4)],
    )
    model = TwoHeads()
    train = DataLoader(data(1, 128), batch_size=16, shuffle=True, num_workers=1)
    trainer.fit(model, train, DataLoader(data(2, 64), batch_size=16))
    assert trainer.current_epoch == 3
    leave(
        trainer,
        out,
        model=model.state_dict(),
        optimizers=[optimizer.state_dict() for optimizer in trainer.optimizers],
        scheduler=trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    )


if __name__ == "__main__":
    main()
