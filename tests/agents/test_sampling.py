"""Sampling parameters from the configuration."""

from __future__ import annotations

import pytest

from hone.agents.sampling import training_sampling, validation_sampling
from hone.config import load_config


@pytest.mark.parametrize(
    ("setting", "stops"),
    [("'</answer>'", ("</answer>",)), ("['</a>','</b>']", ("</a>", "</b>")), ("[]", ())],
)
def test_one_stop_string_is_not_a_list_of_its_characters(
    setting: str, stops: tuple[str, ...]
) -> None:
    rollout = load_config([f"actor_rollout_ref.rollout.stop={setting}"]).actor_rollout_ref.rollout
    assert training_sampling(rollout)["stop"] == stops
    assert validation_sampling(rollout)["stop"] == stops
