"""Tiny real runs that together read every working key: one function per program or feature."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hone.verl.dialect import load_config

SOURCES = """
from hone.data import AbstractDataGenerator, AbstractSampler, RLHFDataset, SFTDataset
from hone.data.pairs import PairDataset
from hone.data.steps import StepDataset
from hone.rewards.managers.rule import NaiveRewardManager


class Own(RLHFDataset):
    pass


class OwnAnswers(SFTDataset):
    pass


class OwnSteps(StepDataset):
    pass


class OwnPairs(PairDataset):
    pass


class OneByOne(AbstractSampler):
    def __init__(self, data_source, data_config):
        self.rows = len(data_source)

    def __iter__(self):
        return iter(range(self.rows))

    def __len__(self):
        return self.rows


class Nothing(AbstractDataGenerator):
    def generate(self, dataset):
        return []


class OwnManager(NaiveRewardManager):
    pass


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": sum(map(ord, solution_str)) % 3 / 2, "short": 1.0, "tidy": 0.5}
"""
TOOLS = "tools:\n  - class_name: hone.agents.tools.gsm8k.Gsm8kTool\n    config: {type: native}\n"


@dataclass(frozen=True)
class Ground:
    """Where the model, the reward model and the rows lie."""

    folder: Path

    def at(self, name: str) -> Path:
        return self.folder / name

    def train(self, name: str, *overrides: str) -> None:
        """`main_ppo`, two steps of 4 prompts × 2 responses."""
        from hone.trainer.main_ppo import run

        run(
            load_config(
                [
                    "algorithm.adv_estimator=grpo",
                    f"data.train_files={self.at('rows.jsonl')}",
                    f"data.val_files={self.at('rows.jsonl')}",
                    "data.train_batch_size=4",
                    "data.max_prompt_length=24",
                    "data.max_response_length=6",
                    f"actor_rollout_ref.model.path={self.at('model')}",
                    "actor_rollout_ref.rollout.n=2",
                    f"custom_reward_function.path={self.at('own.py')}",
                    "trainer.total_training_steps=1",
                    "trainer.val_before_train=false",
                    "trainer.test_freq=0",
                    "trainer.save_freq=0",
                    "trainer.logger=[jsonl]",
                    "trainer.device=cpu",
                    f"trainer.default_local_dir={self.at(name)}",
                    *overrides,
                ]
            )
        )


def prepare(folder: Path) -> Ground:
    """A policy and a judge of a few thousand parameters, and small files."""
    from transformers import (
        AutoConfig,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm

    ground = Ground(folder)
    tokenizer = character_tokenizer()
    shape = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "mlp": 32}
    save_pretrained(tiny_lm(len(tokenizer), **shape), tokenizer, ground.at("model"))
    judges = {
        "judge": (AutoModelForSequenceClassification, 1),
        "step_judge": (AutoModelForTokenClassification, 2),
    }
    for name, (kind, labels) in judges.items():
        config = AutoConfig.for_model(
            "qwen2", vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, intermediate_size=16, num_labels=labels,
            pad_token_id=0,
        )  # fmt: skip
        kind.from_config(config).save_pretrained(ground.at(name))
        tokenizer.save_pretrained(ground.at(name))
    ground.at("own.py").write_text(SOURCES)
    ground.at("tools.yaml").write_text(TOOLS)
    _write(ground.at("rows.jsonl"), [_row(i) for i in range(8)])
    answers = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    _write(ground.at("answers.jsonl"), answers)
    conversations = [
        {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
    ]
    _write(ground.at("conversations.jsonl"), conversations * 4)
    steps = [
        {"prompt": f"{i}", "completions": ["1", "2"], "labels": [True, False]} for i in range(8)
    ]
    _write(ground.at("steps.jsonl"), steps)
    pairs = [{"prompt": f"{i}", "chosen": f"{i}1", "rejected": f"{i}2"} for i in range(8)]
    _write(ground.at("pairs.jsonl"), pairs)
    _write(ground.at("preferences.jsonl"), pairs)
    labels = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": bool(i % 2)}
        for i, row in enumerate(pairs)
    ]
    _write(ground.at("labels.jsonl"), labels)
    _write(ground.at("responses.jsonl"), [_row(i) | {"responses": ["1", "2"]} for i in range(4)])
    return ground


def _row(index: int) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{index}+1="}],
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {"index": index},
    }


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def actor_and_critic(ground: Ground) -> None:
    """PPO with a critic, KL twice, a reward model, validation, checkpoints; then it resumes."""
    settings = [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "critic.optim.lr_scheduler_type=wsd",
        "reward_model.enable=true",
        f"reward_model.model.path={ground.at('judge')}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
        "trainer.log_val_generations=1",
        f"trainer.validation_data_dir={ground.at('validated')}",
        f"trainer.rollout_data_dir={ground.at('rolled')}",
        "actor_rollout_ref.actor.fsdp_config.full_determinism=true",
        "actor_rollout_ref.ref.fsdp_config.full_determinism=true",
        "critic.model.fsdp_config.full_determinism=true",
        "reward_model.model.fsdp_config.full_determinism=true",
        "critic.shuffle=true",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.max_critic_ckpt_to_keep=1",
    ]
    ground.train("ppo", *settings, "global_profiler.steps=[1]")
    ground.train("ppo", *settings, "trainer.total_training_steps=2")
    ground.train(
        "ppo_again",
        *settings,
        "trainer.total_training_steps=2",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={ground.at('ppo')}/global_step_2",
    )


def filters_and_correction(ground: Ground) -> None:
    """Dynamic sampling, correction, the user's own classes, mixing, adapters, micro-batches."""
    own, rows = ground.at("own.py"), ground.at("rows.jsonl")
    ground.train(
        "filtered",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=score",
        "algorithm.filter_groups.max_num_gen_batches=8",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2.0",
        "algorithm.use_pf_ppo=true",
        f"data.custom_cls.path={own}",
        "data.custom_cls.name=Own",
        f"data.sampler.class_path={own}",
        "data.sampler.class_name=OneByOne",
        f"reward_manager.module.path={own}",
        "reward_manager.source=importlib",
        "reward_manager.module.name=OwnManager",
        "actor_rollout_ref.model.lora_rank=2",
        "actor_rollout_ref.actor.shuffle=true",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.name=hf",
    )
    ground.train(
        "mixed",
        f"data.train_files=[{rows},{rows}]",
        "data.dataset_weights=[0.5,0.5]",
        "reward_model.reward_manager=dapo",
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable=true",
        "reward_model.reward_kwargs.overlong_buffer_cfg.len=2",
        "reward_model.repeatness_punishment=true",
        "curriculum_learning.enable=true",
        "curriculum_learning.fn_name=interquartile",
        "algorithm.adv_estimator=gae",
        "critic.model.lora_rank=2",
        "critic.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=wsd",
        "trainer.total_training_steps=null",
        "trainer.total_epochs=1",
        "algorithm.rollout_correction.bypass_mode=true",
    )
    ground.train(
        "grown",
        f"data.datagen.path={own}",
        "data.datagen.name=Nothing",
        "custom_reward_function.path=null",
        "reward_model.reward_manager=prime",
        "reward_model.reward_kwargs.num_processes=1",
    )


