"""Converts rows of PURE, {question, answer, data_source?}, to verl's schema."""

from __future__ import annotations

from dataclasses import replace

from hone.data.rows import DataError, FileRows, RowStore
from hone.types import Row

PROMPT_KEY = "question"
"""The `data.prompt_key` of files in this layout."""
INSTRUCTION = (
    'Please reason step by step, separate the steps with "\\n\\n", and put the final answer within '
    "\\boxed{}."
)
SOURCE = "numina_olympiads"
"""Data source of rows without one, as in PURE."""


def to_verl_schema(store: RowStore, prompt_key: str) -> RowStore:
    """Adds ground truths and an instruction to files without `reward_model`."""
    if prompt_key != PROMPT_KEY:
        return store
    return RowStore([_convert_file(file) for file in store.files])


def _convert_file(file: FileRows) -> FileRows:
    first = file[0]
    if "answer" not in first or "reward_model" in first:
        return file
    rows: list[Row] = []
    for index, row in enumerate(file.scan()):
        question, answer = row.get(PROMPT_KEY), row.get("answer")
        if isinstance(answer, str) and "####" in answer:
            raise DataError(
                f"{file.where(index)}: 'answer' is a worked solution of GSM8K, not a final answer; "
                "convert the file with `hone data prepare gsm8k`"
            )
        if isinstance(question, str) and question:
            question = f"{question}\n\n{INSTRUCTION}"
        source = row.get("data_source") or SOURCE
        truth = {"style": "rule", "ground_truth": answer}
        rows.append({**row, PROMPT_KEY: question, "data_source": source, "reward_model": truth})
    return replace(file, source=rows)
