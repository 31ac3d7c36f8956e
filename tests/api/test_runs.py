"""Training, fine-tuning and evaluation from Python: nothing on disk first, the same runs underneath."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from rewards.scoring_server import ScoringServer, digits_judge

import hone
from hone.api.runs import _RunInputs
from hone.config import ConfigError
from hone.data.rows import DataError
from hone.rewards.failures import SetupError
from hone.trainer.interrupt import Interrupted

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
SMALL: dict[str, Any] = {"steps": 1, "n": 2, "max_tokens": 3, "batch_size": 4, "logger": ["jsonl"]}


def exact(completion: str, answer: str) -> float:
    return float(completion == answer)


def test_a_function_of_this_file_trains_on_rows_in_memory(tiny: Path, here: Path) -> None:
    result = hone.train(tiny, ROWS, exact, val=iter(ROWS[:2]), **SMALL)
    assert result.folder == Path("runs/train-1")
    assert [line["step"] for line in result.metrics] == [0, 1]
    assert "val-core/exact/reward/mean@1" in result.metrics[-1]
    assert result.policy.generate("1+1=", max_tokens=2)[0].token_ids
    evaluation = result.evaluate(n=2)
    assert (evaluation.sources["exact"].num_rows, evaluation.sources["exact"].num_responses) == (
        2,
        4,
    )
    assert result.evaluate(ROWS[:1], "arithmetic").rows[0]["scores"] == [0.0]
    saved = result.save("saved")
    with hone.LLM(saved) as llm:
        repeated, first = (m.generate("1+1=", n=2, max_tokens=3)[0] for m in (llm, result.policy))
    assert [o.token_ids for o in repeated.outputs] == [o.token_ids for o in first.outputs]


def test_a_result_is_shown_in_a_line_and_has_a_curve_and_a_report(tiny: Path, here: Path) -> None:
    result = hone.train(tiny, ROWS, exact, val=ROWS[:2], **SMALL)
    metric = "val-core/exact/reward/mean@1"
    before, after = (line[metric] for line in result.metrics)
    assert repr(result) == f"Trained('runs/train-1', {metric} {before:.4g} → {after:.4g})"
    picture = result.plot()
    assert picture.path == result.folder / "curve.png"
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert result.plot("response_length/mean", "critic/score/mean").path == picture.path
    assert metric in result.report().read_text()
    evaluation = result.evaluate(n=2)
    assert repr(evaluation).startswith("Evaluation(exact: mean ")
    assert repr(evaluation).endswith(" (2 rows, 4 responses))")
    assert len(repr(evaluation)) < 200


def test_fine_tuning_without_validation_shows_its_loss(tiny: Path, here: Path) -> None:
    result = hone.sft(tiny, ROWS, epochs=1)
    assert repr(result).startswith("Trained('runs/sft-1', train/loss ")
    assert result.plot().path.is_file()


def test_the_run_is_that_of_the_command_line(tiny: Path, here: Path) -> None:
    from hone import cli

    result = hone.train(tiny, ROWS, "arithmetic", **SMALL)
    config = yaml.safe_load((result.folder / "config.yaml").read_text())
    (file,) = config["data"]["train_files"]
    assert Path(file).parent == result.folder / "data"
    words = {
        "data.train_files": file, "data.max_response_length": 3, "data.train_batch_size": 4,
        "actor_rollout_ref.model.path": tiny, "actor_rollout_ref.rollout.n": 2,
        "trainer.total_training_steps": 1, "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": "by-hand",
    }  # fmt: skip
    assert cli.main(["train", *(f"{key}={value}" for key, value in words.items())]) == 0
    text, by_hand = ((p / "config.yaml").read_text() for p in (result.folder, Path("by-hand")))
    assert by_hand.replace(f"{result.folder}/data", "data").replace("by-hand", "F") == (
        text.replace(f"{result.folder}/data", "data").replace(str(result.folder), "F")
    )
    score = "critic/score/mean"
    assert hone.tracking.read_metrics("by-hand")[-1][score] == result.metrics[-1][score]  # type: ignore[attr-defined]


def test_a_notebooks_running_event_loop_is_no_obstacle(tiny: Path, here: Path) -> None:
    async def judge(completion: str) -> float:
        await asyncio.sleep(0)
        return float(len(completion))

    async def cell() -> hone.Trained:
        return hone.train(tiny, ["1+1=", "2+2="], judge, **SMALL | {"batch_size": 2})

    assert asyncio.run(cell()).metrics[-1]["critic/score/max"] > 0


def test_a_judge_is_a_reward(tiny: Path, here: Path) -> None:
    server = ScoringServer(digits_judge)
    try:
        judge = hone.Judge(url=server.url, model="big", template="{question}\n{response}")
        result = hone.train(tiny, ROWS, {judge: 2.0, exact: 1.0}, **SMALL)
    finally:
        server.stop()
    assert result.metrics[-1]["critic/score/max"] > 0
    prompts = [body["messages"][0]["content"].partition("<response-")[0] for body in server.bodies]
    assert set(prompts) <= {f"{row['prompt']}\n" for row in ROWS}


def test_files_of_verls_schema_are_read_where_they_lie(tiny: Path, here: Path) -> None:
    from hone.api.rows import to_prompt_row
    from hone.data.rows import write_parquet

    write_parquet(
        [to_prompt_row(row, i, "arithmetic") for i, row in enumerate(ROWS)], "rows.parquet"
    )
    result = hone.train(tiny, "rows.parquet", lambda solution_str: 1.0, **SMALL)
    assert result.config.data.train_files == ("rows.parquet",)
    assert not (result.folder / "data").exists()
    assert result.metrics[-1]["critic/score/mean"] == 1.0


def test_a_function_may_take_a_column_that_the_first_row_lacks(here: Path) -> None:
    rows = [{"prompt": "a", "reward_model": {}, "extra_info": extra} for extra in (None, {"x": 1})]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scorer = _RunInputs(lambda completion, x: x)  # type: ignore[misc]
    assert scorer.prepare("rows.jsonl", here, "train") == ["rows.jsonl"]
    assert scorer.score_function("s", "c", None, {"x": 1}) == 1  # type: ignore[misc]


def test_the_folder_of_an_earlier_run_resumes_it(tiny: Path, here: Path) -> None:
    first = hone.train(tiny, ROWS, exact, out="mine", **SMALL)
    resumed = hone.train(tiny, ROWS, exact, out="mine", **SMALL | {"steps": 2})
    assert (first.folder, len(resumed.metrics)) == (Path("mine"), 2)


def test_a_call_that_is_refused_leaves_nothing_behind(tiny: Path, here: Path) -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: hone.train(tiny, ROWS, exact, stepps=3), ConfigError, "stepps.*steps"),
        (lambda: hone.train(tiny, [{"text": 1}], exact), DataError, "row 0 has no column"),
        (lambda: hone.train(object(), ROWS, exact), ConfigError, "save it and pass its folder"),  # type: ignore[arg-type]
        (lambda: hone.train(tiny, ROWS, exact, out=__file__), ConfigError, "is a file"),
        (lambda: hone.train("no/such/model", ROWS, exact, **SMALL), Exception, "no/such/model"),
        (lambda: hone.train(tiny, ROWS, "gsm9k"), SetupError, "gsm8k"),
        (lambda: hone.train(tiny, ROWS, lambda completion, x, y: 1), SetupError, "x, y"),
        (lambda: hone.train(tiny, "rows.txt", exact), DataError, "rows.txt"),
        (lambda: hone.train(tiny, ["1="] * 4, **SMALL), DataError, "no reward: pass a function"),
        (lambda: hone.evaluate(tiny, ROWS, exact, pass_att=[1]), ConfigError, "pass_at"),
    ]
    for call, kind, sentence in wrong:
        with pytest.raises(kind, match=sentence):
            call()
    assert [p for p in here.rglob("*") if p.is_file()] == []


def test_a_function_that_prime_could_not_import_is_refused_in_a_sentence(
    tiny: Path, here: Path
) -> None:
    setting = {"reward_model.reward_manager": "prime"}
    with pytest.raises(Exception, match="local to another function, so a scoring process"):
        hone.train(tiny, ROWS, lambda completion, answer: 1.0, **SMALL, **setting)


def test_an_interrupt_says_how_to_go_on(
    tiny: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **keywords: Any) -> None:
        Path("mine/config.yaml").touch()  # the run has begun
        raise Interrupted(3)

    monkeypatch.setattr("hone.trainer.main_ppo.run", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 3; out='mine' resumes"):
        hone.train(tiny, ROWS, exact, out="mine", **SMALL)
    assert Path("mine/config.yaml").exists()


@pytest.mark.slow
def test_functions_of_a_session_score_on_ray_too(tiny: Path, here: Path) -> None:
    bonus = 2.0
    result = hone.train(tiny, ROWS, lambda text: bonus, **SMALL, controller="ray", device="cpu")
    assert result.metrics[-1]["critic/score/mean"] == bonus


def test_fine_tuning_takes_pairs_and_all_rows_are_a_batch_where_they_are_few(
    tiny: Path, here: Path
) -> None:
    quiet = {"logger": ["jsonl"]}
    pairs = [(row["prompt"], row["answer"]) for row in ROWS]
    result = hone.sft(tiny, pairs, val=pairs[:2], epochs=2, lr=1e-2, **quiet)
    assert result.config.data.train_batch_size == len(ROWS)
    assert [line["step"] for line in result.metrics] == [1, 2]
    assert "val/loss" in result.metrics[-1]
    Path("val.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    mixed = hone.sft(tiny, pairs, val="val.jsonl", steps=1, **quiet)
    assert "val/loss" in mixed.metrics[-1]
    resumed = hone.sft(result, [{"messages": _chat("1", "2")}] * 2, steps=1, **quiet)
    assert resumed.folder == Path("runs/sft-3")


def test_a_folder_that_was_there_stays_when_a_call_is_refused(tiny: Path, here: Path) -> None:
    Path("mine").mkdir()
    with pytest.raises(ConfigError, match="train_batch_size"):
        hone.train(tiny, ROWS, exact, out="mine", train_batch_size=-1)
    assert Path("mine").is_dir()


def _chat(question: str, answer: str) -> list[dict[str, str]]:
    turns = ("user", question), ("assistant", answer)
    return [{"role": role, "content": content} for role, content in turns]


def test_a_loaded_model_is_evaluated_as_it_is(tiny: Path, here: Path) -> None:
    with hone.LLM(tiny) as llm:
        result = hone.evaluate(llm, ROWS, exact, max_tokens=2)
        assert result.as_dict()["test_score/exact"] == 0.0
        with pytest.raises(ConfigError, match="already loaded: pass top_p"):
            hone.evaluate(llm, ROWS, exact, top_p=0.5)
        assert llm.generate("1")  # not closed by the evaluation
    assert not list(here.iterdir())


def test_files_of_verls_schema_may_have_another_prompt_column_and_extra_info_as_text(
    tiny: Path, here: Path
) -> None:
    row = {"question": "1+1=", "text": "2+2=", "data_source": "sums"}
    row |= {"reward_model": {"ground_truth": "2"}, "extra_info": '{"index": 3}'}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    with hone.LLM(tiny, prompt_key="text", response_length=2) as llm:
        result = hone.evaluate(llm, "rows.jsonl", lambda completion, index: float(index))
        assert result.rows[0]["scores"] == [3.0]
        assert result.rows[0]["responses"] == [llm.generate("2+2=", temperature=0)[0].text]
    with hone.LLM(tiny) as llm:
        result = hone.evaluate(llm, "rows.jsonl", lambda text: 1.0, max_tokens=2)
        assert result.rows[0]["responses"] == [
            llm.generate("1+1=", max_tokens=2, temperature=0)[0].text
        ]


@pytest.mark.slow
def test_every_example_of_the_page_runs(tiny: Path, here: Path) -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len(examples) == 6
    shutil.copytree(tiny, "MODEL")
    names: dict[str, Any] = {"__name__": "page"}
    for example in examples:
        exec(compile(re.sub(r"steps=\d+", "steps=1", example), "python.md", "exec"), names)
    assert Path("my-model/config.json").is_file()
    assert 0 <= names["scores"].sources["exact"].metrics["mean"].value <= 1


def test_the_names_of_the_package_are_listed_and_typed() -> None:
    assert {"train", "sft", "evaluate", "LLM", "Trained", "DataProto"} <= set(dir(hone))
    assert (Path(hone.__file__).parent / "py.typed").is_file()
    for name in hone.__all__:
        assert getattr(hone, name)


def test_pairs_and_labelled_responses_of_this_file_train_a_policy(tiny: Path, here: Path) -> None:
    pairs = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": "no"} for a in range(8)]
    settings: dict[str, Any] = {"steps": 2, "lr": 1e-2, "logger": ["jsonl"]}
    result = hone.dpo(tiny, pairs, val=pairs[:4], beta=0.3, **settings)
    assert result.folder == Path("runs/dpo-1")
    assert result.config.data.train_batch_size == 8
    assert result.metrics[-1]["val/loss"] < 0.6931
    assert result.policy.generate("1+1=", max_tokens=2)[0].token_ids
    labelled = [
        {"prompt": row["prompt"], "completion": row[key], "label": key == "chosen"}
        for row in pairs
        for key in ("chosen", "rejected")
    ]
    result = hone.dpo(tiny, labelled, loss_type="kto", **settings)
    assert result.metrics[-1]["train/rewards/margins"] > 0
