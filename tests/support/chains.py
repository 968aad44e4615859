import itertools
from collections.abc import Iterator

from hypothesis import strategies as st

from swift_ft.costs.chain_profile import ChainProfile
from swift_ft.planning.grouping.chain import Chain


def all_starts(n: int) -> Iterator[tuple[int, ...]]:
    """Every partition of n machines into consecutive groups."""
    for cuts in itertools.product((False, True), repeat=n - 1):
        yield (0, *(i + 1 for i, cut in enumerate(cuts) if cut))


def brute_force(chain: Chain, limit: int) -> float:
    """The least expected replay time of all partitions whose log stays within ``limit`` bytes."""
    return min(chain.expected_replay_s(s) for s in all_starts(chain.n) if chain.logged_bytes(s) <= limit)


@st.composite
def profiles(draw: st.DrawFn, max_machines: int = 10) -> ChainProfile:
    """Chains of machines, with the ties and zeros that planners get wrong."""
    n = draw(st.integers(1, max_machines))
    seconds = draw(st.sampled_from([st.just(1.0), st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.01, 2.0)]))
    size = draw(st.sampled_from([st.just(7), st.integers(0, 4), st.integers(1, 10**9)]))
    weight = draw(st.sampled_from([None, st.floats(0.1, 5.0), st.sampled_from([0.0, 1.0])]))
    weights = () if weight is None else tuple(draw(weight) for _ in range(n))
    return ChainProfile(
        tuple(draw(seconds) for _ in range(n)),
        tuple(draw(size) for _ in range(n - 1)),
        weights if sum(weights) > 0 else (),
    )
