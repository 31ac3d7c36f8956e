"""Mistakes in data files."""

from __future__ import annotations

from pathlib import Path

from .cases import Mistake, eight, jsonl, row, train


def _folder(root: Path) -> None:
    (root / "data").mkdir()


MISTAKES = [
    Mistake(
        "a data file that is not there",
        train("data.train_files=no.parquet"),
        ("no.parquet does not exist", "data.train_files"),
    ),
    Mistake(
        "a folder in place of its files",
        train("data.train_files=data.parquet"),
        ("data.parquet", "is a folder", "name its files"),
        arrange=lambda root: (root / "data.parquet").mkdir(),
    ),
    Mistake(
        "a pattern that matches nothing",
        train("data.train_files=data/*.parquet"),
        ("no file matches 'data/*.parquet'", "data.train_files"),
        arrange=_folder,
    ),
    Mistake(
        "a CSV file",
        train("data.train_files=rows.csv"),
        ("rows.csv", "use one of .parquet, .jsonl"),
        files={"rows.csv": "prompt\n"},
    ),
    Mistake(
        "an empty file",
        train("data.train_files=empty.jsonl"),
        ("empty.jsonl: has no rows",),
        files={"empty.jsonl": ""},
    ),
    Mistake(
        "a line that is no JSON",
        train(),
        ("rows.jsonl, row 1", "not JSON"),
        files={"rows.jsonl": jsonl(row()) + '{"prompt": \n'},
    ),
    Mistake(
        "a file in Latin-1",
        train(),
        ("rows.jsonl, row 1", "not UTF-8", "byte 0xe9"),
        files={"rows.jsonl": jsonl(row()).encode() + b'{"prompt": "caf\xe9"}\n'},
    ),
    Mistake(
        "a parquet file that is none",
        train("data.train_files=rows.parquet"),
        ("rows.parquet: cannot be read",),
        files={"rows.parquet": b"PAR1 and no more"},
    ),
    Mistake(
        "columns of another trainer",
        train(),
        ("row 0: column 'prompt' (data.prompt_key) is missing", "the row has question, answer"),
        files={"rows.jsonl": jsonl({"question": "1+1=", "answer": "2"})},
    ),
    Mistake(
        "a number for a prompt",
        train(),
        ("row 0", "a string or a non-empty list of messages, got 5"),
        files={"rows.jsonl": eight(prompt=5)},
    ),
    Mistake(
        "a message without its text",
        train(),
        ("row 0", "'content' must be text"),
        files={"rows.jsonl": eight(prompt=[{"role": "user"}])},
    ),
    Mistake(
        "a misspelt role",
        train(),
        ("row 0", "role 'usr'", "use one of system, user, assistant"),
        files={"rows.jsonl": eight(prompt=[{"role": "usr", "content": "a"}])},
    ),
    Mistake(
        "a column that training writes",
        train(),
        ("row 0", "column 'values'", "rename it in the file"),
        files={"rows.jsonl": eight(values=[1.0])},
    ),
    Mistake(
        "ground truths of two kinds",
        train(),
        ("row 1", "reward_model.ground_truth is number, earlier rows have text"),
        files={
            "rows.jsonl": jsonl(row(), row(1, reward_model={"style": "rule", "ground_truth": 2}))
        },
    ),
    Mistake(
        "a reward_model that is text",
        train(),
        ("row 0", "column 'reward_model' must be an object, got text"),
        files={"rows.jsonl": eight(reward_model="42")},
    ),
    Mistake(
        "a data source that no score knows",
        train("custom_reward_function.path=null"),
        ("no scorer for data_source 'my/own'", "row 0", "custom_reward_function.path=FILE.py"),
    ),
    Mistake(
        "a misspelt data source",
        train("custom_reward_function.path=null"),
        ("'openai/gsm8'", "Did you mean 'openai/gsm8k'"),
        files={"rows.jsonl": eight(data_source="openai/gsm8")},
    ),
    Mistake(
        "prompts that are too long",
        train("data.max_prompt_length=4"),
        ("8 of 8 prompts have more than data.max_prompt_length=4 tokens", "row", "raise it"),
    ),
    Mistake(
        "prompts that are all filtered out",
        train("data.max_prompt_length=4", "data.filter_overlong_prompts=true"),
        ("all 8 prompts have more than data.max_prompt_length=4 tokens", "raise it"),
    ),
    Mistake(
        "a validation file that is not there",
        train("data.val_files=test.parquet"),
        ("test.parquet does not exist", "data.val_files=[] trains without validation"),
    ),
    Mistake(
        "messages for a model without a chat template",
        train("actor_rollout_ref.model.path=base"),
        ("row 0", "no chat template", "data.prompt_format=raw"),
        arrange=lambda root: _without_template(root),
    ),
    Mistake(
        "weights for files that are not there",
        train("data.dataset_weights=[0.5,0.5]"),
        ("data.dataset_weights", "1"),
    ),
]


def _without_template(root: Path) -> None:
    from .folders import copy_model

    base = copy_model(root, "base")
    (base / "chat_template.jinja").unlink()
