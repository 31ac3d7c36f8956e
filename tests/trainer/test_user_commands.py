"""What users type today, with our name in place of verl's: every command trains.

Only paths and sizes are changed. Where the users' documents lie beside the repository, the commands
in them are run too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .runs import Run

pytestmark = pytest.mark.slow

USER_DOCS = Path(__file__).resolve().parents[3] / "shared" / "user_docs"
ROOTS = "actor_rollout_ref|algorithm|critic|custom_reward_function|data|reward_model|trainer"
TOKEN = re.compile(rf"(?<![\w./`])((?:{ROOTS})\.[\w.]+=(?:\"[^\"]*\"|'[^']*'|[^\s\\`]+))")
PLACES = ("_files", "model.path", "custom_reward_function.path")
SIZES = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "trainer.total_epochs",
)
PRM = ["reward_model.enable=True", "reward_model.type=prm", "reward_model.model.path=PRM"]
BOTH = [*PRM, "reward_model.reward_manager=prime"]
PURE = {
    "PURE-VR": ["reward_model.enable=False", "reward_model.reward_manager=prime"],
    "PURE-PRM": [*PRM, "reward_model.reward_manager=blank"],
    "PURE-PRM+VR": BOTH,
    "gamma-decay": [*BOTH, "reward_model.credit_assignment='gamma-decay'"],
    "strict min-form": [*BOTH, "reward_model.credit_assignment='strict min-form'"],
}
"""The commands of document 000: three modes with the recommended temperature, and the two other forms of
credit. Its estimator is RLOO with whitened advantages."""
PURE_SETTINGS = [
    "data.prompt_key=prompt",  # the rows of these tests are in verl's schema
    "algorithm.adv_estimator=rloo",
    "algorithm.adv_norm=True",
    "actor_rollout_ref.actor.clip_ratio=0.2",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.actor.ppo_epochs=1",
    "actor_rollout_ref.rollout.n=2",
]
_NO_KL = ["algorithm.use_kl_in_reward=False"]
PURE_KL = {
    "PURE-VR": ["actor_rollout_ref.actor.use_kl_loss=True"],
    "PURE-PRM+VR": [],
    "PURE-PRM": _NO_KL,
    "gamma-decay": _NO_KL,
    "strict min-form": _NO_KL,
}
"""PURE itself puts the KL into the reward, unless the loss has it; without it, returns are sums of scores."""

COMMANDS: dict[str, list[str]] = {
    "grpo": [
        "algorithm.adv_estimator=grpo",
        "algorithm.group_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.rollout.name=vllm",
        "trainer.total_epochs=3",
        'trainer.logger=["tensorboard"]',
    ],
    "ppo with a critic": [
        "algorithm.adv_estimator=gae",
        "algorithm.gamma=1.0",
        "algorithm.lam=0.95",
        "critic.enable=true",
        "critic.optim.lr=1e-5",
    ],
    "rloo": ["algorithm.adv_estimator=rloo", "algorithm.group_size=4"],
    "ppo of TinyZero": [
        "data.val_batch_size=1312",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size=2",
        "critic.optim.lr=1e-5",
        "critic.model.path=base",
        "critic.ppo_micro_batch_size=2",
        "algorithm.kl_ctrl.kl_coef=0.001",
        "trainer.logger=['console']",
        "+trainer.val_before_train=False",
        "trainer.default_hdfs_dir=null",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.save_freq=100",
        "trainer.test_freq=100",
        "trainer.project_name=TinyZero",
        "trainer.experiment_name=countdown",
    ],
    "vllm with its arguments": [
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.data_parallel_size=2",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
        "actor_rollout_ref.rollout.enforce_eager=False",
        "actor_rollout_ref.rollout.free_cache_engine=True",
        "actor_rollout_ref.rollout.enable_chunked_prefill=False",
        "actor_rollout_ref.rollout.load_format=safetensors",
        "actor_rollout_ref.rollout.layered_summon=True",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config={level:3}",
    ],
    "sglang with its arguments and several turns": [
        "algorithm.adv_estimator=grpo",
        "data.return_raw_chat=True",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.7",
        "actor_rollout_ref.rollout.multi_stage_wake_up=True",
        "actor_rollout_ref.rollout.over_sample_rate=0",
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes=512",
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3",
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
        "actor_rollout_ref.rollout.multi_turn.max_user_turns=2",
        "actor_rollout_ref.rollout.multi_turn.format=hermes",
        "actor_rollout_ref.rollout.agent.num_workers=8",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    ],
    "a rule by its manager": [
        "algorithm.adv_estimator=grpo",
        "data.reward_fn_key=data_source",
        "reward_model.reward_manager=naive",
    ],
    "ppo on one small gpu": [
        "data.train_batch_size=16",
        "data.max_prompt_length=512",
        "data.max_response_length=256",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "critic.optim.lr=1e-5",
        "critic.model.path=Qwen/Qwen2.5-0.5B-Instruct",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "algorithm.kl_ctrl.kl_coef=0.001",
        "trainer.logger=console",
        "trainer.val_before_train=False",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.save_freq=10",
        "trainer.test_freq=10",
        "trainer.total_epochs=3",
    ],
}

CUSTOM_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    from difflib import SequenceMatcher

    return SequenceMatcher(None, solution_str.lower(), ground_truth.lower()).ratio()
"""

