"""Scores: the user's function in all its forms, what goes wrong in it, loops and reward models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from aiohttp import web
from rewards.scoring_server import ScoringServer, by_length, digits_judge

from hone.checks.row_checks import check_columns, check_media
from hone.config.reward import RewardModelConfig
from hone.data.create import create_run_dataset
from hone.data.dataset import RLHFDataset
from hone.data.rows import DataError, write_parquet
from hone.models.tiny import character_tokenizer
from hone.protocol import DataProto
from hone.rewards.failures import RewardError
from hone.trainer.ppo.credit import score
from hone.trainer.ppo.trainer import PPOTrainer
from hone.verl.dialect import load_config

from .. import rewards
from ..runs import ALPHABET, Run, Task, scored_text, task_row

LOOPS = Path(__file__).with_name("loops.py")


def loop(name: str) -> str:
    return f"actor_rollout_ref.rollout.agent.default_agent_loop='{LOOPS}:{name}'"


@pytest.mark.parametrize("name", ["compute_score", "later", "detailed"])
def test_a_number_a_dict_and_a_coroutine_score_alike(train: Callable[..., Run], name: str) -> None:
    run = train(f"custom_reward_function.name={name}")
    for row in run.rollouts(1):
        text = scored_text(row)
        assert row["score"] == pytest.approx(rewards.share(text))
        assert sum(row["reward/rule"]) == pytest.approx(row["score"])
        if name == "detailed":
            assert row["pred"] == text[:1]
            assert row["acc"] in (0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "reason"), [("raises_on_a", "RuntimeError"), ("nan_on_a", "not_finite")]
)
def test_a_score_that_fails_is_counted_and_the_run_goes_on(
    train: Callable[..., Run], name: str, reason: str
) -> None:
    run = train(
        f"custom_reward_function.name={name}",
        "reward_model.reward_kwargs.failure_score=-1",
        "actor_rollout_ref.rollout.n=8",
    )
    rows = run.rollouts(1)
    failed = [row for row in rows if "a" in scored_text(row)]
    assert failed
    assert all(row["score"] == -1 for row in failed)
    assert all(row["score"] == 1 for row in rows if row not in failed)
    counted = {k: v for k, v in run.steps[0].items() if k.startswith("reward/failures/")}
    assert sum(counted.values()) == len(failed)
    assert {row["reward_failure"] for row in failed} == {
        name.removeprefix("reward/failures/") for name in counted
    }


def test_a_score_that_fails_may_stop_the_run(train: Callable[..., Run]) -> None:
    with pytest.raises(RewardError, match="no a, please"):
        train(
            "custom_reward_function.name=raises_on_a",
            "reward_model.reward_kwargs.on_failure=raise",
            "actor_rollout_ref.rollout.n=8",
        )


@pytest.mark.slow
def test_a_score_that_hangs_is_killed_and_counted(train: Callable[..., Run]) -> None:
    run = train(
        "custom_reward_function.name=hangs_on_row_0",
        "reward_model.reward_manager=prime",
        "reward_model.reward_kwargs.timeout_s=5",
        "reward_model.reward_kwargs.num_processes=1",
        "data.shuffle=false",
        "actor_rollout_ref.rollout.n=1",
        "trainer.total_training_steps=1",
    )
    assert run.steps[0]["reward/failures/timeout"] == 1
    assert sorted(row["reward_failure"] is None for row in run.rollouts(1)) == [
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("whole", [False, True])
def test_a_score_function_reads_what_the_policy_wrote_in_training_and_validation(
    train: Callable[..., Run], task: Task, whole: bool
) -> None:
    run = train(
        loop("TwoTurns"),
        task.validated(),
        "custom_reward_function.name=repeats_what_it_read",
        f"reward_model.score_observations={str(whole).lower()}",
        "data.max_response_length=8",
        "trainer.total_training_steps=1",
    )
    validation = pq.read_table(run.folder / "validation" / "step_1.parquet").to_pylist()
    tokenizer = character_tokenizer(ALPHABET)
    for row in [*run.rollouts(1), *validation]:
        ids, mask = row["response_ids"], row["response_mask"]
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        turns = [ids[: mask.index(0)], ids[mask.index(0) + 2 :]]
        texts = [tokenizer.decode(turn, skip_special_tokens=True) for turn in turns]
        assert row["heard"] == decoded
        assert row["read"] == (decoded if whole else "\n".join(text for text in texts if text))


def test_failures_in_validation_are_counted_too(train: Callable[..., Run], task: Task) -> None:
    run = train(
        task.validated(),
        "custom_reward_function.name=raises_on_a",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "actor_rollout_ref.rollout.val_kwargs.n=8",
        "trainer.val_only=true",
    )
    (line,) = run.metrics
    counted = [v for k, v in line.items() if k.startswith("val-aux/reward/failures/")]
    assert sum(counted) > 0


def test_a_loop_may_bring_its_own_score(train: Callable[..., Run]) -> None:
    run = train(loop("ScoresItself"), "custom_reward_function.path=null")  # no rule for 'lexical'
    for row in run.rollouts(1):
        assert row["score"] == len(set(row["response_ids"]))
        assert sum(row["reward/agent"]) == row["score"]


def test_only_tokens_the_policy_wrote_are_learnt(train: Callable[..., Run]) -> None:
    run = train(loop("TwoTurns"), "data.max_response_length=8")
    for row in run.rollouts(1):
        mask = row["response_mask"]
        assert mask.count(0) == 2
        assert all(a == 0 for a, m in zip(row["advantages"], mask, strict=True) if not m)
        assert row["num_turns"] == 4
        assert json.loads(row["tool_outputs"]) == ["xy"]
    assert run.steps[0]["actor/grad_norm"] > 0


def test_rows_of_another_loop_need_no_known_source(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    rows = [task_row(i, i, agent_name="game") for i in range(8)]
    (tmp_path / "games.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "loops.yaml").write_text(f"- name: game\n  _target_: {LOOPS}:ScoresItself\n")
    run = train(
        f"data.train_files={tmp_path / 'games.jsonl'}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}",
        "custom_reward_function.path=null",
    )
    assert len(run.steps) == 2


@pytest.mark.parametrize("column", ["train_files", "val_files"])
@pytest.mark.parametrize("name", ["{folder}/own.py:Loop", "this:s", "games"])
def test_a_row_that_names_code_stops_before_models_load(
    task: Task, tmp_path: Path, name: str, column: str
) -> None:
    """A data set that ships a file beside its rows cannot have it run."""
    (tmp_path / "own.py").write_text("raise AssertionError('the file of a data set was run')")
    rows = [task_row(0, 0), task_row(1, 1, agent_name=name.format(folder=tmp_path))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = task.overrides(
        tmp_path, f"data.{column}={tmp_path / 'rows.jsonl'}", "data.train_batch_size=1"
    )
    with pytest.raises(DataError, match=r"rows\.jsonl, row 1: agent_name=.* names no agent loop"):
        PPOTrainer(load_config(overrides), character_tokenizer("0123456789+="))


OURS = [
    "loss_mask", "rm_scores", "values", "num_turns", "stop_reason", "versions", "seed",
    "sample_index", "trajectory_id", "responses", "advantages", "old_log_probs",
    "token_level_scores", "prompts", "global_row", "reward/rule",
]  # fmt: skip


def raw_prompts(file: Path, key: str = "prompt") -> RLHFDataset:
    settings = {"prompt_format": "raw", "prompt_key": key}
    return RLHFDataset(str(file), character_tokenizer(ALPHABET), settings)


@pytest.mark.parametrize("name", OURS)
def test_a_row_may_not_bring_a_column_that_a_step_writes(tmp_path: Path, name: str) -> None:
    rows = [task_row(0, 0), task_row(1, 1, **{name: None})]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 1: column '{name}'.*rename it"):
        check_columns(raw_prompts(file), "prompt")


def test_such_a_column_stops_the_run_before_its_first_step(
    train: Callable[..., Run], task: Task, tmp_path: Path
) -> None:
    for kind in ("parquet", "jsonl"):
        file = tmp_path / f"rows.{kind}"
        rows = [task_row(i, i, loss_mask=1) for i in range(4)]
        if kind == "parquet":
            write_parquet(rows, file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for key in ("data.train_files", "data.val_files"):
            with pytest.raises(DataError, match=rf"rows\.{kind}, row 0: column 'loss_mask'"):
                train(f"{key}={file}")


def test_what_data_sets_bring_is_not_refused(tmp_path: Path) -> None:
    names = [
        "uid", "index", "ability", "agent_name", "tools_kwargs", "interaction_kwargs",
        "multi_modal_data", "multi_modal_inputs", "images", "raw_prompt", "question", "answer",
        "solution", "split", "difficulty", "acc",
    ]  # fmt: skip
    brought = dict.fromkeys(names)
    write_parquet([task_row(0, 0) | brought], tmp_path / "rows.parquet")
    check_columns(raw_prompts(tmp_path / "rows.parquet"), "prompt")
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompts": "1+1="}) + "\n")
    check_columns(raw_prompts(tmp_path / "own.jsonl", "prompts"), "prompts")


def test_a_score_at_the_end_of_a_response_that_a_tool_ends_is_not_lost() -> None:
    """As managers of verl write it: on the last token that is no padding."""

    def manager(batch: DataProto, return_dict: bool) -> dict[str, Any]:
        rewards = torch.zeros(2, 4)
        rewards[0, 3], rewards[1, 1] = 1.0, 0.5
        return {"reward_tensor": rewards}

    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0]])
    batch = DataProto.from_dict({"responses": torch.zeros(2, 4), "response_mask": mask})
    scored = score(batch, manager, None, RewardModelConfig())
    assert scored.batch["token_level_scores"].tolist() == [[0, 1.0, 0, 0], [0, 0.5, 0, 0]]


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    """A reward model over the policy's own tokens."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from hone.models.tiny import character_tokenizer

    tokenizer = character_tokenizer(ALPHABET)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, intermediate_size=32, num_labels=1,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    return tmp_path / "judge"


