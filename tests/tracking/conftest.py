"""Fixtures: run folders for tests of the report, as a trainer writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.tracking import RunFolder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def sample(step: int, uid: str, score: float | None, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "uid": uid,
        "sample_index": 0,
        "prompt_text": f"prompt {uid}",
        "response_text": f"response {uid} at {step}",
        "score": score,
        **more,
    }


@pytest.fixture
def rows_of() -> Callable[..., dict[str, Any]]:
    return sample


@pytest.fixture
def write_parquet() -> Callable[[Path, list[dict[str, Any]]], None]:
    return write_rows


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunFolder]:
    """A small run: 20 steps of metrics, three validations, rollouts at steps 1 and 2, a config."""

    def make(name: str = "run", lr: float = 1e-6) -> RunFolder:
        run = RunFolder(tmp_path / name)
        config = {"actor": {"lr": lr, "clip": 0.2}, "trainer": {"logger": ["console"]}}
        run.write_config(config, {"actor.lr": "command line"})
        for step in range(1, 21):
            metrics = {"reward/mean": step / 20, "timing_s/gen": 3.0, "timing_s/step": 5.0}
            if step % 10 == 0:
                metrics |= {"val-core/x/acc/mean@1": step / 40, "timing_s/testing": 1.0}
            run.metrics.append(metrics, step)
        for step in (0, 10, 20):
            write_rows(run.validation_file(step), [sample(step, "a", 0.0), sample(step, "b", 1.0)])
        for step in (1, 2):
            parts = [{"reward/rule": i / 8, "reward/format": 0.125} for i in range(8)]
            rows = [sample(step, f"u{i}", i / 8, **parts[i]) for i in range(8)]
            write_rows((run.rollouts / f"step_{step}.parquet"), rows)
        return run

    return make
