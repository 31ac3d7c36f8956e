"""Checks of a tree that need more than one key, or more than a type; each sentence names values that work.

They run before any model is loaded. A value that cannot stand beside the others, and whose change trains
nothing else, is settled with a note. What follows from the columns that the algorithm reads is checked by
`hone/trainer/ppo/plan.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from hone.config.convert import show_value
from hone.config.errors import did_you_mean, nearest
from hone.config.generation import GenerationConfig
from hone.config.rollout import SEARCH_LOOP
from hone.config.schema import PPOTrainerConfig
from hone.config.sft import SFTConfig
from hone.config.trainer import TrainingRunConfig
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


def find_problems(config: PPOTrainerConfig) -> list[str]:
    """One sentence for each defect of the tree."""
    return [problem for find in CHECKS for problem in find(config)]


def settle(config: PPOTrainerConfig) -> Iterator[tuple[str, JsonValue, str]]:
    """Key, value and sentence for what can run with another value and trains the same."""
    policy = config.actor_rollout_ref
    longest = policy.rollout.prompt_length + policy.rollout.response_length
    budgets = {
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": policy.actor.ppo_max_token_len_per_gpu,
        "critic.ppo_max_token_len_per_gpu": config.critic.ppo_max_token_len_per_gpu,
    }
    for key, budget in budgets.items():
        if budget < longest:
            why = f"a rank's budget must hold the longest prompt plus response, so it is {longest}"
            yield key, longest, why
    buffer = config.reward_model.reward_kwargs.overlong_buffer_cfg
    if buffer.enable and buffer.len == 0:
        key = "reward_model.reward_kwargs.overlong_buffer_cfg.enable"
        yield key, False, "a buffer of len=0 tokens penalises nothing"
    sizes = {"actor_rollout_ref.actor": policy.actor.rollout_n, "critic": config.critic.rollout_n}
    for block, size in sizes.items():
        if size != policy.rollout.n:
            why = f"a prompt has actor_rollout_ref.rollout.n={policy.rollout.n} responses"
            yield f"{block}.rollout_n", policy.rollout.n, why


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
    below = max((d for d in every if d <= near), default=None)
    above = min((d for d in every if d > near), default=None)
    return "use " + " or ".join(str(d) for d in (below, above) if d is not None)


def _batches(config: PPOTrainerConfig) -> Iterator[str]:
    """Our engines make every rank a data-parallel one; another's mesh is known when it is built."""
    if ":" not in config.actor_rollout_ref.actor.strategy:
        yield from uneven_batches(config, config.world_size)


def uneven_batches(config: PPOTrainerConfig, ranks: int) -> Iterator[str]:
    """Batches that do not divide over so many data-parallel ranks."""
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    unit = ranks // math.gcd(ranks, n)
    if prompts % unit:
        rows = f" times rollout.n={n}" if n > 1 else ""
        yield (
            f"data.train_batch_size={prompts}{rows} is not divisible by {ranks} data-parallel ranks; "
            + multiples(prompts, unit)
        )
        return
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    yield from mini_batch_problems(config, "actor_rollout_ref.actor", mini)


def mini_batch_problems(config: PPOTrainerConfig, block: str, mini: int) -> Iterator[str]:
    """Whether a step has the prompts of a role's mini-batch; the last one of a step may be smaller, and
    ranks need not have the same share of it."""
    prompts = config.data.train_batch_size
    if mini > prompts:
        key = f"{block}.ppo_mini_batch_size={mini}"
        yield f"{key} is more prompts than a step has (data.train_batch_size={prompts}); use {prompts}"


def _filters(config: PPOTrainerConfig) -> Iterator[str]:
    filters = config.algorithm.filter_groups
    if filters.enable and config.actor_rollout_ref.rollout.n == 1:
        yield (
            "algorithm.filter_groups.enable=true needs groups, and actor_rollout_ref.rollout.n=1; "
            "use actor_rollout_ref.rollout.n=2 or more"
        )
    if filters.enable and filters.metric is None:
        yield "algorithm.filter_groups.metric=null; use reward, acc, or the name of a reward extra"


def _micro_batches(config: PPOTrainerConfig) -> Iterator[str]:
    policy = config.actor_rollout_ref
    pairs = {
        "actor_rollout_ref.actor.ppo_micro_batch_size": policy.actor,
        "actor_rollout_ref.ref.log_prob_micro_batch_size": policy.ref,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size": policy.rollout,
        "critic.ppo_micro_batch_size": config.critic,
        "critic.forward_micro_batch_size": config.critic,
        "reward_model.micro_batch_size": config.reward_model,
    }
    for key, block in pairs.items():
        name = key.rsplit(".", 1)[1]
        total, per_rank = getattr(block, name), getattr(block, f"{name}_per_gpu")
        if total is not None and per_rank is not None:
            yield f"{key}={total} and {key}_per_gpu={per_rank} say the same thing twice; keep {key}_per_gpu"


