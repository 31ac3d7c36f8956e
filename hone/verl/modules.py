"""Maps verl's module paths (`hone` replaces `verl`) to modules that have all or some names of the path.

Nothing is imported here; finder.py resolves the paths.
"""

from __future__ import annotations

_CONTROLLER = "hone.controller"
_SCORES = "hone.rewards.scores"
_MANAGERS = "hone.rewards.managers"
_DATA = "hone.data"


def _same_names(path: str, package: str, names: str) -> dict[str, str]:
    """Maps each module of `path` to the module of the same name in `package`."""
    return {f"{path}.{name}": f"{package}.{name}" for name in names.split()}


WHOLE_MODULES: dict[str, str] = {
    **_same_names(
        "hone.utils.reward_score",
        _SCORES,
        "gsm8k math_reward math_dapo math_verify rlla sandbox_fusion prime_math "
        "prime_code geo3k qa_em qa_em_format countdown",
    ),
    "hone.utils.reward_score.math": f"{_SCORES}.math_reward",
    "hone.utils.reward_score.math_batch": f"{_SCORES}.math_reward",
    "hone.utils.reward_score.search_r1_like_qa_em": f"{_SCORES}.qa_em",
    "hone.utils.reward_score.multiply": f"{_SCORES}.arithmetic",
    **_same_names("hone.workers.reward_manager", _MANAGERS, "batch prime dapo blank"),
    "hone.workers.reward_manager.abstract": f"{_MANAGERS}.rule",
    "hone.workers.reward_manager.naive": f"{_MANAGERS}.rule",
    "hone.trainer.ppo.reward": "hone.verl.reward",
    "hone.trainer.ppo.rollout_corr_helper": "hone.verl.rollout_correction",
    "hone.algorithms.core_algos": "hone.verl.core_algos",
    "hone.single_controller.base.worker": f"{_CONTROLLER}.worker",
    "hone.experimental.agent_loop.single_turn_agent_loop": "hone.agents.contract",
    "hone.tools.base_tool": "hone.agents.tools.contract",
    "hone.tools.schemas": "hone.agents.tools.contract",
    "hone.tools.gsm8k_tool": "hone.agents.tools.gsm8k",
    "hone.interactions.base": "hone.agents.interactions.contract",
    "hone.tools.search_tool": "hone.agents.tools.search",
    "hone.tools.mcp_base_tool": "hone.agents.tools.mcp",
    "hone.interactions.gsm8k_interaction": "hone.agents.interactions.gsm8k",
    "hone.interactions.weather_interaction": "hone.agents.interactions.weather",
    "hone.experimental.dataset.sampler": f"{_DATA}.samplers",
    "hone.utils.seqlen_balancing": "hone.verl.seqlen_balancing",
    "hone.utils.torch_functional": "hone.verl.torch_functional",
    "hone.utils.py_functional": "hone.verl.py_functional",
    "hone.utils.model": "hone.verl.torch_functional",
    "hone.utils.groupwise": "hone.verl.torch_functional",
    "hone.utils.distributed": "hone.verl.distributed",
    "hone.utils.memory_utils": "hone.verl.distributed",
    "hone.trainer.ppo.metric_utils": "hone.verl.metric_utils",
    "hone.utils.metric.utils": "hone.verl.metric_utils",
    "hone.utils.tracking": "hone.tracking",
    "hone.utils.fs": f"{_DATA}.files",
    "hone.utils.hdfs_io": f"{_DATA}.files",
    "hone.utils.device": "hone.verl.device",
    "hone.utils.rollout_trace": "hone.verl.profiler",
    "hone.utils.tensordict_utils": "hone.verl.tensordict_utils",
    **{
        f"hone.model_merger.{kind}_model_merger": "hone.verl.model_merger"
        for kind in ("base", "fsdp", "megatron")
    },
}
"""Maps each path whose names are all in one of our modules to that module."""

EXTENDED_MODULES: dict[str, dict[str, str]] = {
    "hone.trainer.main_ppo": {
        name: f"hone.verl.ray_trainer:{name}"
        for name in (
            *("TaskRunner", "create_rl_dataset", "create_rl_sampler", "run_ppo", "validate_config"),
            *("need_critic", "need_reference_policy", "get_ppo_ray_runtime_env"),
        )
    },
}
"""Maps each path that is also a module of ours to the names that verl has there in addition."""
