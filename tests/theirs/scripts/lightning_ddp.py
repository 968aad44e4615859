"""A training as Lightning's documents show it: a LightningModule, callbacks, loggers, and Trainer.fit()."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, SubsetRandomSampler

from tests.theirs.scripts.lightning_parts import data, leave


class Classifier(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self.net(x)
        self.log("val_loss", F.cross_entropy(out, y), sync_dist=True)
        self.log("val_acc", (out.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Stops(Callback):  # type: ignore[misc]
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_end(self, trainer: Trainer, _: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or trainer.current_epoch == self.epoch


class Averaged(Classifier):
    """Keeps a moving average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.average = average.requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.net)


class Seeing(Classifier):
    """Keeps which samples it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += batch[0][:, 0].tolist()
        return super().training_step(batch, batch_idx)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--kind", choices=["plain", "averaged", "seeing"], default="plain")
    parser.add_argument("--stop-in", type=int, default=-1, help="the epoch after which a callback ends it")
    args = parser.parse_args()
    out = Path(args.out)
    strategy: Any = "ddp"
    if args.store:
        from swift_ft.integrations.lightning import SwiftStrategy

        strategy = SwiftStrategy(store=args.store, checkpoint_every=4)
    torch.manual_seed(0)
    per_machine = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = Trainer(
        accelerator="cpu",
        devices=per_machine,
        num_nodes=int(os.environ["WORLD_SIZE"]) // per_machine,
        strategy=strategy,
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=0.5,
        log_every_n_steps=1,
        enable_progress_bar=False,
        logger=[CSVLogger(out, name="logs"), TensorBoardLogger(out, name="curves")],
        callbacks=[
            ModelCheckpoint(dirpath=out / "best", monitor="val_loss", save_top_k=2, save_last=True),
            EarlyStopping("val_loss", patience=5),
            LearningRateMonitor("step"),
            *([Stops(args.stop_in)] if args.stop_in >= 0 else []),
        ],
    )
    model = {"plain": Classifier, "averaged": Averaged, "seeing": Seeing}[args.kind]()
    some = SubsetRandomSampler(range(200)) if args.kind == "seeing" else None
    trainer.fit(
        model,
        DataLoader(data(1, 256), batch_size=16, shuffle=some is None, sampler=some),
        DataLoader(data(2, 64), batch_size=16),
    )
    leave(
        trainer,
        out,
        model=model.state_dict(),
        optimizers=[o.state_dict() for o in trainer.optimizers],
        schedulers=[c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        epoch=trainer.current_epoch,
        seen=getattr(model, "seen", []),
    )


if __name__ == "__main__":
    main()
