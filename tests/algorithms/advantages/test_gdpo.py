"""GDPO: the required parts, their weights, and its independence of the scale of a part."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.algorithms.advantages import get_estimator
from hone.algorithms.advantages.group_baseline import gdpo

MASK = torch.ones(4, 1)
ZERO = torch.zeros(4, 1, dtype=torch.float64)


def config(keys, weights=None):
    return {"gdpo_reward_keys": keys, "gdpo_reward_weights": weights}


def parts(**kw):
    return {f"reward/{k}": torch.tensor(v, dtype=torch.float64) for k, v in kw.items()}


def test_the_columns_it_needs_come_from_the_config():
    columns = get_estimator("gdpo", config(["acc", "reward/format"])).requires
    assert columns == ("reward/acc", "reward/format")
    with pytest.raises(ValueError, match="gdpo_reward_keys"):
        get_estimator("gdpo", config(None))
    with pytest.raises(ValueError, match="gdpo_reward_keys"):
        get_estimator("gdpo")


def test_a_part_on_a_scale_a_thousand_times_larger_counts_the_same():
    acc, style = [1.0, 0, 0, 1], [0.0, 1, 0, 1]
    small, _ = gdpo(
        ZERO, MASK, ["p"] * 4, config=config(["acc", "style"]), **parts(acc=acc, style=style)
    )
    large, _ = gdpo(
        ZERO,
        MASK,
        ["p"] * 4,
        config=config(["acc", "style"]),
        **parts(acc=acc, style=[1000 * s for s in style]),
    )
    np.testing.assert_allclose(small, large, atol=1e-4)
    assert small[3] > small[0] > small[2]


def test_a_part_may_have_one_number_per_row_or_per_token():
    per_row, _ = gdpo(ZERO, MASK, ["p"] * 4, config=config(["acc"]), **parts(acc=[1.0, 0, 0, 1]))
    per_token, _ = gdpo(
        ZERO, MASK, ["p"] * 4, config=config(["acc"]), **parts(acc=[[1.0], [0], [0], [1]])
    )
    np.testing.assert_array_equal(per_row, per_token)


def test_weights_default_to_one_and_must_fit_the_keys():
    columns = parts(acc=[1.0, 0, 0, 1], style=[0.0, 1, 0, 1])
    plain, _ = gdpo(ZERO, MASK, ["p"] * 4, config=config(["acc", "style"]), **columns)
    ones, _ = gdpo(ZERO, MASK, ["p"] * 4, config=config(["acc", "style"], [1, 1]), **columns)
    only, _ = gdpo(ZERO, MASK, ["p"] * 4, config=config(["acc", "style"], [1, 0]), **columns)
    np.testing.assert_array_equal(plain, ones)
    assert only[1] == only[2]
    with pytest.raises(ValueError, match="3 numbers for 2"):
        gdpo(ZERO, MASK, ["p"] * 4, config=config(["acc", "style"], [1, 1, 1]), **columns)


def test_the_error_of_a_missing_part_lists_the_existing_parts():
    with pytest.raises(ValueError, match=r"'reward/format'; it has reward/acc"):
        gdpo(ZERO, MASK, ["p"] * 4, config=config(["format"]), **parts(acc=[1.0, 0, 0, 1]))


def test_parts_may_be_columns_of_verls_non_tensor_batch():
    acc, style = [1.0, 0, 0, 1], [0.0, 1, 0, 1]
    names = config(["acc", "style"], [1.0, 0.5])
    columns, _ = gdpo(ZERO, MASK, ["p"] * 4, config=names, **parts(acc=acc, style=style))
    rows = {"acc": np.array(acc, dtype=object), "style": np.array(style, dtype=object)}
    batch = {"prompts": torch.zeros(4, 2), "attention_mask": torch.ones(4, 3)}
    whole, _ = gdpo(ZERO, MASK, ["p"] * 4, config=names, non_tensor_batch=rows, batch=batch)
    assert torch.equal(whole, columns)
    with pytest.raises(ValueError, match=r"no reward part 'reward/format'; it has acc, style"):
        gdpo(ZERO, MASK, ["p"] * 4, config=config(["format"]), non_tensor_batch=rows, batch=batch)
    rows["acc"][1] = None
    with pytest.raises(ValueError, match="'acc' must hold a finite number in every row"):
        gdpo(ZERO, MASK, ["p"] * 4, config=names, non_tensor_batch=rows, batch=batch)


def test_epsilon_and_the_division_are_those_of_each_part():
    """Two equal groups: whitening undoes one common factor, so the parts' own factors show."""
    acc, style = [1.0, 0, 0, 0], [0.0, 4, 0, 0]
    names = config(["acc", "style"])
    given = parts(acc=acc, style=style)
    wide, _ = gdpo(ZERO, MASK, ["p"] * 4, config=names, epsilon=3.0, **given)
    std_acc, std_style = 0.5, 2.0
    raw = np.array(
        [
            (a - 0.25) / (std_acc + 3) + (s - 1) / (std_style + 3)
            for a, s in zip(acc, style, strict=True)
        ]
    )
    np.testing.assert_allclose(wide[:, 0], raw / np.sqrt(raw.var(ddof=1) + 1e-8), rtol=1e-12)
    plain, _ = gdpo(ZERO, MASK, ["p"] * 4, config=names, norm_adv_by_std_in_grpo=False, **given)
    raw = np.array([a - 0.25 + s - 1 for a, s in zip(acc, style, strict=True)])
    np.testing.assert_allclose(plain[:, 0], raw / np.sqrt(raw.var(ddof=1) + 1e-8), rtol=1e-12)
