"""Counter-based random numbers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.ops.counter_rng import fold_seed, uniform

MASK = (1 << 64) - 1


def python_uniform(seed, position):
    """The SplitMix64 finaliser with Python integers."""

    def mix(x):
        x &= MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    return (mix(mix(seed + golden) + position * golden) >> 11) * 2.0**-53


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**40))
def test_uniform_equals_the_same_arithmetic_with_python_integers(seed, position):
    actual = uniform(torch.tensor([seed]), torch.tensor([position])).item()
    assert actual == python_uniform(seed, position)
    assert 0 <= actual < 1


def test_a_random_number_does_not_depend_on_the_batch():
    seeds, positions = torch.arange(100) * 7919, torch.arange(100)
    together = uniform(seeds, positions)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(seeds[order], positions[order]), together[order])
    assert torch.equal(
        torch.cat([uniform(seeds[i, None], positions[i, None]) for i in range(100)]), together
    )


def test_random_numbers_are_uniform_over_seeds_and_over_positions():
    for seed, position in (
        (torch.arange(50_000), torch.zeros(50_000, dtype=torch.int64)),
        (torch.full((50_000,), 42), torch.arange(50_000)),
    ):
        x = uniform(seed, position)
        counts = torch.histc(x, bins=50, min=0, max=1)
        chi_square = ((counts - 1000) ** 2 / 1000).sum()
        assert 25 < chi_square < 85  # 49 degrees of freedom: 1 in 1,000 on either side
        neighbours = torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1]
        assert abs(neighbours) < 0.02


def test_folded_seeds_differ_by_part_and_fit_int64():
    seeds = {
        fold_seed(1, "ab", 0),
        fold_seed(1, "a", "b0"),
        fold_seed(1, "ab0"),
        fold_seed(1, "ab", 1),
    }
    assert len(seeds) == 4
    assert all(0 <= s < 2**63 for s in seeds)
    assert fold_seed(1, "uid", 3) == 3116832617789355738  # a recorded run must replay for ever
