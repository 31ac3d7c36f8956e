"""Programming tasks; tests are JSON text, because their types differ within one column."""

from __future__ import annotations

import ast
import json

from hone.data.preprocess.sources import Source, Splits, Upstream, rows_by_split, task_row
from hone.types import JsonValue, Row

ASK = "Write the whole solution in one Python code block (```python)."
# The scorer replaces this placeholder with the model's program.
CODE_MARK = "__CODE__"

HUMANEVAL = Upstream(("humaneval",), "openai/openai_humaneval", splits={"test": ("test",)})
MBPP = Upstream(
    ("mbpp",),
    "google-research-datasets/mbpp",
    "full",
    {"all": ("mbpp",), "train": ("train",), "validation": ("validation",), "test": ("test",)},
)
LEETCODE = Upstream(
    ("leetcode",),
    "newfacade/LeetCodeDataset",
    splits={"train": ("train", "train_v0.2.0"), "test": ("test", "test_v0.3.1")},
)
TACO = Upstream(("taco",), "likaixin/TACO-verified", splits={"test": ("test", "test_512")})


def _row(
    data_source: str, prompt: str, tests: JsonValue, split: str, index: int, **info: str
) -> Row:
    return task_row(data_source, prompt, "code", json.dumps(tests), split, index, **info)


def humaneval_tests(record: Row) -> str:
    """Returns the tests as one source, with the helper functions of the prompt."""
    helpers = ""
    try:
        tree = ast.parse(record.get("prompt") or "")
    except SyntaxError:
        tree = ast.Module([], [])
    tree.body = [n for n in tree.body if getattr(n, "name", None) != record["entry_point"]]
    if any(isinstance(node, ast.FunctionDef) for node in tree.body):
        helpers = ast.unparse(tree)
    return f"{helpers}\n{record['test']}\ncheck({record['entry_point']})\n"


def humaneval_row(record: Row, split: str, index: int) -> Row:
    prompt = f"Complete this function.\n```python\n{record['prompt']}```\n{ASK}"
    tests: JsonValue = {"functional": humaneval_tests(record)}
    return _row("humaneval", prompt, tests, split, index, task_id=str(record["task_id"]))


def mbpp_row(record: Row, split: str, index: int) -> Row:
    asserts = record["test_list"]
    setup = [*(record.get("test_imports") or ()), record.get("test_setup_code") or ""]
    task = f"{record.get('text') or record['prompt']}\nYour code should pass this test:\n"
    tests: JsonValue = {"functional": "\n".join([*filter(None, setup), *asserts])}
    prompt = f"{task}{asserts[0]}\n{ASK}"
    return _row("mbpp", prompt, tests, split, index, task_id=str(record["task_id"]))


def mbpp_splits(source: Source) -> Splits:
    """Builds upstream's splits; records of its single file name their split."""
    files = source.need(MBPP)
    splits: Splits = {name: files.get(name, []) for name in MBPP.splits}
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
    prompt = f"{task}\n```python\n{starter.rstrip()}\n```\n{ASK}" if starter else f"{task}\n{ASK}"
    source = f"{record['prompt']}\n{CODE_MARK}\n{record['test']}\ncheck({record['entry_point']})\n"
    tests: JsonValue = {"functional": source}
    return _row("leetcode", prompt, tests, split, index, task_id=str(record["task_id"]))


def taco_row(record: Row, split: str, index: int) -> Row:
    return _row("taco", record["prompt"], record["tests"], split, index)
