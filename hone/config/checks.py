"""Checks keys that depend on each other before any model is loaded; each message names valid values.

Checks that only compare keys are rows of `rules.txt`; checks of the columns that the algorithm reads are in
`hone/trainer/ppo/plan.py`. Conflicting values that do not change the training result are adjusted, and the
run prints a note.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from importlib.util import find_spec

from hone.config.block import SchemaBlock
from hone.config.conditions import condition_holds, fill_values
from hone.config.convert import Config, Value, parse_scalar, read_rules
from hone.config.engine import FSDPConfig, sequence_parallel
from hone.config.keys import get, leaves, replace
from hone.config.preference import DPOConfig
from hone.config.ranges import IS_THRESHOLD_KEY, parse_bound, rejection_bounds
from hone.config.sft import RMConfig, SupervisedConfig
from hone.config.trees import PPOTrainerConfig
from hone.suggestions import suggestion

_ACTOR, _REF, _CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
_TREE_OF_ROWS = dict.fromkeys(("prm_trainer", "rm_trainer", "dpo_trainer"), "sft_trainer")
"""Maps a tree to the tree whose rows of `rules.txt` also check it."""
_PARALLEL_SIZE_KEY = re.compile(
    r".*(ulysses_sequence|fsdp_config\.tensor|megatron\.\w+)_parallel_size"
)
"""Keys of parallel sizes, which do not change the training result."""
_KEY = re.compile(r"[\w.]+")
_OPTION_PREFIX = re.compile(r"([a-z_]+): ")


def find_problems(tree: str, config: Config) -> Iterator[str]:
    """Yields one sentence for each problem of a config of the named tree."""
    if isinstance(config, SupervisedConfig):
        # Under torchrun, world_size may be 1 although there are several ranks, so 1 is skipped.
        mesh = mesh_problems(config.world_size, "", config, "engine", config.engine)
        problems = list(mesh) if config.world_size > 1 else []
        data_parallel_ranks = max(1, config.world_size // config.ranks_per_slot)
        yield from problems or batch_size_problems(config, data_parallel_ranks)
    if isinstance(config, PPOTrainerConfig):
        actor, ranks = config.actor_rollout_ref.actor, config.world_size
        if ":" not in actor.strategy:  # a custom engine defines its own mesh
            block = f"{_ACTOR}.fsdp_config"
            problems = list(mesh_problems(ranks, _ACTOR, actor, block, actor.fsdp_config))
            ranks_per_slot = sequence_parallel(actor, actor.fsdp_config)
            ranks_per_slot *= actor.fsdp_config.tensor_parallel_size
            if actor.strategy == "megatron":
                ranks_per_slot = actor.megatron.ranks_per_slot
            yield from problems or batch_size_problems(config, ranks // ranks_per_slot)
        for check in (_reward_and_rollout_problems, _data_problems, _shard_problems):
            yield from check(config)
    yield from (sentence for _, sentence in _applicable_rows("problems", tree, config))
    yield from _unknown_name_problems(tree, config)


def keys_without_effect(tree: str, config: Config) -> Iterator[tuple[str, str]]:
    """Yields each key that has no effect because of other values, and the reason; a key whose docstring
    begins with `clip_cov: …` has no effect unless the value of another key is `clip_cov`."""
    root: type = type(config)
    for condition, leaves_and_blocks, why in _applicable_rows("idle", tree, config):
        condition_keys = _KEY.findall(condition)
        for leaf_or_block in leaves_and_blocks.split():
            for key in leaves(root):
                is_inside = key.startswith(f"{leaf_or_block}.") and key not in condition_keys
                if key == leaf_or_block or is_inside:
                    yield key, why
    if isinstance(config, PPOTrainerConfig):
        used_options = {str(get(config, key)) for key in leaves(root) if key != "reward_model.type"}
        used_options |= {"bypass"} if config.algorithm.rollout_correction.bypass_mode else set()
        for key, leaf in leaves(root).items():
            option = _OPTION_PREFIX.match(leaf.doc)
            if option and option[1] not in used_options:
                yield key, f"no effect without {option[1]}"


def rows_of(section: str) -> Iterator[list[str]]:
    """Yields the tree and the cells of each row of a section; the cells lose the prefix `tree:`."""
    for row in read_rules(__package__)[section]:
        row_tree = row[0].partition(":")[0] if ":" in row[0] else "ppo_trainer"
        yield [row_tree, *(cell.replace(f"{row_tree}:", "") for cell in row)]


def _applicable_rows(section: str, tree: str, config: Config) -> Iterator[list[str]]:
    """Yields the cells of a tree's rows whose condition holds; the value of a key replaces `{key}`."""

    def read(key: str) -> Value:
        """Returns the value of a key, or whether a package is installed (`installed.PACKAGE`)."""
        package = key.removeprefix("installed.")
        return get(config, key) if package == key else find_spec(package) is not None

    trees = (tree, _TREE_OF_ROWS.get(tree))
    for row_tree, condition, *cells in rows_of(section):
        if row_tree in trees and condition_holds(condition, read):
            cells[-1] = cells[-1] or f"no effect while {condition}"
            yield [condition, *(fill_values(cell, read) for cell in cells)]


