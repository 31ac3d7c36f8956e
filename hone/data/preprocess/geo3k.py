"""Geometry3K: a diagram and a question about it, plain and with a tool.

Reads the hub's rows (images, problem, answer) or the upstream examples with PNG files beside them.
Leaves out decoding images: rows keep {bytes, path}.
"""

from __future__ import annotations

from hone.data.preprocess.sources import Source, Upstream
from hone.types import Row

GEO3K = Upstream(
    folders=("geometry3k", "geo3k"),
    splits={
        "train": ("train",),
        "validation": ("validation", "val"),
        "test": ("test",),
        "examples": ("examples",),
    },
    hub="hiyouga/geometry3k",
)
INSTRUCTION = (
    "Think the problem through first and write the reasoning inside <think> </think> tags. Then"
    " give the final answer in \\boxed{}."
)
TOOL_SYSTEM = (
    "You are a math expert. Solve the geometry problem you are given step by step. Before you state"
    " your final answer, use the `calc_geo3k_reward` tool to check it, and improve the answer where"
    " the tool says that it is wrong. Put the final answer in \\boxed{}."
)
# Of a source that has no splits, each fifth problem is held out.
HOLD_OUT_EVERY = 5


def plain_row(record: Row, split: str, index: int) -> Row:
    return {
        "data_source": GEO3K.hub,
        "prompt": [{"role": "user", "content": f"{record['problem']} {INSTRUCTION}"}],
        "images": record["images"],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": record["answer"]},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": record["answer"],
            "question": record["problem"],
        },
    }


def tool_row(record: Row, split: str, index: int) -> Row:
    row = plain_row(record, split, index)
    create_kwargs = {"ground_truth": record["answer"]}
    row["prompt"] = [{"role": "system", "content": TOOL_SYSTEM}, *row["prompt"]]
    row["extra_info"] |= {
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_geo3k_reward": {"create_kwargs": create_kwargs}},
    }
    return row


def from_example(record: Row, source: Source) -> Row:
    """Upstream's own record: a question with four choices and a diagram named by its id."""
    file = source.path(GEO3K, "examples")
    assert file is not None
    name = f"{record['id']}.png"
    image = (file.parent / "images" / name).read_bytes()
    choice = "ABCD".index(record["answer"])
    return {
        "problem": f"<image>{record['problem_text']}",
        "answer": record["choices"][choice],
        "images": [{"bytes": image, "path": name}],
    }


def records_by_split(source: Source) -> dict[str, list[Row]]:
    found = source.need(GEO3K, "train", "validation", "test", "examples")
    if "examples" not in found:
        return found
    examples = [from_example(record, source) for record in found.pop("examples")]
    held_out = examples[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY]
    kept = [one for i, one in enumerate(examples) if (i + 1) % HOLD_OUT_EVERY]
    return {"train": kept, "test": held_out, **found}


def splits(source: Source, *, with_tool: bool) -> dict[str, list[Row]]:
    make = tool_row if with_tool else plain_row
    return {
        split: [make(record, split, index) for index, record in enumerate(records)]
        for split, records in records_by_split(source).items()
    }
