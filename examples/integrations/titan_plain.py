"""Trains a Llama as torchtitan does: a mesh, global clipping, validation, checkpoints, a schedule, bf16.

torchrun --nproc-per-node 4 examples/integrations/titan_plain.py --parallelism.dp_replicate 2
"""

from titan.config import JobConfig
from titan.trainer import Trainer


def main() -> None:
    """Trains one worker's part."""
    config = JobConfig.from_args(__doc__)
    trainer, checkpoint, validation = Trainer(config), config.checkpoint, config.validation
    for _ in range(config.training.steps):
        trainer.train_step()
        if trainer.is_due(validation.interval):
            trainer.validated(trainer.validate())
        if trainer.is_due(checkpoint.interval):
            trainer.save()
    trainer.close()


if __name__ == "__main__":
    main()