def process_rewards(ground: Ground) -> None:
    """A judge of steps."""
    ground.train(
        "steps",
        "algorithm.adv_estimator=rloo_token",
        "reward_model.enable=true",
        "reward_model.type=prm",
        f"reward_model.model.path={ground.at('step_judge')}",
    )


def implicit_rewards(ground: Ground) -> None:
    """PRIME, with both schedules of its reward model."""
    for name in ("cosine", "wsd"):
        ground.train(
            f"prime_{name}",
            "algorithm.adv_estimator=rloo",
            "reward_model.enable=true",
            "reward_model.type=prime",
            f"reward_model.model.path={ground.at('model')}",
            f"reward_model.model.optim.lr_scheduler_type={name}",
            "data.filter_accuracy=true",
            "data.oversample_factor=2",
            "data.accuracy_lower_bound=0",
            "data.accuracy_upper_bound=1",
        )


def tools(ground: Ground) -> None:
    """The tool loop."""
    limits = "actor_rollout_ref.rollout.multi_turn"
    ground.train(
        "tools", f"{limits}.enable=true", f"{limits}.tool_config_path={ground.at('tools.yaml')}"
    )


def every_algorithm(ground: Ground) -> None:
    """Each loss and estimator by its name, with the config that the trainer hands it."""
    from hone.algorithms import advantages, policy_losses

    config = load_config(
        [
            "algorithm.gdpo_reward_keys=[short]",
            "actor_rollout_ref.actor.policy_loss.dro_beta=0.1",
            "algorithm.use_pf_ppo=true",
        ]
    )
    actor = config.actor_rollout_ref.actor
    values, mask = torch.rand(4, 3), torch.ones(4, 3)
    for name in policy_losses.TABLE.names():
        loss = policy_losses.get_policy_loss_fn(name)
        more: dict[str, Any] = {}
        if name == "bypass_mode":
            more["rollout_correction"] = config.algorithm.rollout_correction
        if getattr(loss, "needs_batch_statistics", False):
            more["prepared"] = loss.prepare(-values, -values, values, mask, actor)  # type: ignore[attr-defined]
        loss(-values, -values, values, mask, "token-mean", actor, None, **more)
    for name in advantages.TABLE.names():
        estimator = advantages.get_estimator(name, config.algorithm)
        columns = dict.fromkeys(estimator.requires, values)
        if name == "remax":
            columns["reward_baselines"] = values[:, 0]
        index = ["a", "a", "b", "b"]
        columns |= {"token_level_rewards": values, "response_mask": mask, "index": index}
        advantages.get_adv_estimator_fn(name)(config=config.algorithm, **columns)


