"""Checks keys that depend on each other before any model is loaded; each message names values that work.

Checks that only compare keys are rows of `checks.txt`; checks that compute or look up names are here;
checks of the columns that the algorithm reads are in `hone/trainer/ppo/plan.py`. A conflicting value that
can be changed without changing the training result is changed with a note.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

from hone.config.block import SchemaBlock
from hone.config.convert import Value, read_table, show_value
from hone.config.engine import FSDPConfig, sequence_parallel
from hone.config.errors import did_you_mean, nearest
from hone.config.generation import GenerationConfig
from hone.config.keys import get, leaves
from hone.config.reward_training import RMConfig
from hone.config.rollout import RolloutEngineConfig
from hone.config.schema import PPOTrainerConfig
from hone.config.sft import SupervisedConfig
from hone.config.states import holds
from hone.types import JsonValue

_ACTOR, _REF, _CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
_ROLLOUT_SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_VALUE = re.compile(r"\{([\w.]+)\}")
_SAME_CHECKS = dict.fromkeys(("prm_trainer", "rm_trainer"), "sft_trainer")
"""Trees whose rows in checks.txt are those of another tree."""
_SIZES = (
    "ulysses_sequence_parallel_size",
    "fsdp_config.tensor_parallel_size",
    "megatron.tensor_model_parallel_size",
    "megatron.pipeline_model_parallel_size",
    "megatron.expert_model_parallel_size",
    "megatron.expert_tensor_parallel_size",
)
"""Parallel sizes, which do not change the training."""
_KEY = re.compile(r"[\w.]+")
_BELONGS = re.compile(r"([a-z_]+): ")


def find_problems(tree: str, config: Value) -> Iterator[str]:
    """Yields one sentence for each problem of a tree."""
    if isinstance(config, SupervisedConfig):
        uneven: list[str] = []
        ranks = config.world_size
        if ranks > 1:  # otherwise torchrun may start more ranks
            uneven += uneven_mesh(ranks, "", config, "engine", config.engine)
        if not uneven:
            slots = max(1, ranks // config.ranks_per_slot)
            uneven += _indivisible(config.data.train_batch_size, slots)
        yield from uneven
    if isinstance(config, PPOTrainerConfig):
        if ":" not in config.actor_rollout_ref.actor.strategy:
            # Other engines than the built-in ones define their own mesh.
            actor, ranks = config.actor_rollout_ref.actor, config.world_size
            block = f"{_ACTOR}.fsdp_config"
            if not (uneven := list(uneven_mesh(ranks, _ACTOR, actor, block, actor.fsdp_config))):
                size = sequence_parallel(actor, actor.fsdp_config)
                size *= actor.fsdp_config.tensor_parallel_size
                if actor.strategy == "megatron":
                    size = actor.megatron.ranks_per_slot
                uneven += uneven_batches(config, ranks // size)
            yield from uneven
        for check in (_rewards, _data, _shards, _rollout):
            yield from check(config)
    tree = _SAME_CHECKS.get(tree, tree)
    yield from (sentence for _, sentence in _rows("problems", tree, config))
    yield from _unknown_names(tree, config)


def find_idle(tree: str, config: Value) -> Iterator[tuple[str, str]]:
    """Yields keys that have no effect with the other values, and why.

    A docstring that begins with a name (`clip_cov: …`) names the option to which a key belongs.
    """
    root: type = type(config)
    for condition, row in _rows("idle", tree, config):
        keys, _, why = row.partition(" | ")
        of_condition = _KEY.findall(condition)
        for prefix in keys.split():
            inside = (key for key in leaves(root) if f"{key}.".startswith(f"{prefix}."))
            yield from ((key, why) for key in inside if key == prefix or key not in of_condition)
    if not isinstance(config, PPOTrainerConfig):
        return
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    choices = {
        "bypass" if algorithm.rollout_correction.bypass_mode else "",
        actor.policy_loss.loss_mode,
        algorithm.adv_estimator,
        algorithm.kl_ctrl.type,
        algorithm.pf_ppo.reweight_method,
        config.curriculum_learning.fn_name,
        config.reward_manager.name,
    }
    for key, leaf in leaves(PPOTrainerConfig).items():
        belongs = _BELONGS.match(leaf.doc)
        if belongs and belongs[1] not in choices:
            yield key, f"no effect without {belongs[1]}"


def rows_of(section: str) -> Iterator[list[str]]:
    """Yields the tree and the cells of each row; the names of trees are taken out of the cells."""
    for row in read_table("checks.txt")[section]:
        owner = row[0].partition(":")[0] if ":" in row[0] else "ppo_trainer"
        yield [owner, *(cell.replace(f"{owner}:", "") for cell in row)]


def _rows(section: str, tree: str, config: Value) -> Iterator[tuple[str, str]]:
    """Yields the condition of every row that holds, and the other cells with values filled in."""
    for owner, condition, *cells in rows_of(section):
        if owner == tree and holds(condition, partial(get, config)):
            cells[-1] = cells[-1] or f"no effect while {condition}"
            text = _VALUE.sub(lambda match: show_value(get(config, match[1])), " | ".join(cells))
            yield condition, text


def settle(config: Value) -> Iterator[tuple[str, JsonValue, str]]:
    """Yields (key, new value, sentence) for values that can be changed without changing the training."""
    if isinstance(config, SupervisedConfig):
        sequences = 2 if isinstance(config, RMConfig) else 1  # a pair stays in one micro-batch
        ranks = sequence_parallel(config, config.engine)
        longest = -(-sequences * config.data.max_length // ranks)
        if config.data.max_token_len_per_gpu < longest:
            times = f"{sequences} times " if sequences > 1 else ""
            why = (
                f"a rank's budget must hold {times}data.max_length={config.data.max_length} tokens"
            )
            yield "data.max_token_len_per_gpu", longest, why
    if isinstance(config, GenerationConfig):
        yield from _missing_engine("rollout", config.rollout)
        if config.rollout.do_sample and config.rollout.temperature == 0:
            yield "rollout.do_sample", False, "rollout.temperature=0 decodes greedily"
    if not isinstance(config, PPOTrainerConfig):
        return
    rollout = config.actor_rollout_ref.rollout
    missing = list(_missing_engine("actor_rollout_ref.rollout", rollout))
    yield from missing
    alone = config.rollout_ranks == 1 and rollout.tensor_model_parallel_size > 1
    if alone and (missing or rollout.name == "native"):
        yield _ROLLOUT_SIZE, 1, "one rank decodes with the whole model"
    without_megatron = list(_not_megatron(config))
    yield from without_megatron
    yield from _router_dtype(config)
    yield from _small_budgets(config, is_megatron_off=bool(without_megatron))
    prompts = config.data.train_batch_size
    for block in (_ACTOR, _CRITIC):
        if get(config, f"{block}.ppo_mini_batch_size") > prompts:
            why = f"a step has data.train_batch_size={prompts} prompts, all of them in one update"
            yield f"{block}.ppo_mini_batch_size", prompts, why
        if get(config, f"{block}.rollout_n") != rollout.n:
            why = f"a prompt has actor_rollout_ref.rollout.n={rollout.n} responses"
            yield f"{block}.rollout_n", rollout.n, why
    if config.world_size == 1:
        for key in leaves(PPOTrainerConfig):
            on_pool = key.startswith("reward_model.") and config.reward_pool
            if key.endswith(_SIZES) and (get(config, key) or 1) > 1 and not on_pool:
                yield key, 1, "one rank computes whole sequences and whole layers"
    buffer = config.reward_model.reward_kwargs.overlong_buffer_cfg
    if buffer.enable and buffer.len == 0:
        key = "reward_model.reward_kwargs.overlong_buffer_cfg.enable"
        yield key, False, "a buffer of len=0 tokens penalises nothing"


def _small_budgets(
    config: PPOTrainerConfig, *, is_megatron_off: bool
) -> Iterator[tuple[str, JsonValue, str]]:
    """Yields token budgets that do not hold a rank's part of the longest sequence."""
    policy, critic = config.actor_rollout_ref, config.critic
    reward, pool = config.reward_model, sum(config.reward_pool)
    longest = policy.rollout.prompt_length + policy.rollout.response_length
    actor_size = sequence_parallel(policy.actor, policy.actor.fsdp_config)
    ref_size = sequence_parallel(policy.ref, policy.ref.fsdp_config)
    critic_size = sequence_parallel(critic, critic.model.fsdp_config)
    roles = [
        (f"{_ACTOR}.ppo", policy.actor.strategy, actor_size, config.world_size),
        (
            "actor_rollout_ref.rollout.log_prob",
            policy.actor.strategy,
            actor_size,
            config.world_size,
        ),
        (f"{_REF}.log_prob", policy.ref.strategy, ref_size, config.world_size),
        (f"{_CRITIC}.ppo", critic.strategy, critic_size, config.world_size),
        (f"{_CRITIC}.forward", critic.strategy, critic_size, config.world_size),
    ]
    scored = longest
    if reward.enable and reward.type in ("orm", "prm", "prime") and not reward.server.url:
        if reward.type != "prime":
            # A process reward model's rows end with a padding token.
            scored = min(longest, reward.max_length or longest) + (reward.type == "prm")
        split = sequence_parallel(reward, reward.model.fsdp_config) if reward.type != "orm" else 1
        strategy = policy.actor.strategy if reward.type == "prime" else "fsdp2"
        roles.append(("reward_model.forward", strategy, split, pool or config.world_size))
    for key, strategy, size, ranks in roles:
        splits = ranks > 1 and (strategy != "megatron" or is_megatron_off)
        row = scored if key == "reward_model.forward" else longest
        share = -(-row // size) if splits else row
        if get(config, f"{key}_max_token_len_per_gpu") < share:
            why = f"a rank's budget must hold the longest row, so it is {share}"
            yield f"{key}_max_token_len_per_gpu", share, why


def _not_megatron(config: PPOTrainerConfig) -> Iterator[tuple[str, JsonValue, str]]:
    """Yields the strategies of roles that FSDP2 trains, because Megatron is missing or lacks a feature."""
    policy = config.actor_rollout_ref
    why = ""
    if find_spec("megatron") is None:
        why = "megatron-core is not installed here (pip install 'hone-rl[megatron]')"
    elif policy.model.uses_lora or config.critic.model.lora_rank > 0:
        why = "strategy=megatron trains no LoRA adapters"
    elif (
        policy.actor.strategy == "megatron"
        and policy.actor.router_replay.mode != "disabled"
        and policy.actor.megatron.pipeline_model_parallel_size > 1
        and config.world_size > 1  # one rank has one stage, whatever the size says
    ):
        why = "strategy=megatron replays expert routing without pipeline parallel only"
    for key in (f"{_ACTOR}.strategy", f"{_REF}.strategy", f"{_CRITIC}.strategy"):
        if why and get(config, key) == "megatron":
            yield key, "fsdp2", f"{why}; models are sharded with FSDP2"


def _router_dtype(config: PPOTrainerConfig) -> Iterator[tuple[str, JsonValue, str]]:
    """Yields the reference's overrides with the actor's dtype of router logits, if they have none."""
    actor, ref = (
        role.megatron.override_transformer_config
        for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref)
    )
    name = "moe_router_dtype"
    if name in actor and name not in ref:
        why = "the reference computes the logits of its routers as the actor does"
        yield f"{_REF}.megatron.override_transformer_config", {**ref, name: actor[name]}, why


