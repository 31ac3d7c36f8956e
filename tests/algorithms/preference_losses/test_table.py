"""The table of preference losses, and the user's own losses."""

from __future__ import annotations

from typing import Any

import pytest

from hone.algorithms.preference_losses import TABLE, LossFunction
from hone.config.preference import UNPAIRED_LOSSES
from hone.plugins import PluginError


def margin_only(chosen_logp: Any, rejected_logp: Any, config: Any) -> Any:
    return rejected_logp - chosen_logp, {}


def with_wrong_names(chosen: Any, rejected: Any) -> Any:
    return rejected - chosen, {}


def test_a_users_loss_gets_what_its_parameters_name() -> None:
    loss = LossFunction(f"{__name__}:margin_only")
    assert loss.arguments == ("chosen_logp", "rejected_logp", "config")
    assert loss.is_paired
    assert not loss.needs_reference


def test_wrong_parameters_and_names_are_refused() -> None:
    with pytest.raises(PluginError, match=r"with_wrong_names.*takes chosen, rejected, but"):
        LossFunction(f"{__name__}:with_wrong_names")
    with pytest.raises(PluginError, match=r"unknown preference loss 'sigmod'.*'sigmoid'"):
        LossFunction("sigmod")


def test_the_losses_over_single_responses_are_those_that_the_config_names() -> None:
    unpaired = {name for name in TABLE.names() if not LossFunction(name).is_paired}
    assert unpaired == set(UNPAIRED_LOSSES)
