"""Seconds from the start of a run to the end of its first step, with 100,000 rows to train on.

`scans_of_training_file` and `scans_of_validation_file` count how many times the rows of a file are read in
order; `fetched_rows` counts the rows that are read one by one. The lengths of prompts are not cached.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hone.config import load_config
from hone.data.prompts import FileRows
from hone.data.rows import write_parquet
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.trainer.main_ppo import run

TRAINING_ROWS, VALIDATION_ROWS = 100_000, 16
ALPHABET = "abcdefghijklmnopqrstuvwxyzW0123456789+=?., \n"


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Rows of the usual columns, with prompts of about 200 characters."""
    for index in range(count):
        question = f"What is {index} + {7 * index}? " + "think step by step and show it. " * 5
        yield {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(8 * index)},
            "extra_info": {"split": "train", "index": index, "question": question},
        }


def count_reads(reads: Counter[str]) -> None:
    """Counts the scans of each file, and the rows that are fetched one by one."""
    scan: Callable[..., Iterator[dict[str, Any]]] = FileRows.scan
    fetch = FileRows.__getitem__

    def counted_scan(self: FileRows, *arguments: Any) -> Iterator[dict[str, Any]]:
        reads[Path(self.path).stem] += 1
        return scan(self, *arguments)

    def counted_fetch(self: FileRows, index: int) -> dict[str, Any]:
        reads["fetched"] += 1
        return fetch(self, index)

    FileRows.scan, FileRows.__getitem__ = counted_scan, counted_fetch  # type: ignore[method-assign]


def seconds_to_first_step(folder: Path) -> tuple[float, Counter[str]]:
    """The seconds of a run of one step over these rows, and how often each file was read."""
    tokenizer = character_tokenizer(ALPHABET)
    lm = tiny_lm(len(tokenizer), hidden=32, layers=2, tie_embeddings=False, seed=3)
    model = save_pretrained(lm, tokenizer, folder / "model")
    for name, count in (("training", TRAINING_ROWS), ("validation", VALIDATION_ROWS)):
        write_parquet(list(rows(count)), folder / f"{name}.parquet")
    overrides = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/training.parquet",
        f"data.val_files={folder}/validation.parquet",
        "data.prompt_format=raw",
        "data.train_batch_size=4",
        "data.max_prompt_length=256",
        "data.max_response_length=4",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        "trainer.logger=[jsonl]",
        "trainer.device=cpu",
        f"trainer.default_local_dir={folder}/run",
    ]
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    reads: Counter[str] = Counter()
    count_reads(reads)
    started = time.perf_counter()
    run(load_config(overrides))
    return time.perf_counter() - started, reads


def main() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        seconds, reads = seconds_to_first_step(Path(folder))
    print(f"{TRAINING_ROWS:,} rows: {seconds:.1f} s to the end of step 1")
    for name in ("training", "validation"):
        print(f"  the {name} file was scanned {reads[name]} times")
    print(f"  {reads['fetched']:,} rows were fetched one by one")
    return {
        "seconds_to_step_1": seconds,
        "scans_of_training_file": float(reads["training"]),
        "scans_of_validation_file": float(reads["validation"]),
        "fetched_rows": float(reads["fetched"]),
    }


if __name__ == "__main__":
    main()
