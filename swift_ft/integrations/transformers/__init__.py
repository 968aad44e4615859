"""The ``Trainer`` of Hugging Face, and any subclass of it, such that it survives the loss of machines.

from swift_ft.integrations.transformers import SwiftTrainer

trainer = SwiftTrainer(model, args, train_dataset=..., store="s3://bucket/run7")
trainer.train()
"""

from swift_ft.integrations.transformers.trainer import SwiftTrainer, SwiftTrainerMixin

__all__ = ["SwiftTrainer", "SwiftTrainerMixin"]
