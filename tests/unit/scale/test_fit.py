"""The exponent with which a cost grows, from measured points."""

import pytest

from benchmarks.scale.fit import fit


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.2, 2.0])
def test_a_power_law_is_found(exponent: float) -> None:
    found = fit({size: 0.003 * size**exponent for size in (64, 128, 256, 512, 1024)})
    assert found.exponent == pytest.approx(exponent)
    assert found.factor == pytest.approx(0.003)
    assert found.at(16384) == pytest.approx(0.003 * 16384**exponent)


def test_a_constant_beside_a_growing_cost_hides_its_growth() -> None:
    assert 0.0 < fit({size: 5.0 + 0.001 * size for size in (64, 1024)}).exponent < 0.1


def test_noise_of_a_tenth_moves_the_exponent_by_little() -> None:
    noise = (1.1, 0.9, 1.1, 0.9, 1.1)
    costs = {size: size * by for size, by in zip((64, 128, 256, 512, 1024), noise, strict=True)}
    assert fit(costs).exponent == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("costs", [{64: 1.0}, {64: 1.0, 128: 0.0}, {0: 1.0, 128: 1.0}])
def test_what_has_no_growth_is_refused(costs: dict[int, float]) -> None:
    with pytest.raises(ValueError, match=r"[Ss]izes"):
        fit(costs)
