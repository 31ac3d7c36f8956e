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
DEFAULT_DATA_SOURCE = "numina_olympiads"
"""The data source of rows that have none, as in PURE."""


def to_verl_schema(store: RowStore, prompt_key: str) -> RowStore:
    """Converts the files that have PURE's columns; other files stay as they are."""
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
        source = row.get("data_source") or DEFAULT_DATA_SOURCE
        reward_model = {"style": "rule", "ground_truth": answer}
        columns = {"data_source": source, "reward_model": reward_model}
        rows.append({**row, PROMPT_KEY: question, **columns})
    return replace(file, content=rows)
