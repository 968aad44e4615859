"""Lightning's Trainer, protected: ``Trainer(strategy=SwiftStrategy(store=...))``, started by ``swift-run``.

from swift_ft.integrations.lightning import SwiftStrategy

trainer = Trainer(strategy=SwiftStrategy(store="s3://bucket/run7"), devices=1, num_nodes=2)
"""

from swift_ft.integrations.lightning.strategies import SwiftModelParallelStrategy, SwiftStrategy

__all__ = ["SwiftModelParallelStrategy", "SwiftStrategy"]
