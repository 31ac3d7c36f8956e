"""The process reward model: where steps end, what it reads there, and how its scores become credit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.config import ConfigError, load_config
from hone.models.tiny import character_tokenizer
from hone.protocol import DataProto
from hone.workers.process_reward_model import ProcessRewardModelWorker, separator_ids

WORDS = ("\n\n", ".\n\n")
TEXTS = ["ab.\n\ncd\n\nef", "abc", "ab\n\n"]


def save_judge(folder: Path, words: tuple[str, ...] = WORDS) -> Path:
    from transformers import AutoConfig, AutoModelForTokenClassification

    tokenizer = character_tokenizer(words=words)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, intermediate_size=16, num_labels=2,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_judge(tmp_path_factory.mktemp("judge"))


def worker(judge: Path, *overrides: str) -> ProcessRewardModelWorker:
    made = ProcessRewardModelWorker(
        load_config(
            [
                "reward_model.enable=true",
                "reward_model.type=prm",
                f"reward_model.model.path={judge}",
                f"actor_rollout_ref.model.path={judge}",
                "trainer.device=cpu",
                *overrides,
            ]
        )
    )
    made.init_model()
    return made


def batch_of(tokenizer: Any) -> DataProto:
    from hone.agents.collate import collate_outputs
    from hone.agents.contract import AgentLoopOutput

    outputs = []
    for number, text in enumerate(TEXTS):
        ids = tokenizer.encode(text, add_special_tokens=False)
        start = tokenizer.encode("1+" * (number + 1), add_special_tokens=False)
        outputs.append(AgentLoopOutput(start, ids, [1] * len(ids)))
    return collate_outputs(outputs, pad_token_id=0)


def test_merged_tokens_end_a_step_and_the_last_token_does_once(judge: Path) -> None:
    made = worker(judge)
    ends = separator_ids(made.tokenizer, "\n\n").tolist()
    assert [made.tokenizer.decode([i]) for i in ends] == list(WORDS)
    steps = made.compute_rm_score(batch_of(made.tokenizer)).batch["step_mask"]
    # a b .\n\n c d \n\n e f  |  a b c  |  a b \n\n
    assert steps.int().tolist() == [
        [0, 0, 1, 0, 0, 1, 0, 1],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
    ]


def test_scores_are_the_models_own_with_the_separator_in_the_steps_place(judge: Path) -> None:
    made = worker(judge, "reward_model.credit_assignment=gamma-decay")
    tokenizer = made.tokenizer
    batch = batch_of(tokenizer)
    scores = made.compute_rm_score(batch).batch["process_scores"]
    text = tokenizer.encode("1+" + "ab" + "\n" + "cd" + "\n" + "e" + "\n", add_special_tokens=False)
    with torch.no_grad():
        logits = made.model(input_ids=torch.tensor([text])).logits[0, 2:]
    expected = torch.softmax(logits, -1) @ torch.tensor([-1.0, 1.0])
    ends = torch.tensor([2, 5, 7])
    assert torch.allclose(scores[0, ends], expected[ends], atol=1e-6)
    assert scores[0].count_nonzero() == 3


@pytest.mark.parametrize("cut", ["micro_batch_size_per_gpu=1", "forward_max_token_len_per_gpu=20"])
def test_scores_do_not_depend_on_the_micro_batch(judge: Path, cut: str) -> None:
    whole, parts = worker(judge), worker(judge, f"reward_model.{cut}")
    batch = batch_of(whole.tokenizer)
    a, b = (w.compute_rm_score(batch).batch["process_scores"] for w in (whole, parts))
    assert torch.allclose(a, b, atol=1e-6)


def test_a_small_temperature_leaves_the_worst_step(judge: Path) -> None:
    raw = worker(judge, "reward_model.credit_assignment=gamma-decay")
    soft = worker(judge, "reward_model.credit_assignment=0.0001")
    batch = batch_of(raw.tokenizer)
    steps = raw.compute_rm_score(batch).batch
    lowest = steps["process_scores"][0][steps["step_mask"][0]].min()
    summed = soft.compute_rm_score(batch).batch["process_scores"][0].sum()
    assert summed == pytest.approx(lowest.item(), abs=1e-4)


def test_another_vocabulary_and_a_separator_of_two_tokens_are_refused(
    judge: Path, tmp_path: Path
) -> None:
    other = save_judge(tmp_path / "other", words=("\n\n",))
    with pytest.raises(ConfigError, match="another vocabulary than the policy"):
        worker(judge, f"actor_rollout_ref.model.path={other}")
    with pytest.raises(ConfigError, match="is 2 tokens of the reward model"):
        worker(judge, "reward_model.step_separator='ab'")


@pytest.mark.parametrize(
    ("manager", "credit", "parts"),
    [
        ("blank", "0.1", {"reward/process", "reward/rule"}),
        ("naive", "strict min-form", {"reward/process", "reward/rule"}),
    ],
)
def test_a_run_learns_from_steps_and_from_the_rule(
    judge: Path, tmp_path: Path, manager: str, credit: str, parts: set[str]
) -> None:
    import pyarrow.parquet as pq

    from hone.models.tiny import save_pretrained, tiny_lm
    from hone.tracking import read_metrics
    from hone.trainer.main_ppo import run

    tokenizer = character_tokenizer(words=WORDS)
    lm = tiny_lm(len(tokenizer), hidden=16, layers=1, heads=2, kv_heads=1, mlp=32)
    save_pretrained(lm, tokenizer, tmp_path / "m")
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "6*7?"}],
        "reward_model": {"style": "rule", "ground_truth": "42"},
    }
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    settings = [
        "algorithm.adv_estimator=rloo_token",
        "algorithm.adv_norm=true",
        f"data.train_files={tmp_path}/rows.jsonl",
        "data.val_files=[]",
        "data.train_batch_size=4",
        "data.max_prompt_length=32",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={tmp_path}/m",
        "actor_rollout_ref.rollout.n=2",
        "reward_model.enable=true",
        "reward_model.type=prm",
        f"reward_model.model.path={judge}",
        f"reward_model.credit_assignment={credit}",
        f"reward_model.reward_manager={manager}",
        "reward_model.modeling_reward_coef=0.5",
        "trainer.total_training_steps=1",
        "trainer.save_freq=0",
        "trainer.logger=[jsonl]",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path}/run",
        f"trainer.rollout_data_dir={tmp_path}/run/rollouts",
    ]
    run(load_config(settings))
    (step,) = read_metrics(tmp_path / "run")
    assert step["num_of_steps/min"] >= 1
    assert step["actor/grad_norm"] > 0
    kept = pq.read_table(tmp_path / "run" / "rollouts" / "step_1.parquet").to_pylist()
    assert parts <= set(kept[0])
    for line in kept:
        assert line["score"] == pytest.approx(
            sum(line["reward/process"]) + sum(line["reward/rule"]), abs=1e-5
        )