def adjust_values(tree: str, config: Config) -> tuple[Config, list[tuple[str, Value, str]]]:
    """Adjusts conflicting values that do not change the training result; returns the new config and, for
    each change, the key, the previous value and the reason."""
    previous_values: list[tuple[str, Value, str]] = []
    while change := next(_changes(tree, config), None):
        key, value, why = change
        previous_values.append((key, get(config, key), why))
        config = replace(config, key, value)
    return config, previous_values


def _changes(tree: str, config: Config) -> Iterator[tuple[str, Value, str]]:
    """Yields the key, the new value and the reason of each change that the config still needs."""
    for _, setting, why in _applicable_rows("adjusted", tree, config):
        key, _, value = setting.partition("=")
        yield key, parse_scalar(value), why
    if isinstance(config, SupervisedConfig):
        has_pairs = isinstance(config, RMConfig) or (
            isinstance(config, DPOConfig) and config.has_pairs
        )  # a pair stays in one micro-batch
        max_row_tokens = config.data.max_length * (2 if has_pairs else 1)
        minimum = math.ceil(max_row_tokens / sequence_parallel(config, config.engine))
        if config.data.max_token_len_per_gpu < minimum:
            subject = "longest pair" if has_pairs else "longest sequence"
            yield "data.max_token_len_per_gpu", minimum, _budget_note(subject, minimum)
    if not isinstance(config, PPOTrainerConfig):
        return
    for key, minimum in _min_token_budgets(config).items():
        if get(config, key) < minimum:
            yield key, minimum, _budget_note("longest row", minimum)
    for key in leaves(PPOTrainerConfig) if config.world_size == 1 else ():
        has_own_pool = key.startswith("reward_model.") and config.reward_pool
        if _PARALLEL_SIZE_KEY.fullmatch(key) and (get(config, key) or 1) > 1 and not has_own_pool:
            yield key, 1, "one rank computes whole sequences and whole layers"
    name, policy = "moe_router_dtype", config.actor_rollout_ref
    actor_overrides = policy.actor.megatron.override_transformer_config
    ref_overrides = policy.ref.megatron.override_transformer_config
    if name in actor_overrides and name not in ref_overrides:
        overrides = {**ref_overrides, name: actor_overrides[name]}
        why = "the reference computes the logits of its routers as the actor does"
        yield f"{_REF}.megatron.override_transformer_config", overrides, why


def _budget_note(subject: str, tokens: int) -> str:
    return f"a rank's budget must hold its part of the {subject}, so it is {tokens}"


