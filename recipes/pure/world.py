"""Arithmetic chains with checkable steps: prompts, demonstrations, true step labels and the answer's score.

Usage: python recipes/pure/world.py OUT (writes train, test and sft .jsonl, and an untrained model base/)
       python recipes/pure/world.py OUT --label RESPONSES (labels the steps of responses for `hone train-prm`
       in OUT/train.jsonl; the responses to every tenth prompt are held out in OUT/test.jsonl)

`7a+5b+4=` is added modulo 10 from left to right, in steps apart by a blank line: `a7+5=2`, `b2+4=6` and
`\\boxed{6}`. Some demonstrations restate a value (`2=2`): such a step is right and brings nothing. Some steps
have a wrong result, so that the policy starts with errors to unlearn.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

SEPARATOR = "\n\n"
NAMES = "abcdefgh"
LENGTHS = (3, 4, 5)
"""Additions per chain; every file has equally many chains of each length."""
RESTATED, SLIP = 0.06, 0.1
"""Probabilities that a demonstration restates the value after a step, and that a step has a wrong result."""
_OPERATION = re.compile(r"([a-h])(\d)\+(\d)=(\d)")
_RESTATEMENT = re.compile(r"(\d)=(\d)")
_BOXED = re.compile(r"\\boxed\{(\d)\}")


def prompt_of(start: int, terms: list[int]) -> str:
    return f"{start}{''.join(f'{n}+{term}' for n, term in zip(NAMES, terms, strict=False))}="


def read_prompt(prompt: str) -> tuple[int, list[int]]:
    start, *terms = map(int, filter(str.isdigit, prompt))
    return start, terms


def demonstration(start: int, terms: list[int], rng: random.Random) -> list[str]:
    """Steps, some with a wrong result from which the next goes on, and restatements here and there."""
    steps, value = [], start
    for name, term in zip(NAMES, terms, strict=False):
        after = (value + term) % 10
        if rng.random() < SLIP:
            after = (after + rng.randrange(1, 10)) % 10
        steps.append(f"{name}{value}+{term}={after}")
        while rng.random() < RESTATED:
            steps.append(f"{after}={after}")
        value = after
    return [*steps, f"\\boxed{{{value}}}"]


def step_labels(prompt: str, steps: list[str]) -> list[bool]:
    """The truth about each step: it is right, and so are all before it."""
    value, terms = read_prompt(prompt)
    labels, done, right = [], 0, True
    for step in steps:
        if match := _OPERATION.fullmatch(step):
            name, (a, b, after) = match[1], map(int, match.groups()[1:])
            due = done < len(terms) and (name, b) == (NAMES[done], terms[done])
            right = right and due and a == value and (a + b) % 10 == after
            value, done = after, done + 1
        elif match := _RESTATEMENT.fullmatch(step):
            right = right and int(match[1]) == int(match[2]) == value
        else:
            match = _BOXED.fullmatch(step)
            right = right and match is not None and done == len(terms) and int(match[1]) == value
        labels.append(right)
    return labels


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    """1 for the right answer in the last step, else 0; beside it what the steps were."""
    steps = solution_str.split(SEPARATOR)
    match = _BOXED.fullmatch(steps[-1])
    score = float(match is not None and match[1] == str(ground_truth))
    return {
        "score": score,
        "acc": score,
        "steps": float(len(steps)),
        "restated": float(sum(_RESTATEMENT.fullmatch(step) is not None for step in steps)),
        "right_steps": float(sum(step_labels(extra_info["prompt"], steps)) / len(steps)),
    }


def row(index: int, start: int, terms: list[int]) -> dict[str, Any]:
    return {
        "data_source": "chains",
        "prompt": prompt_of(start, terms),
        "reward_model": {"style": "rule", "ground_truth": str((start + sum(terms)) % 10)},
        "extra_info": {"index": index, "prompt": prompt_of(start, terms)},
    }


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in rows), encoding="utf-8")


def make(out: Path, counts: dict[str, int], seed: int) -> None:
    """Writes the rows of every file; no chain is in two of them."""
    rng, seen = random.Random(seed), set()
    for name, count in counts.items():
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            start = rng.randrange(10)
            terms = [rng.randrange(1, 10) for _ in range(LENGTHS[len(rows) % len(LENGTHS)])]
            line = row(len(rows), start, terms)
            if line["prompt"] in seen:
                continue
            seen.add(line["prompt"])
            if name == "sft":
                steps = demonstration(start, terms, rng)
                line = {"prompt": line["prompt"], "response": SEPARATOR.join(steps)}
            rows.append(line)
        write(out / f"{name}.jsonl", rows)


def base_model(folder: Path, hidden: int, layers: int) -> None:
    """An untrained decoder with a token per character, separator and `\\boxed{`."""
    from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm

    tokenizer = character_tokenizer(f"0123456789+=}}\n{NAMES}", words=[SEPARATOR, "\\boxed{"])
    lm = tiny_lm(
        len(tokenizer), hidden=hidden, layers=layers, heads=4, mlp=2 * hidden, kv_heads=4,
        max_positions=256,
    )  # fmt: skip
    save_pretrained(lm, tokenizer, folder)


def label(responses: Path, out: Path, least: float) -> None:
    """Labels sampled responses (`hone generate`): one row per response with `completions` and `labels`."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    for number, line in enumerate(pq.read_table(responses).to_pylist()):
        for response in line["responses"]:
            steps = list(takewhile(bool, response.split(SEPARATOR)))  # an empty step has no token
            if steps:
                labels = step_labels(line["prompt"], steps)
                part = rows if number % 10 else held_out
                part.append({"prompt": line["prompt"], "completions": steps, "labels": labels})
    write(out / "train.jsonl", rows)
    write(out / "test.jsonl", held_out)
    rows += held_out
    labels = [label for row in rows for label in row["labels"]]
    steps_right = sum(labels) / len(labels)
    solved = sum(row["labels"][-1] and "boxed" in row["completions"][-1] for row in rows)
    solved /= len(rows)
    sys.stdout.write(
        f"{len(rows)} responses, {solved:.1%} solved, {steps_right:.1%} of the steps right\n"
    )
    if solved < least:
        sys.exit(f"the policy solves less than {least:.0%}; train the SFT longer (SFT=…)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--label", type=Path, metavar="RESPONSES")
    parser.add_argument("--least", type=float, default=0.3, help="share that must be solved")
    parser.add_argument("--train", type=int, default=9000)
    parser.add_argument("--test", type=int, default=300)
    parser.add_argument("--demonstrations", type=int, default=12000)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.label:
        label(given.label, given.out, given.least)
        return
    counts = {"test": given.test, "train": given.train, "sft": given.demonstrations}
    make(given.out, counts, given.seed)
    base_model(given.out / "base", given.hidden, given.layers)


if __name__ == "__main__":
    main()
