"""Rollout files of runs with turns: one real run with a tool, an interaction and a loop of the user's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.trainer.ppo.rollout_file import JSON_COLUMNS, SCHEMA, split_turns

from ..runs import REWARDS, Run

ROLLOUT = "actor_rollout_ref.rollout"
CALL = '<tool_call>{"name": "calc_gsm8k_reward", "arguments": {"answer": "%s"}}</tool_call>'
TOOLS = "tools:\n  - class_name: hone.agents.tools.gsm8k.Gsm8kTool\n    config: {type: native}\n"
USERS = """interaction:
  - name: gsm8k
    class_name: hone.agents.interactions.gsm8k.Gsm8kInteraction
"""
LOOPS = f"- name: says_more\n  _target_: {Path(__file__).with_name('loops.py')}:SaysMore\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One step: two prompts for the tool loop with a simulated user, two for a loop of the user's."""
    folder = tmp_path_factory.mktemp("turns")
    tokenizer = character_tokenizer(words=[CALL % n for n in range(40, 64)])
    save_pretrained(tiny_lm(len(tokenizer), hidden=32, mlp=48, seed=3), tokenizer, folder / "m")
    for name, text in (("tools", TOOLS), ("users", USERS), ("loops", LOOPS)):
        (folder / f"{name}.yaml").write_text(text)
    truth = {"ground_truth": "42"}
    row: dict[str, Any] = {
        "data_source": "x",
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": "6*7?"}],
        "reward_model": {"style": "rule", **truth},
        "extra_info": {
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": truth}},
            "interaction_kwargs": {"name": "gsm8k", **truth},
        },
    }
    custom_row = {**row, "agent_name": "says_more", "extra_info": {}}
    rows = [json.dumps(r) for r in (row, custom_row, row, custom_row)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return Run(folder / "run").train(
        [
            "algorithm.adv_estimator=grpo",
            f"data.train_files={folder}/rows.jsonl",
            "data.val_files=[]",
            "data.train_batch_size=4",
            "data.max_prompt_length=32",
            "data.max_response_length=600",
            f"actor_rollout_ref.model.path={folder}/m",
            f"{ROLLOUT}.n=4",
            f"{ROLLOUT}.max_tokens_per_turn=6",
            f"{ROLLOUT}.multi_turn.tool_config_path={folder}/tools.yaml",
            f"{ROLLOUT}.multi_turn.interaction_config_path={folder}/users.yaml",
            f"{ROLLOUT}.multi_turn.max_assistant_turns=4",
            f"{ROLLOUT}.agent.agent_loop_config_path={folder}/loops.yaml",
            f"custom_reward_function.path={REWARDS}",
            "trainer.total_training_steps=1",
            "trainer.save_freq=0",
            "trainer.logger=[jsonl]",
            "trainer.device=cpu",
            f"trainer.default_local_dir={folder}/run",
        ]
    )


def of_loop(run: Run, mine: bool) -> list[dict[str, Any]]:
    return [row for row in run.rollouts(1) if (row["searches"] is not None) == mine]


def test_what_tools_and_users_scored_is_in_the_file(run: Run) -> None:
    rows = of_loop(run, mine=False)
    assert len(rows) == 8
    called = 0
    for row in rows:
        outputs = json.loads(row["tool_outputs"])
        called += len(outputs)
        rewards = [out["reward"] for out in outputs if out["reward"] is not None]
        assert json.loads(row["tool_rewards"]) == rewards
        scores = json.loads(row["reward_scores"])
        assert set(scores) - {"gsm8k"} == {out["name"] for out in outputs if not refused(out)}
        assert row["tool_call_counts"] == len(outputs)
        assert json.loads(row["timeouts"]) == []
    assert called
    assert any(json.loads(row["turn_scores"]) for row in rows)


def refused(output: dict[str, Any]) -> bool:
    return bool(output["text"].startswith("Error:"))


def test_turns_say_who_wrote_what(run: Run) -> None:
    for row in of_loop(run, mine=False):
        turns = json.loads(row["turns"] or "[]")
        if not turns:
            assert 0 not in row["response_mask"]
            continue
        assert "".join(turn["text"] for turn in turns) == row["response_text"]
        assert {turn["role"] for turn in turns[::2]} == {"assistant"}
        assert {turn["role"] for turn in turns[1::2]} <= {"tool", "user"}
        assert sum(turn.get("calls", 0) for turn in turns) == row["tool_call_counts"]
        scores = [turn["score"] for turn in turns if "score" in turn]
        assert scores == json.loads(row["turn_scores"])
        assert [turn["tokens"] for turn in turns] == runs_of(row["response_mask"])
    assert {row["num_turns"] for row in of_loop(run, mine=False)} != {2}


def runs_of(mask: list[int]) -> list[int]:
    text = "".join(map(str, mask))
    return [len(run) for run in text.replace("01", "0 1").replace("10", "1 0").split()]


def test_the_fields_of_a_users_loop_are_columns(run: Run) -> None:
    for row in of_loop(run, mine=True):
        assert row["searches"] == row["sample_index"]
        expected = {"depth": 2} if row["sample_index"] else "none"
        assert json.loads(row["plan"]) == expected
        assert row["extra/prompt_text"] == "mine"
        assert row["prompt_text"] != "mine"
        assert json.loads(row["turn_scores"]) == [0.5, None]
        roles = [turn["role"] for turn in json.loads(row["turns"])]
        assert roles == ["assistant", "environment", "assistant"]


def test_the_schema_comes_first_and_ragged_columns_are_text(run: Run) -> None:
    schema = pq.read_schema(run.folder / "rollouts" / "step_1.parquet")
    assert schema.names[: len(SCHEMA)] == list(SCHEMA)
    kinds = {name: str(schema.field(name).type) for name in schema.names}
    assert {kinds[name] for name in (*JSON_COLUMNS, "plan")} == {"string"}
    assert {kinds[name] for name in ("searches", "tool_call_counts", "num_turns")} == {"int64"}


class Letters:
    def decode(self, ids: Any) -> str:
        return "".join(chr(96 + i) for i in ids)


@pytest.mark.parametrize("spans", [None, 7, [{"role": "tool"}], [{"role": "tool", "tokens": 2}]])
def test_where_a_loop_says_nothing_that_fits_the_mask_tells_the_turns(spans: Any) -> None:
    turns = split_turns([1, 2, 3, 4], [1, 1, 0, 1], spans, Letters())
    assert [(turn["role"], turn["text"]) for turn in turns] == [
        ("assistant", "ab"),
        ("environment", "c"),
        ("assistant", "d"),
    ]