def _missing_engine(
    block: str, rollout: RolloutEngineConfig
) -> Iterator[tuple[str, JsonValue, str]]:
    if rollout.server.urls:
        return
    for name, title, python, install in (
        ("vllm", "vLLM", rollout.vllm.python, "make setup-vllm, or pip install 'hone-rl[vllm]'"),
        ("sglang", "SGLang", rollout.sglang.python, "pip install 'hone-rl[sglang]'"),
    ):
        if rollout.name == name and python is None and find_spec(name) is None:
            why = f"{title} is not installed here ({install}) and rollout.server.urls is empty; "
            why += "native decodes with the actor's own parameters"
            yield f"{block}.name", "native", why


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
        if problem := role["megatron"].uneven(ranks):
            yield f"{role_key}.megatron.{problem}"
        return
    sequence, tensor = sequence_parallel(role, sharding), sharding.tensor_parallel_size
    if ranks % (sequence * tensor):
        key = f"{role_key}.ulysses_sequence_parallel_size".lstrip(".")
        sizes = [f"{key}={sequence}"] * (sequence > 1)
        sizes += [f"{block_key}.tensor_parallel_size={tensor}"] * (tensor > 1)
        advice = divisors(ranks, sequence * tensor).removeprefix("use ")
        yield f"{' times '.join(sizes)} does not divide {ranks} ranks; use {advice}"