def _lengths(config: PPOTrainerConfig) -> Iterator[str]:
    policy = config.actor_rollout_ref
    longest = policy.rollout.prompt_length + policy.rollout.response_length
    limit = policy.rollout.max_model_len
    if limit is not None and limit < longest:
        yield (
            f"actor_rollout_ref.rollout.max_model_len={limit} is less than the longest prompt plus "
            f"response ({longest}); use {longest} or null, or lower data.max_response_length"
        )


def _sampling(config: PPOTrainerConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.do_sample and rollout.temperature <= 0:
        yield (
            f"actor_rollout_ref.rollout.temperature={show_value(rollout.temperature)} with do_sample=true "
            "samples nothing; use temperature=1.0, or do_sample=false to decode greedily"
        )
    if not rollout.do_sample and rollout.n > 1 and not config.trainer.val_only:
        yield (
            f"actor_rollout_ref.rollout.do_sample=false gives {rollout.n} equal responses a prompt; "
            "use do_sample=true, or n=1"
        )


def _exact(config: PPOTrainerConfig) -> Iterator[str]:
    policy, key = config.actor_rollout_ref, "actor_rollout_ref.rollout.exact=true"
    if not policy.rollout.exact:
        return
    if policy.rollout.name != "native":
        yield f"{key} is the native engine's, and rollout.name={policy.rollout.name}; use native"
    if config.world_size > 1:
        yield (
            f"{key} is for one rank, and this run has {config.world_size}; use trainer.nnodes=1 and "
            "trainer.n_gpus_per_node=1, or exact=false"
        )
    if config.rollout_pool:
        yield f"{key} decodes with the trainer's own parameters; use hybrid_engine=true, or exact=false"
    if policy.model.uses_lora:
        yield f"{key} does not know adapters; use model.lora_rank=0, or exact=false"
    if policy.actor.use_torch_compile or policy.actor.fsdp_config.use_torch_compile:
        yield f"{key} has kernels of its own; use actor.use_torch_compile=false, or exact=false"


def _loss(config: PPOTrainerConfig) -> Iterator[str]:
    loss = config.actor_rollout_ref.actor.policy_loss
    beta = loss.dro_beta
    if loss.loss_mode == "dro" and (beta is None or beta <= 0):
        yield (
            f"actor_rollout_ref.actor.policy_loss.dro_beta={show_value(beta)} with loss_mode=dro; "
            "use a number above 0"
        )


def _correction(config: PPOTrainerConfig) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    key = "algorithm.rollout_correction"
    options = correction.rollout_rs
    named = options.split(",") if isinstance(options, str) else list(options or ())
    for option in (name.strip() for name in named):
        if option not in REJECTIONS:
            yield f"{key}.rollout_rs has no option '{option}'.{did_you_mean(nearest(option, REJECTIONS))}"
    if named and correction.rollout_rs_threshold is None:
        yield f"{key}.rollout_rs={','.join(named)} needs {key}.rollout_rs_threshold, for example 2.0"
    if config.actor_rollout_ref.actor.policy_loss.loss_mode == "bypass_mode" and not (
        correction.bypass_mode
    ):
        yield (
            f"actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode needs {key}.bypass_mode=true, "
            "which chooses that loss by itself and takes the rollout's log-probs as the old ones"
        )


def _rewards(config: PPOTrainerConfig) -> Iterator[str]:
    model, manager = config.reward_model, config.reward_manager
    if model.enable and not model.model.path:
        yield "reward_model.enable=true needs reward_model.model.path"
    if manager.source == "importlib" and not manager.module.path:
        yield "reward_manager.source=importlib needs reward_manager.module.path, the file of your class"
    if manager.name == "blank" and manager.source == "register" and not model.enable:
        yield (
            "reward_manager.name=blank gives no score and reward_model.enable=false, so there is no "
            "reward at all; use naive, or reward_model.enable=true"
        )
    credit = model.credit_assignment
    if isinstance(credit, str) and credit not in CREDIT_ASSIGNMENTS:
        yield (
            f"reward_model.credit_assignment={credit}; use {', '.join(CREDIT_ASSIGNMENTS)}, or a "
            "temperature above 0"
        )
    if isinstance(credit, float) and credit <= 0:
        yield f"reward_model.credit_assignment={show_value(credit)}; a temperature is above 0, as 0.1"
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


def _trackers(trainer: TrainingRunConfig) -> Iterator[str]:
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path, a global_step_N folder"
    for name in trainer.logger:
        if name not in TRACKERS and ":" not in name:
            hint = did_you_mean(nearest(name, TRACKERS))
            yield f"trainer.logger has no tracker '{name}'.{hint} Use {', '.join(TRACKERS)}"


def _named(key: str, name: str, known: tuple[str, ...]) -> Iterator[str]:
    """Whether a name is one of ours, or the user's own as pkg.mod:object."""
    if name not in known and ":" not in name:
        hint = did_you_mean(nearest(name, known))
        yield f"{key}={name} is unknown.{hint} Use {', '.join(known)}, or your own as pkg.mod:object"


def _engines(config: PPOTrainerConfig) -> Iterator[str]:
    policy, critic = config.actor_rollout_ref, config.critic
    for key, name in {
        "actor_rollout_ref.actor": policy.actor.strategy,
        "actor_rollout_ref.ref": policy.ref.strategy,
        "critic": critic.strategy,
    }.items():
        yield from _named(f"{key}.strategy", name, STRATEGIES)
    for key, optim in {
        "actor_rollout_ref.actor": policy.actor.optim,
        "critic": critic.optim,
    }.items():
        yield from _named(f"{key}.optim.lr_scheduler_type", optim.lr_scheduler_type, SCHEDULES)


def _agents(config: PPOTrainerConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    own = rollout.agent.agent_loop_config_path or config.actor_rollout_ref.model.external_lib
    if rollout.agent.default_agent_loop == SEARCH_LOOP and not own:
        yield (
            f"actor_rollout_ref.rollout.agent.default_agent_loop={SEARCH_LOOP}: the search loop is not "
            "built; use single_turn_agent, tool_agent with a search tool, or file.py:Loop of your own"
        )


def _run(config: PPOTrainerConfig) -> Iterator[str]:
    trainer, ranks = config.trainer, config.world_size
    if trainer.controller == "local" and ranks > 1:
        yield (
            f"trainer.controller=local is one process, and nnodes={trainer.nnodes} times n_gpus_per_node="
            f"{trainer.n_gpus_per_node} is {ranks}; use trainer.controller=ray, or 1 and 1"
        )
    if trainer.controller == "local" and config.rollout_pool:
        yield (
            "trainer.controller=local is one process, and the rollout has a pool of its own "
            "(hybrid_engine=false or rollout.nnodes>0); use trainer.controller=ray, or hybrid_engine=true"
        )
    yield from _trackers(trainer)
    checkpoints = {
        "actor_rollout_ref.actor": config.actor_rollout_ref.actor.checkpoint,
        "critic": config.critic.checkpoint,
    }
    for key, checkpoint in checkpoints.items():
        parts = (*checkpoint.save_contents, *(checkpoint.load_contents or ()))
        for part in dict.fromkeys(parts):
            if part not in CHECKPOINT_PARTS:
                yield f"{key}.checkpoint has no part '{part}'; use {', '.join(CHECKPOINT_PARTS)}"
    sharded = {
        "actor_rollout_ref.actor.fsdp_config": config.actor_rollout_ref.actor.fsdp_config,
        "actor_rollout_ref.ref.fsdp_config": config.actor_rollout_ref.ref.fsdp_config,
        "critic.model.fsdp_config": config.critic.model.fsdp_config,
    }
    for key, sharding in sharded.items():
        size = sharding.fsdp_size
        if size != -1 and (size < 1 or ranks % size):
            yield (
                f"{key}.fsdp_size={size} does not divide {ranks} ranks; "
                f"use -1, or {divisors(ranks, max(size, 1)).removeprefix('use ')}"
            )


CHECKS: tuple[Callable[[PPOTrainerConfig], Iterator[str]], ...] = (
    _batches,
    _filters,
    _micro_batches,
    _lengths,
    _sampling,
    _exact,
    _loss,
    _correction,
    _rewards,
    _data,
    _agents,
    _engines,
    _run,
)


def sft_problems(config: SFTConfig) -> Iterator[str]:
    """One sentence for each defect of an `sft_trainer` tree."""
    batch, ranks = config.data.train_batch_size, config.world_size
    if batch % ranks:
        yield (
            f"data.train_batch_size={batch} is not divisible by {ranks} data-parallel ranks; "
            + multiples(batch, ranks)
        )
    yield from _named("engine.strategy", config.engine.strategy, STRATEGIES)
    schedule = config.optim.lr_scheduler_type
    yield from _named("optim.lr_scheduler_type", schedule, SCHEDULES)
    if not config.data.use_dynamic_bsz and config.data.sequences_per_micro_batch(ranks) is None:
        yield "data.use_dynamic_bsz=false needs data.micro_batch_size_per_gpu, for example 4"
    yield from _trackers(config.trainer)


def generation_problems(config: GenerationConfig) -> Iterator[str]:
    """One sentence for each defect of a `generation` tree."""
    rollout = config.rollout
    if rollout.do_sample and rollout.temperature <= 0:
        yield (
            f"rollout.temperature={show_value(rollout.temperature)} with rollout.do_sample=true samples "
            "nothing; use rollout.temperature=1.0, or rollout.do_sample=false"
        )
    if not rollout.do_sample and config.data.n_samples > 1:
        yield (
            f"data.n_samples={config.data.n_samples} greedy responses are all the same; "
            "use rollout.do_sample=true, or data.n_samples=1"
        )
