"""Programming tasks; tests are JSON text, because their types differ within one column."""

from __future__ import annotations

import ast
import json

from hone.data.preprocess.sources import Source, Splits, UpstreamDataset, rows_by_split, task_row
from hone.types import JsonValue, Row

CODE_BLOCK_INSTRUCTION = "Write the whole solution in one Python code block (```python)."
CODE_PLACEHOLDER = "__CODE__"  # the text that the scorer replaces with the model's program

HUMANEVAL = UpstreamDataset(("humaneval",), "openai/openai_humaneval", splits={"test": ("test",)})
MBPP = UpstreamDataset(
    ("mbpp",),
    "google-research-datasets/mbpp",
    "full",
    {"all": ("mbpp",), "train": ("train",), "validation": ("validation",), "test": ("test",)},
)
LEETCODE = UpstreamDataset(
    ("leetcode",),
    "newfacade/LeetCodeDataset",
    splits={"train": ("train", "train_v0.2.0"), "test": ("test", "test_v0.3.1")},
)
TACO = UpstreamDataset(
    ("taco",),
    "likaixin/TACO-verified",
    splits={"train": ("train",), "test": ("test", "test_512")},
)


def _program_row(
    data_source: str, prompt: str, tests: JsonValue, split: str, index: int, **extra_info: str
) -> Row:
    return task_row(data_source, prompt, "code", json.dumps(tests), split, index, **extra_info)


def humaneval_tests(record: Row) -> str:
    """Returns the source of the tests, with the helper functions that the prompt defines."""
    helpers = ""
    try:
        module = ast.parse(record.get("prompt") or "")
    except SyntaxError:
        module = ast.Module([], [])
    module.body = [
        node for node in module.body if getattr(node, "name", None) != record["entry_point"]
    ]
    if any(isinstance(node, ast.FunctionDef) for node in module.body):
        helpers = ast.unparse(module)
    return f"{helpers}\n{record['test']}\ncheck({record['entry_point']})\n"


def humaneval_row(record: Row, split: str, index: int) -> Row:
    prompt = f"Complete this function.\n```python\n{record['prompt']}```\n{CODE_BLOCK_INSTRUCTION}"
    tests: JsonValue = {"functional": humaneval_tests(record)}
    return _program_row("humaneval", prompt, tests, split, index, task_id=str(record["task_id"]))


def mbpp_row(record: Row, split: str, index: int) -> Row:
    asserts = record["test_list"]
    setup = [*(record.get("test_imports") or ()), record.get("test_setup_code") or ""]
    task = f"{record.get('text') or record['prompt']}\nYour code should pass this test:\n"
    tests: JsonValue = {"functional": "\n".join([*filter(None, setup), *asserts])}
    prompt = f"{task}{asserts[0]}\n{CODE_BLOCK_INSTRUCTION}"
    return _program_row("mbpp", prompt, tests, split, index, task_id=str(record["task_id"]))


def mbpp_splits(source: Source) -> Splits:
    """Builds the upstream splits; if they are in one file, each record names its split."""
    existing_splits = source.existing_splits(MBPP)
    splits: Splits = {name: existing_splits.get(name, []) for name in MBPP.splits}
    for record in splits.pop("all"):
        name = {"val": "validation"}.get(record["split"], record["split"])
        if name in splits:  # skips split `prompt`, ten few-shot examples
            splits[name].append(record)
    return {split: rows for split, rows in rows_by_split(splits, mbpp_row).items() if rows}


def leetcode_row(record: Row, split: str, index: int) -> Row:
    meta = record.get("meta") or {}
    task = record.get("problem_description") or meta.get("problem_description")
    task = task or record.get("query") or meta.get("question_title")
    starter = record.get("starter_code") or meta.get("lang_code") or meta.get("starter_code") or ""
    prompt = (
        f"{task}\n```python\n{starter.rstrip()}\n```\n{CODE_BLOCK_INSTRUCTION}"
        if starter
        else f"{task}\n{CODE_BLOCK_INSTRUCTION}"
    )
    call = f"check({record['entry_point']})"
    test_source = f"{record['prompt']}\n{CODE_PLACEHOLDER}\n{record['test']}\n{call}\n"
    tests: JsonValue = {"functional": test_source}
    return _program_row("leetcode", prompt, tests, split, index, task_id=str(record["task_id"]))


def taco_row(record: Row, split: str, index: int) -> Row:
    if "input_output" in record:  # on the Hub
        starter = (record.get("starter_code") or "").rstrip()
        code = f"\n```python\n{starter}\n```" if starter else ""
        prompt = f"{record['question'].strip()}{code}\n{CODE_BLOCK_INSTRUCTION}"
        return task_row("taco", prompt, "code", record["input_output"], split, index)
    return _program_row("taco", record["prompt"], record["tests"], split, index)
