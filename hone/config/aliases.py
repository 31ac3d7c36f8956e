"""Keys that users' documents and older trees write, and what they are called here.

Renames and rewritten values are rows of `other_keys.txt`; here are the keys that depend on other keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from hone.config.errors import nearest
from hone.config.reward import RewardKwargs
from hone.config.sources import Setting
from hone.config.states import is_one_of, names, new_key, renames, rewrites
from hone.types import JsonObject, JsonValue

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"

LORA_RANK_WHEN_ENABLED = 16
"""Rank of `actor.lora.enable=true` where no rank is given."""

Given = Mapping[str, JsonValue]
"""The last value of every key that was set."""


class BadAliasValue(ValueError):
    """The value of an old key cannot be said in the new one; the text says what it takes."""


@dataclass(frozen=True)
class Change:
    """What a key becomes beside the others: the function gives the settings in its place."""

    apply: Callable[[str, JsonValue, Given], JsonObject]
    meaning: str = ""
    outranks: bool = False
    """It wins over the same key written later."""


def _is_number(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _searches(key: str, value: JsonValue, given: Given) -> JsonObject:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadAliasValue("takes an integer")
    return {f"{ROLLOUT}.multi_turn.max_assistant_turns": value + 1}


def _retriever(key: str, value: JsonValue, given: Given) -> JsonObject:
    """A retriever without a word about the loop asks for searches, as `do_search` is true there."""
    loop = f"{ROLLOUT}.agent.default_agent_loop"
    silent = value is not None and not {"do_search", loop} & given.keys()
    return {key: value, **({loop: "search_agent"} if silent else {})}


def _lora_switch(key: str, value: JsonValue, given: Given) -> JsonObject:
    rank = f"{MODEL}.lora_rank"
    if not isinstance(value, bool):
        raise BadAliasValue("takes true or false")
    if value and rank in given:
        return {}
    return {rank: LORA_RANK_WHEN_ENABLED if value else 0}


def _kl_number(key: str, value: JsonValue, given: Given) -> JsonObject:
    if not _is_number(value):
        return {key: value}
    if given.get(f"{ACTOR}.use_kl_loss") is True:
        return {f"{ACTOR}.kl_loss_coef": value}
    switch = "algorithm.use_kl_in_reward"
    return {"algorithm.kl_ctrl.kl_coef": value, **({} if switch in given else {switch: True})}


def _least_rate(key: str, value: JsonValue, given: Given) -> JsonObject:
    block = key.rpartition(".")[0]
    peak = given.get(f"{block}.lr")
    if not (isinstance(value, float) and isinstance(peak, float) and peak > 0):
        return {key: value}
    return {f"{block}.min_lr_ratio": value / peak} if value else {}


def _lower_bound(key: str, low: JsonValue, given: Given) -> JsonObject:
    """Both bounds of verl 0.6's rejection as one `lower_upper`; each is the other's inverse by default."""
    upper = f"{CORRECTION}.rollout_rs_threshold"
    if not isinstance(low, float | int) or not low:
        return {}
    high = given.get(upper)
    top = high if isinstance(high, float | int) else 1 / low
    return {upper: f"{low:g}_{top:g}"}


def _generation_batch(key: str, value: JsonValue, given: Given) -> JsonObject:
    """Without filters a step has `gen_batch_size` prompts, as verl's loader has."""
    filters = given.get("algorithm.filter_groups.enable") is True
    if type(value) is not int or value < 1 or filters:
        return {key: value}
    return {key: value, "data.train_batch_size": value}


def _search_length(new: str) -> Callable[[str, JsonValue, Given], JsonObject]:
    return lambda key, value, given: {new if "data.max_start_length" in given else key: value}


def _manager_extras(key: str, value: JsonValue, given: Given) -> JsonObject:
    """A key that the managers' settings do not know goes to a manager of the user's own."""
    block, known = "reward_model.reward_kwargs", {field.name for field in fields(RewardKwargs)}
    rest = key.removeprefix(block + ".")
    name = rest.split(".")[0]
    if rest == key or name in known or nearest(name, known):
        return {key: value}
    return {f"{block}.extra.{rest}": value}


