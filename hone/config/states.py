"""What each key comes to here: it works, it is neutral, or it is refused with a sentence. One table.

A key that no rule names works. To make one work, delete its rule; the table is data, nothing else decides.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

State = Literal["works", "neutral", "refused"]


class Accepts(Enum):
    """Values a rule lets through that are not listed one by one."""

    ANY = "any value"
    DEFAULT = "the default"
    OFF = "null, false, 0, or nothing"


@dataclass(frozen=True)
class Rule:
    """State of the keys a pattern names. `*` is one name, `**` any number of them."""

    pattern: str
    state: State
    why: str
    accepts: tuple[Any, ...] | Accepts = Accepts.ANY
    or_own: bool = False
    """Whether the user's own is let through too, as pkg.mod:object."""

    def lets_through(self, value: Any, default: Any) -> bool:
        """True when the value may be written."""
        if self.accepts is Accepts.ANY:
            return True
        if self.accepts is Accepts.DEFAULT:
            return bool(value == default)
        if self.or_own and isinstance(value, str) and ":" in value:
            return True
        if self.accepts is Accepts.OFF:
            return value in (None, False, 0, "", "disabled") or value in ({}, [], ())
        return value in self.accepts


def works_only(pattern: str, values: tuple[Any, ...], why: str) -> Rule:
    """The key works with these values; the others are refused."""
    return Rule(pattern, "works", why, values)


def works_named(pattern: str, names: tuple[str, ...], why: str) -> Rule:
    """The key works with these names and with the user's own, as pkg.mod:object; others are refused."""
    return Rule(pattern, "works", why, names, or_own=True)


def neutral(pattern: str, why: str) -> Rule:
    """Every value asks for nothing that differs here."""
    return Rule(pattern, "neutral", why)


def only(pattern: str, values: tuple[Any, ...], why: str) -> Rule:
    """These values ask for nothing that differs here; the others are refused."""
    return Rule(pattern, "neutral", why, values)


def refused(pattern: str, why: str) -> Rule:
    """Only the default, which asks for nothing, may be written."""
    return Rule(pattern, "refused", why, Accepts.DEFAULT)


ROLLOUT = "actor_rollout_ref.rollout"

_FSDP2 = "FSDP2 is the one way to shard; use fsdp2"


def strategies(*roles: str) -> tuple[Rule, ...]:
    """The training engine of these blocks: ours, or the user's own."""
    why = f"{_FSDP2}, or your own as pkg.mod:Class"
    return tuple(works_named(f"{role}.strategy", ("fsdp", "fsdp2"), why) for role in roles)


ENGINE_RULES: tuple[Rule, ...] = (
    only("**.strategy", ("fsdp", "fsdp2"), _FSDP2),
    only("**.wrap_policy.min_num_params", (0,), "sharding is by decoder layer; use 0"),
    neutral("**.forward_prefetch", "FSDP2 prefetches by itself"),
    neutral("**.use_orig_params", "FSDP2 always keeps the original parameters"),
    neutral("**.entropy_from_logits_with_chunking", "log-probs and entropy always go in chunks"),
    neutral("**.entropy_checkpointing", "chunks are always recomputed in the backward pass"),
    neutral("**.use_no_sync_for_gradient_accumulation", "it changes traffic, not results"),
    neutral("**.use_remove_padding", "rows are always packed without padding"),
    neutral(
        "**.use_fused_kernels", "log-probs come from hidden states in chunks, never whole logits"
    ),
    neutral("**.fused_kernel_options.impl_backend", "there is one chunked implementation"),
    only("**.ulysses_sequence_parallel_size", (1,), "sequences are not split over ranks; use 1"),
    works_named(
        "**.optim.lr_scheduler_type",
        ("constant", "cosine", "wsd"),
        "there is no such schedule; use constant, cosine, wsd, or your own as pkg.mod:function",
    ),
    only("**.optim.zero_indexed_step", (True,), "the first update is step 0"),
    only("**.checkpoint.async_save", (False,), "checkpoints are written before the next step"),
    only("**.checkpoint.strict", (True,), "a checkpoint must match the model"),
    only("**.use_shm", (False,), "files are read where they are; copy them to /dev/shm yourself"),
    only("**.use_liger", (False,), "Liger kernels are not used"),
    only("**.tiled_mlp.enabled", (False,), "the MLP is not sliced; lower the token budget instead"),
    neutral("**.tiled_mlp.num_shards", "no effect while tiled_mlp.enabled=false"),
    only("**.model_dtype", ("auto", "fp32", "float32"), "master weights are float32; use fp32"),
    neutral("**.entropy_from_logits_chunk_size", "chunks are sized by memory"),
    neutral("actor_rollout_ref.ref.fsdp_config.forward_only", "the reference is never updated"),
    neutral("reward_model.model.fsdp_config.forward_only", "reward models are never updated"),
    only("**.forward_only", (False,), "this model is trained; hone generate runs one without"),
    neutral("actor_rollout_ref.actor.calculate_entropy", "the entropy is always measured"),
    refused(
        "**.hf_config_path",
        "the model's own config.json is read; use override_config",
    ),
    only(
        "**.enable_activation_offload",
        (False,),
        "activations stay on the device; use enable_gradient_checkpointing=true",
    ),
)

