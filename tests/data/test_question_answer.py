from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.data.dataset import RLHFDataset
from hone.data.question_answer import DEFAULT_DATA_SOURCE, INSTRUCTION
from hone.data.rows import DataError, write_parquet
from hone.rewards.ground_truth import is_missing
from hone.rewards.scores.table import default_compute_score


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
    assert first["raw_prompt"] == f"1+1?\n\n{INSTRUCTION}"
    assert (first["data_source"], second["data_source"]) == (DEFAULT_DATA_SOURCE, "math")
    truth = first["reward_model"]["ground_truth"]
    assert default_compute_score(DEFAULT_DATA_SOURCE, "so\n\n\\boxed{2}", truth) == 1.0
    assert default_compute_score(DEFAULT_DATA_SOURCE, "so\n\n\\boxed{3}", truth) == 0.0
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
