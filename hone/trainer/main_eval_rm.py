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
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from hone.data.pairs import PairDataset

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
    data = config.data
    if options.folds:
        if data.val_max_samples > 0:
            raise ConfigError(
                f"data.val_max_samples={data.val_max_samples} has no effect with --folds, which tests "
                "on every pair; data.train_max_samples limits the pairs"
            )
        results = {"cross_validation": cross_validate(config, options.folds)}
        # The baseline is evaluated on the pairs of all folds.
        config = replace(config, "data.val_files", data.train_files)
        config = replace(config, "data.val_max_samples", data.train_max_samples)
    else:
        results = {"model": evaluate_model(config)}
    if options.baseline:
        results["baseline"] = evaluate_model(replace(config, "model.path", options.baseline))
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
    from hone.models.from_config import build_tokenizer
    from hone.trainer.ranks import Ranks
    from hone.trainer.sft.run import build_engine
    from hone.trainer.sft.tasks import PairTask
    from hone.trainer.sft.trainer import SFTTrainer

    tokenizer, task = build_tokenizer(config.model), PairTask()
    pairs = _read_pairs(config, config.data.val_files or (), config.data.val_max_samples)
    engine = build_engine(config, Ranks(), task, is_trained=False)
    pad_token_id = tokenizer.pad_token_id
    trainer = SFTTrainer(
        engine, pairs, pad_token_id=pad_token_id, rows_per_batch=1, seed=0, task=task
    )
    metrics = trainer.validate(pairs, config.data.train_batch_size)
    num_correct = round(metrics["accuracy"] * len(pairs))
    return _accuracy_result(num_correct, len(pairs), dict(pairs.bad_rows.counts))


def cross_validate(config: RMConfig, folds: int) -> dict[str, Any]:
    """Trains one model per fold on the other folds, and returns the accuracy over all folds.

    Pairs with the same first user turn are in the same fold.
    """
    from hone.data.rows import write_file
    from hone.trainer.ranks import Ranks
    from hone.trainer.sft.run import SFTRun
    from hone.trainer.sft.tasks import PairTask

    run_folder = Path(config.trainer.default_local_dir).expanduser()
    check_output_folder(str(run_folder), "trainer.default_local_dir")
    dataset = _read_pairs(config, config.data.train_files, config.data.train_max_samples)
    good_rows = [dataset.store[position] for position in dataset.positions]
    first_turns = [dataset.pair(row).first_user_turn for row in good_rows]
    unique_turns = list(dict.fromkeys(first_turns))
    if len(unique_turns) < folds:
        raise ConfigError(
            f"--folds {folds}: the pairs have only {len(unique_turns)} different first user turns"
        )
    random.Random(config.trainer.seed).shuffle(unique_turns)
    fold_of_turn = {turn: i % folds for i, turn in enumerate(unique_turns)}
    fold_results, total_correct = [], 0
    for fold in range(folds):
        rows_by_split: dict[str, list[Row]] = {"train": [], "test": []}
        for row, turn in zip(good_rows, first_turns, strict=True):
            rows_by_split["test" if fold_of_turn[turn] == fold else "train"].append(row)
        folder = run_folder / f"fold_{fold}"
        fold_config = replace(config, "trainer.default_local_dir", str(folder))
        fold_config = replace(fold_config, "trainer.default_hdfs_dir", None)
        fold_config = replace(fold_config, "data.train_max_samples", -1)
        for split, key in (("train", "data.train_files"), ("test", "data.val_files")):
            file = folder / f"{split}.jsonl"
            lines = (json.dumps(row, default=str) + "\n" for row in rows_by_split[split])
            with write_file(file) as temporary:
                temporary.write_text("".join(lines), encoding="utf-8")
            fold_config = replace(fold_config, key, (str(file),))
        run = SFTRun(fold_config, Ranks(), task=PairTask())
        run.fit()
        assert run.val_rows is not None
        metrics = run.trainer.validate(run.val_rows, config.data.train_batch_size)
        num_correct = round(metrics["accuracy"] * len(run.val_rows))
        fold_result = _accuracy_result(num_correct, len(run.val_rows), {})
        fold_results.append(fold_result | {"loss": metrics["loss"]})
        total_correct += num_correct
    total_pairs = sum(result["pairs"] for result in fold_results)
    pooled_result = _accuracy_result(total_correct, total_pairs, dict(dataset.bad_rows.counts))
    return pooled_result | {"folds": {str(i): result for i, result in enumerate(fold_results)}}


def _read_pairs(config: RMConfig, files: Sequence[str], max_samples: int) -> PairDataset:
    """Reads and encodes the pairs of these files; bad pairs are left out, and counted."""
    from hone.data.pairs import PairDataset
    from hone.models.from_config import build_tokenizer
    from hone.trainer.sft.tasks import PairTask

    tokenizer = build_tokenizer(config.model)
    pairs = PairTask().dataset(files, config.data, tokenizer, max_samples)
    if not isinstance(pairs, PairDataset):
        raise ConfigError(
            f"data.custom_cls: {type(pairs).__name__} is not a subclass of PairDataset, which hone "
            "eval-rm needs"
        )
    pairs.encode_all()
    return pairs


def _accuracy_result(
    num_correct: int, num_pairs: int, bad_row_counts: dict[str, int]
) -> dict[str, Any]:
    """Returns the accuracy and its interval; `bad_row_counts` counts the bad rows by reason."""
    from hone.trainer.prm_metrics import wilson_estimate

    accuracy = wilson_estimate(num_correct, num_pairs)
    return {
        "pairs": num_pairs,
        "right": num_correct,
        "accuracy": accuracy.value,
        "low": accuracy.low,
        "high": accuracy.high,
        "left_out": bad_row_counts,
    }


if __name__ == "__main__":
    sys.exit(run_module(main, "rm_trainer", MODULE))
