"""Layers of a LayerStack that share a parameter, as embedding and head do, on whichever stages they are."""

from __future__ import annotations

from functools import partial

from swift_ft.errors import UsageError
from swift_ft.recovery.layout.stage_layers import StageLayers, even_layout, layers_of
from swift_ft.torch_adapters.layer_stack import LayerStack
from swift_ft.torch_adapters.pipelining.tied_parameters import Place, TiedParameters


class TiedLayers:
    """Pairs of parameters of two layers each.

    Args:
        stack: has the layers of this worker.
        tied: sums the gradients, between the stages on which the layers are.
    """

    def __init__(self, stack: LayerStack, tied: TiedParameters) -> None:
        self._stack = stack
        self._tied = tied
        self._layout = even_layout(stack.count, stack.num_stages)
        self._pairs: list[tuple[str, str]] = []

    def tie(self, first: str, second: str) -> None:
        """Declare that two layers share a parameter: ``tie("0.token.weight", "9.logits.weight")``.

        Raises:
            UsageError: these are not parameters of two layers.
        """
        one, other = self._layer_of(first), self._layer_of(second)
        if one == other:
            raise UsageError(f"tie_layers() was given layer {one} twice: share the parameter itself there.")
        self._pairs.append((first, second) if one < other else (second, first))
        self.place(self._layout)

    def place(self, layout: StageLayers) -> None:
        """Find the stages on which the layers are, in a layout.

        Args:
            layout: the number of layers of each stage.
        """
        self._layout = layout
        if self._pairs:
            self._tied.tie_layers((self._place(first), self._place(second)) for first, second in self._pairs)

    def _place(self, name: str) -> Place:
        layer = _number(name)
        stage = next(s for s in range(len(self._layout)) if layer in layers_of(self._layout, s))
        return partial(self._stack.get_parameter, name), stage

    def _layer_of(self, name: str) -> int:
        number, _, rest = name.partition(".")
        if not (number.isdigit() and int(number) < self._stack.count and rest):
            raise UsageError(
                f"tie_layers() was given {name!r}: it takes the number of a layer, 0 to "
                f"{self._stack.count - 1}, and the name of a parameter in it, as in '0.token.weight'."
            )
        here = int(number) in self._stack.layers
        if here and rest not in dict(self._stack.layer(int(number)).named_parameters()):
            raise UsageError(f"tie_layers() was given {name!r}: layer {number} has no parameter {rest!r}.")
        return int(number)


def _number(name: str) -> int:
    return int(name.partition(".")[0])
