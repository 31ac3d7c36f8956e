"""The rollout file: a fixed schema, and enough in it to replay scores, advantages and sampling."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from hone.models.tiny import character_tokenizer
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.trainer.ppo.rollout_file import (
    SCHEMA,
    SCHEMA_KEY,
    SCHEMA_VERSION,
    _to_one_type,
    write_rollouts,
)

from .. import rewards
from ..runs import Run, Task, scored_text


def test_the_schema_does_not_depend_on_what_a_run_computes(train: Callable[..., Run]) -> None:
    plain = train(folder="a")
    rich = train(
        "algorithm.use_kl_in_reward=true",
        "algorithm.adv_estimator=gae",
        "algorithm.rollout_correction.rollout_is=token",
        folder="b",
    )
    first, second = (
        pq.read_schema(run.folder / "rollouts" / "step_1.parquet") for run in (plain, rich)
    )
    assert first.names[: len(SCHEMA)] == list(SCHEMA)
    assert [first.field(n).type for n in SCHEMA] == [second.field(n).type for n in SCHEMA]
    assert first.metadata[SCHEMA_KEY.encode()] == str(SCHEMA_VERSION).encode()
    assert plain.rollouts(1)[0]["values"] is None
    assert len(rich.rollouts(1)[0]["values"]) == len(rich.rollouts(1)[0]["response_ids"])


def test_scores_and_advantages_can_be_computed_again(train: Callable[..., Run]) -> None:
    run = train("actor_rollout_ref.rollout.n=4")
    for step in (1, 2):
        rows = run.rollouts(step)
        assert {row["step"] for row in rows} == {step}
        groups: dict[str, list[float]] = {}
        for row in rows:
            repeated = rewards.compute_score(
                row["data_source"],
                scored_text(row),
                json.loads(row["ground_truth"]),
                json.loads(row["extra_info"]),
            )
            assert row["score"] == pytest.approx(repeated)
            groups.setdefault(row["uid"], []).append(repeated)
        for row in rows:
            scores = np.array(groups[row["uid"]])
            expected = (row["score"] - scores.mean()) / (scores.std(ddof=1) + 1e-6)
            assert row["advantages"] == pytest.approx(
                [expected] * len(row["response_ids"]), abs=1e-4
            )


def test_a_response_can_be_drawn_again_from_its_seed(train: Callable[..., Run], task: Task) -> None:
    from hone.agents.loop_thread import run_with_engine
    from hone.models.load import eos_ids, load_causal_lm, load_tokenizer
    from hone.models.policy import PolicyModel
    from hone.rollout.build import build_rollout
    from hone.rollout.contract import RolloutSpec, Sampling
    from hone.verl.dialect import load_config

    run = train("trainer.total_training_steps=1")
    config = load_config(task.overrides(run.folder)).actor_rollout_ref.rollout
    tokenizer = load_tokenizer(str(task.model))
    lm = load_causal_lm(str(task.model), dtype=torch.float32)
    ends = eos_ids(lm.config, lm.generation_config, tokenizer)
    engine = build_rollout(
        RolloutSpec(
            config,
            model_path=str(task.model),
            load_policy=lambda: PolicyModel(lm),
            dtype=torch.float32,
            device=torch.device("cpu"),
            tokenizer=tokenizer,
            eos_ids=tuple(ends),
        )
    )
    for row in run.rollouts(1):
        sampling = Sampling(max_tokens=6, seed=row["seed"], temperature=1.0)
        out = run_with_engine(
            engine, engine.generate(row["prompt_ids"], sampling, row["trajectory_id"])
        )
        assert out.token_ids == row["response_ids"]
        assert out.log_probs == pytest.approx(row["rollout_log_probs"], abs=1e-5)
    asyncio.run(engine.close())


def test_extras_of_any_kind_are_kept(train: Callable[..., Run], task: Task) -> None:
    run = train(
        task.validated(),
        "custom_reward_function.name=odd_extras",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=1",
    )
    file_rows = pq.read_table(run.folder / "validation" / "step_1.parquet").to_pylist()
    for rows in (run.rollouts(1), file_rows):
        assert {type(json.loads(row["pred"])) for row in rows} == {int, str}
        assert {json.dumps(json.loads(row["sure"])) for row in rows} == {"true", "0.5"}
        assert {type(row["right"]) for row in rows} == {bool}
        assert {row["whole"] for row in rows} == {3.0, 0.25}
        for row in rows:
            text = scored_text(row)
            assert json.loads(row["pred"]) in (text, len(text))
            assert json.loads(row["large"]) == 10**30
            assert int(json.loads(row["vast"]), 16) == 10**5000
            assert row["broken"] == "half ? a pair"
            assert json.loads(row["steps"]) in ([1, 2], "{(1, 2): '\\udfff'}")
    assert run.steps[0]["actor/grad_norm"] > 0


def test_ids_texts_and_masks_belong_together(train: Callable[..., Run], task: Task) -> None:
    from hone.models.load import load_tokenizer

    tokenizer = load_tokenizer(str(task.model))
    for row in train().rollouts(2):
        assert tokenizer.decode(row["response_ids"]) == row["response_text"]
        assert tokenizer.decode(row["prompt_ids"]) == row["prompt_text"]
        assert len(row["response_mask"]) == len(row["response_ids"]) == len(row["versions"])
        assert row["trajectory_id"] == f"{row['uid']}-{row['sample_index']}"
        assert set(row["versions"]) == {1}
        assert row["stop_reason"] is not None


class Hostile:
    def __str__(self) -> str:
        raise SystemError("no")

    __repr__ = __str__


def test_any_text_and_any_object_of_a_row_is_written(tmp_path: Path) -> None:
    columns = {
        "data_source": ["a\ud800"],
        "stop_reason": [5],
        "extra_info": [{"x": "\udfff", "own": Hostile()}],
        "tool_outputs": [[{"text": "\0\ud800"}]],
        "reward_model": [{"ground_truth": "\ud800"}],
        "na\ud800me": ["\ud800"],
        "own": [Hostile()],
    }
    batch = DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[5]]),
            "responses": torch.tensor([[6]]),
            "attention_mask": torch.ones(1, 2, dtype=torch.long),
        },
        non_tensors={name: object_array(values) for name, values in columns.items()},
    )
    batch.meta_info["reward_extra_names"] = ["na\ud800me", "own"]
    write_rollouts(tmp_path / "x.parquet", batch, character_tokenizer(), step=1)
    [row] = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert (row["data_source"], row["stop_reason"], row["na?me"]) == ("a?", "5", "?")
    assert json.loads(row["extra_info"]) == {"x": "?", "own": "a Hostile that cannot be shown"}
    assert json.loads(row["own"]) == "a Hostile that cannot be shown"


def test_the_documented_columns_are_the_schema() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tracking.md").read_text(encoding="utf-8")
    section = page.partition("## Rollout files")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = [name.strip(" `") for row in rows for name in row.split(",")]
    assert sorted(documented) == sorted(SCHEMA)
    assert f"is the version, now {SCHEMA_VERSION}." in section


def test_values_of_a_subclass_are_kept_as_text_and_numbers() -> None:
    class Letter(str):
        pass

    assert _to_one_type([Letter("a"), None]) == ["a", None]
    assert _to_one_type([True, 1]) == ["true", "1"]
    assert _to_one_type([1, 0.5, None]) == [1.0, 0.5, None]
