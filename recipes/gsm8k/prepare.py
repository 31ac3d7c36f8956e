"""GSM8K for this recipe: worked solutions for SFT, problems for RL, each plain and with a calculator.

The calculator's conversations follow from the annotations of the train split: `48/2 = <<48/2=24>>24`
becomes a call with `48/2`, the tool's answer `24`, and the sentence that goes on.

Usage: python recipes/gsm8k/prepare.py OUT [--source FOLDER]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hone.data.prepare import prepare
from hone.tracking import atomic_path

SYSTEM = (
    "Solve the problem step by step. For every calculation call the tool `calculator` with"
    ' <tool_call>{"name": "calculator", "arguments": {"expression": "48/2"}}</tool_call> and go on'
    ' with its result. Give the final answer after "####".'
)
ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>]*)>>")
ARITHMETIC = re.compile(r"[0-9+\-*/(). ]+")


def with_calls(question: str, answer: str) -> list[dict[str, str]]:
    """The worked solution as a conversation in which the calculator does the arithmetic."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    text, end = "", 0
    for annotation in ANNOTATION.finditer(answer):
        text += answer[end : annotation.start()]
        expression, value = annotation[1].strip(), annotation[2].strip()
        end = annotation.end()
        if not ARITHMETIC.fullmatch(expression) or not ARITHMETIC.fullmatch(value):
            continue
        call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
        messages += [
            {"role": "assistant", "content": f"{text}<tool_call>{call}</tool_call>"},
            {"role": "tool", "content": value},
        ]
        text = ""
    return [*messages, {"role": "assistant", "content": text + answer[end:]}]


def without_annotations(answer: str) -> str:
    return ANNOTATION.sub("", answer)


def tool_row(row: dict[str, Any]) -> dict[str, Any]:
    prompt = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": row["extra_info"]["question"]},
    ]
    return {**row, "agent_name": "tool_agent", "prompt": prompt}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", help="folder of GSM8K's files; the model hub if absent")
    arguments = parser.parse_args()
    out: Path = arguments.out
    source: str | None = arguments.source
    prepare("gsm8k", local_dir=out, source_dir=source, hub=source is None)
    rows = {
        split: pq.read_table(out / f"{split}.parquet").to_pylist() for split in ("train", "test")
    }
    train = rows["train"]
    files = {
        "sft": [
            {
                "messages": [
                    *row["prompt"],
                    {
                        "role": "assistant",
                        "content": without_annotations(row["extra_info"]["answer"]),
                    },
                ]
            }
            for row in train
        ],
        "sft_tools": [
            {"messages": with_calls(row["extra_info"]["question"], row["extra_info"]["answer"])}
            for row in train
        ],
        "train_tools": [tool_row(row) for row in train],
        "test_tools": [tool_row(row) for row in rows["test"]],
    }
    for name, table in files.items():
        with atomic_path(out / f"{name}.parquet") as temporary:
            pq.write_table(pa.Table.from_pylist(table), temporary)
        sys.stdout.write(f"{out / name}.parquet: {len(table)} rows\n")


if __name__ == "__main__":
    main()