def _rollout(config: PPOTrainerConfig) -> Iterator[str]:
    rollout, ranks = config.actor_rollout_ref.rollout, config.rollout_ranks
    size = rollout.tensor_model_parallel_size
    if rollout.name == "native" and ranks % size:
        yield f"{_ROLLOUT_SIZE}={size} does not divide {ranks} rollout ranks; {divisors(ranks, size)}"


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


def _rewards(config: PPOTrainerConfig) -> Iterator[str]:
    model = config.reward_model
    buffer = model.reward_kwargs.overlong_buffer_cfg
    limit = model.reward_kwargs.max_resp_len or config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= limit:
        yield (
            f"reward_model.reward_kwargs.overlong_buffer_cfg.len={buffer.len} lies outside the response "
            f"(1 to {limit} tokens); use for example {max(1, limit // 5)}"
        )


def _data(config: PPOTrainerConfig) -> Iterator[str]:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    if data.dataset_weights is not None:
        files, weights = len(data.train_files), len(data.dataset_weights)
        if files != weights:
            yield f"data.dataset_weights has {weights} numbers for {files} data.train_files; give one each"
        if any(w < 0 for w in data.dataset_weights) or sum(data.dataset_weights) <= 0:
            yield "data.dataset_weights must be 0 or more, and not all 0; use for example [0.7,0.3]"
    order = data.sampler
    if bool(order.class_path) != bool(order.class_name) and not _ends_with_class(order.class_path):
        yield "data.sampler needs both class_path and class_name, or neither"
    for key, own in {"custom_cls": data.custom_cls, "datagen": data.datagen}.items():
        if own.path and not own.name and not _ends_with_class(own.path):
            yield f"data.{key}.path needs data.{key}.name, the class in that file"
    limit = rollout.max_model_len
    if limit is not None and limit <= rollout.prompt_length:
        yield (
            f"actor_rollout_ref.rollout.max_model_len={limit} leaves no room for a response to a prompt of "
            f"{rollout.prompt_length} tokens; raise it, or lower data.max_prompt_length"
        )


def _ends_with_class(path: str | None) -> bool:
    """Returns whether a path has the form `file.py:Class`."""
    return path is not None and ":" in path.removeprefix("pkg://").removeprefix("file://")


def _unknown_names(tree: str, config: Value) -> Iterator[str]:
    """Yields names that are neither registered nor, where allowed, an import path."""
    for words, names, own in read_table("checks.txt")["names"]:
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
