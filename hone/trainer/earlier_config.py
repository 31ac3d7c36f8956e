"""The settings of a resumed run that differ from those it began with.

Only settings that decide what is computed count; folders, trackers and how often something is saved do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hone.config.convert import show_value
from hone.types import JsonValue, Settings

MAX_LINES = 6
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PPO_KEYS = (
    *("algorithm", "custom_reward_function", "reward_model", "critic.optim", "trainer.seed"),
    *(f"{_ACTOR}.{name}" for name in ("optim", "policy_loss", "loss_agg_mode", "entropy_coeff")),
    *(f"{_ACTOR}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")),
    *(f"{_ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type")),
    *(f"{_ACTOR}.{name}" for name in ("ppo_epochs", "ppo_mini_batch_size", "grad_clip")),
    *(f"{_ROLLOUT}.{name}" for name in ("n", "temperature", "top_k", "top_p", "min_p")),
    *(f"{_ROLLOUT}.{name}" for name in ("multi_turn", "agent.default_agent_loop")),
    *(f"data.{name}" for name in ("train_batch_size", "max_prompt_length", "max_response_length")),
    *(f"data.{name}" for name in ("truncation", "prompt_format", "apply_chat_template_kwargs")),
)
SFT_KEYS = ("optim", "data.train_batch_size", "data.max_length", "data.truncation", "trainer.seed")
_DERIVED = ("total_training_steps", "input_tokenizer")
"""Follow from the length of the run, which a resumed one may change, and from the model."""


def changed_settings(before: Settings, now: Settings, keys: tuple[str, ...]) -> list[str]:
    """`key=value, before value` for each setting below `keys` that differs, a few at most."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    below = tuple(f"{key}." for key in keys)
    changed = [
        f"{key}={show_value(new[key])}, before {show_value(old[key])}"
        for key in new
        if f"{key}.".startswith(below)
        and not key.endswith(_DERIVED)
        and key in old
        and _lists(old[key]) != _lists(new[key])
    ]
    if len(changed) > MAX_LINES:
        changed[MAX_LINES - 1 :] = [f"and {len(changed) - MAX_LINES + 1} settings more"]
    return changed


def _leaves(tree: Settings, prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _lists(value: JsonValue) -> JsonValue:
    """YAML has lists where a config has tuples."""
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
