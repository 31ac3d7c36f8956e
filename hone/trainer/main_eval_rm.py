"""`python -m hone.trainer.main_eval_rm … key=value …` evaluates a reward model on pairs of responses.

It scores `data.val_files`; with `--folds N` it cross-validates on N parts of `data.train_files` instead.
Keys are those of `hone train-rm`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from hone.config import ConfigError, replace
from hone.config.sft import RMConfig
from hone.trainer.command_line import (
    compose_arguments,
    require_file,
    require_folder,
    require_keys,
    run_module,
)
from hone.trainer.main_eval_prm import check_single_rank, show, write_json
from hone.types import Fields, Row

MODULE = "hone.trainer.main_eval_rm"


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = parser().parse_known_args(arguments)
    composed = compose_arguments(overrides, schema="rm_trainer", program="hone eval-rm")
    files = "data.train_files" if options.folds else "data.val_files"
    require_keys(composed, {"model.path": "the reward model", files: "the files of pairs"})
    config: RMConfig = composed.config
    check_single_rank(config.world_size, "hone eval-rm")
    if options.out:
        require_file(options.out, "--out")
    if options.folds == 1 or options.folds < 0:
        raise ConfigError(f"--folds {options.folds}: use 2 or more")
    if options.folds:
        results = {"cross_validation": cross_validate(config, options.folds)}
    else:
        results = {"model": evaluate_model(config)}
    if options.baseline:
        pair_files = config.data.train_files if options.folds else config.data.val_files
        baseline = replace(config, "data.val_files", pair_files)
        baseline = replace(baseline, "model.path", options.baseline)
        results["baseline"] = evaluate_model(baseline)
    show(results)
    write_json(results, options.out)


def parser() -> argparse.ArgumentParser:
    commands = argparse.ArgumentParser(
        prog="hone eval-rm",
        usage="hone eval-rm [--folds N] [--baseline MODEL] [--out FILE] model.path=MODEL "
        "data.val_files=FILE [key=value …]",
        allow_abbrev=False,
        description="Score pairs of responses, or train and test on N parts of data.train_files in turn.",
        epilog="`hone config show --tree rm_trainer` lists the keys.",
    )
    commands.add_argument(
        "--folds", type=int, default=0, metavar="N", help="cross-validate in N parts"
    )
    commands.add_argument("--baseline", metavar="MODEL", help="another model to evaluate")
    commands.add_argument("--out", metavar="FILE", help="JSON file for the results")
    return commands


def evaluate_model(config: RMConfig) -> Fields:
    """Returns the accuracy of a model over all pairs of data.val_files."""
    from hone.data.pairs import PairDataset
    from hone.models.from_config import build_tokenizer
    from hone.trainer.ranks import Ranks
    from hone.trainer.sft.run import build_engine
    from hone.trainer.sft.tasks import PairTask
    from hone.trainer.sft.trainer import SFTTrainer

    tokenizer, task = build_tokenizer(config.model), PairTask()
    rows = PairDataset(config.data.val_files, tokenizer, config.data, config.data.val_max_samples)
    rows.encode_all()
    engine = build_engine(config, Ranks(), task, is_trained=False)
    pad = tokenizer.pad_token_id
    trainer = SFTTrainer(engine, rows, pad_token_id=pad, batch_rows=1, seed=0, task=task)
    metrics = trainer.validate(rows, config.data.train_batch_size)
    return _result(round(metrics["accuracy"] * len(rows)), len(rows), dict(rows.bad_rows.counts))


def cross_validate(config: RMConfig, folds: int) -> Fields:
    """Tests each fold after training on the others; pairs with the same prompt are in the same fold."""
    from hone.data.pairs import PairDataset
    from hone.models.from_config import build_tokenizer
    from hone.trainer.ranks import Ranks
    from hone.trainer.sft.run import SFTRun
    from hone.trainer.sft.tasks import PairTask

    out = Path(config.trainer.default_local_dir).expanduser()
    require_folder(str(out), "trainer.default_local_dir")
    rows = PairDataset(config.data.train_files, build_tokenizer(config.model), config.data)
    good_rows = [rows.store[position] for position in rows.positions]
    openings = [rows.pair(row).opening for row in good_rows]
    groups = list(dict.fromkeys(openings))
    if len(groups) < folds:
        raise ConfigError(f"--folds {folds}: the pairs have only {len(groups)} different prompts")
    random.Random(config.trainer.seed).shuffle(groups)
    fold_of = {group: i % folds for i, group in enumerate(groups)}
    results, hits = [], 0
    for fold in range(folds):
        parts: dict[str, list[Row]] = {"train": [], "test": []}
        for row, opening in zip(good_rows, openings, strict=True):
            parts["test" if fold_of[opening] == fold else "train"].append(row)
        folder = out / f"fold_{fold}"
        changes: Fields = {
            "trainer.default_local_dir": str(folder),
            "trainer.default_hdfs_dir": None,
        }
        for part, key in (("train", "data.train_files"), ("test", "data.val_files")):
            changes[key] = (str(_write_jsonl(folder / f"{part}.jsonl", parts[part])),)
        fold_config = config
        for key, value in changes.items():
            fold_config = replace(fold_config, key, value)
        run = SFTRun(fold_config, Ranks(), task=PairTask())
        run.fit()
        assert run.val_rows is not None
        metrics = run.trainer.validate(run.val_rows, config.data.train_batch_size)
        correct = round(metrics["accuracy"] * len(run.val_rows))
        results.append(_result(correct, len(run.val_rows), {}) | {"loss": metrics["loss"]})
        hits += correct
    pooled = _result(hits, sum(result["pairs"] for result in results), dict(rows.bad_rows.counts))
    return pooled | {"folds": {str(i): result for i, result in enumerate(results)}}


def _write_jsonl(path: Path, rows: Sequence[Row]) -> Path:
    from hone.data.rows import write_file

    with write_file(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _result(correct: int, pairs: int, left_out: dict[str, int]) -> Fields:
    """Returns the accuracy and its interval; `left_out` counts the bad rows by reason."""
    from hone.trainer.step_scores import wilson

    share = wilson(correct, pairs)
    return {
        "pairs": pairs,
        "right": correct,
        "accuracy": share.value,
        "low": share.low,
        "high": share.high,
        "left_out": left_out,
    }


if __name__ == "__main__":
    sys.exit(run_module(main, "rm_trainer", MODULE))
