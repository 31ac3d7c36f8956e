"""Presets of rollout correction, by verl's names and arguments."""

from __future__ import annotations

import pytest

from hone.config.algorithm import RolloutCorrectionConfig as Correction


def test_a_preset_has_the_settings_of_its_name() -> None:
    preset = Correction.decoupled_k3_rs_seq_tis(is_threshold=3.0)
    assert (preset.rollout_is, preset.rollout_is_threshold) == ("sequence", 3.0)
    assert (preset.rollout_rs, preset.rollout_rs_threshold) == ("seq_mean_k3", 0.01)
    assert not preset.bypass_mode
    assert Correction.bypass_pg_is(3.0).rollout_is_threshold == 3.0
    assert Correction.bypass_pg_is().loss_type == "reinforce"
    assert Correction.decoupled_geo_rs_seq_tis(rs_threshold=1.001).rollout_rs_threshold == 1.001
    assert Correction.disabled() == Correction()


def test_icepops_band_has_two_ends() -> None:
    assert Correction.decoupled_token_icepop().rollout_is_threshold == "0.5_5.0"
    assert Correction.bypass_pg_token_icepop(4.0, 0.25).rollout_is_threshold == "0.25_4.0"


def test_an_argument_that_a_preset_does_not_take_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"takes threshold\. Did you mean 'threshold'"):
        Correction.decoupled_token_is(treshold=2.0)
    with pytest.raises(TypeError, match="takes no arguments"):
        Correction.disabled(2.0)
