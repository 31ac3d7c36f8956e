"""verl's module paths, as one table: what a user imports there, and which module has it here.

A finder at the end of `sys.meta_path` answers only for paths of this table that are no real module;
names load when they are asked for. Leaves out what verl keeps private.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

_CONTROLLER = "hone.controller"
_SCORES = "hone.rewards.scores"
_MANAGERS = "hone.rewards.managers"
_STREAMING = f"{_MANAGERS}.streaming"
_ADVANTAGES = "hone.algorithms.advantages"
_LOSSES = "hone.algorithms.policy_losses"
_CORE = "hone.algorithms.core_algos"
_STEPS = "hone.trainer.ppo.verl_steps"
_AGENTS = "hone.agents.contract"
_DATA = "hone.data"

WHOLE_MODULES: dict[str, str] = {
    "hone.utils.reward_score.gsm8k": f"{_SCORES}.gsm8k",
    "hone.utils.reward_score.math": f"{_SCORES}.math_reward",
    "hone.utils.reward_score.math_reward": f"{_SCORES}.math_reward",
    "hone.utils.reward_score.math_dapo": f"{_SCORES}.math_dapo",
    "hone.utils.reward_score.math_batch": f"{_SCORES}.math_reward",
    "hone.utils.reward_score.math_verify": f"{_SCORES}.math_verify",
    "hone.utils.reward_score.rlla": f"{_SCORES}.rlla",
    "hone.utils.reward_score.sandbox_fusion": f"{_SCORES}.sandbox_fusion",
    "hone.utils.reward_score.prime_math": f"{_SCORES}.prime_math",
    "hone.utils.reward_score.prime_code": f"{_SCORES}.prime_code",
    "hone.utils.reward_score.geo3k": f"{_SCORES}.geo3k",
    "hone.utils.reward_score.search_r1_like_qa_em": f"{_SCORES}.qa_em",
    "hone.utils.reward_score.qa_em": f"{_SCORES}.qa_em",
    "hone.utils.reward_score.qa_em_format": f"{_SCORES}.qa_em_format",
    "hone.utils.reward_score.countdown": f"{_SCORES}.countdown",
    "hone.utils.reward_score.multiply": f"{_SCORES}.arithmetic",
    "hone.workers.reward_manager.abstract": f"{_MANAGERS}.abstract",
    "hone.workers.reward_manager.naive": f"{_MANAGERS}.naive",
    "hone.workers.reward_manager.batch": f"{_MANAGERS}.batch",
    "hone.workers.reward_manager.prime": f"{_MANAGERS}.prime",
    "hone.workers.reward_manager.dapo": f"{_MANAGERS}.dapo",
    "hone.workers.reward_manager.blank": f"{_MANAGERS}.blank",
    "hone.workers.reward_manager.registry": f"{_MANAGERS}.registry",
    "hone.trainer.ppo.reward": "hone.rewards.loading",
    "hone.trainer.ppo.rollout_corr_helper": "hone.algorithms.rollout_correction",
    "hone.single_controller.base.decorator": f"{_CONTROLLER}.decorator",
    "hone.single_controller.base.worker": f"{_CONTROLLER}.worker",
    "hone.single_controller.base.worker_group": f"{_CONTROLLER}.worker_group",
    "hone.experimental.agent_loop.single_turn_agent_loop": "hone.agents.loops.single_turn",
    "hone.experimental.agent_loop.tool_agent_loop": "hone.agents.loops.tool",
    "hone.tools.base_tool": "hone.agents.tools.contract",
    "hone.tools.schemas": "hone.agents.tools.contract",
    "hone.tools.gsm8k_tool": "hone.agents.tools.gsm8k",
    "hone.interactions.base": "hone.agents.interactions.contract",
    "hone.interactions.gsm8k_interaction": "hone.agents.interactions.gsm8k",
    "hone.experimental.dataset.sampler": f"{_DATA}.samplers",
    "hone.utils.seqlen_balancing": "hone.ops.balancing",
    "hone.utils.tracking": "hone.tracking",
    "hone.utils.fs": f"{_DATA}.files",
    "hone.utils.hdfs_io": f"{_DATA}.files",
    "hone.utils.device": "hone.ops.device",
    "hone.utils.rollout_trace": "hone.tracking.markers",
}
"""Paths whose every name is in one module here."""

_MANAGER_NAMES = {
    "AbstractRewardManager": f"{_MANAGERS}.abstract:AbstractRewardManager",
    "NaiveRewardManager": f"{_MANAGERS}.naive:NaiveRewardManager",
    "BatchRewardManager": f"{_MANAGERS}.batch:BatchRewardManager",
    "PrimeRewardManager": f"{_MANAGERS}.prime:PrimeRewardManager",
    "DAPORewardManager": f"{_MANAGERS}.dapo:DAPORewardManager",
    "register": f"{_MANAGERS}.registry:register",
    "get_reward_manager_cls": f"{_MANAGERS}.registry:get_reward_manager_cls",
}
_LOOP_NAMES = {
    "AgentLoopBase": f"{_AGENTS}:AgentLoopBase",
    "AgentLoopOutput": f"{_AGENTS}:AgentLoopOutput",
    "AgentLoopMetrics": f"{_AGENTS}:AgentLoopMetrics",
    "AsyncLLMServerManager": f"{_AGENTS}:ServerManager",
    "LLMServerClient": f"{_AGENTS}:ServerManager",
    "DictConfigWrap": f"{_AGENTS}:DictConfigWrap",
    "ToolListWrap": f"{_AGENTS}:ToolListWrap",
    "TokenOutput": "hone.rollout.contract:TokenOutput",
    "register": f"{_AGENTS}:register",
    "register_agent_loop": f"{_AGENTS}:register_agent_loop",
    "SingleTurnAgentLoop": "hone.agents.loops.single_turn:SingleTurnAgentLoop",
    "ToolAgentLoop": "hone.agents.loops.tool:ToolAgentLoop",
}
_PARSERS = "hone.agents.parsers"
_PARSER_NAMES = {
    "FunctionCall": f"{_PARSERS}.contract:FunctionCall",
    "ToolParser": f"{_PARSERS}.contract:ToolParser",
    "HermesToolParser": f"{_PARSERS}.hermes:HermesToolParser",
    "Qwen3XMLToolParser": f"{_PARSERS}.tagged:Qwen3XMLToolParser",
    "GLMToolParser": f"{_PARSERS}.tagged:GLMToolParser",
    "KimiToolParser": f"{_PARSERS}.marked:KimiToolParser",
    "GptOssToolParser": f"{_PARSERS}.marked:GptOssToolParser",
}
_FUNCTION_TOOLS = "hone.agents.tools.function_tool"
_FUNCTION_TOOL_NAMES = {
    **{
        name: f"{_FUNCTION_TOOLS}:{name}"
        for name in (
            "FUNCTION_TOOL_REGISTRY",
            "_LOADED_FUNCTION_TOOL_PATHS",
            "FunctionTool",
            "function_tool",
            "get_function_tool",
            "load_function_tools_from_path",
        )
    },
    "normalize_function_tool_return": ("hone.agents.tools.answers:normalize_function_tool_return"),
}
_TOOL_LISTS = {
    "initialize_tools_from_config": "hone.agents.tools.listing:initialize_tools_from_config",
    "load_all_tools": "hone.agents.tools.listing:load_all_tools",
    "get_tool_class": "hone.plugins:load_object",
}
_MARKERS = {
    name: f"hone.tracking.markers:{name}"
    for name in (
        "GPUMemoryLogger",
        "log_gpu_memory_usage",
        "mark_annotate",
        "mark_end_range",
        "mark_start_range",
        "marked_timer",
        "simple_timer",
    )
}
_REWARD_LOOP_NAMES = {
    "AsyncTokenBucket": f"{_STREAMING}:AsyncTokenBucket",
    "get_reward_loop_manager_cls": f"{_STREAMING}:get_reward_manager_cls",
    "get_reward_manager_cls": f"{_STREAMING}:get_reward_manager_cls",
    "register": f"{_MANAGERS}.registry:register",
    "RewardLoopManagerBase": f"{_STREAMING}:RewardManagerBase",
    "RewardManagerBase": f"{_STREAMING}:RewardManagerBase",
    **{
        f"{kind}{ending}": f"{_STREAMING}:{kind}RewardManager"
        for kind in ("Naive", "DAPO", "RateLimited")
        for ending in ("RewardManager", "RewardLoopManager")
    },
}
_REWARD_LOOP_PATHS = (
    "hone.experimental.reward_loop",
    *(
        f"{path}{name}"
        for path in (
            "hone.experimental.reward_loop.reward_manager",
            "hone.experimental.reward.reward_loop",
        )
        for name in ("", ".base", ".naive", ".dapo", ".limited", ".registry")
    ),
)
_BASE_NAMES = {
    "Worker": f"{_CONTROLLER}:Worker",
    "WorkerGroup": f"{_CONTROLLER}:WorkerGroup",
    "ResourcePool": f"{_CONTROLLER}:ResourcePool",
    "ClassWithInitArgs": f"{_CONTROLLER}:ClassWithInitArgs",
}
_RAY_NAMES = {
    "RayResourcePool": f"{_CONTROLLER}:RayResourcePool",
    "RayClassWithInitArgs": f"{_CONTROLLER}:RayClassWithInitArgs",
    "RayWorkerGroup": f"{_CONTROLLER}:RayWorkerGroup",
    "create_colocated_worker_cls": f"{_CONTROLLER}:create_colocated_worker_cls",
    "create_colocated_worker_cls_fused": f"{_CONTROLLER}:create_colocated_worker_cls_fused",
}
_WORKER_NAMES = {
    "ActorRolloutRefWorker": "hone.workers.actor_rollout_ref:ActorRolloutRefWorker",
    "AsyncActorRolloutRefWorker": "hone.workers.actor_rollout_ref:ActorRolloutRefWorker",
    "CriticWorker": "hone.workers.critic:CriticWorker",
    "RewardModelWorker": "hone.workers.reward_model:RewardModelWorker",
    "ProcessRewardModelWorker": "hone.workers.process_reward_model:ProcessRewardModelWorker",
}
_CORE_ALGOS = {
    **{
        name: f"{_CORE}:{name}"
        for name in (
            "ADV_ESTIMATOR_REGISTRY",
            "POLICY_LOSS_REGISTRY",
            "AdvantageEstimator",
            "compute_gae_advantage_return",
            "compute_gdpo_outcome_advantage",
            "compute_gpg_outcome_advantage",
            "compute_grpo_outcome_advantage",
            "compute_grpo_passk_outcome_advantage",
            "compute_multi_turn_optimal_token_baseline_advantage",
            "compute_opo_outcome_advantage",
            "compute_optimal_token_baseline_advantage",
            "compute_pf_ppo_reweight_data",
            "compute_policy_loss",
            "compute_policy_loss_reinforce",
            "compute_reinforce_plus_plus_baseline_outcome_advantage",
            "compute_reinforce_plus_plus_outcome_advantage",
            "compute_remax_outcome_advantage",
            "compute_rewards",
            "compute_rloo_outcome_advantage",
        )
    },
    "compute_grpo_vectorized_outcome_advantage": f"{_CORE}:compute_grpo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage": f"{_CORE}:compute_rloo_outcome_advantage",
    "register_adv_est": f"{_ADVANTAGES}:register_adv_est",
    "get_adv_estimator_fn": f"{_ADVANTAGES}:get_adv_estimator_fn",
    "register_policy_loss": f"{_LOSSES}:register_policy_loss",
    "get_policy_loss_fn": f"{_LOSSES}:get_policy_loss_fn",
    "compute_policy_loss_vanilla": f"{_LOSSES}.vanilla:vanilla",
    "compute_policy_loss_gspo": f"{_LOSSES}.sequence_ratio:gspo",
    "compute_policy_loss_sapo": f"{_LOSSES}.sapo:sapo",
    "compute_policy_loss_gpg": f"{_LOSSES}.reinforce:gpg",
    "compute_policy_loss_cispo": f"{_LOSSES}.cispo:cispo",
    "compute_policy_loss_geo_mean": f"{_LOSSES}.sequence_ratio:geo_mean",
    "compute_policy_loss_clip_cov": f"{_LOSSES}.covariance:clip_cov",
    "compute_policy_loss_kl_cov": f"{_LOSSES}.covariance:kl_cov",
    "compute_policy_loss_dppo_tv": f"{_LOSSES}.dppo:dppo_tv",
    "compute_policy_loss_dppo_kl": f"{_LOSSES}.dppo:dppo_kl",
    "compute_policy_loss_dro": f"{_LOSSES}.dro:dro",
    "compute_policy_loss_bypass_mode": f"{_LOSSES}.bypass:bypass_mode",
    "compute_value_loss": "hone.algorithms.value_loss:compute_value_loss",
    "compute_entropy_loss": "hone.algorithms.entropy:compute_entropy_loss",
    "agg_loss": "hone.algorithms.aggregation:agg_loss",
    "kl_penalty": "hone.algorithms.kl:kl_penalty",
    "kl_penalty_forward": "hone.algorithms.kl:kl_penalty_forward",
    "AdaptiveKLController": "hone.algorithms.kl:AdaptiveKLController",
    "FixedKLController": "hone.algorithms.kl:FixedKLController",
    "get_kl_controller": "hone.algorithms.kl:get_kl_controller",
}
_ALGORITHM_CONFIGS = {
    "AlgoConfig": "hone.config.algorithm:AlgorithmConfig",
    "FilterGroupsConfig": "hone.config.algorithm:FilterGroupsConfig",
    "KLControlConfig": "hone.config.algorithm:KLControlConfig",
    "RolloutCorrectionConfig": "hone.config.algorithm:RolloutCorrectionConfig",
}
_DATASET_NAMES = {
    "RLHFDataset": f"{_DATA}:RLHFDataset",
    "SFTDataset": f"{_DATA}:SFTDataset",
    "MultiTurnSFTDataset": f"{_DATA}:MultiTurnSFTDataset",
    "collate_fn": f"{_DATA}:collate_fn",
}

NAMES: dict[str, dict[str, str]] = {
    "hone.utils.reward_score": {"default_compute_score": "hone.rewards:default_compute_score"},
    "hone.workers.reward_manager": _MANAGER_NAMES,
    "hone.workers.fsdp_workers": _WORKER_NAMES,
    "hone.experimental.agent_loop": _LOOP_NAMES,
    "hone.experimental.agent_loop.agent_loop": _LOOP_NAMES,
    "hone.experimental.agent_loop.tool_parser": _PARSER_NAMES,
    "hone.tools.function_tool": _FUNCTION_TOOL_NAMES,
    "hone.tools.tool_registry": _TOOL_LISTS,
    "hone.tools.utils.tool_registry": _TOOL_LISTS,
    "hone.interactions.utils.interaction_registry": {
        "initialize_interactions_from_config": (
            "hone.agents.interactions.listing:initialize_interactions_from_config"
        ),
        "get_interaction_class": "hone.plugins:load_object",
    },
    "hone.single_controller.base": _BASE_NAMES,
    "hone.single_controller.ray": _RAY_NAMES,
    "hone.single_controller.ray.base": _RAY_NAMES,
    "hone.trainer.ppo.core_algos": _CORE_ALGOS,
    "hone.trainer.ppo.ray_trainer": {
        "RayPPOTrainer": "hone.trainer.ppo.trainer:PPOTrainer",
        "ResourcePoolManager": f"{_CONTROLLER}:ResourcePoolManager",
        "Role": f"{_CONTROLLER}:Role",
        "AdvantageEstimator": f"{_CORE}:AdvantageEstimator",
        "apply_kl_penalty": f"{_STEPS}:apply_kl_penalty",
        "compute_advantage": f"{_STEPS}:compute_advantage",
        "compute_response_mask": f"{_STEPS}:compute_response_mask",
    },
    "hone.trainer.ppo.metric_utils": {
        "process_validation_metrics": "hone.trainer.ppo.validation:process_validation_metrics",
        "reduce_metrics": f"{_STEPS}:reduce_metrics",
    },
    "hone.utils.metric": {"reduce_metrics": f"{_STEPS}:reduce_metrics"},
    "hone.trainer.config": _ALGORITHM_CONFIGS,
    "hone.trainer.config.algorithm": _ALGORITHM_CONFIGS,
    "hone.trainer.ppo.utils": {"Role": f"{_CONTROLLER}:Role"},
    "hone.utils.dataset": _DATASET_NAMES,
    "hone.utils.dataset.rl_dataset": _DATASET_NAMES,
    "hone.utils.dataset.sft_dataset": {"SFTDataset": f"{_DATA}:SFTDataset"},
    "hone.utils.dataset.multiturn_sft_dataset": {
        "MultiTurnSFTDataset": f"{_DATA}:MultiTurnSFTDataset"
    },
    "hone.utils.dataset.dynamicgen_dataset": {
        "AbstractDataGenerator": f"{_DATA}:AbstractDataGenerator",
        "DynamicGenDataset": f"{_DATA}:DynamicGenDataset",
    },
    **dict.fromkeys(_REWARD_LOOP_PATHS, _REWARD_LOOP_NAMES),
    "hone.utils.profiler": _MARKERS,
    "hone.utils.profiler.performance": _MARKERS,
    "hone.utils.debug": _MARKERS,
    "hone.utils.debug.performance": _MARKERS,
    "hone.utils.ray_utils": {"get_event_loop": "hone.event_loop:get_event_loop"},
    "hone.utils.chat_template": {
        "initialize_system_prompt": f"{_DATA}.prompts:initialize_system_prompt"
    },
    "hone.utils.import_utils": {
        "load_extern_object": "hone.rewards:load_extern_object",
        "load_extern_type": "hone.rewards:load_extern_object",
    },
    "hone.utils.torch_functional": {
        "masked_sum": "hone.ops.masked:masked_sum",
        "masked_mean": "hone.ops.masked:masked_mean",
        "masked_var": "hone.ops.masked:masked_var",
        "masked_whiten": "hone.ops.masked:masked_whiten",
    },
    "hone.utils.tokenizer": {"hf_tokenizer": "hone.models.load:load_tokenizer"},
    "hone.utils": {"hf_tokenizer": "hone.models.load:load_tokenizer"},
    "hone.workers.rollout.replica": {"TokenOutput": "hone.rollout.contract:TokenOutput"},
}
"""Paths whose names are in several modules here: name to "module:object"."""

_SFT, _PPO = "hone.trainer.main_sft", "hone.trainer.main_ppo"
_DAPO = f"{_PPO} --config-name=dapo_trainer"
_SEARCH_SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
PROGRAMS: dict[str, str] = {
    "hone.trainer.fsdp_sft_trainer": _SFT,
    "hone.trainer.sft_trainer": _SFT,
    "hone.trainer.sft_trainer_ray": _SFT,
    "hone.trainer.main_ppo_format": (
        f"{_PPO} reward_model.scores={{"
        + ",".join(f"{name}:'{_SCORES}.qa_em_format:judge'" for name in _SEARCH_SETS)
        + "}"
    ),
    "hone.model_merger": "hone.trainer.model_merger",
    "hone.recipe.dapo.main_dapo": _DAPO,
    "hone.recipe.dapo.src.main_dapo": _DAPO,
    "hone.recipe.entropy.main_entropy": _DAPO,
    "hone.recipe.transfer_queue.main_ppo": _PPO,
    "hone.recipe.r1.main_eval": "hone.trainer.main_eval",
}
"""What `python -m` runs there, and here, with the words that stand before the user's."""

