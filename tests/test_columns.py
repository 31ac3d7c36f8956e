"""Columns: each is declared once, written once, and missed with a sentence."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from hone.columns import (
    COLUMNS,
    ColumnWrittenTwice,
    MissingColumn,
    declaration,
    is_data_column,
    require,
    reward_column,
    write,
)
from hone.protocol import PADDED_ROW, DataProto


def batch() -> DataProto:
    return DataProto.from_dict({"responses": torch.zeros(2, 3, dtype=torch.int64)}, {"uid": [1, 2]})


def test_the_sentence_says_who_should_have_written_it() -> None:
    with pytest.raises(MissingColumn) as caught:
        require(batch(), "values")
    assert str(caught.value) == (
        "batch has no 'values' (critic estimate before each token): phase 'values' writes it "
        "if an estimator reads it (gae), or critic.enable=True"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert caught.value.name == "values"
    assert isinstance(caught.value, KeyError)


def test_a_phase_that_always_runs_is_said_to() -> None:
    with pytest.raises(MissingColumn, match="phase 'generate' always writes it"):
        require(batch(), "response_mask")


def test_a_column_that_is_there_is_returned() -> None:
    data = batch()
    assert require(data, "responses").shape == (2, 3)
    assert list(require(data, "uid")) == [1, 2]


def test_a_typo_is_helped_and_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(MissingColumn, match="Did you mean 'advantages'"):
        require(batch(), "advantage")
    with pytest.raises(MissingColumn, match=r"no phase declares it.*\['responses', 'uid'\]"):
        require(batch(), "qqqq")


def test_a_users_own_column_needs_no_declaration() -> None:
    data = batch()
    write(data, "my_extra", np.array(["a", "b"], dtype=object))
    assert list(require(data, "my_extra")) == ["a", "b"]


def test_a_column_is_written_once() -> None:
    data = batch()
    write(data, "values", torch.zeros(2, 3))
    with pytest.raises(
        ColumnWrittenTwice, match="'values' has already been written by phase 'values'"
    ):
        write(data, "values", torch.ones(2, 3))
    assert float(data.column("values").sum()) == 0
    with pytest.raises(ColumnWrittenTwice, match="'uid'"):
        write(data, "uid", np.array([3, 4], dtype=object))


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("values", torch.zeros(2), r"float \[B, T\]; got shape \(2,\)"),
        ("values", torch.zeros(2, 3, dtype=torch.int64), "got torch.int64"),
        ("values", np.zeros((2, 3)), "got a ndarray, not a tensor"),
        ("input_ids", torch.zeros(2, 3), "got torch.float32"),
        ("data_source", ["a", "b"], "got a list"),
        ("values", torch.zeros(3, 3), "3 rows; the batch has 2"),
    ],
)
def test_what_does_not_fit_its_declaration_is_refused(
    name: str, value: object, problem: str
) -> None:
    data = batch()
    with pytest.raises(ValueError, match=problem):
        write(data, name, value)
    assert not data.has_column(name)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_may_have_any_type(dtype: torch.dtype) -> None:
    data = batch()
    write(data, "response_mask", torch.ones(2, 3, dtype=dtype))
    assert data.has_column("response_mask")


def test_positions_may_have_a_rope_axis() -> None:
    data = batch()
    write(data, "position_ids", torch.zeros(2, 4, 5, dtype=torch.int64))
    assert data.has_column("position_ids")


def test_every_reward_part_is_declared_by_its_family() -> None:
    assert reward_column("rule") == "reward/rule"
    column = declaration("reward/rule")
    assert column is not None
    assert (column.shape, column.phase) == ("[B, T]", "score")
    with pytest.raises(MissingColumn, match="reward part 'kl' of each token"):
        require(batch(), "reward/kl")
    for wrong in ("", "a/b"):
        with pytest.raises(ValueError, match="a name without"):
            reward_column(wrong)
    assert declaration("reward/") is None


def test_a_row_may_bring_what_is_its_own_and_nothing_a_phase_writes() -> None:
    assert all(is_data_column(name) for name in ("data_source", "extra_info", "acc", "difficulty"))
    assert not any(is_data_column(name) for name in ("responses", "seed", "values", "reward/rule"))


def test_every_declaration_is_complete() -> None:
    for name, column in COLUMNS.items():
        assert name == column.name
        assert column.shape in {"[B]", "[B, P]", "[B, T]", "[B, P+T]", "[B, P+T, L, k]"}
        assert column.dtype in {"float", "int", "mask", "object"}
        assert all((column.phase, column.when, column.meaning))
        assert column.ndim == {"[B]": 1, "[B, P+T, L, k]": 4}.get(column.shape, 2)


def test_the_columns_of_the_walk_are_declared() -> None:
    walk = (
        "prompts responses response_mask attention_mask position_ids input_ids rollout_log_probs "
        "token_level_scores token_level_rewards old_log_probs ref_log_prob entropys values "
        "advantages returns loss_mask rollout_is_weights uid trajectory_id data_source "
        "reward_model extra_info raw_prompt agent_name rm_scores reward_baselines versions "
        "sample_index num_turns"
    )
    assert set(walk.split()) - COLUMNS.keys() == set()
    assert PADDED_ROW in COLUMNS
