"""HH-RLHF: preferences between two assistant replies, as SFT, reward-model and RL rows.

Reads the hub's table (prompt, response, chosen, rejected) or Anthropic's pairs of transcripts.
Leaves out the reward model itself.
"""

from __future__ import annotations

from hone.data.preprocess.sources import Source, Upstream
from hone.data.rows import DataError
from hone.types import Row

HH_RLHF = Upstream(
    folders=("full_hh_rlhf", "hh_rlhf"),
    splits={"train": ("train", "harmless_base_train", "harmless_base_test")},
    hub="Dahoas/full-hh-rlhf",
)
SUBSETS = ("sft", "rm", "rl")
_REPLY = "\n\nAssistant:"


def pair(record: Row) -> Row | None:
    """{prompt, chosen, rejected}; None for transcripts that part before the last reply."""
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


def sft_rows(pairs: list[Row]) -> list[Row]:
    return [
        {"prompt": one["prompt"], "response": one[kind]}
        for one in pairs
        for kind in ("chosen", "rejected")
    ]


def rl_row(one: Row, split: str, index: int) -> Row:
    return {
        "data_source": HH_RLHF.hub,
        "prompt": [{"role": "user", "content": one["prompt"]}],
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": one["chosen"]},
        "extra_info": {"split": split, "index": index},
    }


def splits(source: Source, *, subsets: str = ",".join(SUBSETS)) -> dict[str, list[Row]]:
    """Rows by `subset/split`: sft/train, rm/train (75 %), rm/test (25 %), rl/train."""
    chosen = [name.strip() for name in subsets.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in SUBSETS]
    if unknown or not chosen:
        raise DataError(f"hh-rlhf has the subsets {', '.join(SUBSETS)}, not {subsets!r}")
    records = source.need(HH_RLHF, "train")["train"]
    pairs = [made for record in records if (made := pair(record)) is not None]
    cut = round(len(pairs) * 0.75)
    every = {
        "sft/train": sft_rows(pairs),
        "rm/train": pairs[:cut],
        "rm/test": pairs[cut:],
        "rl/train": [rl_row(one, "train", index) for index, one in enumerate(pairs)],
    }
    return {name: rows for name, rows in every.items() if name.split("/")[0] in chosen}
