"""MATH: competition problems whose answer is the last `\\boxed{…}` of the worked solution.

Leaves out scoring and normalisation: hone.rewards.
"""

from __future__ import annotations

from hone.data.preprocess.sources import Source, Upstream
from hone.types import Row

MATH = Upstream(
    folders=("math", "MATH-lighteval"),
    splits={"train": ("train",), "test": ("test",)},
    hub="DigitalLearningGmbH/MATH-lighteval",
)
SUFFIX = "Let's think step by step and output the final answer within \\boxed{}."


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` or `\\fbox{…}` with balanced braces, or `\\boxed x`."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    after = text[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if after.startswith(" "):
        return after[1:].split("$")[0].strip()
    depth = 0
    for position, character in enumerate(after):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return after[1:position] if character == "}" else None
    return None


def row(record: Row, split: str, index: int) -> Row | None:
    """None where the solution boxes nothing: there is no answer to compare with."""
    answer = last_boxed(record["solution"])
    if not answer:
        return None
    return {
        "data_source": MATH.hub,
        "prompt": [{"role": "user", "content": f"{record['problem']} {SUFFIX}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }


def splits(source: Source) -> dict[str, list[Row]]:
    return {
        split: [made for i, record in enumerate(records) if (made := row(record, split, i))]
        for split, records in source.need(MATH, "train", "test").items()
    }
