"""Keys that users' documents and older trees write, and what they are called here.

Plain renames are rows of `other_keys.txt`; here are those that change a value or depend on other keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from hone.config.errors import nearest
from hone.config.reward import RewardKwargs
from hone.config.sources import Setting
from hone.config.states import renames
from hone.types import JsonObject, JsonValue

ROLLOUT = "actor_rollout_ref.rollout"
MULTI_TURN = f"{ROLLOUT}.multi_turn"
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"

LORA_RANK_WHEN_ENABLED = 16
"""Rank of `actor.lora.enable=true` where no rank is given."""
SAMPLES_WHEN_LOGGED = 8
"""Samples of `trainer.log_generation_samples=true`."""


class BadAliasValue(ValueError):
    """The value of an old key cannot be said in the new one; the text says what it takes."""


@dataclass(frozen=True)
class Rule:
    """An old key whose value changes on the way: the function gives the new settings."""

    apply: Callable[[JsonValue], JsonObject]
    meaning: str


def _truth(value: JsonValue) -> bool:
    if isinstance(value, bool):
        return value
    raise BadAliasValue("takes true or false")


def _whole(value: JsonValue) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise BadAliasValue("takes an integer")


def _agent_loop(value: JsonValue) -> JsonObject:
    names = {"tool_agent_loop": "tool_agent", "single_turn_agent_loop": "single_turn_agent"}
    return {f"{ROLLOUT}.agent.default_agent_loop": names.get(str(value), value)}


def _log_samples(value: JsonValue) -> JsonObject:
    count = SAMPLES_WHEN_LOGGED * value if isinstance(value, bool) else _whole(value)
    return {"trainer.log_train_generations": count, "trainer.log_val_generations": count}


def _debug(value: JsonValue) -> JsonObject:
    return {"trainer.controller": "local", "trainer.logger": ["console"]} if _truth(value) else {}


def _search(value: JsonValue) -> JsonObject:
    loop = "search_agent" if _truth(value) else "single_turn_agent"
    return {f"{ROLLOUT}.agent.default_agent_loop": loop}


def _when(key: str, new: JsonValue) -> Callable[[JsonValue], JsonObject]:
    return lambda value: {key: new} if value is not None and _truth(value) else {}


def _samples(key: str) -> Callable[[JsonValue], JsonObject]:
    return lambda value: {key: -1 if value is None else value}


RULES: dict[str, Rule] = {
    f"{ROLLOUT}.agent_loop": Rule(_agent_loop, f"{ROLLOUT}.agent.default_agent_loop"),
    "trainer.log_generation_samples": Rule(
        _log_samples,
        f"trainer.log_train_generations and trainer.log_val_generations; true is {SAMPLES_WHEN_LOGGED}",
    ),
    "trainer.debug": Rule(_debug, "true is trainer.controller=local trainer.logger=[console]"),
    "trainer.debug_mode": Rule(_debug, "true is trainer.controller=local trainer.logger=[console]"),
    "trainer.remove_previous_ckpt_in_save": Rule(
        _when("trainer.max_actor_ckpt_to_keep", 1), "true is trainer.max_actor_ckpt_to_keep=1"
    ),
    f"{ACTOR}.use_token_level_loss": Rule(
        lambda v: {f"{ACTOR}.loss_agg_mode": "token-mean" if _truth(v) else "seq-mean-token-mean"},
        f"true is {ACTOR}.loss_agg_mode=token-mean, false seq-mean-token-mean",
    ),
    f"{ACTOR}.use_rollout_log_probs": Rule(
        _when(f"{CORRECTION}.bypass_mode", True), f"true is {CORRECTION}.bypass_mode=true"
    ),
    f"{CORRECTION}.use_policy_gradient": Rule(
        _when(f"{CORRECTION}.loss_type", "reinforce"), f"true is {CORRECTION}.loss_type=reinforce"
    ),
    "data.train_data_num": Rule(
        _samples("data.train_max_samples"), "data.train_max_samples; null is -1, all"
    ),
    "data.val_data_num": Rule(
        _samples("data.val_max_samples"), "data.val_max_samples; null is -1, all"
    ),
    "max_turns": Rule(
        lambda value: {f"{MULTI_TURN}.max_assistant_turns": _whole(value) + 1},
        f"{MULTI_TURN}.max_assistant_turns, one more: so many searches, then the answer",
    ),
    "do_search": Rule(
        _search, f"true is {ROLLOUT}.agent.default_agent_loop=search_agent, false single_turn_agent"
    ),
}
"""Old key to a function of its value."""

GROUPED: dict[str, str] = {
    f"{ACTOR}.lora.enable": (
        f"false is {MODEL}.lora_rank=0; true without a rank is rank {LORA_RANK_WHEN_ENABLED}"
    ),
    "algorithm.kl_penalty": (
        "as a number: algorithm.kl_ctrl.kl_coef with algorithm.use_kl_in_reward=true, or "
        f"{ACTOR}.kl_loss_coef where {ACTOR}.use_kl_loss=true"
    ),
    "data.max_start_length": (
        "data.max_prompt_length; beside it data.max_prompt_length is the length of all turns "
        f"(data.max_response_length) and data.max_response_length that of one "
        f"({ROLLOUT}.max_tokens_per_turn)"
    ),
    f"{CORRECTION}.rollout_rs_threshold_lower": (
        f"the lower bound of {CORRECTION}.rollout_rs_threshold, as lower_upper"
    ),
    "**.optim.min_lr": "optim.min_lr_ratio, as a share of optim.lr",
}
"""Old keys whose meaning depends on other keys; the functions below do them."""


def written_as(origin: str, old: str) -> str:
    """The origin of a value that was set under another name."""
    return f"{origin}, written {old}"


def _moved(setting: Setting, key: str, value: JsonValue) -> Setting:
    return replace(setting, key=key, value=value, origin=written_as(setting.origin, setting.key))


def translate(settings: Sequence[Setting], problems: list[str]) -> list[Setting]:
    """The settings of a `ppo_trainer` tree under their own names."""
    grouped = least_rates(_asked_search(list(settings)))
    grouped = _search_lengths(_kl_number(_lora_switch(grouped, problems)))
    new = [new for old in grouped for new in _translate_one(old, problems)]
    return _generation_batch(_bounds(new))


def _asked_search(settings: list[Setting]) -> list[Setting]:
    """A retriever without a word about the loop asks for searches, as `do_search` is true there."""
    loops = {"do_search", f"{ROLLOUT}.agent_loop", f"{ROLLOUT}.agent.default_agent_loop"}
    asking = [s for s in settings if s.key == "retriever.url" and s.value is not None]
    if not asking or any(s.key in loops for s in settings):
        return settings
    return [*settings, _moved(asking[-1], "do_search", True)]


def _translate_one(setting: Setting, problems: list[str]) -> list[Setting]:
    if setting.key in RULES:
        try:
            new = RULES[setting.key].apply(setting.value)
        except BadAliasValue as error:
            problems.append(f"{setting.key}={setting.value} {error} ({setting.origin})")
            return []
        return [_moved(setting, key, value) for key, value in new.items()]
    return [_manager_extras(rename(setting, "ppo_trainer"))]


def new_name(key: str, tree: str) -> str:
    """The name of a key in a tree; a renamed block may hold a renamed key."""
    table = renames(tree)
    for _ in range(4):
        if key in table:
            key = table[key]
            continue
        for old, new in table.items():
            head, tail = old.removesuffix(".**"), old.removeprefix("**.")
            if head != old and (key == head or key.startswith(head + ".")):
                key = new.removesuffix(".**") + key[len(head) :]
                break
            if tail != old and (key == tail or key.endswith("." + tail)):
                key = key[: len(key) - len(tail)] + new.removeprefix("**.")
                break
        else:
            return key
    return key


def rename(setting: Setting, tree: str) -> Setting:
    """The setting under its new name, or as it is."""
    key = new_name(setting.key, tree)
    return setting if key == setting.key else _moved(setting, key, setting.value)


def _lora_switch(settings: list[Setting], problems: list[str]) -> list[Setting]:
    switch = f"{ACTOR}.lora.enable"
    asked = [s for s in settings if s.key == switch]
    if not asked:
        return settings
    kept = [s for s in settings if s.key != switch]
    try:
        enabled = _truth(asked[-1].value)
    except BadAliasValue as error:
        problems.append(f"{switch}={asked[-1].value} {error} ({asked[-1].origin})")
        return kept
    if not enabled:
        return [*kept, _moved(asked[-1], f"{MODEL}.lora_rank", 0)]
    if any(new_name(s.key, "ppo_trainer") == f"{MODEL}.lora_rank" for s in kept):
        return kept
    return [*kept, _moved(asked[-1], f"{MODEL}.lora_rank", LORA_RANK_WHEN_ENABLED)]


def _kl_number(settings: list[Setting]) -> list[Setting]:
    def is_number(s: Setting) -> bool:
        number = isinstance(s.value, int | float) and not isinstance(s.value, bool)
        return s.key == "algorithm.kl_penalty" and number

    last = {s.key: s.value for s in settings}
    result: list[Setting] = []
    for setting in settings:
        if not is_number(setting):
            result.append(setting)
        elif last.get(f"{ACTOR}.use_kl_loss") is True:
            result.append(_moved(setting, f"{ACTOR}.kl_loss_coef", setting.value))
        else:
            result.append(_moved(setting, "algorithm.kl_ctrl.kl_coef", setting.value))
            if "algorithm.use_kl_in_reward" not in last:
                result.append(_moved(setting, "algorithm.use_kl_in_reward", True))
    return result


def least_rates(settings: Sequence[Setting]) -> list[Setting]:
    """`optim.min_lr`, a rate, as a share of the peak rate that was written beside it."""
    last = {s.key: s.value for s in settings}
    result = []
    for setting in settings:
        block, _, name = setting.key.rpartition(".")
        least, peak = setting.value, last.get(f"{block}.lr")
        named = name in ("min_lr", "lr_min")
        if not (named and isinstance(least, float) and isinstance(peak, float) and peak > 0):
            result.append(setting)
        elif least:
            result.append(_moved(setting, f"{block}.min_lr_ratio", least / peak))
    return result


def _bounds(settings: list[Setting]) -> list[Setting]:
    """Both bounds of verl 0.6's rejection as one `lower_upper`; each is the other's inverse by default."""
    lower, upper = (f"{CORRECTION}.rollout_rs_threshold{end}" for end in ("_lower", ""))
    last = {s.key: s for s in settings}
    kept = [s for s in settings if s.key != lower]
    low, high = last.get(lower), last.get(upper)
    if low is None or not isinstance(low.value, float | int) or not low.value:
        return kept
    top = high.value if high is not None and isinstance(high.value, float | int) else 1 / low.value
    return [*kept, _moved(low, upper, f"{low.value:g}_{top:g}")]


def _generation_batch(settings: list[Setting]) -> list[Setting]:
    """Without filters a step has `gen_batch_size` prompts, as verl's loader has."""
    last = {s.key: s for s in settings}
    size, filters = last.get("data.gen_batch_size"), last.get("algorithm.filter_groups.enable")
    value = size.value if size is not None else None
    if size is None or type(value) is not int or value < 1 or (filters and filters.value is True):
        return settings
    return [*settings, _moved(size, "data.train_batch_size", size.value)]


def _manager_extras(setting: Setting) -> Setting:
    """A key that the managers' settings do not know goes to a manager of the user's own."""
    block = "reward_model.reward_kwargs"
    rest = setting.key.removeprefix(block + ".")
    known = {field.name for field in fields(RewardKwargs)}
    name = rest.split(".")[0]
    if rest == setting.key or name in known or nearest(name, known):
        return setting
    return _moved(setting, f"{block}.extra.{rest}", setting.value)


def _search_lengths(settings: list[Setting]) -> list[Setting]:
    if all(s.key != "data.max_start_length" for s in settings):
        return settings
    names = {
        "data.max_start_length": "data.max_prompt_length",
        "data.max_prompt_length": "data.max_response_length",
        "data.max_response_length": f"{ROLLOUT}.max_tokens_per_turn",
    }
    return [_moved(s, names[s.key], s.value) if s.key in names else s for s in settings]
