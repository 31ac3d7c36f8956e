"""`hone generate`: n samples a row, the same file after a kill, sharded over ranks or not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hone.config import load_config
from hone.data.rows import BadRows, DataError, read_rows
from hone.trainer.generation import Generation, GenerationError, Parts
from hone.trainer.ranks import Ranks

from .around_fixtures import prompts, tiny_model, write_jsonl

COUNT = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(tmp_path: Path, model: Path) -> list[str]:
    rows = write_jsonl(tmp_path / "rows.jsonl", prompts(COUNT))
    return [
        f"data.path={rows}",
        f"model.path={model}",
        "data.n_samples=3",
        "data.batch_size=2",
        "rollout.response_length=6",
        "rollout.prompt_length=32",
        f"data.output_path={tmp_path / 'out.parquet'}",
    ]


def generation(settings: list[str], ranks: Ranks | None = None) -> Generation:
    config = load_config(settings, config_name="generation")
    return Generation(config, ranks or Ranks())


def read(path: Path) -> list[dict[str, Any]]:
    return list(read_rows(path, BadRows("raise")).scan())


def test_each_row_gets_its_samples_and_keeps_its_columns(settings: list[str]) -> None:
    out = generation(settings).run()
    rows = read(out)
    assert [row["extra_info"]["index"] for row in rows] == list(range(COUNT))
    assert all(len(row["responses"]) == 3 for row in rows)
    assert len({text for row in rows for text in row["responses"]}) > COUNT
    assert all(
        1 <= length <= 6 and (reason == "stop" or length == 6)
        for row in rows
        for length, reason in zip(row["response_lengths"], row["stop_reasons"], strict=True)
    )
    assert not list(out.parent.glob("*.parts"))


def test_greedy_decoding_gives_the_reference_engines_text(settings: list[str]) -> None:
    greedy = [*settings, "rollout.do_sample=false", "data.n_samples=1"]
    ours = read(generation(greedy).run())
    slow = read(generation([*greedy, "rollout.name=hf"]).run())
    assert [row["responses"] for row in ours] == [row["responses"] for row in slow]


def test_a_killed_run_resumes_at_the_row_and_writes_the_same_file(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = generation(settings).run().read_bytes()
    append = Parts.append
    written: list[int] = []

    def dying(self: Parts, row: int, columns: dict[str, Any]) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(row)
        append(self, row, columns)

    monkeypatch.setattr(Parts, "append", dying)
    killed = generation(settings)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    file = next(killed.parts.folder.glob("rank_*.jsonl"))
    with file.open("a") as stream:
        stream.write('{"row": 5, "colu')  # torn by the kill
    redone: list[int] = []

    def counting(self: Parts, row: int, columns: dict[str, Any]) -> None:
        redone.append(row)
        append(self, row, columns)

    monkeypatch.setattr(Parts, "append", counting)
    assert generation(settings).run().read_bytes() == whole
    assert sorted(written + redone) == list(range(COUNT))


def test_parts_of_another_job_are_dropped(settings: list[str]) -> None:
    first = generation(settings)
    first.parts.open()
    first.parts.append(0, {"responses": ["stale"]})
    other = generation([*settings, "rollout.temperature=0.5"])
    rows = read(other.run())
    assert rows[0]["responses"] != ["stale"]


def test_ranks_share_the_rows_and_write_what_one_rank_writes(settings: list[str]) -> None:
    whole = generation(settings).run().read_bytes()

    class Together(Ranks):
        def wait_for_all(self) -> None:
            """The ranks of this test take turns."""

    second = generation(settings, Together(rank=1, world_size=2))
    generation(settings).parts.open()
    second.run()
    assert sorted(second.parts.finished()) == [1, 3, 5]
    # With rank 1's rows done, rank 0 of another size finishes the rest.
    assert generation(settings).run().read_bytes() == whole


@pytest.mark.slow
def test_two_started_ranks_write_the_same_file(settings: list[str]) -> None:
    whole = generation(settings).run().read_bytes()
    command = [sys.executable, "-m", "hone.trainer.main_generation", *settings]
    subprocess.run([*command, "trainer.n_gpus_per_node=2"], check=True, timeout=200)
    output = Path(settings[-1].partition("=")[2])
    assert output.read_bytes() == whole


def test_log_probs_are_kept_when_asked_for(settings: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    generation([*settings, "rollout.calculate_log_probs=true", f"data.output_path={out}"]).run()
    for line in out.read_text().splitlines():
        row = json.loads(line)
        assert [len(p) for p in row["log_probs"]] == row["response_lengths"]
        assert all(p <= 0 for ps in row["log_probs"] for p in ps)


def test_a_prompt_that_does_not_fit_is_named_before_anything_runs(settings: list[str]) -> None:
    with pytest.raises(DataError, match=r"row 0 has \d+ prompt tokens"):
        generation([*settings, "rollout.prompt_length=3"]).run()


def test_a_missing_prompt_column_is_named(settings: list[str]) -> None:
    with pytest.raises(DataError, match="no column 'question'"):
        generation([*settings, "data.prompt_key=question"]).run()


def test_an_output_of_an_unknown_kind_is_refused(settings: list[str]) -> None:
    with pytest.raises(GenerationError, match="must end in"):
        generation([*settings, "data.output_path=out.csv"])
