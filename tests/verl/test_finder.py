"""verl's module paths: every import a user writes there runs here, under our name."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from verl_names import EXAMPLES_AND_DOCUMENTS

import hone
from hone.verl import finder

USER_DOCS = Path(__file__).resolve().parents[3] / "shared" / "user_docs"
IMPORT = re.compile(r"^\s*(from\s+verl[\w.]*\s+import\s+[\w ,]+|import\s+verl[\w.]*)\s*$", re.M)

WRITTEN_BY_USERS = [
    "from verl import DataProto",
    "from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput",
    "from verl.experimental.agent_loop import register_agent_loop",
    "from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register",
    "from verl.single_controller.base import Worker",
    "from verl.single_controller.base.decorator import Dispatch, Execute, register",
    "from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup",
    "from verl.single_controller.ray.base import create_colocated_worker_cls",
    "from verl.single_controller.ray.base import create_colocated_worker_cls_fused",
    "from verl.protocol import DataProto, DataProtoItem, pad_dataproto_to_divisor, unpad_dataproto",
    "from verl.tools.base_tool import BaseTool",
    "from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse",
    "from verl.interactions.base import BaseInteraction",
    "from verl.interactions.gsm8k_interaction import Gsm8kInteraction",
    "from verl.tools.gsm8k_tool import Gsm8kTool",
    "from verl.tools.function_tool import function_tool",
    "from verl.tools.schemas import OpenAIFunctionParametersSchema, OpenAIFunctionPropertySchema",
    "from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop",
    "from verl.experimental.agent_loop.tool_parser import ToolParser",
    "from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY, register",
    "from verl.workers.reward_manager import REWARD_MANAGER_REGISTRY, get_reward_manager_cls",
    "from verl.experimental.reward_loop import get_reward_manager_cls",
    "from verl.trainer.main_ppo import need_critic, need_reference_policy, validate_config",
    "from verl.trainer.main_ppo import get_ppo_ray_runtime_env",
    "from verl.utils.dataset.rl_dataset import process_image",
    "from verl.utils.ray_utils import auto_await",
    "from verl.workers.rollout.async_server import AsyncLLMServerManager, AsyncServerBase",
    "from verl.workers.fsdp_workers import ProcessRewardModelWorker",
    "from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss, agg_loss",
    "from verl.trainer.ppo.core_algos import kl_penalty, compute_value_loss, AdaptiveKLController",
    "from verl.trainer.ppo.core_algos import AdvantageEstimator, ADV_ESTIMATOR_REGISTRY",
    "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, compute_policy_loss",
    "from verl.trainer.ppo.core_algos import compute_policy_loss_gspo, compute_rewards",
    "from verl.trainer.ppo.core_algos import compute_grpo_vectorized_outcome_advantage",
    "from verl.trainer.ppo.core_algos import compute_gdpo_outcome_advantage",
    "from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage",
    "from verl.trainer.ppo.ray_trainer import compute_response_mask, WorkerType, _timer",
    "from verl.utils.debug.performance import _timer",
    "from verl.trainer.ppo.metric_utils import process_validation_metrics, reduce_metrics",
    "from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask",
    "from verl.trainer.config import AlgoConfig, RolloutCorrectionConfig",
    "from verl.utils.metric import reduce_metrics, Metric, AggregationType",
    "from verl.utils import tensordict_utils as tu, as_torch_index, omega_conf_to_dataclass",
    "from verl.utils.config import omega_conf_to_dataclass",
    "from verl.utils.model import compute_position_id_with_mask, create_random_mask",
    "from verl.utils.torch_functional import get_response_mask, pad_2d_list_to_length",
    "from verl.utils.py_functional import append_to_dict",
    "from verl.utils.seqlen_balancing import rearrange_micro_batches, karmarkar_karp",
    "from verl.base_config import BaseConfig",
    "from verl.trainer.constants_ppo import get_ppo_ray_runtime_env",
    "from verl.trainer.ppo.utils import need_critic, need_reference_policy, create_rl_dataset",
    "from verl.utils.config import validate_config, omega_conf_to_dataclass",
    "from verl.utils import hf_processor, hf_tokenizer, validate_config",
    "from verl.trainer.ppo.ray_trainer import compute_data_metrics, marked_timer, DataProto",
    "from verl.workers.megatron_workers import ActorRolloutRefWorker, CriticWorker",
    "from verl.workers.config import ActorConfig, FSDPEngineConfig, HFModelConfig, RolloutConfig",
    "from verl.workers.config.actor import PolicyLossConfig",
    "from verl.trainer.main_ppo import run_ppo, TaskRunner, create_rl_dataset, create_rl_sampler",
    "from verl.single_controller.base.decorator import collect_all_to_all, Dispatch",
    "from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_timing_metrics",
    "from verl.protocol import serialize_tensordict, deserialize_tensordict, fold_batch_dim",
    "from verl.protocol import DataProtoConfig, collate_fn, unfold_batch_dim",
    "from verl.trainer.ppo.ray_trainer import RayPPOTrainer",
    "from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role",
    "from verl.trainer.ppo.reward import load_reward_manager, compute_reward, compute_reward_async",
    "from verl.model_merger.base_model_merger import BaseModelMerger, ModelMergerConfig",
    "from verl.model_merger.fsdp_model_merger import FSDPModelMerger",
    "from verl.model_merger.megatron_model_merger import MegatronModelMerger",
    "from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn",
    "from verl.utils.dataset.sft_dataset import SFTDataset",
    "from verl.utils.import_utils import load_extern_type",
    "from verl.utils.reward_score import default_compute_score",
    "from verl.utils.reward_score import gsm8k, math_reward, geo3k",
    "from verl.utils.reward_score import prime_code, search_r1_like_qa_em",
    "from verl.utils.reward_score import qa_em",
    "from verl.utils.reward_score.countdown import compute_score",
    "from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions",
    "from verl.utils.torch_functional import masked_mean, masked_whiten",
    "from verl.utils.tracking import Tracking",
    "from verl.utils.checkpoint.checkpoint_manager import should_save_ckpt_esi",
    "from verl.trainer.ppo.metric_utils import compute_variance_proxy_metrics",
    "from verl.utils.rollout_skip import RolloutSkip",
    "from verl.utils.torch_functional import broadcast_dict_tensor, allgather_dict_tensors",
    "from verl.utils.torch_functional import get_eos_mask, get_wsd_schedule_with_warmup",
    "from verl.utils.model import print_model_size, get_generation_config",
    "from verl.utils.py_functional import convert_to_regular_types",
    "from verl.utils.device import auto_set_device, get_visible_devices_keyword",
    "from verl.utils.device import is_torch_npu_available, set_expandable_segments",
    "from verl.utils.distributed import initialize_global_process_group",
    "from verl.utils.memory_utils import aggressive_empty_cache",
    "from verl.utils import normalize_token_ids, set_pad_token_id",
    "from verl.trainer.ppo.reward import extract_reward",
    "from verl.trainer.config import PFPPOConfig",
    "from verl.trainer.config.config import CriticConfig, ModuleConfig",
    "from verl.utils import hf_tokenizer",
    "from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker",
    "from verl.workers.fsdp_workers import RewardModelWorker",
    "from verl.workers.reward_manager import get_reward_manager_cls",
    "from verl.workers.reward_manager import NaiveRewardManager, register",
    "from verl.workers.reward_manager.abstract import AbstractRewardManager",
    "import verl.utils.reward_score",
]


@pytest.fixture(autouse=True)
def _installed() -> None:
    finder.install_finder()


def exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def in_user_docs() -> list[str]:
    if not USER_DOCS.is_dir():
        return []
    texts = [p.read_text(encoding="utf-8", errors="replace") for p in USER_DOCS.glob("*.txt")]
    return sorted({m.strip() for text in texts for m in IMPORT.findall(text)})


@pytest.mark.parametrize("line", sorted({*WRITTEN_BY_USERS, *in_user_docs()}))
def test_an_import_of_verl_runs_under_our_name(line: str) -> None:
    exec(re.sub(r"\bverl\b", "hone", line), {})


@pytest.mark.parametrize("path", sorted(EXAMPLES_AND_DOCUMENTS))
def test_what_verls_examples_and_documents_import_is_here(path: str) -> None:
    names = EXAMPLES_AND_DOCUMENTS[path].replace(" ", ", ")
    exec(f"from {path.replace('verl', 'hone', 1)} import {names}", {})


def test_a_patch_of_a_module_of_verls_meets_the_module_itself(monkeypatch: Any) -> None:
    from hone.rewards.scores import gsm8k

    monkeypatch.setattr("hone.utils.reward_score.gsm8k.compute_score", lambda *_: 7.0)
    assert gsm8k.compute_score("", "") == 7.0


@pytest.mark.parametrize("path", sorted(finder.WHOLE_MODULES))
def test_a_whole_module_shows_the_names_of_the_room(path: str) -> None:
    module, room = (
        importlib.import_module(path),
        importlib.import_module(finder.WHOLE_MODULES[path]),
    )
    public = [n for n in vars(room) if not n.startswith("_")]
    assert public
    assert all(getattr(module, n) is getattr(room, n) for n in public)
    assert set(public) <= set(dir(module))


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in finder.NAMES.items() for name in names]
)
def test_every_name_of_the_table_is_there(path: str, name: str) -> None:
    module, _, attribute = finder.NAMES[path][name].partition(":")
    found = getattr(importlib.import_module(path), name)
    assert found is getattr(importlib.import_module(module), attribute)
    assert name in dir(importlib.import_module(path))


@pytest.mark.parametrize("path", sorted(finder.EXTENDED_MODULES))
def test_a_module_of_ours_at_a_path_of_verl_has_verls_names_too(path: str) -> None:
    module = importlib.import_module(path)
    assert (Path(hone.__file__).parents[1] / path.replace(".", "/")).with_suffix(".py").is_file()
    for name, target in finder.EXTENDED_MODULES[path].items():
        room, _, attribute = target.partition(":")
        assert getattr(module, name) is getattr(importlib.import_module(room), attribute)
    with pytest.raises(AttributeError, match=f"module '{path}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path, names in finder.ABSENT_NAMES.items() for name in names],
)
def test_a_name_that_is_not_built_says_so_when_it_is_called(path: str, name: str) -> None:
    found = getattr(importlib.import_module(path), name)
    for called in (found, type("Mine", (found,), {})):
        with pytest.raises(NotImplementedError, match=f"^{name}: "):
            called("x", key=1)
    assert name not in finder.NAMES.get(path, {})


@pytest.mark.parametrize("path", sorted(finder.PROGRAMS))
def test_every_program_of_the_table_is_there(path: str) -> None:
    module, *_ = finder.PROGRAMS[path].split()
    assert exists(module)
    assert module in finder.VerlLoader().get_code(path).co_consts


@pytest.mark.parametrize("path", sorted({*finder.PROGRAMS, *finder.ABSENT_PROGRAMS}))
def test_a_program_is_found_inside_and_recipes_also_where_verl_has_them(path: str) -> None:
    assert exists(path)
    if path.startswith("hone.recipe."):
        assert exists(path.removeprefix("hone."))


def test_a_users_own_package_recipe_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "recipe" / "dapo").mkdir(parents=True)
    for folder in ("recipe", "recipe/dapo"):
        (tmp_path / folder / "__init__.py").touch()
    code = "import hone; from recipe.dapo import main_dapo"
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-c", code], **options)  # type: ignore[call-overload]
    assert "cannot import name 'main_dapo' from 'recipe.dapo'" in done.stderr


def run(*words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "path", ["hone.experimental.one_step_off_policy.main_ppo", "recipe.spin.main_spin"]
)
def test_a_program_that_is_not_there_says_so_in_a_sentence(path: str) -> None:
    code, told = run(path, "trainer.seed=3")
    assert code == 2
    assert "not supported; " in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("path", ["hone.trainer.sft_trainer", "recipe.dapo.main_dapo"])
def test_a_program_has_a_name_in_its_arguments(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run writes this name into the lock of its folder; runpy sets None for a module without a file."""
    program: list[str] = []
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: program.append(name))
    monkeypatch.setattr(sys, "argv", [None, "trainer.seed=3"])
    spec = importlib.util.find_spec(path)
    assert spec is not None
    exec(spec.loader.get_code(path), {})
    assert sys.argv[0] == program[0]
    assert sys.argv[-1] == "trainer.seed=3"


