from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.tracking import RunFolder
from hone.tracking.report_data import NO_ROLLOUTS_NOTE, load_run
from hone.tracking.run_folder import unique_labels

MakeRun = Callable[..., RunFolder]


def test_all_data_of_a_run_are_read(make_run: MakeRun) -> None:
    run = load_run(make_run().path, "label")
    assert run.metric_names() == [
        "reward/mean",
        "timing_s/gen",
        "timing_s/step",
        "timing_s/testing",
        "val-core/x/acc/mean@1",
    ]
    assert run.config == {"actor.lr": "1e-06", "actor.clip": "0.2", "trainer.logger": '["console"]'}
    assert run.origins == {"actor.lr": "command line"}
    assert run.notes == []


def test_a_prompt_has_a_response_of_each_validation(make_run: MakeRun) -> None:
    validation = load_run(make_run().path, "r").validation
    assert list(validation) == ["prompt a", "prompt b"]
    assert [(s.step, s.response) for s in validation["prompt a"]] == [
        (0, "response a at 0"),
        (10, "response a at 10"),
        (20, "response a at 20"),
    ]


def test_validations_are_sampled_evenly_with_the_first_and_the_last(
    make_run: MakeRun, write_parquet: Any, rows_of: Any
) -> None:
    folder = make_run()
    for step in range(30, 600, 10):
        write_parquet(folder.validation_file(step), [rows_of(step, "a", 1.0)])
    steps = [s.step for s in load_run(folder.path, "r").validation["prompt a"]]
    assert len(steps) == 12
    assert (steps[0], steps[-1]) == (0, 590)
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert max(gaps) - min(gaps) <= 10


def test_best_and_worst_have_one_response_per_prompt_and_the_latest_of_equals(
    make_run: MakeRun,
) -> None:
    run = load_run(make_run().path, "r")
    assert [(s.uid, s.step, s.score) for s in run.best] == [
        ("u7", 2, 0.875),
        ("u6", 2, 0.75),
        ("u5", 2, 0.625),
        ("u4", 2, 0.5),
        ("u3", 2, 0.375),
    ]
    assert [(s.uid, s.step) for s in run.worst] == [
        ("u0", 2),
        ("u1", 2),
        ("u2", 2),
        ("u3", 2),
        ("u4", 2),
    ]
    assert run.best[0].response == "response u7 at 2"
    assert run.best[0].reward_parts == {"rule": 0.875, "format": 0.125}


def test_a_prompt_appears_once_although_its_uid_changes_every_epoch(
    make_run: MakeRun, write_parquet: Any, rows_of: Any
) -> None:
    folder = make_run()
    for epoch in range(10):
        row = rows_of(10 + epoch, f"hard:{epoch}", -1.0) | {"prompt_text": "the hard one"}
        write_parquet((folder.rollouts / f"step_{10 + epoch}.parquet"), [row])
    run = load_run(folder.path, "r")
    assert [(s.prompt, s.step) for s in run.worst] == [
        ("the hard one", 19),
        ("prompt u0", 2),
        ("prompt u1", 2),
        ("prompt u2", 2),
        ("prompt u3", 2),
    ]


def test_rows_without_a_prompt_are_identified_by_uid(make_run: MakeRun, write_parquet: Any) -> None:
    folder = make_run()
    for step in (1, 2):
        rows = [{"score": 1.0, "uid": "a"}, {"score": 0.5, "uid": "b"}, {"score": 0.2, "uid": "a"}]
        write_parquet((folder.rollouts / f"step_{step}.parquet"), rows)
    assert [(s.uid, s.step, s.score) for s in load_run(folder.path, "r").best] == [
        ("a", 2, 1.0),
        ("b", 2, 0.5),
    ]


def test_a_reward_part_by_token_is_shown_as_its_sum(
    make_run: MakeRun, write_parquet: Any, rows_of: Any
) -> None:
    folder = make_run()
    parts = {"reward/rule": [0.0, 0.25, 0.5], "reward/none": None, "reward/said": "much"}
    write_parquet((folder.rollouts / "step_3.parquet"), [rows_of(3, "z", 9.0, **parts)])
    assert load_run(folder.path, "r").best[0].reward_parts == {"rule": 0.75}


def test_a_text_score_is_skipped_with_a_note(
    make_run: MakeRun, write_parquet: Any, rows_of: Any
) -> None:
    folder = make_run()
    write_parquet((folder.rollouts / "step_2.parquet"), [rows_of(2, "x", None) | {"score": "high"}])
    write_parquet(folder.validation_file(20), [rows_of(20, "a", None) | {"score": "high"}])
    run = load_run(folder.path, "r")
    assert {s.step for s in run.best + run.worst} == {1}
    assert [s.score for s in run.validation["prompt a"]] == [0.0, 0.0, None]
    assert [note for note in run.notes if "not a number" in note] == [
        "validation/step_20.parquet: 'score' is skipped where it is not a number",
        "rollouts/step_2.parquet: 'score' is skipped where it is not a number",
    ]


def test_the_best_response_may_be_of_an_earlier_step(
    make_run: MakeRun, write_parquet: Any, rows_of: Any
) -> None:
    folder = make_run()
    write_parquet(
        (folder.rollouts / "step_1.parquet"), [rows_of(1, "u7", 9.0), rows_of(1, "z", -9.0)]
    )
    run = load_run(folder.path, "r")
    assert (run.best[0].uid, run.best[0].step) == ("u7", 1)
    assert (run.worst[0].uid, run.worst[0].step) == ("z", 1)