_ASYNC = (
    "asynchronous training is not built; `python -m hone.trainer.main_ppo` takes the same keys and "
    "trains synchronously"
)
_OWN = (
    "this recipe is a trainer of its own, which is not built; `hone recipes` lists what there is, and "
    "docs/extend.md says how to add a loss, an estimator or a loop"
)
ABSENT_PROGRAMS: dict[str, str] = {
    **dict.fromkeys(
        (
            "hone.experimental.fully_async_policy.fully_async_main",
            "hone.experimental.one_step_off_policy.main_ppo",
            "hone.recipe.fully_async_policy.fully_async_main",
            "hone.recipe.one_step_off_policy.main_ppo",
            "hone.recipe.one_step_off_policy.async_main_ppo",
            "hone.recipe.async_flow.main_ppo",
            "hone.recipe.partial_rollout.main_ppo",
        ),
        _ASYNC,
    ),
    **{
        f"hone.recipe.{name}.main_{name}": _OWN
        for name in ("disco", "flowrl", "gkd", "prime", "rep_exp", "sdpo", "spin", "spo", "sppo")
    },
    "hone.experimental.vla.main_ppo": _OWN,
}
"""Programs that are not there, and the sentence that says so."""


def paths() -> set[str]:
    """Every path of the table, with the packages above them."""
    listed = {*WHOLE_MODULES, *NAMES, *PROGRAMS, *ABSENT_PROGRAMS}
    return listed | {path[:i] for path in listed for i, letter in enumerate(path) if letter == "."}


