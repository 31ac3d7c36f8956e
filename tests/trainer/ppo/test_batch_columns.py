"""`columns.py` equals the columns of real batches, both ways, over configurations of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.columns import COLUMNS, Column, declaration
from hone.protocol import DataProto

from ..runs import ALPHABET, Task, opened

TOKENS = ("old_log_probs", "entropys")
RULE = ("ability", "rollout_log_probs", "reward/rule")
MODEL = ("reward/model", "rm_scores")
CORRECTION = "algorithm.rollout_correction"
LOOPS = Path(__file__).with_name("loops.py")
TOOLS = """
tools:
  - class_name: hone.agents.tools.gsm8k:Gsm8kTool
    config: {}
    tool_schema:
      type: function
      function: {name: calc_gsm8k_reward, description: grades, parameters: {type: object, properties: {}}}
"""
TOOL_FACTS = (
    "tool_outputs", "tool_rewards", "turn_scores", "turn_rewards", "timeouts", "tool_call_counts",
    "tool_failures", "reward_scores", "turn_spans",
)  # fmt: skip

CONFIGURATIONS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    # name: overrides, columns beyond those that are always there
    "grpo": ([], RULE),
    "ppo": (["algorithm.adv_estimator=gae"], (*RULE, "values")),
    "remax": (["algorithm.adv_estimator=remax"], (*RULE, "reward_baselines")),
    "dapo": (
        [
            "algorithm.filter_groups.enable=true",
            "reward_model.reward_manager=dapo",
            "reward_model.overlong_buffer.enable=true",
            "reward_model.overlong_buffer.len=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        ],
        (*RULE, *TOKENS),
    ),
    "kl in the reward": (["algorithm.use_kl_in_reward=true"], (*RULE, *TOKENS, "ref_log_prob")),
    "kl in the loss": (["actor_rollout_ref.actor.use_kl_loss=true"], (*RULE, "ref_log_prob")),
    "truncated weights": (
        [f"{CORRECTION}.rollout_is=token"],
        (*RULE, *TOKENS, "loss_mask", "rollout_is_weights"),
    ),
    "rejection": (
        [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=2.0"],
        (*RULE, *TOKENS, "loss_mask"),
    ),
    "bypass": ([f"{CORRECTION}.bypass_mode=true"], (*RULE, "old_log_probs")),
    "lora": (
        ["actor_rollout_ref.model.lora_rank=2", "actor_rollout_ref.actor.use_kl_loss=true"],
        (*RULE, "ref_log_prob"),
    ),
    "optimal token baseline": (
        ["algorithm.adv_estimator=optimal_token_baseline"],
        (*RULE, *TOKENS, "sum_pi_squared"),
    ),
    "tools": (
        [
            "actor_rollout_ref.rollout.multi_turn.tool_config_path={folder}/tools.yaml",
            "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        ],
        (*RULE, *TOOL_FACTS),
    ),
    "a loop that scores": (
        [f"actor_rollout_ref.rollout.agent.default_agent_loop={LOOPS}:ScoresItself"],
        ("ability", "rollout_log_probs", "reward/agent"),
    ),
    "a loop of several rows": (
        [f"actor_rollout_ref.rollout.agent.default_agent_loop={LOOPS}:Summarises"],
        (*RULE, "trajectory_row"),
    ),
    "several rows and a reward model": (
        [
            f"actor_rollout_ref.rollout.agent.default_agent_loop={LOOPS}:ScoresRows",
            "reward_model.enable=true",
            "reward_model.model.path={judge}",
        ],
        ("ability", "rollout_log_probs", "reward/agent", *MODEL, "trajectory_row"),
    ),
    "reward model": (
        ["reward_model.enable=true", "reward_model.model.path={judge}"],
        (*RULE, *MODEL),
    ),
    "process reward model": (
        [
            "reward_model.enable=true",
            "reward_model.type=prm",
            "reward_model.model.path={step_judge}",
            "reward_model.step_separator='+'",
            "algorithm.adv_estimator=rloo_token",
        ],
        (*RULE, "reward/process", "step_mask"),
    ),
    "no log-probs": (
        ["actor_rollout_ref.rollout.calculate_log_probs=false"],
        ("ability", "reward/rule"),
    ),
}
ALWAYS = {name for name, column in COLUMNS.items() if column.when == "always"}


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A reward model of one label, and one that judges steps."""
    from transformers import (
        AutoConfig,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    from hone.models.tiny import character_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("judges"), character_tokenizer(ALPHABET)
    kinds = (
        ("judge", AutoModelForSequenceClassification, 1),
        ("step_judge", AutoModelForTokenClassification, 2),
    )
    for name, kind, labels in kinds:
        config = AutoConfig.for_model(
            "qwen2", vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, intermediate_size=16, num_labels=labels,
            pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        kind.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name, *_ in kinds}


def stepped(task: Task, folder: Path, overrides: list[str], judges: dict[str, Path]) -> DataProto:
    (folder / "tools.yaml").write_text(TOOLS)
    filled = [o.replace("{folder}", str(folder)) for o in overrides]
    for name, path in judges.items():
        filled = [o.replace(f"{{{name}}}", str(path)) for o in filled]
    with opened(task.overrides(folder / "run", *filled)) as trainer:
        batch, _ = trainer.step()
    return batch


def fits(column: Column, value: Any, batch: DataProto) -> bool:
    """Whether the column has the declared shape and type."""
    widths = {"P": batch.batch["prompts"].shape[1], "T": batch.batch["responses"].shape[1]}
    sizes = [s.strip() for s in column.shape.strip("[]").split(",")][1:]
    shape = (len(batch), *(sum(widths[part] for part in size.split("+")) for size in sizes))
    if tuple(value.shape) != shape:
        return False
    if column.dtype == "object":
        return isinstance(value, np.ndarray) and value.dtype == object
    if column.dtype == "mask":
        return bool(((value == 0) | (value == 1)).all())
    return bool(value.is_floating_point() == (column.dtype == "float"))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_real_batch_has_the_columns_that_are_declared_and_no_others(
    task: Task, tmp_path: Path, judges: dict[str, Path], name: str
) -> None:
    overrides, conditional = CONFIGURATIONS[name]
    batch = stepped(task, tmp_path, overrides, judges)
    extras = set(batch.meta_info["reward_extra_names"]) - {"reward_failure"}
    assert set(batch.column_names()) - extras == ALWAYS | set(conditional)
    for column_name in set(batch.column_names()) - extras:
        column = declaration(column_name)
        assert column is not None
        assert fits(column, batch.column(column_name), batch), column


def test_the_configurations_show_every_column_that_is_not_always_there() -> None:
    configured = {name for _, columns in CONFIGURATIONS.values() for name in columns}
    # Made for a reader (test_plan.py), by ranks (test_ray_runs.py), of experts (test_router_replay.py),
    # and not built: vision.
    elsewhere = {"input_ids", "position_ids", "padded_row", "routed_experts", "multi_modal_data"}
    assert COLUMNS.keys() - ALWAYS - elsewhere <= configured
