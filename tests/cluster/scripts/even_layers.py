"""Another script (OF), whose layers all count as equally expensive: a test knows where they move."""

import importlib
import os

from swift_ft.planning.layout.profile import LayerProfile
from swift_ft.runtime.rebalance import Rebalance


def equal_costs(self: Rebalance, workers: int) -> list[LayerProfile] | None:
    del workers
    return [LayerProfile(forward_ns=1, backward_ns=2, state_bytes=0)] * self._count


def main() -> None:
    Rebalance._profile = equal_costs
    importlib.import_module(os.environ.get("OF", "train_elastic")).main()


if __name__ == "__main__":
    main()
