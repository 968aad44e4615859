"""Layers from shapes and from powers of two."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.errors import UsageError
from swift_ft.planning.layout.shapes import Shapes, from_powers, transformer_layers

GPT2 = Shapes(hidden=768, blocks=12, vocabulary=50257, sequence=1024, tied=True)


def test_a_known_model_has_its_size() -> None:
    """GPT-2: 85 million parameters in blocks and 38.6 million in the embedding, 16 bytes each."""
    layers = transformer_layers(GPT2, 1e12)
    assert len(layers) == 14
    blocks = sum(layer.state_bytes for layer in layers[1:-1]) / 16
    assert blocks == pytest.approx(85e6, rel=0.01)
    assert layers[0].state_bytes / 16 == pytest.approx(38.6e6, rel=0.01)
    assert (layers[-1].state_bytes, layers[-1].shared_with) == (0, 0)
    operations = sum(layer.forward_ns for layer in layers) * 1000  # at 1e12 per second
    assert operations == pytest.approx(2 * (85e6 + 38.6e6) * 1024 + 12 * 4 * 1024 * 768 * 1024, rel=0.01)
    assert sum(layer.backward_ns for layer in layers) == 2 * sum(layer.forward_ns for layer in layers)


def test_measured_blocks_replace_the_estimate() -> None:
    layers = transformer_layers(GPT2, 1e12, blocks_ns=(1201, 2402))
    assert sum(layer.forward_ns for layer in layers[1:-1]) == 1201
    assert sum(layer.backward_ns for layer in layers[1:-1]) == 2402
    assert max(layer.forward_ns for layer in layers[1:-1]) == 101


@given(st.integers(0, 200), st.lists(st.integers(0, 10**9), min_size=1, max_size=8))
def test_times_are_sums_of_binary_digits(count: int, times: list[int]) -> None:
    measured = {1 << power: time for power, time in enumerate(times)}
    highest = len(times) - 1
    digits = sum(time for power, time in enumerate(times[:-1]) if count >> power & 1)
    assert from_powers(count, measured) == digits + (count >> highest) * times[highest]


@pytest.mark.parametrize("measured", [{}, {2: 1}, {1: 1, 4: 1}, {1: 1, 3: 1}])
def test_powers_without_a_gap(measured: dict[int, int]) -> None:
    with pytest.raises(UsageError, match="without a gap"):
        from_powers(5, measured)


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="hidden is 0"):
        Shapes(0, 1, 1, 1)
    with pytest.raises(UsageError, match="must be more than 0"):
        transformer_layers(GPT2, 0)