PROFILER_RULES: tuple[Rule, ...] = (
    refused(
        "global_profiler.tool", "no profiler is wired; timing_s/* in the metrics times each phase"
    ),
    refused(
        "global_profiler.steps", "no profiler is wired; timing_s/* in the metrics times each phase"
    ),
    neutral("global_profiler.**", "no effect while global_profiler.tool is null"),
    only(
        "**.profiler.tool",
        (None,),
        "no profiler is wired; timing_s/* in the metrics times each phase",
    ),
    only(
        "**.profiler.enable",
        (False,),
        "no profiler is wired; timing_s/* in the metrics times each phase",
    ),
    neutral("**.profiler.**", "no effect while global_profiler.tool is null"),
)

ROLLOUT_RULES: tuple[Rule, ...] = (
    works_named(
        f"{ROLLOUT}.name",
        ("native", "hf"),
        "its adapter is not built; use native, which decodes with the actor's own parameters",
    ),
    neutral(f"{ROLLOUT}.mode", "loops always run as coroutines"),
    neutral(f"{ROLLOUT}.load_format", "the native engine decodes with the actor's own parameters"),
    neutral(f"{ROLLOUT}.multi_stage_wake_up", "there is no second copy of the weights to wake"),
    neutral(f"{ROLLOUT}.enable_chunked_prefill", "it changes speed, not results"),
    neutral(f"{ROLLOUT}.disable_log_stats", "the engine's statistics are in the step's metrics"),
    neutral(f"{ROLLOUT}.skip_tokenizer_init", "engines always see token ids"),
    neutral(f"{ROLLOUT}.layered_summon", "there is no second copy of the weights to fill"),
    neutral(f"{ROLLOUT}.full_determinism", "sampling always depends on the seed alone"),
    neutral(f"{ROLLOUT}.engine_kwargs.**", "arguments of engines that are not in use"),
    neutral(f"{ROLLOUT}.checkpoint_engine.engine_kwargs.**", "the transports take no arguments"),
    neutral(f"{ROLLOUT}.agent.num_workers", "loops are coroutines beside their engine"),
    only(
        f"{ROLLOUT}.tensor_model_parallel_size",
        (1,),
        "each rank decodes with the whole model; use 1",
    ),
    only(f"{ROLLOUT}.data_parallel_size", (1,), "each rank decodes its own prompts; use 1"),
    only(f"{ROLLOUT}.expert_parallel_size", (1,), "experts are not split over ranks; use 1"),
    only(f"{ROLLOUT}.pipeline_model_parallel_size", (1,), "layers are not split over ranks; use 1"),
    only(
        f"{ROLLOUT}.logprobs_mode", ("processed_logprobs",), "log-probs are those after temperature"
    ),
    only(f"{ROLLOUT}.scheduling_policy", ("fcfs",), "requests are served in order; use fcfs"),
    only(f"{ROLLOUT}.over_sample_rate", (0.0,), "use algorithm.filter_groups to generate more"),
    refused(
        f"{ROLLOUT}.trace.backend",
        "tracing is not built; trainer.rollout_data_dir keeps every turn",
    ),
    neutral(f"{ROLLOUT}.trace.*", "no effect while rollout.trace.backend is null"),
    refused(
        f"{ROLLOUT}.prometheus.enable",
        "there is no server to watch; the metrics are in metrics.jsonl",
    ),
    neutral(f"{ROLLOUT}.prometheus.*", "no effect while rollout.prometheus.enable=false"),
    refused(
        f"{ROLLOUT}.quantization", "weights are decoded in the compute dtype; set rollout.dtype"
    ),
    refused(f"{ROLLOUT}.quantization_config_file", "weights are decoded in the compute dtype"),
    refused(
        f"{ROLLOUT}.skip_rollout", "generations are not reused; trainer.rollout_data_dir keeps them"
    ),
    neutral(f"{ROLLOUT}.skip_dump_dir", "no effect while rollout.skip_rollout=false"),
    refused(f"{ROLLOUT}.enable_rollout_routing_replay", "expert routing is not replayed"),
    refused(
        f"{ROLLOUT}.agent.custom_async_server.*",
        "write an engine for hone.rollout.contract instead",
    ),
)

