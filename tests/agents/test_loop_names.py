"""The loops that a row may name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hone.agents.contract import LOOPS
from hone.agents.loop_names import LoopNames
from hone.config import PPOTrainerConfig
from hone.config.rollout import BUILT_IN_LOOPS
from hone.plugins import PluginError

Config = Callable[..., PPOTrainerConfig]


def names(config: Config, *overrides: str) -> LoopNames:
    return LoopNames(config(*overrides).actor_rollout_ref.rollout)


def test_the_data_check_knows_every_built_in_loop() -> None:
    targets = {name: target for name, target in LOOPS.entries.items() if isinstance(target, str)}
    built_in = {name for name, target in targets.items() if target.startswith("hone.agents.")}
    assert built_in == set(BUILT_IN_LOOPS)


def test_a_module_of_a_configured_loop_may_register_further_names(
    config: Config, tmp_path: Path
) -> None:
    """The module is imported when a row names an unknown loop, and not before."""
    (tmp_path / "own.py").write_text(
        "from hone.agents.contract import register\n"
        "from hone.agents.contract import SingleTurnAgentLoop\n"
        "@register('listing_test_further')\n"
        "class Main(SingleTurnAgentLoop): pass\n"
    )
    loops = names(
        config, f"actor_rollout_ref.rollout.agent.default_agent_loop='{tmp_path}/own.py:Main'"
    )
    assert loops.name_of_row("tool_agent") == "tool_agent"
    assert "listing_test_further" not in LOOPS
    assert loops.name_of_row("listing_test_further") == "listing_test_further"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- name: [", "cannot be read as YAML"),
        ("- 5", "needs `name` and `_target_`"),
        ('- {name: x, _target_: "\\ud800"}', "lone surrogate"),
        ("[" * 2_000, "nested too deeply"),
    ],
)
def test_a_list_that_cannot_be_used_is_named(
    config: Config, tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / "loops.yaml").write_text(text)
    key = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path}/loops.yaml"
    with pytest.raises(PluginError, match=rf"loops\.yaml.*{why}"):
        names(config, key)