TOOLS_BY_NAME = """
tools:
  - name: calculator
    description: "arithmetic"
    parameters:
      expression: {type: string, description: "such as '23 * 45 + 67'"}
  - name: python
    description: "run Python"
    parameters:
      code: {type: string, description: "Python code"}
"""

LORA_YAML = """
defaults: [ppo_trainer, _self_]
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  actor:
    lora:
      enable: true
      r: 16
      lora_alpha: 32
      target_modules: ["q_proj", "v_proj", "k_proj", "o_proj"]
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A chat model, a process reward model, three data sets in verl's schema and a score function."""
    from transformers import AutoConfig, AutoModelForTokenClassification

    from hone.data.rows import write_parquet
    from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm

    folder = tmp_path_factory.mktemp("user")
    tokenizer = character_tokenizer()
    lm = tiny_lm(len(tokenizer), hidden=32, mlp=48, seed=1)
    paths = {"model": save_pretrained(lm, tokenizer, folder / "model"), "steps": folder / "steps"}
    shape = AutoConfig.for_model(
        "qwen2", vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_labels=2,
        num_attention_heads=2, num_key_value_heads=2, intermediate_size=16, pad_token_id=0,
    )  # fmt: skip
    AutoModelForTokenClassification.from_config(shape).save_pretrained(paths["steps"])
    tokenizer.save_pretrained(paths["steps"])
    for number, name in enumerate(("easy", "medium", "hard")):
        paths[name] = folder / f"{name}.parquet"
        write_parquet([gsm8k_row(number, i) for i in range(16)], paths[name])
    paths["reward"] = folder / "my_reward.py"
    paths["reward"].write_text(CUSTOM_REWARD)
    return paths


def gsm8k_row(level: int, i: int) -> dict[str, Any]:
    question = f"{i} + {10**level} = ?"
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 10**level)},
        "extra_info": {"split": "train", "index": i, "max_length": 100, "keywords": ["so"]},
    }


def run_command(command: Sequence[str], places: dict[str, Path], folder: Path, *more: str) -> Run:
    """Paths and sizes replaced; all else as it was typed."""
    from hone.trainer.main_ppo import main

    arguments = [t for t in command if not any(p in t.split("=")[0] for p in (*PLACES, *SIZES))]
    batch = 4 if any("mini_batch_size=4" in t for t in command) else 2
    main(
        [
            *arguments,
            f"data.train_files={places['easy']}",
            f"data.val_files={places['medium']}",
            f"actor_rollout_ref.model.path={places['model']}",
            *(
                [f"critic.model.path={places['model']}"]
                if "critic.model.path" in str(command)
                else []
            ),
            f"data.train_batch_size={batch}",
            "data.max_prompt_length=32",
            "data.max_response_length=8",
            "trainer.total_training_steps=2",
            f"trainer.default_local_dir={folder}",
            *more,
        ]
    )
    run = Run(folder)
    assert [line["step"] for line in run.steps] == [1, 2]
    assert all("actor/pg_loss" in line for line in run.steps)
    assert any(key.startswith("val-core/openai/gsm8k/") for key in run.metrics[-1])
    return run


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_trains(name: str, places: dict[str, Path], tmp_path: Path) -> None:
    run = run_command(COMMANDS[name], places, tmp_path)
    needs_critic = name.startswith("ppo")
    assert all(("critic/vf_loss" in line) == needs_critic for line in run.steps)
    assert [line["training/global_step"] for line in run.steps] == [1, 2]
    if name == "ppo of TinyZero":
        assert all("actor/reward_kl_penalty" in line for line in run.steps)


