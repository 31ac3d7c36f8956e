"""The four trees by name: root class, aliases, states and checks of each.

`compose` knows only this table; a new tree is one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hone.config import aliases, checks
from hone.config.checks import TRACKERS, multiples
from hone.config.convert import show_value
from hone.config.errors import did_you_mean, nearest
from hone.config.evaluation import EvaluationConfig
from hone.config.generation import GenerationConfig
from hone.config.ranges import NOT_NEGATIVE, POSITIVE, TOP_P, Range, out_of_range
from hone.config.schema import PPOTrainerConfig
from hone.config.sft import SFTConfig
from hone.config.sources import BuiltIn, Setting
from hone.config.states import (
    ENGINE_RULES,
    PROFILER_RULES,
    ROLLOUT,
    ROLLOUT_RULES,
    Rule,
    neutral,
    only,
    refused,
    strategies,
)
from hone.config.states import RULES as PPO_RULES

Origins = dict[str, str]


@dataclass(frozen=True)
class Tree:
    """One config tree."""

    name: str
    root: type
    purpose: str
    translate: Callable[[Sequence[Setting], list[str]], list[Setting]]
    rules: tuple[Rule, ...]
    find_problems: Callable[[Any, Origins], list[str]]
    find_idle: Callable[[Any, Origins], list[str]] = lambda config, origins: []


def renames(
    keys: dict[str, str], blocks: dict[str, str]
) -> Callable[[Sequence[Setting], list[str]], list[Setting]]:
    """A translation that only renames."""
    return lambda settings, problems: [aliases.rename(s, keys, blocks) for s in settings]


SFT_RENAMED = {
    "model.partial_pretrain": "model.path",
    "model.strategy": "engine.strategy",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "optim.warmup_style": "optim.lr_scheduler_type",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "model.fsdp_config.cpu_offload": "engine.param_offload",
    "model.fsdp_config.offload_params": "engine.optimizer_offload",
    "data.messages_key": "data.multiturn.messages_key",
    "data.tools_key": "data.multiturn.tools_key",
    "data.enable_thinking_key": "data.multiturn.enable_thinking_key",
    "trainer.run_name": "trainer.experiment_name",
    "ray_init.timeline_json_file": "ray_kwargs.timeline_json_file",
}
SFT_RENAMED_BLOCKS = {
    "model.fsdp_config": "engine",
    "trainer.checkpoint": "checkpoint",
    "ray_init": "ray_kwargs.ray_init",
}
RAY_RENAMED = {"ray_init.timeline_json_file": "ray_kwargs.timeline_json_file"}
RAY_RENAMED_BLOCKS = {"ray_init": "ray_kwargs.ray_init"}

NO_RAY = "the ranks are plain processes; start them with torchrun, Ray is not used"
NO_RAY_RULES = (
    only("ray_kwargs.ray_init.local_mode", (False,), "use trainer.controller=local"),
    neutral("ray_kwargs.ray_init.num_cpus", NO_RAY),
    neutral("ray_kwargs.ray_init.num_gpus", NO_RAY),
    refused("ray_kwargs.**", NO_RAY),
)

SFT_RULES = (
    neutral("data.pad_mode", "rows are always packed without padding"),
    refused("model.mtp.*", "multi-token prediction heads are not trained"),
    only("trainer.profile_interval", ((-1, -1),), "no profiler is wired"),
    refused("trainer.default_hdfs_dir", "checkpoints go to trainer.default_local_dir"),
    *NO_RAY_RULES,
    *PROFILER_RULES,
    *strategies("engine"),
    *ENGINE_RULES,
)
GENERATION_RULES = (
    *(replace(r, pattern=r.pattern.replace(ROLLOUT, "rollout")) for r in ROLLOUT_RULES),
    only("rollout.n", (1,), "use data.n_samples for more responses a prompt"),
    neutral("rollout.log_prob_micro_batch_size*", "nothing is trained in generation"),
    neutral("rollout.free_cache_engine", "the engine ends with the run"),
    neutral("actor.**", "nothing is trained in generation"),
    *NO_RAY_RULES,
)
EVALUATION_RULES = (
    neutral("data.prompt_key", "responses are scored without their prompts"),
    neutral("sandbox_fusion.max_concurrent", "each of num_processes sends one request at a time"),
    *NO_RAY_RULES,
)

SFT_RANGES = {
    "data.train_batch_size": POSITIVE,
    "data.micro_batch_size": POSITIVE,
    "data.micro_batch_size_per_gpu": POSITIVE,
    "data.max_token_len_per_gpu": POSITIVE,
    "data.max_length": POSITIVE,
    "trainer.total_epochs": POSITIVE,
    "trainer.total_training_steps": POSITIVE,
    "trainer.nnodes": POSITIVE,
    "trainer.n_gpus_per_node": POSITIVE,
    "trainer.num_threads": POSITIVE,
    "optim.lr": NOT_NEGATIVE,
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.clip_grad": Range(above=0),
    "model.lora_rank": NOT_NEGATIVE,
}
GENERATION_RANGES = {
    "data.n_samples": POSITIVE,
    "data.batch_size": POSITIVE,
    "rollout.temperature": NOT_NEGATIVE,
    "rollout.top_p": TOP_P,
    "rollout.top_k": Range(least=0, minus_one=True),
    "rollout.prompt_length": POSITIVE,
    "rollout.response_length": POSITIVE,
    "rollout.max_num_seqs": POSITIVE,
    "trainer.nnodes": POSITIVE,
    "trainer.n_gpus_per_node": POSITIVE,
    "trainer.num_threads": POSITIVE,
}
EVALUATION_RANGES = {
    "metrics.confidence": Range(above=0, most=1),
    "metrics.bootstrap_samples": POSITIVE,
    "num_processes": POSITIVE,
    "timeout_s": Range(above=0),
}


def _sft_problems(config: SFTConfig, origins: Origins) -> list[str]:
    return out_of_range(config, SFT_RANGES) or list(_sft_checks(config))


def _sft_checks(config: SFTConfig) -> Iterator[str]:
    batch, ranks = config.data.train_batch_size, config.world_size
    if batch % ranks:
        yield (
            f"data.train_batch_size={batch} is not divisible by {ranks} data-parallel ranks; "
            + multiples(batch, ranks)
        )
    if config.data.max_token_len_per_gpu < config.data.max_length:
        yield (
            f"data.max_token_len_per_gpu={config.data.max_token_len_per_gpu} tokens cannot hold "
            f"data.max_length={config.data.max_length}; use {config.data.max_length} or more"
        )
    if not config.data.use_dynamic_bsz and config.data.sequences_per_micro_batch(ranks) is None:
        yield "data.use_dynamic_bsz=false needs data.micro_batch_size_per_gpu, for example 4"
    if config.trainer.resume_mode == "resume_path" and not config.trainer.resume_from_path:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path, a global_step_N folder"
    for name in config.trainer.logger:
        if name not in TRACKERS and ":" not in name:
            yield f"trainer.logger has no tracker '{name}'.{did_you_mean(nearest(name, TRACKERS))}"


def _generation_problems(config: GenerationConfig, origins: Origins) -> list[str]:
    problems = out_of_range(config, GENERATION_RANGES)
    rollout = config.rollout
    if rollout.do_sample and rollout.temperature <= 0:
        problems.append(
            f"rollout.temperature={show_value(rollout.temperature)} with rollout.do_sample=true samples "
            "nothing; use rollout.temperature=1.0, or rollout.do_sample=false"
        )
    if not rollout.do_sample and config.data.n_samples > 1:
        problems.append(
            f"data.n_samples={config.data.n_samples} greedy responses are all the same; "
            "use rollout.do_sample=true, or data.n_samples=1"
        )
    return problems


def _evaluation_problems(config: EvaluationConfig, origins: Origins) -> list[str]:
    return out_of_range(config, EVALUATION_RANGES)


TREES: dict[str, Tree] = {
    tree.name: tree
    for tree in (
        Tree(
            "ppo_trainer",
            PPOTrainerConfig,
            "reinforcement learning: `hone train`, `python -m hone.trainer.main_ppo`",
            aliases.translate,
            PPO_RULES,
            checks.find_problems,
            checks.find_idle,
        ),
        Tree(
            "sft_trainer",
            SFTConfig,
            "supervised fine-tuning: `hone sft`, `python -m hone.trainer.main_sft`",
            renames(SFT_RENAMED, SFT_RENAMED_BLOCKS),
            SFT_RULES,
            _sft_problems,
        ),
        Tree(
            "generation",
            GenerationConfig,
            "responses for a file of prompts: `hone generate`, `python -m hone.trainer.main_generation`",
            renames(RAY_RENAMED, RAY_RENAMED_BLOCKS),
            GENERATION_RULES,
            _generation_problems,
        ),
        Tree(
            "evaluation",
            EvaluationConfig,
            "scores for a file of responses: `hone eval`, `python -m hone.trainer.main_eval`",
            renames(RAY_RENAMED, RAY_RENAMED_BLOCKS),
            EVALUATION_RULES,
            _evaluation_problems,
        ),
    )
}

_STRATEGY = {"ppo_trainer": "actor_rollout_ref.actor.strategy", "sft_trainer": "engine.strategy"}
_OTHER_NAMES = {
    "ppo": "ppo_trainer",
    "sft": "sft_trainer",
    "sft_trainer_engine": "sft_trainer",
    "_generated_ppo_trainer": "ppo_trainer",
    "fully_async_ppo_trainer": "ppo_trainer",
    "one_step_off_ppo_trainer": "ppo_trainer",
}
BUILT_IN: dict[str, BuiltIn] = {
    **{name: BuiltIn(name) for name in TREES},
    **{name: BuiltIn(tree) for name, tree in _OTHER_NAMES.items()},
    "dapo_trainer": BuiltIn("ppo_trainer", {"reward_model.reward_manager": "dapo"}),
}
"""verl's configs by name."""
BUILT_IN |= {
    name.replace("_trainer", f"_{engine}_trainer"): BuiltIn(
        config.tree, {**config.values, _STRATEGY[config.tree]: engine}
    )
    for name, config in BUILT_IN.items()
    if name.endswith("_trainer")
    for engine in ("megatron", "torchtitan", "veomni")
}
