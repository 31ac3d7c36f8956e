"""GDPO: the parts it asks for, their weights, and the scale of one part not drowning another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.algorithms.advantages import needs
from hone.algorithms.advantages.gdpo import gdpo

MASK = torch.ones(4, 1)
ZERO = torch.zeros(4, 1, dtype=torch.float64)


def config(keys, weights=None):
    return {"gdpo_reward_keys": keys, "gdpo_reward_weights": weights}


def parts(**kw):
    return {f"reward/{k}": torch.tensor(v, dtype=torch.float64) for k, v in kw.items()}


def test_the_columns_it_needs_come_from_the_config():
    assert needs("gdpo", config(["acc", "reward/format"])) == ("reward/acc", "reward/format")
    with pytest.raises(ValueError, match="gdpo_reward_keys"):
        needs("gdpo", config(None))
    with pytest.raises(ValueError, match="gdpo_reward_keys"):
        needs("gdpo")


def test_a_part_on_a_scale_a_thousand_times_larger_counts_the_same():
    acc, style = [1.0, 0, 0, 1], [0.0, 1, 0, 1]
    small, _ = gdpo(ZERO, MASK, ["p"] * 4, config(["acc", "style"]), **parts(acc=acc, style=style))
    large, _ = gdpo(
        ZERO,
        MASK,
        ["p"] * 4,
        config(["acc", "style"]),
        **parts(acc=acc, style=[1000 * s for s in style]),
    )
    np.testing.assert_allclose(small, large, atol=1e-4)
    assert small[3] > small[0] > small[2]


def test_a_part_may_be_one_number_a_row_or_one_a_token():
    per_row, _ = gdpo(ZERO, MASK, ["p"] * 4, config(["acc"]), **parts(acc=[1.0, 0, 0, 1]))
    per_token, _ = gdpo(ZERO, MASK, ["p"] * 4, config(["acc"]), **parts(acc=[[1.0], [0], [0], [1]]))
    np.testing.assert_array_equal(per_row, per_token)


def test_weights_default_to_one_and_must_fit_the_keys():
    columns = parts(acc=[1.0, 0, 0, 1], style=[0.0, 1, 0, 1])
    plain, _ = gdpo(ZERO, MASK, ["p"] * 4, config(["acc", "style"]), **columns)
    ones, _ = gdpo(ZERO, MASK, ["p"] * 4, config(["acc", "style"], [1, 1]), **columns)
    only, _ = gdpo(ZERO, MASK, ["p"] * 4, config(["acc", "style"], [1, 0]), **columns)
    np.testing.assert_array_equal(plain, ones)
    assert only[1] == only[2]
    with pytest.raises(ValueError, match="3 numbers for 2"):
        gdpo(ZERO, MASK, ["p"] * 4, config(["acc", "style"], [1, 1, 1]), **columns)


def test_a_missing_part_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"'reward/format'; it has reward/acc"):
        gdpo(ZERO, MASK, ["p"] * 4, config(["format"]), **parts(acc=[1.0, 0, 0, 1]))
