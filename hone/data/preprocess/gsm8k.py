"""GSM8K: grade-school maths. Plain rows, with a tool, with an interaction, and as conversations.

Leaves out scoring: the number after `####` is compared in hone.rewards.
"""

from __future__ import annotations

import re

from hone.data.preprocess.sources import Source, Upstream
from hone.data.rows import DataError
from hone.types import Row

GSM8K = Upstream(
    folders=("gsm8k", "openai/gsm8k"),
    splits={"train": ("train",), "test": ("test",)},
    hub="openai/gsm8k",
    config="main",
)
DATA_SOURCE = "openai/gsm8k"
SUFFIX = 'Let\'s think step by step and output the final answer after "####".'
TICKED_SUFFIX = "Let's think step by step and output the final answer after `####`."

TOOL_SYSTEM = (
    "You are a math expert. Solve the question you are given step by step. Before you state your"
    " final answer, use the `calc_gsm8k_reward` tool to check it, and improve the answer where the"
    " tool says that it is wrong. Put the final answer in the form `#### <answer>`."
)
INTERACTION_SYSTEM = (
    "You are a math expert. Solve the question you are given step by step, and put the final answer"
    " in the form `#### <answer>`. If you are told that the answer is wrong, think again."
)


def final_answer(answer: str) -> str:
    """The number after `#### `, without commas."""
    found = re.search(r"####\s*(-?[0-9.,]+)", answer)
    if found is None:
        raise DataError(f"a gsm8k answer has no '#### number': {answer[-80:]!r}")
    return found.group(1).replace(",", "")


def plain_row(record: Row, split: str, index: int) -> Row:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{record['question']} {SUFFIX}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_answer(record["answer"])},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": record["answer"],
            "question": record["question"],
        },
    }


def tool_row(record: Row, split: str, index: int) -> Row:
    row = plain_row(record, split, index)
    question = f"{record['question']} {TICKED_SUFFIX}"
    ground_truth = row["reward_model"]["ground_truth"]
    row["prompt"] = [
        {"role": "system", "content": TOOL_SYSTEM},
        {"role": "user", "content": question},
    ]
    row["extra_info"] |= {
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": ground_truth}}},
        "interaction_kwargs": {"query": question, "ground_truth": ground_truth},
    }
    return row


def agent_loop_row(record: Row, split: str, index: int) -> Row:
    return {"agent_name": "tool_agent", **tool_row(record, split, index)}


def interaction_row(record: Row, split: str, index: int) -> Row:
    row = plain_row(record, split, index)
    question = f"{record['question']} {TICKED_SUFFIX}"
    row["prompt"] = [
        {"role": "system", "content": INTERACTION_SYSTEM},
        {"role": "user", "content": question},
    ]
    row["extra_info"]["interaction_kwargs"] = {
        "name": "gsm8k",
        "query": question,
        "ground_truth": row["reward_model"]["ground_truth"],
    }
    return row


def conversation_row(record: Row, split: str, index: int) -> Row:
    return {
        "messages": [
            {"role": "user", "content": f"{record['question']} {SUFFIX}"},
            {"role": "assistant", "content": record["answer"]},
        ]
    }


KINDS = {
    "plain": plain_row,
    "tool": tool_row,
    "agent_loop": agent_loop_row,
    "interaction": interaction_row,
    "conversation": conversation_row,
}


def splits(source: Source, *, kind: str) -> dict[str, list[Row]]:
    make = KINDS[kind]
    return {
        split: [make(record, split, index) for index, record in enumerate(records)]
        for split, records in source.need(GSM8K, "train", "test").items()
    }
