"""Programming tasks: HumanEval, MBPP, LeetCode and TACO, each with its tests.

`ground_truth` is JSON text, {"functional": source} or {"inputs", "outputs"}, because tests of
different shapes must share a column. Leaves out running them: hone.rewards and hone.sandbox.
"""

from __future__ import annotations

import ast
import json

from hone.data.preprocess.sources import Source, Upstream
from hone.types import JsonValue, Row

ASK = "Write the whole solution in one Python code block (```python)."
# Where the scorer puts the model's program, in a test that needs text before it.
CODE_MARK = "__CODE__"

HUMANEVAL = Upstream(("humaneval",), {"test": ("test",)}, "openai/openai_humaneval")
MBPP = Upstream(
    ("mbpp",),
    {
        "all": ("mbpp",),
        "train": ("train",),
        "validation": ("validation",),
        "test": ("test",),
    },
    "google-research-datasets/mbpp",
    "full",
)
LEETCODE = Upstream(
    ("leetcode",),
    {"train": ("train", "train_v0.2.0"), "test": ("test", "test_v0.3.1")},
    "newfacade/LeetCodeDataset",
)
TACO = Upstream(("taco",), {"test": ("test", "test_512")}, "likaixin/TACO-verified")


def _row(
    data_source: str,
    prompt: str,
    tests: JsonValue | dict[str, str],
    split: str,
    index: int,
    task_id: JsonValue = None,
) -> Row:
    info: Row = {"split": split, "index": index}
    if task_id is not None:
        info["task_id"] = str(task_id)
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(tests)},
        "extra_info": info,
    }


def humaneval_tests(record: Row) -> str:
    """The tests as one source. Functions that a prompt gives beside the one to write belong to the tests:
    they must not be the program's own when they check it."""
    given = ""
    try:
        tree = ast.parse(record.get("prompt") or "")
    except SyntaxError:
        tree = ast.Module([], [])
    tree.body = [n for n in tree.body if getattr(n, "name", None) != record["entry_point"]]
    if any(isinstance(node, ast.FunctionDef) for node in tree.body):
        given = ast.unparse(tree)
    return f"{given}\n{record['test']}\ncheck({record['entry_point']})\n"


def humaneval_splits(source: Source) -> dict[str, list[Row]]:
    rows = []
    for index, record in enumerate(source.need(HUMANEVAL, "test")["test"]):
        prompt = f"Complete this function.\n```python\n{record['prompt']}```\n{ASK}"
        tests = {"functional": humaneval_tests(record)}
        rows.append(_row("humaneval", prompt, tests, "test", index, record["task_id"]))
    return {"test": rows}


def mbpp_row(record: Row, split: str, index: int) -> Row:
    asserts = record["test_list"]
    setup = [*(record.get("test_imports") or ()), record.get("test_setup_code") or ""]
    prompt = f"{record.get('text') or record['prompt']}\nYour code should pass this test:\n"
    tests = {"functional": "\n".join([*filter(None, setup), *asserts])}
    return _row("mbpp", f"{prompt}{asserts[0]}\n{ASK}", tests, split, index, record["task_id"])


def mbpp_splits(source: Source) -> dict[str, list[Row]]:
    """Upstream's splits; its one file says in each record which it belongs to."""
    found = source.need(MBPP, "all", "train", "validation", "test")
    by_split: dict[str, list[Row]] = {name: found.get(name, []) for name in MBPP.splits}
    for record in by_split.pop("all"):
        name = {"val": "validation"}.get(record["split"], record["split"])
        if name in by_split:  # the ten records of split `prompt` are examples for prompts
            by_split[name].append(record)
    return {
        split: [mbpp_row(record, split, index) for index, record in enumerate(records)]
        for split, records in by_split.items()
        if records
    }


def leetcode_row(record: Row, split: str, index: int) -> Row:
    meta = record.get("meta") or {}
    task = record.get("problem_description") or meta.get("problem_description")
    task = task or record.get("query") or meta.get("question_title")
    starter = record.get("starter_code") or meta.get("lang_code") or meta.get("starter_code") or ""
    prompt = f"{task}\n```python\n{starter.rstrip()}\n```\n{ASK}" if starter else f"{task}\n{ASK}"
    source = f"{record['prompt']}\n{CODE_MARK}\n{record['test']}\ncheck({record['entry_point']})\n"
    tests = {"functional": source}
    return _row("leetcode", prompt, tests, split, index, record["task_id"])


def leetcode_splits(source: Source) -> dict[str, list[Row]]:
    return {
        split: [leetcode_row(record, split, index) for index, record in enumerate(records)]
        for split, records in source.need(LEETCODE, "train", "test").items()
    }


def taco_splits(source: Source) -> dict[str, list[Row]]:
    records = source.need(TACO, "test")["test"]
    return {
        "test": [
            _row("taco", record["prompt"], record["tests"], "test", index)
            for index, record in enumerate(records)
        ]
    }
