"""PURE's layout of rows, {question, answer, data_source?}, in the schema of verl."""

from __future__ import annotations

from dataclasses import replace

from hone.data.rows import DataError, FileRows, RowStore
from hone.types import Row

PROMPT_KEY = "question"
"""The `data.prompt_key` with which files are read in this layout."""
INSTRUCTION = (
    'Please reason step by step, separate the steps with "\\n\\n", and put the final answer within '
    "\\boxed{}."
)
SOURCE = "numina_olympiads"
"""Data source of rows without one, which PRIME's rule for mathematics scores, as in PURE."""


def in_verls_schema(store: RowStore, prompt_key: str) -> RowStore:
    """Returns the rows with a ground truth and an instruction; files with `reward_model` stay as they are."""
    if prompt_key != PROMPT_KEY:
        return store
    return RowStore([_converted(file) for file in store.files])


def _converted(file: FileRows) -> FileRows:
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