def _min_token_budgets(config: PPOTrainerConfig) -> dict[str, int]:
    """Returns the minimum of each token budget: the tokens of the longest row that one rank processes."""
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    max_row_tokens = policy.rollout.prompt_length + policy.rollout.response_length
    actor = (policy.actor, policy.actor.fsdp_config)
    value_model = (critic, critic.model.fsdp_config)
    roles: dict[str, tuple[SchemaBlock, FSDPConfig]] = {
        f"{_ACTOR}.ppo": actor,
        "actor_rollout_ref.rollout.log_prob": actor,
        f"{_REF}.log_prob": (policy.ref, policy.ref.fsdp_config),
        "critic.ppo": value_model,
        "critic.forward": value_model,
    }
    budgets = {}
    for key, (role, sharding) in roles.items():
        splits_sequences = config.world_size > 1 and role["strategy"] != "megatron"
        size = sequence_parallel(role, sharding) if splits_sequences else 1
        budgets[key] = math.ceil(max_row_tokens / size)
    if reward.enable and reward.type != "judge" and not reward.server.url:
        ranks = sum(config.reward_pool) or config.world_size
        splits_sequences = ranks > 1 and reward.type != "orm"
        if reward.type == "prime":
            splits_sequences = splits_sequences and policy.actor.strategy != "megatron"
        else:
            max_row_tokens = min(max_row_tokens, reward.max_length or max_row_tokens)
            # A process reward model's rows end with a padding token.
            max_row_tokens += 1 if reward.type == "prm" else 0
        size = sequence_parallel(reward, reward.model.fsdp_config) if splits_sequences else 1
        budgets["reward_model.forward"] = math.ceil(max_row_tokens / size)
    return {f"{key}_max_token_len_per_gpu": tokens for key, tokens in budgets.items()}


def multiples_advice(value: int, unit: int) -> str:
    """Returns the positive multiples of `unit` below and above `value`, as `use A or B`."""
    below = value // unit * unit
    return f"use {below} or {below + unit}" if below else f"use {unit}"


def divisors_advice(value: int, near: int) -> str:
    """Returns the divisors of `value` below and above `near`, as `use A or B`."""
    divisors = [number for number in range(1, value + 1) if value % number == 0]
    below = [divisor for divisor in divisors if divisor <= near][-1:]
    above = [divisor for divisor in divisors if divisor > near][:1]
    return "use " + " or ".join(map(str, [*below, *above]))


def mesh_problems(
    ranks: int, role_key: str, role: SchemaBlock, block_key: str, sharding: FSDPConfig
) -> Iterator[str]:
    """Yields a problem if the product of a role's parallel sizes does not divide the ranks."""
    if role.get("strategy") == "megatron":
        if problem := role["megatron"].divisibility_problem(ranks):
            yield f"{role_key}.megatron.{problem}"
        return
    sequence, tensor = sequence_parallel(role, sharding), sharding.tensor_parallel_size
    if ranks % (sequence * tensor):
        key = f"{role_key}.ulysses_sequence_parallel_size".lstrip(".")
        sizes = [f"{key}={sequence}"] * (sequence > 1)
        sizes += [f"{block_key}.tensor_parallel_size={tensor}"] * (tensor > 1)
        advice = divisors_advice(ranks, sequence * tensor)
        yield f"{' times '.join(sizes)} does not divide {ranks} ranks; {advice}"


def batch_size_problems(config: PPOTrainerConfig | SupervisedConfig, ranks: int) -> Iterator[str]:
    """Yields a problem if the batch size is not divisible by the number of data-parallel ranks; the last
    mini-batch of a step may be smaller, and its rows may be uneven over the ranks."""
    prompts = config.data.train_batch_size
    n = config.actor_rollout_ref.rollout.n if isinstance(config, PPOTrainerConfig) else 1
    unit = ranks // math.gcd(ranks, n)  # prompts * n is divisible by ranks if prompts is by unit
    if prompts % unit:
        n_text = f" times rollout.n={n}" if n > 1 else ""
        subject = f"data.train_batch_size={prompts}{n_text}"
        yield f"{subject} is not divisible by {ranks} data-parallel ranks; {multiples_advice(prompts, unit)}"


