"""Trains a Llama as torchtitan does, on a mesh. A machine that dies is replaced; the others keep their state.

swift-run --standalone --machines 4 --spares 1 --inject "kill machine=1 iteration=12 point=optimizer" \
    examples/integrations/titan_swift.py --parallelism.dp_replicate 2
"""

from titan.config import JobConfig
from titan.trainer import Trainer

import swift_ft


def main() -> None:
    """Trains one worker's part."""
    config = JobConfig.from_args(__doc__)
    trainer, checkpoint, validation = Trainer(config), config.checkpoint, config.validation
    swift_ft.wrap_optimizer(trainer.optimizer, exact=True)
    session = swift_ft.Session(trainer.state, store=checkpoint.store, checkpoint_every=checkpoint.interval)
    session.attach_pipeline(trainer.schedule)
    if trainer.replicated:
        (session.attach_ddp if trainer.uses_ddp else session.attach_fsdp)(trainer.model)
    session.between(trainer.validate, every=validation.interval, then=trainer.validated)
    session.between(trainer.save, every=checkpoint.interval)
    for step in session.steps(config.training.steps):
        with step:
            trainer.train_step()
    trainer.close()


if __name__ == "__main__":
    main()
