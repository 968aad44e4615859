"""The exact search (§5.3) against every partition of small chains, and its own proof on larger ones."""

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swift_ft.costs.chain_profile import ChainProfile
from swift_ft.planning.grouping import exact
from swift_ft.planning.grouping.chain import Chain
from swift_ft.planning.grouping.exact import optimal_partition
from tests.support.chains import brute_force, profiles


@settings(deadline=None, max_examples=300)
@given(profiles(), st.sampled_from([1.0, 1e3, 1e9]), st.booleans(), st.floats(0, 1))
def test_equals_brute_force(profile: ChainProfile, bandwidth: float, parallel: bool, part: float) -> None:
    chain = Chain(profile, bandwidth, parallel)
    limit = int(part * sum(profile.boundary_bytes))
    found = optimal_partition(chain, limit)
    assert found.gap_s == 0.0
    assert chain.logged_bytes(found.starts) <= limit
    assert found.cost == pytest.approx(brute_force(chain, limit), rel=1e-10, abs=1e-15)


@pytest.mark.parametrize("seed", range(4))
def test_equals_brute_force_on_twelve_machines(seed: int) -> None:
    rng = random.Random(seed)
    sizes = tuple(rng.randint(1, 10**9) for _ in range(11))
    weights = tuple(rng.uniform(0.5, 3) for _ in range(12))
    chain = Chain(
        ChainProfile(tuple(rng.uniform(0.3, 0.7) for _ in range(12)), sizes, weights), 5e9, seed % 2 == 1
    )
    limit = int(sum(sizes) * rng.uniform(0.2, 0.8))
    assert optimal_partition(chain, limit).cost == pytest.approx(brute_force(chain, limit), rel=1e-11)


@settings(deadline=None, max_examples=80)
@given(profiles(8), st.booleans(), st.floats(0, 1))
@example(ChainProfile((1.0,) * 6, (0, 0, 0, 0, 1)), False, 0.0)  # a toll that grows beyond all costs
def test_search_by_class_is_exact_too(profile: ChainProfile, parallel: bool, part: float) -> None:
    """With room for three labels the plain search gives up; what the classes prove must still be true."""
    chain = Chain(profile, 1e9, parallel)
    limit = int(part * sum(profile.boundary_bytes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "_FIRST_LABELS", 3)
        found = optimal_partition(chain, limit)
    best = brute_force(chain, limit)
    assert chain.logged_bytes(found.starts) <= limit
    assert found.cost - found.gap_s <= best * (1 + 1e-10) + 1e-15


@pytest.mark.parametrize("parallel", [False, True])
def test_agrees_with_dynamic_programming_on_120_machines(parallel: bool) -> None:
    """Equal boundaries make bytes a count of cuts, so a plain table over (machine, cuts) is exact as well."""
    rng = random.Random(5)
    n, size, cuts = 120, 10**6, 37
    chain = Chain(
        ChainProfile(tuple(rng.uniform(0.1, 1) for _ in range(n)), (size,) * (n - 1)), 1e9, parallel
    )
    table = [[float("inf")] * (cuts + 1) for _ in range(n + 1)]
    table[0] = [0.0] * (cuts + 1)
    for j in range(1, n + 1):
        for used in range(cuts + 1):
            table[j][used] = min(
                (table[i][used - (i > 0)] if used >= (i > 0) else float("inf"))
                + chain.chance(i, j) * chain.replay_s(i, j)
                for i in range(j)
            )
    found = optimal_partition(chain, cuts * size + size // 2)
    assert found.gap_s == 0.0
    assert found.cost == pytest.approx(table[n][cuts], rel=1e-11)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("part", [0.5, 0.7, 0.9])
def test_machines_alike_agree_with_dynamic_programming_on_60(parallel: bool, part: float) -> None:
    """Costs come in steps, and boundaries of a few bytes make a plain table over (machine, bytes) exact."""
    rng = random.Random(7)
    n = 60
    sizes = tuple(rng.randint(10, 100) for _ in range(n - 1))
    chain = Chain(ChainProfile((0.5,) * n, sizes), 500.0, parallel)
    limit = int(sum(sizes) * part)
    table = np.full((n + 1, limit + 1), np.inf)
    table[0, 0] = 0.0
    for j in range(1, n + 1):
        for i in range(j):
            paid = sizes[i - 1] if i else 0
            way = table[i, : limit + 1 - paid] + chain.chance(i, j) * chain.replay_s(i, j)
            table[j, paid:] = np.minimum(table[j, paid:], way)
    found = optimal_partition(chain, limit)
    assert found.gap_s == 0.0
    assert found.cost == pytest.approx(table[n].min(), rel=1e-11)


def test_is_proven_where_machines_are_exactly_alike_and_boundaries_random() -> None:
    """So many partitions cost the same that a search finds no end; one that meets the bound is a proof."""
    rng = random.Random(2)
    n = 400
    sizes = tuple(rng.randint(10**8, 10**9) for _ in range(n - 1))
    chain = Chain(ChainProfile((0.5,) * n, sizes), 5e9)
    found = optimal_partition(chain, int(sum(sizes) * 0.7))
    assert found.gap_s == 0.0


def test_failure_weights_move_the_cuts() -> None:
    """Where only the last machine fails, it stays alone."""
    flat = ChainProfile((1.0,) * 6, (10,) * 5)
    frail = ChainProfile((1.0,) * 6, (10,) * 5, (0, 0, 0, 0, 0, 1))
    assert optimal_partition(Chain(flat, 1e9), 10).starts == (0, 3)
    assert optimal_partition(Chain(frail, 1e9), 10).starts == (0, 5)


def test_says_how_far_it_may_be_off_when_it_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_FIRST_LABELS", 3)
    monkeypatch.setattr(exact, "_CLASS_LABELS", 3)
    rng = random.Random(1)
    sizes = tuple(rng.randint(1, 10**9) for _ in range(11))
    chain = Chain(ChainProfile((0.5,) * 12, sizes), 5e9)
    limit = sum(sizes) // 2
    found = optimal_partition(chain, limit)
    assert found.gap_s > 0
    assert found.cost - found.gap_s <= brute_force(chain, limit) <= found.cost
