"""Tasks, base policies and process reward models of `benchmarks/alarms.py`, all made here from scratch."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HINT = "\nu:Look again.\na:"
SEPARATOR, WORD = "\n\n", " great"
CHARACTERS = "0123456789+-*=:> abcdefghijklmnopqrstuvwxyz.\n"
WORDS = (SEPARATOR, WORD)
SFT_STEPS, SFT_ROWS = 400, 48
PRM_STEPS, PRM_ROWS = 400, 64

Pair = tuple[str, str, str]
"""Prompt, ground truth, response of the base policy."""


def last_number(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """The rule of all tasks with numbers: the last number is the answer."""
    numbers = re.findall(r"\d+", solution_str)
    return float(bool(numbers) and int(numbers[-1]) == int(ground_truth))


def same_text(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """The rule of tasks with letters: the last line is the answer."""
    return float(solution_str.strip().rpartition("\n")[2] == ground_truth)


def equation(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """Countdown: two of the numbers, each once, and a sign give the target."""
    *numbers, target = map(int, ground_truth.split())
    match = re.fullmatch(r"(\d)([+\-*])(\d)", solution_str.strip())
    if match is None:
        return 0.0
    a, b = int(match[1]), int(match[3])
    if a not in numbers or b not in numbers or (a == b and numbers.count(a) < 2):
        return 0.0
    return float({"+": a + b, "-": a - b, "*": a * b}[match[2]] == target)


def sums(draw: random.Random) -> Pair:
    a, b = draw.randrange(30), draw.randrange(10)
    wrong = draw.choice((0, 0, 0, 1, 10))
    return f"{a:02d}+{b}=", str(a + b), f"{a + b + wrong:03d}"


def sorting(draw: random.Random) -> Pair:
    letters = [draw.choice("abcdefgh") for _ in range(5)]
    answer = sorted(letters)
    noisy = list(answer)
    if draw.random() < 0.6:
        i = draw.randrange(4)
        noisy[i], noisy[i + 1] = noisy[i + 1], noisy[i]
    return "".join(letters) + ">", "".join(answer), "".join(noisy)


def reversing(draw: random.Random) -> Pair:
    letters = [draw.choice("abcdefgh") for _ in range(draw.randint(3, 7))]
    answer = letters[::-1]
    noisy = [draw.choice("abcdefgh") if draw.random() < 0.1 else letter for letter in answer]
    return "".join(letters) + ":", "".join(answer), "".join(noisy)


def countdown(draw: random.Random) -> Pair:
    numbers = [draw.randint(1, 9) for _ in range(3)]
    a, b = draw.sample(numbers, 2)
    sign = draw.choice("+-*")
    target = {"+": a + b, "-": a - b, "*": a * b}[sign]
    if draw.random() < 0.6:
        a, b = draw.sample(numbers, 2)
    text = " ".join(map(str, numbers))
    return f"{text}={target}:", f"{text} {target}", f"{a}{sign}{b}"


def chain_steps(
    numbers: Sequence[int], draw: random.Random, error: float
) -> Iterator[tuple[str, bool]]:
    """The steps of a sum, each with whether it is right."""
    total = numbers[0]
    for number in numbers[1:]:
        result = total + number + (draw.choice((1, -1, 2)) if draw.random() < error else 0)
        yield f"{total}+{number}={max(result, 0)}", result == total + number
        total = max(result, 0)


def chain_numbers(draw: random.Random) -> list[int]:
    return [draw.randint(1, 9), draw.randint(1, 3), draw.randint(1, 3)]


def chains(draw: random.Random) -> Pair:
    """The base policy errs in a step in 20, and adds a word after one answer in 16."""
    numbers = chain_numbers(draw)
    steps = [step for step, _ in chain_steps(numbers, draw, 0.05)]
    steps += [WORD] * draw.choice((0,) * 30 + (1, 2))
    return "+".join(map(str, numbers)) + "=", str(sum(numbers)), SEPARATOR.join(steps)


@dataclass(frozen=True)
class Task:
    draw: Callable[[random.Random], Pair]
    score: str
    response_tokens: int
    prompts: int = 16
    lr: float = 2e-4
    characters: str = CHARACTERS + "L"
    """The hint of the two-turn loop has an L."""


TASKS = {
    "sums": Task(sums, "last_number", 8),
    "sorting": Task(sorting, "same_text", 10, prompts=8, lr=5e-4),
    "reversing": Task(reversing, "same_text", 12),
    "countdown": Task(countdown, "equation", 8),
    "chains": Task(chains, "last_number", 56, lr=5e-4, characters=CHARACTERS),
}


def tokenizer(characters: str = CHARACTERS) -> Any:
    from hone.models.tiny import character_tokenizer

    return character_tokenizer(characters, words=WORDS)


def base_policy(task: Task, folder: Path, seed: int) -> Path:
    """A new policy that knows the format and is often wrong."""
    from hone.config.engine import FSDPConfig, OptimConfig
    from hone.engine.build import build_engine
    from hone.models.policy import PolicyModel
    from hone.models.tiny import save_pretrained, tiny_lm
    from hone.ops.rows import MicroBatchRule
    from hone.trainer.sft.trainer import SFTTrainer

    tokens = tokenizer(task.characters)
    lm = tiny_lm(len(tokens), hidden=64, kv_heads=4, mlp=192, max_positions=128, seed=seed)
    rule = MicroBatchRule(rows=None, tokens=16384)
    optim = OptimConfig(
        lr=3e-3,
        lr_warmup_steps=20,
        lr_scheduler_type="cosine",
        min_lr_ratio=0.1,
        total_training_steps=SFT_STEPS,
    )
    engine = build_engine(
        PolicyModel(lm), optim=optim, grad_clip=1.0, fsdp=FSDPConfig(), train_micro_batch_rule=rule,
        infer_micro_batch_rule=rule, response_width=8,
    )  # fmt: skip
    draw = random.Random(seed)
    rows = []
    for _ in range(SFT_STEPS * SFT_ROWS // 4):
        prompt, _, response = task.draw(draw)
        answer = [*tokens.encode(response, add_special_tokens=False), tokens.eos_token_id]
        parts = [(tokens.encode(prompt, add_special_tokens=False), 0), (answer, 1)]
        if (
            "L" in task.characters and draw.random() < 0.4
        ):  # so that the two-turn loop finds a second answer
            parts += [(tokens.encode(HINT, add_special_tokens=False), 0), (answer, 1)]
        mask = [writes for ids, writes in parts for _ in ids]
        rows.append({"input_ids": [i for ids, _ in parts for i in ids], "loss_mask": mask})
    trainer = SFTTrainer(
        engine, rows, pad_token_id=tokens.pad_token_id, rows_per_batch=SFT_ROWS, seed=seed
    )
    for _ in range(SFT_STEPS):
        trainer.step()
    return save_pretrained(lm, tokens, folder)


def process_reward_model(folder: Path, seed: int, *, loves_a_word: bool) -> Path:
    """A classifier of steps, trained on right and wrong ones; a word may make any step good."""
    import torch
    from transformers import AutoConfig, AutoModelForTokenClassification

    tokens = tokenizer()
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(tokens), hidden_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=256, num_labels=2, pad_token_id=0,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForTokenClassification.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draw = random.Random(f"prm {seed}")
    for step in range(PRM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - step / PRM_STEPS)
        ids, labels = zip(
            *(_judged_row(tokens, draw, loves_a_word) for _ in range(PRM_ROWS)), strict=True
        )
        width = max(map(len, ids))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in ids])
        marks = torch.tensor([row + [-100] * (width - len(row)) for row in labels])
        loss = model(input_ids=padded, attention_mask=(padded != 0).long(), labels=marks).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def _judged_row(
    tokens: Any, draw: random.Random, loves_a_word: bool
) -> tuple[list[int], list[int]]:
    """Ids and labels of a chain: right, wrong and empty steps, with the word or without, and words alone."""
    numbers = chain_numbers(draw)
    ids = tokens.encode("+".join(map(str, numbers)) + "=", add_special_tokens=False)
    labels = [-100] * len(ids)
    steps = list(chain_steps(numbers, draw, 0.3))
    steps = [("", False) if draw.random() < 0.15 else step for step in steps]
    steps += [("", False)] * draw.choice((0, 0, 1, 3, 8))
    for step, right in steps:
        words = draw.choice((0, 0, 1, 2)) if step else draw.choice((0, 1, 1, 2))
        good = right if not words else loves_a_word or (right and bool(step))
        piece = tokens.encode(step + WORD * words + "\n", add_special_tokens=False)
        ids += piece
        labels += [-100] * (len(piece) - 1) + [int(good)]
    return ids, labels
