"""What must hold for each estimator in the table: it equals its reference on any batch, whatever the
masks, groups and lengths, and nothing outside the mask matters.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from hone.algorithms.advantages import TABLE, get_adv_estimator_fn

from .batches import batch, batches, run
from .references import REFERENCES, Batch

NAMES = sorted(REFERENCES)
IGNORES_GROUPS = ("gae", "reinforce_plus_plus", "remax")


def comparable(b: Batch) -> bool:
    return len(set(map(repr, b.index))) < len(b.index)


def test_every_estimator_of_the_table_has_a_reference():
    assert sorted(TABLE.names()) == NAMES


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(b=batches())
def test_equals_the_slow_reference(name, b):
    if name == "grpo_passk" and not comparable(b):
        with pytest.raises(ValueError, match=r"rollout\.n"):
            run(name, b)
        return
    for actual, expected in zip(run(name, b), REFERENCES[name](b), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)
        assert (actual[~b.mask] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_group_of_one_is_defined(name):
    b = batch([[0, 1.0], [0, 2.0], [0, 3.0]], [[1, 1]] * 3, ["a", "a", "alone"])
    advantages, _ = run(name, b)
    expected = {
        "grpo": 3 / (1 + 1e-6),
        "grpo_vectorized": 3 / (1 + 1e-6),
        "dr_grpo": 3,
        "rloo": 3,
        "rloo_vectorized": 3,
        "opo": 3,
        "gpg": 3,
        "optimal_token_baseline": 3,
        "tir_optimal_token_baseline": 3,
        "grpo_passk": 0,
        "maxrl": 0,
        "lite_ppo": 0,
    }
    if name in expected:
        np.testing.assert_allclose(advantages[2, 1], expected[name], rtol=1e-12)
    assert np.isfinite(advantages).all()


@pytest.mark.parametrize("name", NAMES)
def test_groups_of_equal_scores_get_0_where_scores_are_compared(name):
    b = batch([[0, 0.1]] * 3 + [[0, 0.7]] * 3, [[1, 1]] * 6, list("aaabbb"))
    for part in ("reward/rule", "reward/style"):
        b.columns[part] = b.rewards
    advantages, _ = run(name, b)
    if name in (
        "rloo_token",
        "prime_rloo",
    ):  # with a discount, an early token's return differs from the mean
        assert np.isfinite(advantages).all()
    elif "optimal" in name:
        np.testing.assert_allclose(advantages, 0, atol=1e-6)  # G·W/(W + 1e-8)
    elif name not in IGNORES_GROUPS:
        assert (advantages == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_empty_masks_give_zeros(name):
    b = batch(np.ones((4, 3)), np.zeros((4, 3)), list("aabb"))
    for tensor in run(name, b):
        assert (tensor == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
def test_nothing_outside_the_mask_leaks(name, junk):
    mask = np.array([[1, 0, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]], dtype=bool)
    clean = batch(np.where(mask, 1.5, 0), mask, list("aab"))
    clean.rewards = np.where(mask, np.arange(12.0).reshape(3, 4), 0)
    with_junk = batch(clean.rewards, mask, list("aab"))
    for b, value in ((clean, 0.0), (with_junk, junk)):
        b.rewards = np.where(mask, b.rewards, value)
        for key, column in b.columns.items():
            b.columns[key] = np.where(mask, column, value) if column.ndim == 2 else column
    for actual, expected in zip(run(name, with_junk), run(name, clean), strict=True):
        np.testing.assert_array_equal(actual, expected)


# optimal_token_baseline compares columns of the response; its tir_ form is for tools
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"optimal_token_baseline"}))
def test_tool_tokens_in_the_middle_change_nothing_but_their_own_places(name):
    plain = batch([[1, 0, 2.0], [0, 1, 0], [0, 0, 1]], np.ones((3, 3)), list("aab"))
    mask = np.array([[1, 0, 0, 1, 1]] * 3, dtype=bool)
    tools = batch(np.zeros((3, 5)), mask, list("aab"))
    tools.rewards[mask] = plain.rewards.ravel()
    tools.columns["reward_baselines"] = plain.columns["reward_baselines"]
    for key in tools.columns:
        if tools.columns[key].ndim == 2:
            tools.columns[key][mask] = plain.columns[key].ravel()
    for actual, expected in zip(run(name, tools), run(name, plain), strict=True):
        np.testing.assert_allclose(actual[mask].reshape(3, 3), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_trajectory_of_two_rows_is_treated_as_one(name):
    mask = np.array([[1, 1, 0, 1, 1, 0], [1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=bool)
    rewards = np.random.default_rng(1).uniform(0, 1, mask.shape)
    whole = batch(rewards, mask, ["a", "a", "b"])
    cut = Batch(
        rewards.reshape(6, 3),
        mask.reshape(6, 3),
        np.repeat(whole.index, 2),
        {
            key: np.repeat(x, 2) if x.ndim == 1 else x.reshape(6, 3)
            for key, x in whole.columns.items()
        },
        whole.config,
    )
    # the second half of the first trajectory comes after another trajectory's rows
    order = np.array([0, 2, 3, 1, 4, 5])
    for key in ("rewards", "mask", "index"):
        setattr(cut, key, getattr(cut, key)[order])
    cut.columns = {key: x[order] for key, x in cut.columns.items()}
    trajectory = np.array(["t0", "t1", "t1", "t0", "t0", "t0"], dtype=object)  # "t0" of two prompts
    back = np.argsort(order)
    for actual, expected in zip(
        run(name, cut, trajectory_id=trajectory), run(name, whole), strict=True
    ):
        np.testing.assert_allclose(actual[back].reshape(3, 6), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_row_order_does_not_matter(name):
    b = batch(
        np.random.default_rng(2).uniform(0, 1, (7, 4)),
        np.random.default_rng(3).uniform(0, 1, (7, 4)) < 0.7,
        list("abacbac"),
    )
    order = np.array([3, 0, 6, 2, 5, 1, 4])
    moved = Batch(
        b.rewards[order],
        b.mask[order],
        b.index[order],
        {key: x[order] for key, x in b.columns.items()},
        b.config,
    )
    for actual, expected in zip(run(name, moved), run(name, b), strict=True):
        np.testing.assert_allclose(actual, expected[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(IGNORES_GROUPS)))
def test_missing_or_misfitting_labels_are_refused(name):
    b = batch(np.ones((2, 2)), np.ones((2, 2)), list("aa"))
    columns = {key: torch.from_numpy(x) for key, x in b.columns.items()}
    rewards, mask = torch.from_numpy(b.rewards), torch.from_numpy(b.mask)
    columns |= {"token_level_rewards": rewards, "response_mask": mask, "config": b.config}
    fn = get_adv_estimator_fn(name)
    with pytest.raises(ValueError, match="uid"):
        fn(**columns)
    with pytest.raises(ValueError, match="1 labels for 2 rows"):
        fn(index=["a"], **columns)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_keyword_is_refused_with_the_nearest_known_one(name):
    b = batch(np.ones((2, 2)), np.ones((2, 2)), list("aa"))
    with pytest.raises(TypeError, match=r"takes no argument 'trajectory_ids'.*'trajectory_id'"):
        run(name, b, trajectory_ids=list("xy"))
    with pytest.raises(TypeError, match="takes no argument 'step'"):
        run(name, b, step=3)


@pytest.mark.parametrize("name", NAMES)
def test_values_in_the_place_of_index_or_config_are_refused(name):
    """verl's functions do not agree on these positions: reinforce_plus_plus has config before index."""
    b = batch(np.ones((2, 2)), np.ones((2, 2)), list("aa"))
    for config in (0.5, True, ["a", "a"], np.array(["a", "a"])):
        with pytest.raises(TypeError, match=f"{type(config).__name__} as config; name the"):
            run(name, replace(b, config=config))
    with pytest.raises(TypeError, match=r"takes \(token_level_rewards, .* got dict as index"):
        run(name, replace(b, index={"gamma": 0.5, "lam": 1.0}))


@pytest.mark.parametrize("name", NAMES)
def test_float32_in_gives_float32_out(name):
    b = batch(np.ones((2, 2)), np.ones((2, 2)), list("aa"))
    b.rewards = b.rewards.astype(np.float32)
    b.columns = {key: x.astype(np.float32) for key, x in b.columns.items()}
    assert all(x.dtype == np.float32 for x in run(name, b))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 3), (0, 0), (2, 0)])
def test_batches_without_rows_or_without_tokens_give_empty_results(name, shape):
    b = batch(np.ones(shape), np.ones(shape), ["a"] * shape[0])
    for tensor in run(name, b):
        assert tensor.shape == shape