@pytest.mark.slow
def test_a_recipes_program_has_the_recipes_config_and_takes_the_users() -> None:
    code, shown = run("recipe.dapo.main_dapo", "data.seed=7", "--cfg", "job", "-p", "data")
    assert (code, "seed: 7" in shown) == (0, True)
    code, shown = run("hone.recipe.dapo.main_dapo", "--info")
    assert (code, "reward_manager: dapo" in shown) == (0, True)
    code, shown = run(
        "recipe.prime.main_prime", "reward_model.model.path=m", "--cfg", "job", "-p", "reward_model"
    )
    assert (code, "type: prime" in shown, "reward_manager: prime" in shown) == (0, True, True)


@pytest.mark.slow
def test_the_search_program_with_format_scores_scores_the_format() -> None:
    code, shown = run("hone.trainer.main_ppo_format", "--cfg", "job", "-p", "reward_model.scores")
    assert code == 0
    assert "nq: hone.rewards.scores.qa_em_format:score_details" in shown


def test_no_path_of_the_table_hides_a_real_module() -> None:
    root = Path(hone.__file__).parent
    listed = {*finder.WHOLE_MODULES, *finder.NAMES, *finder.ABSENT_NAMES, *finder.PROGRAMS}
    for path in listed:
        file = root.joinpath(*path.split(".")[1:])
        assert not file.with_suffix(".py").exists(), path
        assert not (file / "__init__.py").exists(), path


