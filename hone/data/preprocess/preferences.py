"""HellaSwag (choose one of four endings of a text) and HH-RLHF (pairs of replies)."""

from __future__ import annotations

import re

from hone.data.preprocess.sources import Source, Splits, Upstream, task_row
from hone.data.rows import DataError
from hone.types import Row

HELLASWAG = Upstream(
    ("hellaswag",),
    "Rowan/hellaswag",
    splits={"train": ("train",), "validation": ("validation", "val", "dev"), "test": ("test",)},
)


def clean(text: str) -> str:
    """Removes WikiHow's bracketed tags from the text."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def hellaswag_row(record: Row, split: str, index: int) -> Row:
    label = record.get("label")
    text = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    row = task_row(HELLASWAG.hub, clean(text), "nlp", None, split, index)
    row["reward_model"] = {
        "style": "model",
        "eval": "multiple_choice",
        "ground_truth": int(label) if label not in (None, "") else None,
        "choices": [clean(ending) for ending in record["endings"]],
    }
    return row


HH_RLHF = Upstream(
    ("full_hh_rlhf", "hh_rlhf"),
    "Dahoas/full-hh-rlhf",
    splits={"train": ("train", "harmless_base_train", "harmless_base_test")},
)
SUBSETS = ("sft", "rm", "rl")
_REPLY = "\n\nAssistant:"


def split_pair(record: Row) -> Row | None:
    """Returns {prompt, chosen, rejected}; None if the transcripts differ before the last reply."""
    if record.get("prompt"):
        return {name: record[name] for name in ("prompt", "chosen", "rejected")}
    chosen, rejected = record["chosen"], record["rejected"]
    end = chosen.rfind(_REPLY) + len(_REPLY)
    prompt = chosen[:end]
    if _REPLY not in chosen or not rejected.startswith(prompt):
        return None
    replies = chosen[end:], rejected[end:]
    if any("\n\nHuman:" in reply or _REPLY in reply or not reply.strip() for reply in replies):
        return None
    return {"prompt": prompt, "chosen": replies[0], "rejected": replies[1]}


def hh_rlhf(source: Source, *, subsets: str = ",".join(SUBSETS)) -> Splits:
    """Builds rows by `subset/split`: sft/train, rm/train (75 %), rm/test (25 %), rl/train."""
    names = [name.strip() for name in subsets.split(",") if name.strip()]
    if not names or not set(names) <= set(SUBSETS):
        raise DataError(f"hh-rlhf has the subsets {', '.join(SUBSETS)}, not {subsets!r}")
    records = source.need(HH_RLHF)["train"]
    pairs = [row for record in records if (row := split_pair(record)) is not None]
    n = round(len(pairs) * 0.75)
    sft = [
        {"prompt": row["prompt"], "response": row[kind]}
        for row in pairs
        for kind in ("chosen", "rejected")
    ]
    rl = [
        task_row(HH_RLHF.hub, row["prompt"], "alignment", row["chosen"], "train", i, style="model")
        for i, row in enumerate(pairs)
    ]
    splits = {"sft/train": sft, "rm/train": pairs[:n], "rm/test": pairs[n:], "rl/train": rl}
    return {name: rows for name, rows in splits.items() if name.split("/")[0] in names}
