"""HellaSwag (choose one of four endings of a text) and HH-RLHF (pairs of replies)."""

from __future__ import annotations

import re

from hone.data.preprocess.sources import Source, Splits, UpstreamDataset, task_row
from hone.data.rows import DataError
from hone.types import Row

HELLASWAG = UpstreamDataset(
    ("hellaswag",),
    "Rowan/hellaswag",
    splits={"train": ("train",), "validation": ("validation", "val", "dev"), "test": ("test",)},
)


def remove_wikihow_tags(text: str) -> str:
    """Removes the tags in brackets that HellaSwag's WikiHow texts contain."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def hellaswag_row(record: Row, split: str, index: int) -> Row:
    label = record.get("label")
    text = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    row = task_row(HELLASWAG.hub_path, remove_wikihow_tags(text), "nlp", None, split, index)
    row["reward_model"] = {
        "style": "model",
        "eval": "multiple_choice",
        "ground_truth": int(label) if label not in (None, "") else None,
        "choices": [remove_wikihow_tags(ending) for ending in record["endings"]],
    }
    return row


HH_RLHF = UpstreamDataset(
    ("full_hh_rlhf", "hh_rlhf"),
    "Dahoas/full-hh-rlhf",
    splits={"train": ("train", "harmless_base_train", "harmless_base_test")},
)
SUBSETS = ("sft", "rm", "rl")
_REPLY_PREFIX = "\n\nAssistant:"


def split_pair(record: Row) -> Row | None:
    """Returns {prompt, chosen, rejected}; None if the transcripts differ before the last reply."""
    if record.get("prompt"):
        return {name: record[name] for name in ("prompt", "chosen", "rejected")}
    chosen, rejected = record["chosen"], record["rejected"]
    end = chosen.rfind(_REPLY_PREFIX) + len(_REPLY_PREFIX)
    prompt = chosen[:end]
    if _REPLY_PREFIX not in chosen or not rejected.startswith(prompt):
        return None
    replies = chosen[end:], rejected[end:]
    if any(
        "\n\nHuman:" in reply or _REPLY_PREFIX in reply or not reply.strip() for reply in replies
    ):
        return None
    return {"prompt": prompt, "chosen": replies[0], "rejected": replies[1]}


def hh_rlhf_splits(source: Source, *, subsets: str = ",".join(SUBSETS)) -> Splits:
    """Builds rows by `subset/split`: sft/train, rm/train (75 %), rm/test (25 %), rl/train."""
    subset_names = [name.strip() for name in subsets.split(",") if name.strip()]
    if not subset_names or not set(subset_names) <= set(SUBSETS):
        raise DataError(f"hh-rlhf has the subsets {', '.join(SUBSETS)}, not {subsets!r}")
    records = source.existing_splits(HH_RLHF)["train"]
    pairs = [pair for pair in map(split_pair, records) if pair is not None]
    num_train = round(len(pairs) * 0.75)
    sft = [
        {"prompt": row["prompt"], "response": row[kind]}
        for row in pairs
        for kind in ("chosen", "rejected")
    ]
    rl = [
        task_row(
            HH_RLHF.hub_path, row["prompt"], "alignment", row["chosen"], "train", i, style="model"
        )
        for i, row in enumerate(pairs)
    ]
    splits = {
        "sft/train": sft,
        "rm/train": pairs[:num_train],
        "rm/test": pairs[num_train:],
        "rl/train": rl,
    }
    return {name: rows for name, rows in splits.items() if name.split("/")[0] in subset_names}