def supervised(ground: Ground) -> None:
    """`hone sft`, `dpo`, `train-prm`, `train-rm` with validation and a checkpoint, resumed."""
    from hone.algorithms import preference_losses
    from hone.trainer import main_dpo, main_prm, main_rm, main_sft

    def train(main: Callable[[list[str]], None], rows: str, *overrides: str) -> None:
        settings = [
            f"data.train_files={ground.at(rows)}",
            f"data.val_files={ground.at(rows)}",
            f"model.path={ground.at('model')}",
            "data.train_batch_size=4",
            "trainer.total_training_steps=1",
            "trainer.test_freq=1",
            "trainer.save_freq=1",
            "trainer.logger=[jsonl]",
            "trainer.device=cpu",
            f"trainer.default_local_dir={ground.at('run_' + rows)}",
            *overrides,
        ]
        main(settings)

    epochs = ("trainer.total_training_steps=null", "trainer.total_epochs=1")
    for loss_type in preference_losses.TABLE.names():
        rows = (
            "pairs.jsonl" if preference_losses.LossFunction(loss_type).is_paired else "labels.jsonl"
        )
        folder = f"trainer.default_local_dir={ground.at('run_' + loss_type)}"
        train(main_dpo.main, rows, f"algorithm.loss_type={loss_type}", folder)
    programs = {
        "answers.jsonl": (main_sft.main, "OwnAnswers"),
        "steps.jsonl": (main_prm.main, "OwnSteps"),
        "pairs.jsonl": (main_rm.main, "OwnPairs"),
        "preferences.jsonl": (main_dpo.main, "OwnPairs"),
    }
    for rows, (main, own_class) in programs.items():
        train(main, rows, "optim.lr_scheduler_type=cosine")
        train(main, rows, "trainer.total_training_steps=2", "optim.lr_scheduler_type=wsd")
        train(
            main,
            rows,
            "trainer.total_training_steps=3",
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={ground.at('run_' + rows)}/global_step_2",
            f"data.custom_cls.path={ground.at('own.py')}",
            f"data.custom_cls.name={own_class}",
            "engine.full_determinism=true",
            "data.use_dynamic_bsz=false",
            "data.micro_batch_size_per_gpu=2",
        )
        lora = ("model.lora_rank=2", f"trainer.default_local_dir={ground.at('lora_' + rows)}")
        if main is not main_sft.main:
            train(main, rows, *lora, *epochs)
    overrides = ("model.lora_rank=2", "data.multiturn.enable=true", *epochs)
    train(main_sft.main, "conversations.jsonl", *overrides)


def generation(ground: Ground) -> None:
    """`hone generate`."""
    from hone.trainer.main_generation import main

    settings = [
        f"data.path={ground.at('rows.jsonl')}",
        f"model.path={ground.at('model')}",
        "data.n_samples=2",
        "rollout.response_length=4",
        "rollout.prompt_length=24",
        "trainer.device=cpu",
        f"data.output_path={ground.at('out.parquet')}",
    ]
    main(settings)


def evaluation(ground: Ground) -> None:
    """`hone eval`."""
    from hone.trainer.main_eval import run

    settings = [
        f"data.path={ground.at('responses.jsonl')}",
        "num_processes=1",
        "metrics.bootstrap_samples=10",
        f"output.json_path={ground.at('scores.json')}",
    ]
    run(load_config(settings, config_name="evaluation"))
    own = f"custom_reward_function.path={ground.at('own.py')}"
    run(load_config([*settings, own], config_name="evaluation"))


RUNS: tuple[Callable[[Ground], None], ...] = (
    actor_and_critic,
    filters_and_correction,
    process_rewards,
    implicit_rewards,
    tools,
    every_algorithm,
    supervised,
    generation,
    evaluation,
)
