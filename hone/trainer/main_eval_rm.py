"""`python -m hone.trainer.main_eval_rm … key=value …` evaluates a reward model on pairs of responses.

The pairs are in `data.val_files`; `--folds N` cross-validates on N parts of `data.train_files` instead.
The keys are those of `hone train-rm`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.config import ConfigError, replace
from hone.config.sft import RMConfig
from hone.trainer.command_line import (
    check_output_file,
    check_output_folder,
    compose_arguments,
    require_keys,
    run_module,
)
from hone.trainer.main_eval_prm import check_single_rank, print_table, write_json
from hone.types import Row

MODULE = "hone.trainer.main_eval_rm"


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = build_parser().parse_known_args(arguments)
    composed = compose_arguments(overrides, schema="rm_trainer", program="hone eval-rm")
    files_key = "data.train_files" if options.folds else "data.val_files"
    require_keys(composed, {"model.path": "the reward model", files_key: "the files of pairs"})
    config: RMConfig = composed.config
    check_single_rank(config.world_size, "hone eval-rm")
    if options.out:
        check_output_file(options.out, "--out")
    if options.folds == 1 or options.folds < 0:
        raise ConfigError(f"--folds {options.folds}: use 2 or more")
    if options.folds:
        results = {"cross_validation": cross_validate(config, options.folds)}
    else:
        results = {"model": evaluate_model(config)}
    if options.baseline:
        pair_files = config.data.train_files if options.folds else config.data.val_files
        baseline_config = replace(config, "data.val_files", pair_files)
        baseline_config = replace(baseline_config, "model.path", options.baseline)
        results["baseline"] = evaluate_model(baseline_config)
    print_table(results)
    write_json(results, options.out)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hone eval-rm",
        usage="hone eval-rm [--folds N] [--baseline MODEL] [--out FILE] model.path=MODEL "
        "data.val_files=FILE [key=value …]",
        allow_abbrev=False,
        description="Score pairs of responses, or train and test on N parts of data.train_files in turn.",
        epilog="`hone config show --tree rm_trainer` lists the keys.",
    )
    parser.add_argument(
        "--folds", type=int, default=0, metavar="N", help="number of parts for cross-validation"
    )
    parser.add_argument("--baseline", metavar="MODEL", help="another model to evaluate")
    parser.add_argument("--out", metavar="FILE", help="JSON file for the results")
    return parser


def evaluate_model(config: RMConfig) -> dict[str, Any]:
    """Returns the accuracy of a model over all pairs of data.val_files."""
    from hone.data.pairs import PairDataset
    from hone.models.from_config import build_tokenizer
    from hone.trainer.ranks import Ranks
    from hone.trainer.sft.run import build_engine
    from hone.trainer.sft.tasks import PairTask
    from hone.trainer.sft.trainer import SFTTrainer

    tokenizer, task = build_tokenizer(config.model), PairTask()
    pairs = PairDataset(config.data.val_files, tokenizer, config.data, config.data.val_max_samples)
    pairs.encode_all()
    engine = build_engine(config, Ranks(), task, is_trained=False)
    pad_token_id = tokenizer.pad_token_id
    trainer = SFTTrainer(engine, pairs, pad_token_id=pad_token_id, batch_rows=1, seed=0, task=task)
    metrics = trainer.validate(pairs, config.data.train_batch_size)
    return _accuracy_result(
        round(metrics["accuracy"] * len(pairs)), len(pairs), dict(pairs.bad_rows.counts)
    )


def cross_validate(config: RMConfig, folds: int) -> dict[str, Any]:
    """Trains one model per fold on the other folds, and returns the accuracy over all folds.

    Pairs with the same prompt are in the same fold.
    """
    from hone.data.pairs import PairDataset
    from hone.models.from_config import build_tokenizer
    from hone.trainer.ranks import Ranks
    from hone.trainer.sft.run import SFTRun
    from hone.trainer.sft.tasks import PairTask

    run_folder = Path(config.trainer.default_local_dir).expanduser()
    check_output_folder(str(run_folder), "trainer.default_local_dir")
    dataset = PairDataset(config.data.train_files, build_tokenizer(config.model), config.data)
    good_rows = [dataset.store[position] for position in dataset.positions]
    openings = [dataset.pair(row).first_user_turn for row in good_rows]
    prompts = list(dict.fromkeys(openings))
    if len(prompts) < folds:
        raise ConfigError(f"--folds {folds}: the pairs have only {len(prompts)} different prompts")
    random.Random(config.trainer.seed).shuffle(prompts)
    fold_of_prompt = {prompt: i % folds for i, prompt in enumerate(prompts)}
    results, total_correct = [], 0
    for fold in range(folds):
        parts: dict[str, list[Row]] = {"train": [], "test": []}
        for row, opening in zip(good_rows, openings, strict=True):
            parts["test" if fold_of_prompt[opening] == fold else "train"].append(row)
        folder = run_folder / f"fold_{fold}"
        overrides: dict[str, Any] = {
            "trainer.default_local_dir": str(folder),
            "trainer.default_hdfs_dir": None,
        }
        for part, key in (("train", "data.train_files"), ("test", "data.val_files")):
            overrides[key] = (str(_write_jsonl(folder / f"{part}.jsonl", parts[part])),)
        fold_config = config
        for key, value in overrides.items():
            fold_config = replace(fold_config, key, value)
        run = SFTRun(fold_config, Ranks(), task=PairTask())
        run.fit()
        assert run.val_rows is not None
        metrics = run.trainer.validate(run.val_rows, config.data.train_batch_size)
        correct = round(metrics["accuracy"] * len(run.val_rows))
        results.append(_accuracy_result(correct, len(run.val_rows), {}) | {"loss": metrics["loss"]})
        total_correct += correct
    pooled_result = _accuracy_result(
        total_correct, sum(result["pairs"] for result in results), dict(dataset.bad_rows.counts)
    )
    return pooled_result | {"folds": {str(i): result for i, result in enumerate(results)}}


def _write_jsonl(path: Path, rows: Sequence[Row]) -> Path:
    from hone.data.rows import write_file

    with write_file(path) as temporary:
        temporary.write_text(
            "".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8"
        )
    return path


def _accuracy_result(correct: int, pairs: int, bad_row_counts: dict[str, int]) -> dict[str, Any]:
    """Returns the accuracy and its interval; `bad_row_counts` counts the bad rows by reason."""
    from hone.trainer.prm_metrics import wilson_estimate

    accuracy = wilson_estimate(correct, pairs)
    return {
        "pairs": pairs,
        "right": correct,
        "accuracy": accuracy.value,
        "low": accuracy.low,
        "high": accuracy.high,
        "left_out": bad_row_counts,
    }


if __name__ == "__main__":
    sys.exit(run_module(main, "rm_trainer", MODULE))