class VerlModule(ModuleType):
    """A module that looks its names up in the table."""

    def __getattr__(self, name: str) -> Any:
        path = self.__name__
        whole = PROGRAMS.get(path, "").partition(" ")[0]
        if whole and not name.startswith("__"):
            found = getattr(importlib.import_module(whole), name)
        elif name in NAMES.get(path, {}):
            module, _, attribute = NAMES[path][name].partition(":")
            found = getattr(importlib.import_module(module), attribute)
        else:
            raise AttributeError(f"module {path!r} has no attribute {name!r}{_known(path)}")
        setattr(self, name, found)
        return found

    def __dir__(self) -> Sequence[str]:
        return sorted({*self.__dict__, *NAMES.get(self.__name__, {})})


def _known(path: str) -> str:
    names: Mapping[str, str] = NAMES.get(path, {})
    return f"; it has {', '.join(sorted(names))}" if names else ""


class VerlLoader(Loader):
    """Makes a `VerlModule`; a path of `WHOLE_MODULES` is the module itself, so that patches meet it."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return VerlModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in WHOLE_MODULES:
            sys.modules[module.__name__] = importlib.import_module(WHOLE_MODULES[module.__name__])
        names = NAMES.get(module.__name__)
        if names:
            module.__dict__["__all__"] = sorted(names)

    def get_code(self, name: str) -> CodeType:
        """For `python -m`: the program here, under the name it has there."""
        path = _inside(name)
        if path in ABSENT_PROGRAMS:
            text = (
                f"import sys\nsys.stderr.write({ABSENT_PROGRAMS[path] + chr(10)!r})\nsys.exit(2)\n"
            )
        elif path in PROGRAMS:
            module, *words = PROGRAMS[path].split()
            text = (
                f"import runpy, sys\nsys.argv[1:1] = {words!r}\n"
                f"runpy.run_module({module!r}, run_name='__main__')\n"
            )
        else:
            raise ImportError(f"{name} is no program; it only holds names to import")
        return compile(text, f"<{name}>", "exec")


def _inside(path: str) -> str:
    """verl's recipes lie in a package `recipe` beside its own; here both are inside."""
    return f"hone.{path}" if path.startswith("recipe.") else path


class VerlFinder(MetaPathFinder):
    """Finds the paths of the table; real modules were found before it is asked."""

    def __init__(self) -> None:
        self._paths = paths()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        inside = _inside(fullname)
        if inside not in self._paths:
            return None
        is_program = inside in PROGRAMS or inside in ABSENT_PROGRAMS
        return ModuleSpec(fullname, VerlLoader(), is_package=not is_program)


def install() -> None:
    """Answer for verl's paths from now on; doing it twice changes nothing."""
    if not any(isinstance(finder, VerlFinder) for finder in sys.meta_path):
        sys.meta_path.append(VerlFinder())