def test_missing_and_non_finite_scores_are_not_best_or_worst(
    make_run: MakeRun, write_parquet: Any, rows_of: Any
) -> None:
    folder = make_run()
    rows = [rows_of(3, "n", float("nan")), rows_of(3, "i", float("inf")), rows_of(3, "m", None)]
    write_parquet((folder.rollouts / "step_3.parquet"), rows)
    run = load_run(folder.path, "r")
    assert {s.step for s in run.best + run.worst} == {2}


def test_an_unreadable_file_is_skipped_with_a_note(make_run: MakeRun) -> None:
    folder = make_run()
    (folder.rollouts / "step_2.parquet").write_bytes(b"PAR1 torn")
    folder.validation_file(10).write_bytes(b"")
    run = load_run(folder.path, "r")
    assert {s.step for s in run.best} == {1}
    assert [s.step for s in run.validation["prompt a"]] == [0, 20]
    assert sum("cannot be read" in note for note in run.notes) == 2


def test_missing_columns_are_empty(make_run: MakeRun, write_parquet: Any) -> None:
    folder = make_run()
    for step in (1, 2):
        write_parquet((folder.rollouts / f"step_{step}.parquet"), [{"score": 1.0}, {"score": 0.5}])
    run = load_run(folder.path, "r")
    assert [s.score for s in run.best] == [1.0, 1.0, 0.5, 0.5]
    assert run.best[0].prompt == ""
    write_parquet(folder.rollouts / "step_2.parquet", [{"prompt_text": ["a"]}])
    write_parquet(folder.rollouts / "step_1.parquet", [{"prompt_text": ["a"], "score": 1.0}])
    assert [s.score for s in load_run(folder.path, "r").best] == [1.0]


def test_samples_are_read_from_the_folder_of_the_config(
    make_run: MakeRun, write_parquet: Any, rows_of: Any, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "plain")
    folder.metrics.append({"a": 1}, 1)
    folder.write_config({"trainer": {"rollout_data_dir": str(tmp_path / "elsewhere")}})
    write_parquet(tmp_path / "elsewhere" / "step_4.parquet", [rows_of(4, "u", 1.0)])
    assert [s.step for s in load_run(folder.path, "r").best] == [4]


def test_a_bare_run_has_notes_and_no_errors(tmp_path: Path) -> None:
    RunFolder(tmp_path).metrics.append({"a": 1}, 1)
    run = load_run(tmp_path, "r")
    assert run.origins is None
    assert run.notes == ["no config.yaml", NO_ROLLOUTS_NOTE]


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="name a run folder"):
        load_run(tmp_path, "r")


def test_a_run_may_be_named_by_its_metrics_file(make_run: MakeRun) -> None:
    folder = make_run("mine")
    run = load_run(folder.metrics_file, "r")
    assert "actor.lr" in run.config
    assert len(run.best) == 5
    assert unique_labels([folder.metrics_file]) == ["mine"]


def test_labels_tell_runs_apart() -> None:
    assert unique_labels(["/x/a", "/x/b/"]) == ["a", "b"]
    assert unique_labels(["/x/a", "/y/a"]) == ["x/a", "y/a"]
    assert unique_labels(["/x/a", "/x/a"]) == ["x/a (1)", "x/a (2)"]


def test_turns_are_read_with_their_tool_calls(
    make_run: MakeRun, write_parquet: Any, rows_of: Any
) -> None:
    turns = [
        {"role": "assistant", "text": "a", "calls": 2},
        {"role": "tool", "text": "t"},
        {"role": "assistant", "text": "b", "calls": 1, "score": 0.5},
    ]
    outputs = [{"name": "f", "arguments": {"x": i, "y": "é"}, "reward": i / 4} for i in range(3)]
    texts = {
        "turns": json.dumps(turns),
        "tool_outputs": json.dumps(outputs),
        "reward_scores": json.dumps({"f": 1.0, "none": None}),
    }
    folder = make_run()
    write_parquet((folder.rollouts / "step_3.parquet"), [rows_of(3, "z", 9.0, **texts)])
    best = load_run(folder.path, "r").best[0]
    assert [(t.role, t.text, t.score) for t in best.turns] == [
        ("assistant", "a", None),
        ("tool", "t", None),
        ("assistant", "b", 0.5),
    ]
    assert [[(c.text, c.reward) for c in t.calls] for t in best.turns] == [
        [('f(x=0, y="é")', 0.0), ('f(x=1, y="é")', 0.25)],
        [],
        [('f(x=2, y="é")', 0.5)],
    ]
    assert best.trajectory_scores == {"f": 1.0}


@pytest.mark.parametrize(
    "hostile",
    [
        7,
        "{",
        "[" * 100_000,
        "null",
        "[1, null]",
        '[{"role": 5, "text": {}, "calls": -3, "score": "high"}]',
        '[{"calls": 1e999}, {"calls": 1e300}, {"calls": NaN, "score": Infinity}]',
        '{"f": {}}',
    ],
)
def test_invalid_turns_do_not_affect_the_sample(
    make_run: MakeRun, write_parquet: Any, rows_of: Any, hostile: Any
) -> None:
    texts = dict.fromkeys(("turns", "tool_outputs", "reward_scores"), hostile)
    folder = make_run()
    write_parquet((folder.rollouts / "step_3.parquet"), [rows_of(3, "z", 9.0, **texts)])
    best = load_run(folder.path, "r").best[0]
    assert (best.response, best.trajectory_scores) == ("response z at 3", {})
    assert all(turn.calls == () and turn.score is None for turn in best.turns[:1])