CHANGES: dict[str, Change] = {
    "max_turns": Change(
        _searches,
        f"{ROLLOUT}.multi_turn.max_assistant_turns, one more: so many searches, then the answer",
    ),
    f"{ACTOR}.lora.enable": Change(
        _lora_switch,
        f"false is {MODEL}.lora_rank=0; true without a rank is rank {LORA_RANK_WHEN_ENABLED}",
        outranks=True,
    ),
    "algorithm.kl_penalty": Change(
        _kl_number,
        "as a number: algorithm.kl_ctrl.kl_coef with algorithm.use_kl_in_reward=true, or "
        f"{ACTOR}.kl_loss_coef where {ACTOR}.use_kl_loss=true",
    ),
    "data.max_start_length": Change(
        _search_length("data.max_prompt_length"),
        "data.max_prompt_length; beside it data.max_prompt_length is the length of all turns "
        f"(data.max_response_length) and data.max_response_length that of one "
        f"({ROLLOUT}.max_tokens_per_turn)",
    ),
    "data.max_prompt_length": Change(_search_length("data.max_response_length")),
    "data.max_response_length": Change(_search_length(f"{ROLLOUT}.max_tokens_per_turn")),
    f"{CORRECTION}.rollout_rs_threshold_lower": Change(
        _lower_bound,
        f"the lower bound of {CORRECTION}.rollout_rs_threshold, as lower_upper",
        outranks=True,
    ),
    "**.optim.min_lr": Change(_least_rate, "optim.min_lr_ratio, as a share of optim.lr"),
    "**.optim.lr_min": Change(_least_rate),
    "data.gen_batch_size": Change(_generation_batch, outranks=True),
    "retriever.url": Change(_retriever, outranks=True),
    "reward_model.reward_kwargs.**": Change(_manager_extras),
}
"""Keys whose meaning depends on other keys; a pattern that begins with `**` counts in every tree."""


def _moved(setting: Setting, key: str, value: JsonValue) -> Setting:
    """The setting under another name, which its origin tells."""
    if key == setting.key:
        return setting
    return replace(setting, key=key, value=value, origin=f"{setting.origin}, written {setting.key}")


def translate(settings: Sequence[Setting], problems: list[str], tree: str) -> list[Setting]:
    """The settings under the names that keys have in a tree."""
    renamed = [_moved(s, new_name(s.key, tree), s.value) for s in settings]
    given = {s.key: s.value for s in renamed}
    result: list[Setting] = []
    outranking: list[Setting] = []
    for setting in renamed:
        change = _change_of(setting.key, tree)
        try:
            if change is not None:
                new = change.apply(setting.key, setting.value, given)
            else:
                new = _rewritten(setting, tree)
        except BadAliasValue as error:
            problems.append(f"{setting.key}={setting.value} {error} ({setting.origin})")
            continue
        moved = [_moved(setting, key, value) for key, value in new.items()]
        (outranking if change and change.outranks else result).extend(moved)
    return [*result, *outranking]


def _change_of(key: str, tree: str) -> Change | None:
    table = CHANGES.items()
    mine = (c for p, c in table if (tree == "ppo_trainer" or p.startswith("**")) and names(p, key))
    return next(mine, None)


def _rewritten(setting: Setting, tree: str) -> JsonObject:
    """The settings that stand in the table for this value of an old key."""
    rows = rewrites(tree).get(setting.key)
    if rows is None:
        return {setting.key: setting.value}
    for row in rows:
        if is_one_of(setting.value, row.values):
            return {k: setting.value if v == "*" else v for k, v in row.settings.items()}
    if setting.value in (None, False):
        return {}
    raise BadAliasValue("takes true or false")


def other_names(tree: str) -> dict[str, str]:
    """Every other name of a tree's keys, with what it comes to."""
    rewritten = {old: "; ".join(map(str, rows)) for old, rows in rewrites(tree).items()}
    changes = {old: change.meaning for old, change in CHANGES.items() if change.meaning}
    return {**renames(tree), **rewritten, **(changes if tree == "ppo_trainer" else {})}


@functools.cache
def new_name(key: str, tree: str) -> str:
    """The name of a key in a tree; a renamed block may hold a renamed key."""
    new = next((new for o, n in renames(tree).items() if (new := new_key(o, n, key))), None)
    return key if new is None else new_name(new, tree)
