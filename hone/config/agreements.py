"""Checks of what the roles of a `ppo_trainer` tree must agree on: group size, tokens, dtype, loops.

Part of the checks in `checks.py`, which runs them; each sentence names values that work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hone.config.schema import PPOTrainerConfig


def _group_sizes(config: PPOTrainerConfig) -> Iterator[str]:
    n = config.actor_rollout_ref.rollout.n
    sizes = {
        "actor_rollout_ref.actor": config.actor_rollout_ref.actor.rollout_n,
        "critic": config.critic.rollout_n,
    }
    for block, size in sizes.items():
        if size != n:
            yield (
                f"{block}.rollout_n={size} differs from actor_rollout_ref.rollout.n={n}, the responses "
                f"a prompt has; use {n}, or leave it out"
            )


def _agents(config: PPOTrainerConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    turns, agent = rollout.multi_turn, rollout.agent
    key = "actor_rollout_ref.rollout.multi_turn"
    others = (turns.tool_config_path, turns.function_tool_path, turns.interaction_config_path)
    if turns.enable and not any(others):
        yield (
            f"{key}.enable=true has neither tools nor interactions; give {key}.tool_config_path, "
            f"{key}.function_tool_path or {key}.interaction_config_path, or use {key}.enable=false"
        )
    own = agent.agent_loop_config_path or config.actor_rollout_ref.model.external_lib
    if agent.default_agent_loop == "search_agent" and not own:
        yield (
            "actor_rollout_ref.rollout.agent.default_agent_loop=search_agent: the search loop is not "
            "built; use single_turn_agent, tool_agent with a search tool, or file.py:Loop of your own"
        )


def _rollout_dtype(config: PPOTrainerConfig) -> Iterator[str]:
    key = "actor_rollout_ref.rollout.dtype"
    wanted, actor = config.actor_rollout_ref.rollout.dtype, config.actor_rollout_ref.actor
    trained: str = actor.fsdp_config.dtype
    if trained == "auto":
        trained = {"cpu": "fp32", "cuda": "bf16"}.get(config.trainer.device, wanted)
    short = {"float32": "fp32", "bfloat16": "bf16"}
    if wanted != "auto" and short.get(wanted, wanted) != short.get(trained, trained):
        yield (
            f"{key}={wanted}: the rollout decodes with the actor's own parameters, in {trained} here; "
            f"use {key}=auto, or set actor_rollout_ref.actor.fsdp_config.dtype={wanted} as well"
        )


def _critic_tokenizer(config: PPOTrainerConfig) -> Iterator[str]:
    model = config.actor_rollout_ref.model
    path = config.critic.model.tokenizer_path
    if path not in (None, model.path, model.tokenizer_path, config.critic.model.path):
        yield (
            f"critic.model.tokenizer_path={path}: the critic reads the policy's tokens; use "
            f"{model.tokenizer_path or model.path}, or leave it out"
        )


AGREEMENTS: tuple[Callable[[PPOTrainerConfig], Iterator[str]], ...] = (
    _group_sizes,
    _agents,
    _rollout_dtype,
    _critic_tokenizer,
)