def test_rule_and_reward_model_are_mixed_by_their_weights(
    train: Callable[..., Run], judge: Path
) -> None:
    run = train(
        "reward_model.enable=true",
        f"reward_model.model.path={judge}",
        "reward_model.verifiable_reward_coef=2.0",
        "reward_model.modeling_reward_coef=0.5",
    )
    calls = set()
    for row in run.rollouts(1):
        rule, model = sum(row["reward/rule"]), sum(row["reward/model"])
        assert rule == pytest.approx(rewards.share(scored_text(row)))
        assert row["score"] == pytest.approx(2.0 * rule + 0.5 * model, abs=1e-5)
        calls.add(round(model, 6))
    assert len(calls) > 1


def test_a_reward_model_may_be_the_only_judge(train: Callable[..., Run], judge: Path) -> None:
    run = train(
        "reward_model.enable=true",
        f"reward_model.model.path={judge}",
        "reward_model.reward_manager=blank",
        "algorithm.adv_estimator=gae",
    )
    for row in run.rollouts(2):
        assert row["score"] == pytest.approx(sum(row["reward/model"]), abs=1e-6)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("column", ["images", "videos", "audios"])
def test_rows_with_pictures_are_refused_before_models_load(
    tmp_path: Path, suffix: str, column: str
) -> None:
    """Also through an own loop or an own engine alone; both together may read them."""
    rows = [task_row(i, 1) for i in range(3)]
    for row in rows:
        row[column] = None if row is rows[0] else []
    rows[2][column] = [{"bytes": "png", "path": None}]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        write_parquet(rows, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine, custom_loop = "actor_rollout_ref.rollout.name=my_pkg:Engine", loop("TwoTurns")
    tokenizer = character_tokenizer(ALPHABET)
    for settings, refused in (
        ((), True),
        ((custom_loop,), True),
        ((engine,), True),
        ((custom_loop, engine), False),
    ):
        config = load_config([f"data.train_files={path}", "data.prompt_format=raw", *settings])
        dataset = RLHFDataset(str(path), tokenizer, config.data)
        default = config.actor_rollout_ref.rollout.agent.default_agent_loop
        if refused:
            with pytest.raises(DataError, match=f"row 2: column '{column}' is not empty.*text"):
                check_media(dataset, config, default_loop=default)
        else:
            check_media(dataset, config, default_loop=default)


def test_pictures_in_arrays_are_refused_and_empty_arrays_pass() -> None:
    config = load_config(["data.train_files=[]", "data.prompt_format=raw"])
    rows = [{"prompt": "a", "images": np.array(images)} for images in ([], ["a.png", "b.png"])]
    loop_name = config.actor_rollout_ref.rollout.agent.default_agent_loop

    def check(rows: list[Any]) -> None:
        dataset = create_run_dataset(rows, config.data, character_tokenizer("ab"), is_train=True)
        check_media(dataset, config, default_loop=loop_name)

    check(rows[:1])
    with pytest.raises(DataError, match="column 'images' is not empty"):
        check(rows)


def test_a_run_over_rows_with_pictures_does_not_start(
    train: Callable[..., Run], task: Task, tmp_path: Path
) -> None:
    path = tmp_path / "pictures.jsonl"
    path.write_text((json.dumps({**task_row(0, 1), "images": ["a.png"]}) + "\n") * 4)
    with pytest.raises(Exception, match="only read text"):
        train(f"data.train_files={path}")


def styled(folder: Path, *styles: str) -> Path:
    """Rows whose scorer is the rule or the reward model, as document 004 marks them."""
    file = folder / "styled.jsonl"
    rows = [task_row(i, i) for i in range(8)]
    for row, style in zip(rows, styles * 8, strict=False):
        row["reward_model"] = {"style": style, "ground_truth": str(row["extra_info"]["index"])}
        row["data_source"] = "lexical" if style == "rule" else "no rule knows this"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_style_of_a_row_chooses_rule_or_reward_model(
    train: Callable[..., Run], judge: Path, tmp_path: Path
) -> None:
    run = train(
        f"data.train_files={styled(tmp_path, 'rule', 'model', 'model')}",
        "data.shuffle=false",
        "reward_model.enable=true",
        f"reward_model.model.path={judge}",
        "reward_model.modeling_reward_coef=3.0",
        "custom_reward_function.name=detailed",
    )
    for step, line in enumerate(run.steps, start=1):
        means = {"rule": [], "model": []}
        for row in run.rollouts(step):
            style = "model" if row["data_source"] != "lexical" else "rule"
            rule, model = sum(row["reward/rule"]), sum(row["reward/model"])
            assert (rule != 0, model != 0) == (style == "rule", style == "model")
            assert (row["acc"] is None) == (style == "model")
            assert row["score"] == pytest.approx(rule + 3.0 * model, abs=1e-5)
            means[style].append(row["score"])
        for style, scores in means.items():
            assert line[f"reward/style_{style}/mean"] == pytest.approx(sum(scores) / len(scores))
            assert line[f"reward/style_{style}/share"] == pytest.approx(len(scores) / 8)


def test_rows_of_one_style_need_only_its_scorer(
    train: Callable[..., Run], judge: Path, tmp_path: Path
) -> None:
    """The table has no rule for these rows, and none is asked for."""
    run = train(
        f"data.train_files={styled(tmp_path, 'model')}",
        "reward_model.enable=true",
        f"reward_model.model.path={judge}",
        "custom_reward_function.path=null",
    )
    for row in run.rollouts(2):
        assert row["score"] == pytest.approx(sum(row["reward/model"])) != 0


def test_a_row_for_a_reward_model_stops_a_run_without_one(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    rows = styled(tmp_path, "rule", "model")
    with pytest.raises(DataError, match=r"styled\.jsonl, row 1: .*style=model.*no reward model"):
        train(f"data.train_files={rows}", "custom_reward_function.path=null",
              "+reward_model.scores.lexical=hone.rewards.scores.gsm8k:compute_score")  # fmt: skip
    with pytest.raises(DataError, match=r"no row has reward_model.style=model"):
        train("reward_model.enable=true", "reward_model.model.path=m",
              "reward_model.route_by_style=true")  # fmt: skip
    run = train(f"data.train_files={rows}")  # a function of the user's may be the model
    assert len(run.steps) == 2


def server_overrides(server: ScoringServer, *more: str) -> list[str]:
    return ["reward_model.enable=true", f"reward_model.server.url={server.url}",
            "reward_model.server.kind=texts", "reward_model.server.retries=0", *more]  # fmt: skip


def test_a_served_reward_model_scores_its_rows(train: Callable[..., Run], tmp_path: Path) -> None:
    server = ScoringServer(by_length)
    try:
        run = train(
            *server_overrides(server, "reward_model.modeling_reward_coef=0.1"),
            f"data.train_files={styled(tmp_path, 'rule', 'model')}",
        )
    finally:
        server.stop()
    for row in run.rollouts(1) + run.rollouts(2):
        model = row["data_source"] != "lexical"
        length = len(row["prompt_text"]) + len(scored_text(row)) if model else 0
        assert sum(row["reward/model"]) == length
        assert row["score"] == pytest.approx(0.1 * length + sum(row["reward/rule"]))
    assert run.steps[0]["reward/server/requests"] >= 1


def test_a_reward_model_server_that_is_down_follows_the_failure_policy(
    train: Callable[..., Run],
) -> None:
    server = ScoringServer(by_length)
    steps = 0

    def answer(path: str, body: Any) -> Any:
        nonlocal steps
        steps += 1
        return by_length(path, body) if steps != 2 else web.Response(status=500)

    server.answer = answer
    settings = [*server_overrides(server), "data.train_batch_size=2", "trainer.total_training_steps=3",
                "reward_model.server.cache=null"]  # fmt: skip
    try:
        run = train(*settings, "reward_model.reward_kwargs.failure_score=-1")
        scores = [[sum(row["reward/model"]) for row in run.rollouts(step)] for step in (1, 2, 3)]
        assert scores[1] == [-1.0] * 4
        assert min(scores[0] + scores[2]) > 0
        assert [r["reward_failure"] for r in run.rollouts(2)] == ["http_error"] * 4
        assert run.steps[1]["reward/model_failures/http_error"] == 4
        steps = 0
        with pytest.raises(RewardError, match=r"http_error: .*status 500"):
            train(*settings, "reward_model.reward_kwargs.on_failure=raise")
    finally:
        server.stop()
    with pytest.raises(RewardError, match=r"none of the 4 .* could be scored.*unreachable"):
        train(*settings)


JUDGED = ("reward_model.enable=true", "reward_model.type=judge")


def test_a_served_judge_grades_the_rows_of_its_style(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    server = ScoringServer(digits_judge)
    try:
        run = train(
            *JUDGED,
            f"reward_model.server.url={server.url}",
            "reward_model.server.model=big",
            "reward_model.judge.votes=2",
            "reward_model.judge.temperature=0.7",
            f"data.train_files={styled(tmp_path, 'rule', 'model')}",
        )
    finally:
        server.stop()
    for row in run.rollouts(1) + run.rollouts(2):
        text, model = scored_text(row), sum(row["reward/model"])
        if row["data_source"] == "lexical":
            assert (model, row["judge"]) == (0, None)
        else:
            assert model == pytest.approx(sum(map(str.isdigit, text)) / max(len(text), 1), abs=1e-5)
            assert row["judge"].startswith("Score: ")
            assert row["judge_votes"] == 2


def test_a_judge_of_our_own_engine_that_gives_no_grade_is_counted(
    train: Callable[..., Run], task: Task
) -> None:
    """A random model writes no grade: the first batch of failures stops the run and says why."""
    settings = (*JUDGED, f"reward_model.model.path={task.model}")
    with pytest.raises(
        RewardError, match=r"none of the 8 .*unparsed: the judge.s text was cut off"
    ):
        train(*settings, "reward_model.judge.max_tokens=4")
    run = train(*settings, "reward_model.judge.score_after=a", "reward_model.judge.highest=1e9",
                "reward_model.judge.max_tokens=24", "reward_model.judge.temperature=1.0",
                "reward_model.judge.votes=8")  # fmt: skip
    rows = run.rollouts(1) + run.rollouts(2)
    graded = [row for row in rows if row["judge"] is not None]
    assert graded
    assert all((sum(row["reward/model"]) > 0) <= (row["judge_votes"] > 0) for row in graded)
    assert run.steps[0]["reward/model_failures/unparsed"] > 0


def two_rows() -> DataProto:
    return DataProto.from_dict(
        {"responses": torch.zeros(2, 3), "response_mask": torch.ones(2, 3)}, {"uid": np.arange(2)}
    )


class TinyZerosManager:
    """Takes the batch alone, and returns the rewards alone."""

    def __call__(self, data: DataProto) -> torch.Tensor:
        rewards = torch.zeros(data.batch["responses"].shape, dtype=torch.float64)
        rewards[:, -1] = torch.arange(len(data))
        return rewards


def test_a_manager_that_returns_rewards_alone_scores() -> None:
    scored = score(two_rows(), TinyZerosManager(), None, RewardModelConfig())
    assert scored.batch["token_level_scores"].tolist() == [[0, 0, 0], [0, 0, 1]]
    assert scored.batch["token_level_scores"].dtype == torch.float32


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (None, r"a NoneType of shape \(\) as rewards; return a tensor of shape \(2, 3\)"),
        (torch.zeros(2), r"a Tensor of shape \(2,\) as rewards"),
        (torch.tensor([[0.0] * 3, [0, torch.nan, 0]]), "reward for row 1 that is not finite"),
        (
            {"reward_tensor": torch.zeros(2, 3), "reward_extra_info": {"a": [1]}},
            r"\[1\] as reward_extra_info\['a'\]; return one value for each of the 2 rows",
        ),
        ({"reward_tensor": torch.zeros(2, 3), "reward_extra_info": {"a": 0.5}}, "one value"),
    ],
)
def test_what_a_manager_of_ones_own_returns_wrongly_is_named(result: Any, problem: str) -> None:
    def manager(data: DataProto, return_dict: bool = False) -> Any:
        return result

    with pytest.raises(RewardError, match=f"the reward manager manager .*{problem}"):
        score(two_rows(), manager, None, RewardModelConfig())