def test_a_name_that_is_not_there_says_what_is() -> None:
    with pytest.raises(ImportError, match="RayPPOTrainers"):
        exec("from hone.trainer.ppo.ray_trainer import RayPPOTrainers", {})
    module = importlib.import_module("hone.trainer.ppo.ray_trainer")
    with pytest.raises(
        AttributeError, match="RayPPOTrainer, RayResourcePool, ResourcePoolManager, Role"
    ):
        module.nothing  # noqa: B018


def test_a_path_outside_the_table_is_no_module() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hone.utils.nothing_here")


def test_a_path_that_is_no_program_cannot_be_run() -> None:
    with pytest.raises(ImportError, match="is not a program"):
        finder.VerlLoader().get_code("hone.utils.reward_score")


def test_star_imports_bring_the_names_of_the_table() -> None:
    scope: dict[str, object] = {}
    exec("from hone.workers.reward_manager import *", scope)
    assert {"NaiveRewardManager", "register"} <= set(scope)


def test_installing_twice_leaves_one_finder() -> None:
    finder.install_finder()
    assert sum(isinstance(f, finder.VerlFinder) for f in sys.meta_path) == 1


def test_installing_and_importing_a_path_loads_nothing_heavy() -> None:
    code = (
        "import sys; import hone.verl.finder; hone.verl.finder.install_finder(); "
        "import hone.utils.reward_score, hone.workers.reward_manager, hone.experimental.agent_loop; "
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_importing_hone_is_enough() -> None:
    code = "from hone.utils.reward_score import gsm8k; print(gsm8k.compute_score.__name__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "compute_score"


def test_a_registry_that_is_replaced_is_what_names_are_looked_up_in() -> None:
    from hone.algorithms import advantages

    core_algos = importlib.import_module("hone.trainer.ppo.core_algos")
    before = advantages.TABLE.entries
    try:
        for _ in range(2):
            core_algos.ADV_ESTIMATOR_REGISTRY = {"mine": len}
            core_algos.register_adv_est("other")(max)
            assert {"mine": len, "other": max} == core_algos.ADV_ESTIMATOR_REGISTRY
            assert core_algos.get_adv_estimator_fn("mine") is len
    finally:
        core_algos.ADV_ESTIMATOR_REGISTRY = before
    assert core_algos.get_adv_estimator_fn("gae").__name__ == "gae"


def test_a_module_of_the_table_is_pickled_by_name() -> None:
    module = importlib.import_module("hone.trainer.ppo.core_algos")
    assert pickle.loads(pickle.dumps(module)) is module


def test_a_manager_in_verls_table_of_managers_is_found_by_its_name() -> None:
    from hone.workers.reward_manager.registry import (  # type: ignore[import-not-found]
        REWARD_MANAGER_REGISTRY,
    )

    from hone.rewards.managers.registry import get_reward_manager_cls

    naive = REWARD_MANAGER_REGISTRY["naive"]
    REWARD_MANAGER_REGISTRY["mine"] = naive
    try:
        assert get_reward_manager_cls("mine") is naive
    finally:
        del REWARD_MANAGER_REGISTRY["mine"]