@pytest.mark.parametrize("mode", sorted(PURE))
def test_a_mode_of_pure_trains(mode: str, places: dict[str, Path], tmp_path: Path) -> None:
    command = [*PURE_SETTINGS, *PURE[mode], *PURE_KL[mode]]
    judge = [f"reward_model.model.path={places['steps']}"] if mode != "PURE-VR" else []
    run = run_command(command, places, tmp_path, *judge)
    line = run.steps[-1]
    assert ("actor/reward_kl_penalty" in line) == (mode == "PURE-PRM+VR")
    rows = run.rollouts(2)
    assert ("reward/process" in rows[0]) == (mode != "PURE-VR")
    assert ("num_of_steps/mean" in line) == (mode != "PURE-VR")
    assert ("instant_rewards/verifiable_reward/mean" in line) == (mode != "PURE-PRM")
    assert "val-core/openai/gsm8k/acc/mean@1" in run.metrics[-1]  # by the rule in every mode
    if mode == "PURE-VR":
        assert "actor/kl_loss" in line
        return
    assert any(value != 0 for row in rows for value in row["reward/process"])
    assert any(advantage != 0 for row in rows for advantage in row["advantages"])
    for row in rows:
        steps, returns = row["reward/process"], row["returns"]
        future = min if mode == "strict min-form" else sum
        expected = future([value for value in steps if value]) if any(steps) else 0.0
        if mode != "PURE-PRM+VR":  # there the KL is part of the return
            assert returns[0] == pytest.approx(expected + sum(row["reward/rule"]), abs=1e-5)


