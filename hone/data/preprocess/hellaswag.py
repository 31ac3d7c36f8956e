"""HellaSwag: which of four endings continues a text.

Leaves out scoring: a model compares the endings (`reward_model.style` is `model`).
"""

from __future__ import annotations

import re

from hone.data.preprocess.sources import Source, Upstream
from hone.types import Row

HELLASWAG = Upstream(
    folders=("hellaswag",),
    splits={
        "train": ("train",),
        "validation": ("validation", "val", "dev"),
        "test": ("test",),
    },
    hub="Rowan/hellaswag",
)


def cleaned(text: str) -> str:
    """Without WikiHow's marks in brackets."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def row(record: Row, split: str, index: int) -> Row:
    context = f"{record['ctx_a']} {record['ctx_b'].capitalize()}"
    label = record.get("label")
    return {
        "data_source": HELLASWAG.hub,
        "prompt": [{"role": "user", "content": cleaned(f"{record['activity_label']}: {context}")}],
        "ability": "nlp",
        "reward_model": {
            "style": "model",
            "eval": "multiple_choice",
            "ground_truth": int(label) if label not in (None, "") else None,
            "choices": [cleaned(ending) for ending in record["endings"]],
        },
        "extra_info": {"split": split, "index": index},
    }


def splits(source: Source) -> dict[str, list[Row]]:
    return {
        split: [row(record, split, index) for index, record in enumerate(records)]
        for split, records in source.need(HELLASWAG, "train", "validation", "test").items()
    }