AGENT_RULES: tuple[Rule, ...] = (
    only(f"{ROLLOUT}.multi_turn.num_repeat_rollouts", (None,), "use rollout.n for more responses"),
    neutral(
        f"{ROLLOUT}.multi_turn.use_inference_chat_template", "turns are appended, never re-rendered"
    ),
    neutral(f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode", "turns are never re-tokenised"),
    refused("retriever.url", "the search loop is not built; write an agent loop"),
    refused("retriever.corpus_path", "the search loop is not built; write an agent loop"),
    neutral("retriever.*", "no effect while there is no search loop"),
    only(
        "actor_rollout_ref.actor.state_masking",
        (True,),
        "tokens the policy did not write never carry loss; use true",
    ),
)

REWARD_RULES: tuple[Rule, ...] = (
    only(
        "reward_model.model.fsdp_config.offload_policy",
        (False,),
        "the reward model is not sharded; use param_offload",
    ),
    neutral(
        "reward_model.model.fsdp_config.optimizer_offload", "the reward model has no optimizer"
    ),
    neutral(
        "reward_model.model.fsdp_config.reshard_after_forward",
        "every rank holds the whole reward model",
    ),
    neutral("reward_model.model.fsdp_config.fsdp_size", "every rank holds the whole reward model"),
    neutral(
        "reward_model.model.fsdp_config.use_torch_compile",
        "the reward model runs uncompiled; compiling changes speed, not results",
    ),
    refused("reward_model.enable_resource_pool", "the reward model shares the run's devices"),
    refused("reward_model.nnodes", "the reward model shares the run's devices"),
    neutral("reward_model.n_gpus_per_node", "no effect while enable_resource_pool=false"),
    refused("reward_model.training", "reward models are not trained during the run"),
    neutral(
        "reward_model.launch_reward_fn_async", "it changes when scores are computed, not which"
    ),
    neutral("reward_model.use_reward_loop", "it changes when scores are computed, not which"),
    neutral("reward_model.num_workers", "use reward_model.reward_kwargs.num_processes"),
    only("reward_model.reward_loop_source", ("register",), "use reward_manager.source"),
    refused("reward_model.reward_loop_module_path", "use reward_manager.module.path"),
    refused("reward_model.reward_loop_class_name", "use reward_manager.module.name"),
    refused(
        "reward_model.rollout.name", "reward models are not served; call yours in a score function"
    ),
    neutral("reward_model.rollout.**", "no effect while reward_model.rollout.name is null"),
)

OTHER_RULES: tuple[Rule, ...] = (
    neutral(f"{ROLLOUT}.dtype", "the rollout decodes with the actor's own parameters"),
    neutral("actor_rollout_ref.ref.rollout_n", "the reference scores every response there is"),
    neutral("critic.model.tokenizer_path", "the critic reads the policy's tokens"),
    neutral("critic.model.trust_remote_code", "models are opened with the code of transformers"),
    only("data.tokenizer", (None,), "use actor_rollout_ref.model.tokenizer_path"),
    refused("**.router_replay.*", "expert routing is not replayed"),
    refused(
        "actor_rollout_ref.model.mtp.*", "multi-token prediction heads are not trained or decoded"
    ),
    refused(
        "actor_rollout_ref.actor.use_prefix_grouper", "a group's prompt is packed once a response"
    ),
    refused(
        "actor_rollout_ref.actor.freeze_vision_tower", "models with vision towers are not trained"
    ),
    neutral("actor_rollout_ref.actor.sum_pi_squared_checkpointing", "chunks are always recomputed"),
    neutral("data.dataloader_num_workers", "prompts are prepared in the run's own process"),
    neutral("data.filter_overlong_prompts_workers", "the filter runs in the run's own process"),
    neutral("data.return_raw_chat", "rows always carry their messages"),
    neutral("data.return_raw_input_ids", "rows always carry their messages"),
    neutral("data.return_full_prompt", "rows always carry their messages"),
    neutral("data.return_multi_modal_inputs", "rows always carry their images"),
    neutral("data.image_patch_size", "images stay in the row; no vision model reads them"),
    refused("data.mm_processor_kwargs", "there is no multi-modal processor"),
    only("transfer_queue.enable", (False,), "batches go from worker to worker directly"),
    only("ray_kwargs.ray_init.local_mode", (False,), "use trainer.controller=local"),
    refused(
        "trainer.default_hdfs_dir",
        "checkpoints go to trainer.default_local_dir; copy them from there",
    ),
    refused(
        "trainer.esi_redundant_time", "use trainer.save_freq; a stopped run resumes where it saved"
    ),
    refused("trainer.del_local_ckpt_after_load", "use trainer.max_actor_ckpt_to_keep"),
    neutral("trainer.use_legacy_worker_impl", "there is one family of workers"),
)

RULES: tuple[Rule, ...] = (
    *ROLLOUT_RULES,
    *AGENT_RULES,
    *REWARD_RULES,
    *OTHER_RULES,
    *PROFILER_RULES,
    *strategies("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"),
    *ENGINE_RULES,
)
"""The first rule whose pattern names a key decides."""

WORKS = Rule("**", "works", "")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = [
        ".*" if p == "**" else re.escape(p).replace(r"\*", "[^.]*") for p in pattern.split(".")
    ]
    text = r"\.".join(parts)
    # `**` at the front also names keys at the root; at the end also the block itself.
    text = re.sub(r"^\.\*\\\.", r"(?:.*\\.)?", text)
    text = re.sub(r"\\\.\.\*$", r"(?:\\..*)?", text)
    return re.compile(text)


def first_match(key: str, rules: tuple[Rule, ...]) -> Rule | None:
    """The first rule that names the key."""
    return next((rule for rule in rules if _compiled(rule.pattern).fullmatch(key)), None)


def rule_of(key: str, rules: tuple[Rule, ...]) -> Rule:
    """The rule that decides about a declared key."""
    return first_match(key, rules) or WORKS
