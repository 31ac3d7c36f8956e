"""Checks of a tree that must count or look names up; each sentence names values that work.

They run before any model is loaded. A value that cannot stand beside the others, and whose change trains
nothing else, is settled with a note. Checks that only compare keys are rows of `checks.txt`; what depends on
the columns that the algorithm reads is checked by `hone/trainer/ppo/plan.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from hone.config.block import Value
from hone.config.conditions import problems_of
from hone.config.convert import show_value
from hone.config.errors import did_you_mean, nearest
from hone.config.generation import GenerationConfig
from hone.config.keys import get
from hone.config.schema import PPOTrainerConfig
from hone.config.sft import SFTConfig
from hone.types import JsonValue

TRACKERS = ("console", "jsonl", "file", "tensorboard", "wandb", "mlflow", "swanlab")
SCHEDULES = ("constant", "cosine", "linear", "wsd")
STRATEGIES = ("fsdp", "fsdp2")
CHECKPOINT_PARTS = ("model", "optimizer", "extra", "hf_model")
CREDIT_ASSIGNMENTS = ("gamma-decay", "strict min-form")
REJECTIONS = (
    *(f"{level}_k{i}" for level in ("token", "seq_sum", "seq_mean") for i in (1, 2, 3)),
    "seq_max_k2",
    "seq_max_k3",
)
_ACTOR, _REF, _CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"


def find_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """One sentence for each defect of a `ppo_trainer` tree."""
    if ":" not in config.actor_rollout_ref.actor.strategy:
        # Our engines make every rank a data-parallel one; another's mesh is known when it is built.
        yield from uneven_batches(config, config.world_size)
    yield from problems_of("ppo_trainer", config)
    for check in _CHECKS:
        yield from check(config)
    yield from _names_known(config, (_ACTOR, _REF, _CRITIC), (_ACTOR, _CRITIC))


def sft_problems(config: SFTConfig) -> Iterator[str]:
    """One sentence for each defect of an `sft_trainer` tree."""
    yield from _indivisible(config.data.train_batch_size, config.world_size)
    yield from problems_of("sft_trainer", config)
    yield from _names_known(config, ("engine",), ("",))


def generation_problems(config: GenerationConfig) -> Iterator[str]:
    """One sentence for each defect of a `generation` tree."""
    return problems_of("generation", config)


def settle(config: PPOTrainerConfig) -> Iterator[tuple[str, JsonValue, str]]:
    """Key, value and sentence for what can run with another value and trains the same."""
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    for block in (_ACTOR, _CRITIC):
        if get(config, f"{block}.ppo_max_token_len_per_gpu") < longest:
            why = f"a rank's budget must hold the longest prompt plus response, so it is {longest}"
            yield f"{block}.ppo_max_token_len_per_gpu", longest, why
    buffer = config.reward_model.reward_kwargs.overlong_buffer_cfg
    if buffer.enable and buffer.len == 0:
        key = "reward_model.reward_kwargs.overlong_buffer_cfg.enable"
        yield key, False, "a buffer of len=0 tokens penalises nothing"
    for block in (_ACTOR, _CRITIC):
        if get(config, f"{block}.rollout_n") != rollout.n:
            why = f"a prompt has actor_rollout_ref.rollout.n={rollout.n} responses"
            yield f"{block}.rollout_n", rollout.n, why


def settle_sft(config: SFTConfig) -> Iterator[tuple[str, JsonValue, str]]:
    """Key, value and sentence for what can run with another value and trains the same."""
    if config.data.max_token_len_per_gpu < config.data.max_length:
        why = f"a rank's budget must hold data.max_length={config.data.max_length} tokens"
        yield "data.max_token_len_per_gpu", config.data.max_length, why


def multiples(value: int, unit: int) -> str:
    """The nearest multiples of `unit` around `value`, as `use A or B`."""
    below = value // unit * unit
    return f"use {below} or {below + unit}" if below else f"use {unit}"


def divisors(value: int, near: int) -> str:
    """The nearest divisors of `value` around `near`, as `use A or B`."""
    every = [d for d in range(1, value + 1) if value % d == 0]
    around = [[d for d in every if d <= near][-1:], [d for d in every if d > near][:1]]
    return "use " + " or ".join(str(d) for side in around for d in side)


def _indivisible(prompts: int, ranks: int, n: int = 1) -> Iterator[str]:
    unit = ranks // math.gcd(ranks, n)
    if prompts % unit:
        rows = f" times rollout.n={n}" if n > 1 else ""
        what = f"data.train_batch_size={prompts}{rows}"
        yield f"{what} is not divisible by {ranks} data-parallel ranks; {multiples(prompts, unit)}"


def uneven_batches(config: PPOTrainerConfig, ranks: int) -> Iterator[str]:
    """Batches that do not divide over so many data-parallel ranks."""
    policy = config.actor_rollout_ref
    uneven = list(_indivisible(config.data.train_batch_size, ranks, policy.rollout.n))
    mini = policy.actor.ppo_mini_batch_size
    yield from uneven or mini_batch_problems(config, _ACTOR, mini)


def mini_batch_problems(config: PPOTrainerConfig, block: str, mini: int) -> Iterator[str]:
    """Whether a step has the prompts of a role's mini-batch; the last one of a step may be smaller, and
    ranks need not have the same share of it."""
    prompts = config.data.train_batch_size
    if mini > prompts:
        key = f"{block}.ppo_mini_batch_size={mini}"
        yield f"{key} is more prompts than a step has (data.train_batch_size={prompts}); use {prompts}"


def _micro_batches(config: PPOTrainerConfig) -> Iterator[str]:
    for key in (
        f"{_ACTOR}.ppo_micro_batch_size",
        f"{_REF}.log_prob_micro_batch_size",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size",
        "critic.ppo_micro_batch_size",
        "critic.forward_micro_batch_size",
        "reward_model.micro_batch_size",
    ):
        total, per_rank = get(config, key), get(config, f"{key}_per_gpu")
        if total is not None and per_rank is not None:
            yield f"{key}={total} and {key}_per_gpu={per_rank} say the same thing twice; keep {key}_per_gpu"


def _lengths(config: PPOTrainerConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    longest, limit = rollout.prompt_length + rollout.response_length, rollout.max_model_len
    if limit is not None and limit < longest:
        yield (
            f"actor_rollout_ref.rollout.max_model_len={limit} is less than the longest prompt plus "
            f"response ({longest}); use {longest} or null, or lower data.max_response_length"
        )


def _correction(config: PPOTrainerConfig) -> Iterator[str]:
    correction, key = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    options = correction.rollout_rs
    named = options.split(",") if isinstance(options, str) else list(options or ())
    for option in (name.strip() for name in named):
        if option not in REJECTIONS:
            yield f"{key}.rollout_rs has no option '{option}'.{did_you_mean(nearest(option, REJECTIONS))}"
    if named and correction.rollout_rs_threshold is None:
        yield f"{key}.rollout_rs={','.join(named)} needs {key}.rollout_rs_threshold, for example 2.0"


def _rewards(config: PPOTrainerConfig) -> Iterator[str]:
    model = config.reward_model
    credit, key = model.credit_assignment, "reward_model.credit_assignment"
    if isinstance(credit, str) and credit not in CREDIT_ASSIGNMENTS:
        yield f"{key}={credit}; use {', '.join(CREDIT_ASSIGNMENTS)}, or a temperature above 0"
    if isinstance(credit, float) and credit <= 0:
        yield f"{key}={show_value(credit)}; a temperature is above 0, as 0.1"
    buffer = model.reward_kwargs.overlong_buffer_cfg
    limit = model.reward_kwargs.max_resp_len or config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= limit:
        yield (
            f"reward_model.reward_kwargs.overlong_buffer_cfg.len={buffer.len} lies outside the response "
            f"(1 to {limit} tokens); use for example {max(1, limit // 5)}"
        )


def _data(config: PPOTrainerConfig) -> Iterator[str]:
    data = config.data
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


def _ends_with_class(path: str | None) -> bool:
    """Whether a path is written `file.py:Class`."""
    return path is not None and ":" in path.removeprefix("pkg://").removeprefix("file://")


def _names_known(config: Value, engines: Iterable[str], optimizers: Iterable[str]) -> Iterator[str]:
    """Names of trackers, engines and schedules that are neither ours nor the user's own."""
    for name in config.trainer.logger:
        if name not in TRACKERS and ":" not in name:
            hint = did_you_mean(nearest(name, TRACKERS))
            yield f"trainer.logger has no tracker '{name}'.{hint} Use {', '.join(TRACKERS)}"
    names: dict[str, tuple[str, ...]] = {f"{block}.strategy": STRATEGIES for block in engines}
    names |= {f"{b}.optim.lr_scheduler_type".lstrip("."): SCHEDULES for b in optimizers}
    for key, known in names.items():
        name = get(config, key)
        if name not in known and ":" not in name:
            hint = did_you_mean(nearest(name, known))
            yield f"{key}={name} is unknown.{hint} Use {', '.join(known)}, or your own as pkg.mod:object"


def _parts_and_shards(config: PPOTrainerConfig) -> Iterator[str]:
    for block in (_ACTOR, _CRITIC):
        checkpoint = get(config, f"{block}.checkpoint")
        parts = (*checkpoint.save_contents, *(checkpoint.load_contents or ()))
        for part in dict.fromkeys(parts):
            if part not in CHECKPOINT_PARTS:
                yield f"{block}.checkpoint has no part '{part}'; use {', '.join(CHECKPOINT_PARTS)}"
    ranks = config.world_size
    for block in (_ACTOR, _REF, "critic.model"):
        key = f"{block}.fsdp_config.fsdp_size"
        size: int = get(config, key)
        if size != -1 and (size < 1 or ranks % size):
            advice = divisors(ranks, max(size, 1)).removeprefix("use ")
            yield f"{key}={size} does not divide {ranks} ranks; use -1, or {advice}"


_CHECKS: tuple[Callable[[PPOTrainerConfig], Iterator[str]], ...] = (
    _micro_batches,
    _lengths,
    _correction,
    _rewards,
    _data,
    _parts_and_shards,
)