@pytest.mark.parametrize("tools", ["classes", "names"])
def test_the_tool_command_of_the_documents_trains(
    tools: str, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    folder = "examples/sglang_multiturn/config"
    (tmp_path / "names.yaml").write_text(TOOLS_BY_NAME)
    files = {"classes": f"{folder}/tool_config/gsm8k_tool_config.yaml"}
    command = [
        f"--config-path={folder}",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.agent_loop=tool_agent_loop",
        f"tool_config_path={files.get(tools, tmp_path / 'names.yaml')}",
    ]
    run_command(command, places, tmp_path / "run", "data.max_prompt_length=1500")


def test_a_score_function_of_ones_own(places: dict[str, Path], tmp_path: Path) -> None:
    from hone.trainer.main_ppo import main

    main(
        [
            f"custom_reward_function.path={places['reward']}",
            "custom_reward_function.name=compute_score",
            "reward_model.reward_manager=naive",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=4",
            f"data.train_files={places['easy']}",
            "data.val_files=[]",
            f"actor_rollout_ref.model.path={places['model']}",
            "data.train_batch_size=2",
            "data.max_prompt_length=32",
            "data.max_response_length=8",
            "trainer.total_training_steps=2",
            f"trainer.default_local_dir={tmp_path}",
        ]
    )
    assert any(line["critic/score/max"] > 0 for line in Run(tmp_path).steps)


def run_yaml(text: str, places: dict[str, Path], folder: Path, *more: str) -> Run:
    from hone.trainer.main_ppo import main

    (folder / "mine.yaml").write_text(text)
    main(
        [
            f"--config-path={folder}",
            "--config-name=mine",
            "data.val_files=[]",
            f"actor_rollout_ref.model.path={places['model']}",
            "data.train_batch_size=4",
            "data.max_prompt_length=32",
            "data.max_response_length=8",
            "actor_rollout_ref.rollout.n=2",
            "trainer.total_training_steps=2",
            f"trainer.default_local_dir={folder / 'run'}",
            f"trainer.rollout_data_dir={folder / 'run' / 'rollouts'}",
            *more,
        ]
    )
    return Run(folder / "run")


def test_lora_as_the_documents_write_it(places: dict[str, Path], tmp_path: Path) -> None:
    run = run_yaml(LORA_YAML, places, tmp_path, f"data.train_files={places['easy']}")
    adapter = run.checkpoint(2) / "actor" / "lora_adapter" / "adapter_config.json"
    settings = json.loads(adapter.read_text())
    assert (settings["r"], settings["lora_alpha"]) == (16, 32)
    assert sorted(settings["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_several_data_sets_by_weight(places: dict[str, Path], tmp_path: Path) -> None:
    files = "\n".join(f"    - {places[name]}" for name in ("easy", "medium", "hard"))
    text = (
        "defaults: [ppo_trainer, _self_]\nalgorithm: {adv_estimator: grpo}\ndata:\n"
        f"  train_files:\n{files}\n  dataset_weights: [0.5, 0.3, 0.2]\n"
    )
    run = run_yaml(text, places, tmp_path, "data.train_batch_size=10")
    levels = [
        row["prompt_text"].split("+ ")[1].split(" ")[0]
        for step in (1, 2)
        for row in run.rollouts(step)
    ]
    counts = {level: levels.count(level) for level in ("1", "10", "100")}
    assert counts == {"1": 20, "10": 12, "100": 8}  # 20 prompts × n=2


def test_a_curriculum_in_three_stages_each_from_the_one_before(
    places: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    from hone.trainer.main_ppo import main

    start, exports = places["model"], []
    for stage in ("easy", "medium", "hard"):
        folder = tmp_path / "outputs" / stage
        main(
            [
                f"data.train_files=['{places[stage]}']",
                "data.val_files=[]",
                f"actor_rollout_ref.model.path={start}",
                "algorithm.adv_estimator=grpo",
                "actor_rollout_ref.rollout.n=2",
                f"custom_reward_function.path={places['reward']}",
                "actor_rollout_ref.actor.optim.lr=1e-3",
                "data.train_batch_size=4",
                "data.max_prompt_length=32",
                "data.max_response_length=8",
                "trainer.total_training_steps=1",
                f"trainer.default_local_dir={folder}",
            ]
        )
        start = folder / "global_step_1"  # what the documents call outputs/stage1/checkpoint-xxx
        exports.append(load_file(start / "actor" / "huggingface" / "model.safetensors"))
    name = "model.layers.0.mlp.up_proj.weight"
    first = load_file(places["model"] / "model.safetensors")[name]
    # One AdamW step moves a weight by about its learning rate: three stages are three such steps.
    moved = [(export[name] - first).abs().max().item() for export in exports]
    assert moved[0] == pytest.approx(1e-3, rel=0.1)
    assert moved[0] < moved[1] < moved[2] <= 3.1e-3


def commands_in_documents() -> list[list[str]]:
    changes = []
    for file in sorted(USER_DOCS.glob("*.txt")) if USER_DOCS.is_dir() else []:
        text = file.read_text(encoding="utf-8", errors="replace")
        for block in text.split("```")[1::2]:
            for command in block.split("main_ppo")[1:]:
                tokens = [t for t in TOKEN.findall(command) if "..." not in t]
                tokens = [re.sub(r"=([\"'])(.*)\1$", r"=\2", t) for t in tokens]
                if tokens and "tool_config_path" not in command:
                    changes.append(tokens)
    return changes


@pytest.mark.skipif(not USER_DOCS.is_dir(), reason="the users' documents are not here")
@pytest.mark.parametrize("number", range(len(commands_in_documents())))
def test_a_command_of_the_documents_trains(
    number: int, places: dict[str, Path], tmp_path: Path
) -> None:
    run_command(commands_in_documents()[number], places, tmp_path)
