"""A subclass may override verl's methods of a data set; rows in memory and files of PURE."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from hone.config.data import DataConfig
from hone.data.dataset import RLHFDataset
from hone.data.reading import PURE_DATA_SOURCE, PURE_INSTRUCTION, collate_tensors, rows_of
from hone.data.rows import DataError, write_parquet
from hone.models.tiny import character_tokenizer
from hone.rewards.rows import is_missing
from hone.rewards.scores.table import default_compute_score

TOKENIZER = character_tokenizer()
ROWS = [
    {"data_source": "s", "prompt": f"{i}" * (i + 1), "reward_model": {}, "extra_info": {"index": i}}
    for i in range(4)
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    return str(path)


def test_a_data_config_outside_a_runs_config_is_usable(file: str) -> None:
    dataset = RLHFDataset(file, TOKENIZER, DataConfig(prompt_format="raw"))
    assert dataset.settings.trust_remote_code is False
    assert dataset[0]["raw_prompt"] == "0"


def test_a_config_in_verls_form_needs_a_few_keys_only(file: str) -> None:
    config = OmegaConf.create(
        {"prompt_key": "prompt", "prompt_format": "raw", "max_prompt_length": 3, "my_own_key": 5}
        | {"filter_overlong_prompts": True, "cache_dir": "~/.cache"}
    )
    data = RLHFDataset(data_files=file, tokenizer=TOKENIZER, config=config, processor=None)
    assert len(data) == 3
    assert data.config.my_own_key == 5  # type: ignore[union-attr]
    assert [row["prompt"] for row in data.dataframe] == ["0", "11", "222"]  # type: ignore[attr-defined]


def test_every_step_is_called_where_it_is_overridden(file: str) -> None:
    class Mine(RLHFDataset):
        def _download(self, use_origin_parquet: bool = False) -> None:
            self.files_read = list(self.data_files)
            self.data_files = [file]

        def _read_files_and_tokenize(self) -> None:
            super()._read_files_and_tokenize()
            self.dataframe = [{**row, "mine": 1} for row in self.dataframe]  # type: ignore[attr-defined]

        def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
            return [row for row in dataframe if len(row["prompt"]) < 4]

        def _build_messages(self, example: dict[str, Any], key: str) -> Any:  # type: ignore[override]
            return f"{example.pop(key)}!"

    config = OmegaConf.create({"prompt_format": "raw"})
    data = Mine(["elsewhere.parquet"], TOKENIZER, config)
    assert data.files_read == ["elsewhere.parquet"]
    assert [row["raw_prompt"] for row in (data[i] for i in range(len(data)))] == [
        "0!",
        "11!",
        "222!",
    ]
    assert data[0]["mine"] == 1


def test_a_frame_of_any_kind_may_be_set() -> None:
    class Table:
        def to_list(self) -> list[dict[str, Any]]:
            return ROWS[:2]

    frames: list[Callable[[], Any]] = [lambda: ROWS[:2], Table]
    for frame in frames:

        class Mine(RLHFDataset):
            def _read_files_and_tokenize(self) -> None:
                self.dataframe = frame()  # noqa: B023

        assert len(Mine("none", TOKENIZER, {"prompt_format": "raw"})) == 2


def test_an_override_that_reads_nothing_is_an_error() -> None:
    class Nothing(RLHFDataset):
        def _read_files_and_tokenize(self) -> None: ...

    class Empty(RLHFDataset):
        def _read_files_and_tokenize(self) -> None:
            self.dataframe = []

    with pytest.raises(DataError, match=r"must set self\.dataframe"):
        Nothing("none", TOKENIZER, {})
    with pytest.raises(DataError, match="has no rows"):
        Empty("none", TOKENIZER, {})


def test_verls_collate_stacks_tensors_alone() -> None:
    rows = [{"ids": torch.arange(3), "messages": [{"a": i}], "n": [1] * i} for i in (1, 2)]
    batch = collate_tensors(rows)
    assert batch["ids"].shape == (2, 3)
    assert batch["messages"].shape == batch["n"].shape == (2,)
    assert batch["messages"][1] == [{"a": 2}]


def test_a_missing_value_of_a_data_frame_is_none() -> None:
    class Frame:
        columns = ("prompt", "agent_name")

        def to_dict(self, orient: str) -> list[dict[str, Any]]:
            assert orient == "records"
            return [{"prompt": "a", "agent_name": float("nan")}]

    frame: Any = Frame()
    assert rows_of(frame) == [{"prompt": "a", "agent_name": None}]


def test_pures_rows_have_a_ground_truth_and_the_instruction(
    tokenizer: Any, config: Any, tmp_path: Path
) -> None:
    rows = [
        {"question": "1+1?", "answer": "\\frac{4}{2}", "data_source": None},
        {"question": "2+2?", "answer": "null", "data_source": "math"},
    ]
    write_parquet(rows, tmp_path / "train.parquet")
    settings = config(prompt_key="question", prompt_format="raw", max_prompt_length=400)
    first, second = RLHFDataset(str(tmp_path / "train.parquet"), tokenizer, settings)
    assert first["raw_prompt"] == f"1+1?\n\n{PURE_INSTRUCTION}"
    assert (first["data_source"], second["data_source"]) == (PURE_DATA_SOURCE, "math")
    truth = first["reward_model"]["ground_truth"]
    assert default_compute_score(PURE_DATA_SOURCE, "so\n\n\\boxed{2}", truth) == 1.0
    assert default_compute_score(PURE_DATA_SOURCE, "so\n\n\\boxed{3}", truth) == 0.0
    assert is_missing(second["reward_model"]["ground_truth"])


def test_rows_with_a_reward_model_stay_and_worked_solutions_are_refused(
    tokenizer: Any, config: Any, write_jsonl: Callable[..., str]
) -> None:
    settings = config(prompt_key="question")
    row = {"question": "1+1?", "answer": "so 2", "reward_model": {"ground_truth": "2"}}
    (unchanged,) = RLHFDataset(write_jsonl([row]), tokenizer, settings)
    assert unchanged["reward_model"] == {"ground_truth": "2"}
    assert unchanged["raw_prompt"][0]["content"] == "1+1?"
    raw = {"question": "1+1?", "answer": "so\n#### 2"}
    with pytest.raises(DataError, match=r"row 0: 'answer' is a worked solution of GSM8K"):
        RLHFDataset(write_jsonl([raw]), tokenizer, settings)
