from __future__ import annotations

from pathlib import Path

import pytest

from hone.tracking import Tracking

pytest.importorskip("tensorboard")


@pytest.fixture(autouse=True)
def _first_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard sorts the files of one second by the writer's number, as text: 9 after 10."""
    from tensorboard.summary.writer import event_file_writer

    counter = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)


def read(folder: Path) -> object:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_scalars_and_samples_reach_the_event_file(tmp_path: Path) -> None:
    with Tracking("p", "e", "tensorboard", {}, tmp_path) as tracking:
        tracking.log({"reward/mean": 0.5}, 1)
        tracking.log({"reward/mean": 0.75}, 2)
        tracking.log_samples("val", [{"response": "# a\n<b>", "score": 1.0}], 2)
    assert tracking.failures == {}
    events = read(tmp_path / "tensorboard")
    scalars = events.Scalars("reward/mean")  # type: ignore[attr-defined]
    assert [(e.step, e.value) for e in scalars] == [(1, 0.5), (2, 0.75)]
    (text,) = events.Tensors("val/0/text_summary")  # type: ignore[attr-defined]
    markdown = text.tensor_proto.string_val[0].decode()
    assert "    # a\n    <b>" in markdown  # indented, so it is code and not markup


def test_a_resumed_run_replaces_the_repeated_steps(tmp_path: Path) -> None:
    with Tracking("p", "e", "tensorboard", {}, tmp_path) as tracking:
        for step in (1, 2, 3):
            tracking.log({"a": step}, step)
    with Tracking("p", "e", "tensorboard", {}, tmp_path, resumed_from=1) as tracking:
        tracking.log({"a": 20}, 2)
    scalars = read(tmp_path / "tensorboard").Scalars("a")  # type: ignore[attr-defined]
    assert [(e.step, e.value) for e in scalars] == [(1, 1.0), (2, 20.0)]


def test_a_validation_of_an_earlier_checkpoint_hides_no_later_step(tmp_path: Path) -> None:
    with Tracking("p", "e", "tensorboard", {}, tmp_path) as tracking:
        for step in (1, 2, 3):
            tracking.log({"a": step}, step)
    again = Tracking("p", "e", "tensorboard", {}, tmp_path, resumed_from=1, will_train=False)
    with again as tracking:
        tracking.log({"val": 7}, 1)
    scalars = read(tmp_path / "tensorboard").Scalars("a")  # type: ignore[attr-defined]
    assert [e.step for e in scalars] == [1, 2, 3]


def test_a_run_that_starts_anew_in_a_folder_hides_the_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", "")  # an empty variable names no folder
    for value in (1, 2):
        with Tracking("p", "e", "tensorboard", {}, tmp_path) as tracking:
            tracking.log({"a": value}, value)
    scalars = read(tmp_path / "tensorboard").Scalars("a")  # type: ignore[attr-defined]
    assert [(e.step, e.value) for e in scalars] == [(2, 2.0)]


def test_the_environment_variable_sets_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "elsewhere"))
    with Tracking("p", "e", "tensorboard", {}, None) as tracking:
        tracking.log({"a": 1}, 1)
    assert list((tmp_path / "elsewhere").iterdir())
