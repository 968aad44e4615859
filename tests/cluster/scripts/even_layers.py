"""Another script (OF), whose layers all count as equally expensive: a test knows where they move."""

import importlib
import os

from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.recovery.job_state import State
from swift_ft.runtime.elastic.layer_profiler import LayerCosts


def equal_costs(self: LayerCosts, state: State) -> list[LayerProfile] | None:
    del state
    return [LayerProfile(forward_ns=1000, backward_ns=2000, state_bytes=0)] * self._count


def main() -> None:
    LayerCosts.read = equal_costs
    importlib.import_module(os.environ.get("OF", "train_elastic")).main()


if __name__ == "__main__":
    main()