def _reward_and_rollout_problems(config: PPOTrainerConfig) -> Iterator[str]:
    kwargs, rollout = config.reward_model.reward_kwargs, config.actor_rollout_ref.rollout
    buffer = kwargs.overlong_buffer_cfg
    max_tokens = kwargs.max_resp_len or config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= max_tokens:
        subject = f"reward_model.reward_kwargs.overlong_buffer_cfg.len={buffer.len}"
        advice = f"use for example {max(1, max_tokens // 5)}"
        yield f"{subject} lies outside the response (1 to {max_tokens} tokens); {advice}"
    size, ranks = rollout.tensor_model_parallel_size, config.rollout_ranks
    if rollout.name == "native" and ranks % size:
        subject = f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}"
        yield f"{subject} does not divide {ranks} rollout ranks; {divisors_advice(ranks, size)}"
    correction = config.algorithm.rollout_correction
    try:
        if correction.rollout_is is not None:
            parse_bound(correction.rollout_is_threshold, IS_THRESHOLD_KEY)
        if correction.rollout_rs is not None:
            rejection_bounds(correction.rollout_rs, correction.rollout_rs_threshold)
    except ValueError as error:
        yield str(error)


def _data_problems(config: PPOTrainerConfig) -> Iterator[str]:
    data = config.data
    if data.dataset_weights is not None:
        files, weights = len(data.train_files), len(data.dataset_weights)
        if files != weights:
            yield f"data.dataset_weights has {weights} numbers for {files} data.train_files; give one each"
        if any(weight < 0 for weight in data.dataset_weights) or sum(data.dataset_weights) <= 0:
            yield "data.dataset_weights must be 0 or more, and not all 0; use for example [0.7,0.3]"

    def names_class(path: str | None) -> bool:
        """Returns whether the path ends with the class, as `file.py:Class` does."""
        return ":" in (path or "").removeprefix("pkg://").removeprefix("file://")

    sampler = data.sampler
    if bool(sampler.class_path) != bool(sampler.class_name) and not names_class(sampler.class_path):
        yield "data.sampler needs both class_path and class_name, or neither"
    for key, custom in {"custom_cls": data.custom_cls, "datagen": data.datagen}.items():
        if custom.path and not custom.name and not names_class(custom.path):
            yield f"data.{key}.path needs data.{key}.name, the class in that file"


def _unknown_name_problems(tree: str, config: Config) -> Iterator[str]:
    """Yields a problem for each name that is neither built in nor, where allowed, an import path."""
    for keys, known_names_text, other_choice in read_rules(__package__)["names"]:
        known_names = known_names_text.split(", ")
        for tree_and_key in keys.split():
            row_tree, _, key = tree_and_key.rpartition(":")
            trees = (tree, _TREE_OF_ROWS.get(tree))
            value = get(config, key) if (row_tree or "ppo_trainer") in trees else None
            names = value.split(",") if isinstance(value, str) else value
            for name in map(str.strip, names if isinstance(names, list | tuple) else ()):
                if name not in known_names and not (other_choice and ":" in name):
                    advice = ", ".join(filter(None, [*known_names, other_choice]))
                    hint = suggestion(name, known_names)
                    yield f"{key}={name} is unknown.{hint} Use {advice}"


def _shard_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """Yields a problem for each `fsdp_size` that does not divide the ranks."""
    for role, block in ((_ACTOR, _ACTOR), (_REF, _REF), (_CRITIC, "critic.model")):
        strategy: str = get(config, f"{role}.strategy")
        if strategy == "megatron" or ":" in strategy:  # these engines do not use fsdp_config
            continue
        key = f"{block}.fsdp_config.fsdp_size"
        size: int = get(config, key)
        ranks = config.world_size // get(config, f"{block}.fsdp_config.tensor_parallel_size")
        if size != -1 and (size < 1 or ranks % size):
            advice = divisors_advice(ranks, max(size, 1)).removeprefix("use ")
            yield f"{key}={size} does not divide {ranks} ranks; use -1, or {advice}"
