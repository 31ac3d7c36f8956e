"""Checks keys that depend on each other before any model is loaded; each message names values that work.

Checks that only compare keys are rows of `rules.txt`; checks that compute or look up names are here;
checks of the columns that the algorithm reads are in `hone/trainer/ppo/plan.py`. A conflicting value that
can be changed without changing the training result is changed with a note.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from importlib.util import find_spec

from hone.config.block import SchemaBlock
from hone.config.convert import Value, read_table, scalar
from hone.config.engine import FSDPConfig, sequence_parallel
from hone.config.errors import did_you_mean, nearest
from hone.config.keys import get, leaves, replace
from hone.config.sft import RMConfig, SupervisedConfig
from hone.config.states import filled, holds
from hone.config.trees import PPOTrainerConfig
from hone.types import JsonValue

_ACTOR, _REF, _CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
_SAME_CHECKS = dict.fromkeys(("prm_trainer", "rm_trainer"), "sft_trainer")
"""Trees whose rows are those of another tree."""
_SIZES = re.compile(r".*(ulysses_sequence|fsdp_config\.tensor|megatron\.\w+)_parallel_size")
"""Parallel sizes, which do not change the training."""
_KEY = re.compile(r"[\w.]+")
_BELONGS = re.compile(r"([a-z_]+): ")
Change = tuple[str, JsonValue, str]
"""A key, its new value, and the sentence that says why."""


def find_problems(tree: str, config: Value) -> Iterator[str]:
    """Yields one sentence for each problem of a tree."""
    if isinstance(config, SupervisedConfig):
        # One rank here may be one of several that torchrun starts.
        mesh = uneven_mesh(config.world_size, "", config, "engine", config.engine)
        uneven = list(mesh) if config.world_size > 1 else []
        slots = max(1, config.world_size // config.ranks_per_slot)
        yield from uneven or _indivisible(config.data.train_batch_size, slots)
    if isinstance(config, PPOTrainerConfig):
        actor, ranks = config.actor_rollout_ref.actor, config.world_size
        if ":" not in actor.strategy:  # other engines than the built-in ones define their own mesh
            block = f"{_ACTOR}.fsdp_config"
            uneven = list(uneven_mesh(ranks, _ACTOR, actor, block, actor.fsdp_config))
            size = sequence_parallel(actor, actor.fsdp_config)
            size *= actor.fsdp_config.tensor_parallel_size
            size = actor.megatron.ranks_per_slot if actor.strategy == "megatron" else size
            yield from uneven or uneven_batches(config, ranks // size)
        for check in (_rewards_and_rollout, _data, _shards):
            yield from check(config)
    tree = _SAME_CHECKS.get(tree, tree)
    yield from (sentence for _, sentence in _rows("problems", tree, config))
    yield from _unknown_names(tree, config)


def find_idle(tree: str, config: Value) -> Iterator[tuple[str, str]]:
    """Yields keys that have no effect with the other values, and why.

    A docstring that begins with a name (`clip_cov: …`) names the option to which a key belongs.
    """
    root: type = type(config)
    for condition, keys, why in _rows("idle", tree, config):
        of_condition = _KEY.findall(condition)
        for prefix in keys.split():
            inside = (key for key in leaves(root) if f"{key}.".startswith(f"{prefix}."))
            yield from ((key, why) for key in inside if key == prefix or key not in of_condition)
    if isinstance(config, PPOTrainerConfig):
        options = {str(get(config, key)) for key in leaves(root) if key != "reward_model.type"}
        options |= {"bypass"} if config.algorithm.rollout_correction.bypass_mode else set()
        belongs = {key: _BELONGS.match(leaf.doc) for key, leaf in leaves(root).items()}
        for key, name in belongs.items():
            if name and name[1] not in options:
                yield key, f"no effect without {name[1]}"


def rows_of(section: str) -> Iterator[list[str]]:
    """Yields the tree and the cells of each row; the names of trees are taken out of the cells."""
    for row in read_table()[section]:
        owner = row[0].partition(":")[0] if ":" in row[0] else "ppo_trainer"
        yield [owner, *(cell.replace(f"{owner}:", "") for cell in row)]


def _rows(section: str, tree: str, config: Value) -> Iterator[list[str]]:
    """Yields the cells of every row whose condition holds, with values filled in."""

    def read(key: str) -> Value:
        package = key.removeprefix("installed.")
        return get(config, key) if package == key else find_spec(package) is not None

    for owner, condition, *cells in rows_of(section):
        if owner == tree and holds(condition, read):
            cells[-1] = cells[-1] or f"no effect while {condition}"
            yield [condition, *(filled(cell, read) for cell in cells)]


def settle(tree: str, config: Value) -> tuple[Value, list[Change]]:
    """Changes values that can be changed without changing the training; returns the new config, and the
    key, the value before and the reason of each change."""
    before: list[Change] = []
    while change := next(_changes(tree, config), None):
        key, value, why = change
        before.append((key, get(config, key), why))
        config = replace(config, key, value)
    return config, before


def _changes(tree: str, config: Value) -> Iterator[Change]:
    for _, setting, why in _rows("settled", tree, config):
        key, _, value = setting.partition("=")
        yield key, scalar(value), why
    if isinstance(config, SupervisedConfig):
        sequences = 2 if isinstance(config, RMConfig) else 1  # a pair stays in one micro-batch
        longest = -(-sequences * config.data.max_length // sequence_parallel(config, config.engine))
        if config.data.max_token_len_per_gpu < longest:
            rows = f"{'2 times ' * (sequences - 1)}data.max_length={config.data.max_length}"
            yield "data.max_token_len_per_gpu", longest, f"a rank's budget must hold {rows} tokens"
    if not isinstance(config, PPOTrainerConfig):
        return
    for key, least in _least_budgets(config).items():
        if get(config, key) < least:
            yield key, least, f"a rank's budget must hold the longest row, so it is {least}"
    for key in leaves(PPOTrainerConfig) if config.world_size == 1 else ():
        on_pool = key.startswith("reward_model.") and config.reward_pool
        if _SIZES.fullmatch(key) and (get(config, key) or 1) > 1 and not on_pool:
            yield key, 1, "one rank computes whole sequences and whole layers"
    policy, name = config.actor_rollout_ref, "moe_router_dtype"
    actor, ref = (r.megatron.override_transformer_config for r in (policy.actor, policy.ref))
    if name in actor and name not in ref:
        why = "the reference computes the logits of its routers as the actor does"
        yield f"{_REF}.megatron.override_transformer_config", {**ref, name: actor[name]}, why


def _least_budgets(config: PPOTrainerConfig) -> dict[str, int]:
    """Returns the tokens of a rank's part of the longest row, by the key of the token budget."""
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    longest = policy.rollout.prompt_length + policy.rollout.response_length
    actor, value_model = (
        (policy.actor, policy.actor.fsdp_config),
        (critic, critic.model.fsdp_config),
    )
    roles: dict[str, tuple[SchemaBlock, FSDPConfig]] = {
        f"{_ACTOR}.ppo": actor,
        "actor_rollout_ref.rollout.log_prob": actor,
        f"{_REF}.log_prob": (policy.ref, policy.ref.fsdp_config),
        "critic.ppo": value_model,
        "critic.forward": value_model,
    }
    budgets = {}
    for key, (role, sharding) in roles.items():
        splits = config.world_size > 1 and role["strategy"] != "megatron"
        budgets[key] = -(-longest // (sequence_parallel(role, sharding) if splits else 1))
    if reward.enable and reward.type != "judge" and not reward.server.url:
        row, strategy = longest, policy.actor.strategy if reward.type == "prime" else "fsdp2"
        if reward.type != "prime":
            # A process reward model's rows end with a padding token.
            row = min(longest, reward.max_length or longest) + (reward.type == "prm")
        ranks = sum(config.reward_pool) or config.world_size
        splits = ranks > 1 and reward.type != "orm" and strategy != "megatron"
        size = sequence_parallel(reward, reward.model.fsdp_config) if splits else 1
        budgets["reward_model.forward"] = -(-row // size)
    return {f"{key}_max_token_len_per_gpu": least for key, least in budgets.items()}


def multiples(value: int, unit: int) -> str:
    """Returns the multiples of `unit` nearest to `value`, as `use A or B`."""
    below = value // unit * unit
    return f"use {below} or {below + unit}" if below else f"use {unit}"


def divisors(value: int, near: int) -> str:
    """Returns the divisors of `value` nearest to `near`, as `use A or B`."""
    every = [d for d in range(1, value + 1) if value % d == 0]
    around = [*[d for d in every if d <= near][-1:], *[d for d in every if d > near][:1]]
    return "use " + " or ".join(map(str, around))


def uneven_mesh(
    ranks: int, role_key: str, role: SchemaBlock, block_key: str, sharding: FSDPConfig
) -> Iterator[str]:
    """Yields parallel sizes of a role whose product does not divide the ranks."""
    if role.get("strategy") == "megatron":
        if problem := role["megatron"].divisibility_problem(ranks):
            yield f"{role_key}.megatron.{problem}"
        return
    sequence, tensor = sequence_parallel(role, sharding), sharding.tensor_parallel_size
    if ranks % (sequence * tensor):
        key = f"{role_key}.ulysses_sequence_parallel_size".lstrip(".")
        sizes = [f"{key}={sequence}"] * (sequence > 1)
        sizes += [f"{block_key}.tensor_parallel_size={tensor}"] * (tensor > 1)
        advice = divisors(ranks, sequence * tensor)
        yield f"{' times '.join(sizes)} does not divide {ranks} ranks; {advice}"


def _indivisible(prompts: int, ranks: int, n: int = 1) -> Iterator[str]:
    unit = ranks // math.gcd(ranks, n)
    if prompts % unit:
        rows = f" times rollout.n={n}" if n > 1 else ""
        what = f"data.train_batch_size={prompts}{rows}"
        yield f"{what} is not divisible by {ranks} data-parallel ranks; {multiples(prompts, unit)}"


def uneven_batches(config: PPOTrainerConfig, ranks: int) -> Iterator[str]:
    """Yields a batch size that is not divisible by the number of data-parallel ranks; the last mini-batch of
    a step may be smaller, and may be uneven over the ranks."""
    n = config.actor_rollout_ref.rollout.n
    yield from _indivisible(config.data.train_batch_size, ranks, n)


def _rewards_and_rollout(config: PPOTrainerConfig) -> Iterator[str]:
    kwargs, rollout = config.reward_model.reward_kwargs, config.actor_rollout_ref.rollout
    buffer, limit = (
        kwargs.overlong_buffer_cfg,
        kwargs.max_resp_len or config.data.max_response_length,
    )
    if buffer.enable and not 0 < buffer.len <= limit:
        what = f"reward_model.reward_kwargs.overlong_buffer_cfg.len={buffer.len}"
        use = f"(1 to {limit} tokens); use for example {max(1, limit // 5)}"
        yield f"{what} lies outside the response {use}"
    size, ranks = rollout.tensor_model_parallel_size, config.rollout_ranks
    if rollout.name == "native" and ranks % size:
        what = f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}"
        yield f"{what} does not divide {ranks} rollout ranks; {divisors(ranks, size)}"


def _data(config: PPOTrainerConfig) -> Iterator[str]:
    data = config.data
    if data.dataset_weights is not None:
        files, weights = len(data.train_files), len(data.dataset_weights)
        if files != weights:
            yield f"data.dataset_weights has {weights} numbers for {files} data.train_files; give one each"
        if any(w < 0 for w in data.dataset_weights) or sum(data.dataset_weights) <= 0:
            yield "data.dataset_weights must be 0 or more, and not all 0; use for example [0.7,0.3]"

    def names_class(path: str | None) -> bool:
        return ":" in (path or "").removeprefix("pkg://").removeprefix("file://")

    order = data.sampler
    if bool(order.class_path) != bool(order.class_name) and not names_class(order.class_path):
        yield "data.sampler needs both class_path and class_name, or neither"
    for key, own in {"custom_cls": data.custom_cls, "datagen": data.datagen}.items():
        if own.path and not own.name and not names_class(own.path):
            yield f"data.{key}.path needs data.{key}.name, the class in that file"


def _unknown_names(tree: str, config: Value) -> Iterator[str]:
    """Yields names that are neither registered nor, where allowed, an import path."""
    for words, names, own in read_table()["names"]:
        table = names.split(", ")
        for word in words.split():
            owner, _, key = word.rpartition(":")
            value = get(config, key) if (owner or "ppo_trainer") == tree else None
            entries = value.split(",") if isinstance(value, str) else value
            for name in map(str.strip, entries if isinstance(entries, list | tuple) else ()):
                if name not in table and not (own and ":" in name):
                    advice = ", ".join([*table, *([own] if own else [])])
                    hint = did_you_mean(nearest(name, table))
                    yield f"{key}={name} is unknown.{hint} Use {advice}"


def _shards(config: PPOTrainerConfig) -> Iterator[str]:
    for role, block in ((_ACTOR, _ACTOR), (_REF, _REF), (_CRITIC, "critic.model")):
        if get(config, f"{role}.strategy") == "megatron":
            continue
        key = f"{block}.fsdp_config.fsdp_size"
        size: int = get(config, key)
        ranks = config.world_size // get(config, f"{block}.fsdp_config.tensor_parallel_size")
        if size != -1 and (size < 1 or ranks % size):
            advice = divisors(ranks, max(size, 1)).removeprefix("use ")
            yield f"{key}={size} does not divide {ranks} ranks; use -1, or {advice}"
