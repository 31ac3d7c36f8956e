"""Evaluates a process reward model on ProcessBench, best-of-n selection and labelled steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hone import program_dialect
from hone.config import load_config
from hone.config.sft import PRMConfig
from hone.data.reading import read_rows
from hone.data.rows import BadRowPolicy, DataError
from hone.data.steps import Solution, StepDataset, build_step_separator
from hone.models.from_config import build_tokenizer
from hone.ops.at_n import attempt_counts
from hone.tracking import progress
from hone.trainer import prm_metrics as metrics
from hone.trainer.command_line import path_override
from hone.trainer.evaluation import (
    bootstrap_estimates,
    evaluate,
    extract_answer,
    response_texts,
)
from hone.trainer.ranks import Ranks
from hone.trainer.sft.run import build_engine
from hone.trainer.sft.tasks import StepTask

TUNING_SUBSET = "gsm8k"
"""The subset on which the threshold is tuned, as in the paper; if it is missing, the first file is used."""
ROWS_PER_BATCH = 256


class StepScorer:
    """A process reward model that scores the steps of solutions, in packed micro-batches."""

    def __init__(self, config: PRMConfig) -> None:
        self.config, self.tokenizer = config, build_tokenizer(config.model)
        self._task, data = StepTask(), config.data
        separator = build_step_separator(self.tokenizer, data.step_separator, data.step_labels)
        self._task.label_tokens = separator.label_tokens
        self._engine = build_engine(config, Ranks(), self._task, is_trained=False)

    def score(self, solutions: Sequence[Solution]) -> list[np.ndarray]:
        """Returns p(good) of every step of each solution."""
        # StepDataset needs labels, but the engine does not read them here.
        rows = [
            {
                "prompt": solution.prompt,
                "completions": solution.steps,
                "labels": [1] * len(solution.steps),
            }
            for solution in solutions
        ]
        # A step beyond data.max_length would have no score, so a longer row is an error.
        settings = dataclasses.replace(
            self.config.data,
            format="steps",
            prompt_key="prompt",
            completions_key="completions",
            labels_key="labels",
            truncation="error",
            on_bad_row="raise",
        )
        dataset = StepDataset(None, self.tokenizer, settings, rows=rows)
        dataset.encode_all()
        # Rows are sorted by length, so that micro-batches have similar numbers of rows.
        indices_by_length = sorted(range(len(dataset)), key=lambda i: len(dataset[i]["input_ids"]))
        p_good_by_index: dict[int, np.ndarray] = {}
        with progress("score steps", len(dataset)) as bar:
            for start in range(0, len(dataset), ROWS_PER_BATCH):
                indices = indices_by_length[start : start + ROWS_PER_BATCH]
                pad_token_id = self.tokenizer.pad_token_id
                batch = self._task.collate([dataset[i] for i in indices], pad_token_id)
                p_good = self._engine.infer(batch)["scores"].double().sigmoid()
                is_step_end = batch.batch["response_mask"] == 1
                for row, index in enumerate(indices):
                    p_good_by_index[index] = p_good[row][is_step_end[row]].numpy()
                bar.advance(len(indices))
        return [p_good_by_index[index] for index in range(len(dataset))]

    def read_solutions(self, files: Sequence[str], **changes: Any) -> list[Solution]:
        """Returns the labelled solutions in these files; `changes` override keys of the data config."""
        settings = dataclasses.replace(self.config.data, **changes)
        dataset = StepDataset(files, self.tokenizer, settings, self.config.data.val_max_samples)
        return [dataset.solution(dataset.store[position]) for position in dataset.positions]


def process_bench(scorer: StepScorer, files: Sequence[str]) -> dict[str, Any]:
    """Returns the ProcessBench metrics of each file, with threshold 0.5 and with a tuned threshold."""
    subsets: dict[str, tuple[list[np.ndarray], np.ndarray]] = {}
    for file in files:
        solutions = scorer.read_solutions([file], format="processbench")
        step_labels = [solution.labels for solution in solutions]
        first_wrong_steps = np.array(
            [labels.index(0.0) if 0.0 in labels else -1 for labels in step_labels]
        )
        name = Path(file).name.partition(".")[0]
        name = file if name in subsets else name
        subsets[name] = scorer.score(solutions), first_wrong_steps
    tuned_on = TUNING_SUBSET if TUNING_SUBSET in subsets else next(iter(subsets))
    threshold = metrics.best_threshold(*subsets[tuned_on])
    results: dict[str, dict[str, Any]] = {}
    for name, (p_good_by_solution, first_wrong_steps) in subsets.items():
        num_wrong = int((first_wrong_steps >= 0).sum())
        result: dict[str, Any] = {"wrong": num_wrong, "right": len(first_wrong_steps) - num_wrong}
        for suffix, step_threshold in (("", 0.5), ("_tuned", threshold)):
            predictions = metrics.first_errors(p_good_by_solution, step_threshold)
            values = metrics.process_bench(predictions, first_wrong_steps)
            result |= {f"{key}{suffix}": value for key, value in values.items()}
            interval = metrics.bootstrap_f1(predictions, first_wrong_steps)
            result[f"f1{suffix}_interval"] = list(interval)
        result["lenient_f1"] = metrics.lenient_f1(p_good_by_solution, first_wrong_steps)
        step_counts = np.array([len(p_good) for p_good in p_good_by_solution])
        result["chance_f1"] = metrics.chance_f1(step_counts, first_wrong_steps)
        result["step_auc"] = _step_auc(p_good_by_solution, first_wrong_steps)
        results[name] = result
    keys = ("f1", "f1_tuned", "lenient_f1", "chance_f1")
    mean = {key: float(np.mean([result[key] for result in results.values()])) for key in keys}
    return {
        "threshold": 0.5,
        "threshold_tuned": threshold,
        "tuned_on": tuned_on,
        "subsets": results,
        "mean": mean,
    }


def _step_auc(
    p_good_by_solution: Sequence[np.ndarray], first_wrong_steps: np.ndarray
) -> float | None:
    """Returns the area under the ROC curve that separates right steps from first wrong steps.

    Steps after the first wrong step of a solution do not count.
    """
    probabilities: list[float] = []
    is_good: list[bool] = []
    for p_good, first_wrong in zip(p_good_by_solution, first_wrong_steps, strict=True):
        num_steps = len(p_good) if first_wrong < 0 else first_wrong + 1
        probabilities.extend(p_good[:num_steps])
        is_good.extend(step != first_wrong for step in range(num_steps))
    return metrics.area_under_curve(np.array(probabilities), np.array(is_good))


def labelled_step_metrics(scorer: StepScorer) -> dict[str, Any]:
    """Returns accuracy and area under the ROC curve over the labelled steps of data.val_files."""
    solutions = scorer.read_solutions(scorer.config.data.val_files or ())
    probabilities, labels = [], []
    for solution, p_good in zip(solutions, scorer.score(solutions), strict=True):
        for label, p in zip(solution.labels, p_good, strict=True):
            if label is not None:
                probabilities.append(p)
                labels.append(label > 0.5)
    is_good, predicted_good = np.array(labels), np.array(probabilities) > 0.5
    is_correct = is_good == predicted_good
    return {
        "steps": len(is_good),
        "good": int(is_good.sum()),
        "accuracy": vars(metrics.wilson_estimate(int(is_correct.sum()), len(is_correct))),
        "accuracy_of_good_steps": float(is_correct[is_good].mean()) if is_good.any() else None,
        "accuracy_of_bad_steps": float(is_correct[~is_good].mean()) if not is_good.all() else None,
        "auc": metrics.area_under_curve(np.array(probabilities), is_good),
        "majority_accuracy": float(max(is_good.mean(), 1 - is_good.mean())),
    }


def best_of_n(scorer: StepScorer, file: str, aggregate: str, step_separator: str) -> dict[str, Any]:
    """Returns the mean scores of best-of-n, majority vote, weighted vote and oracle, for several k.

    A row has n ≥ k responses, of which the first k count. It also has their `scores`, or the columns from
    which `hone eval` computes scores.
    """
    rows = list(read_rows([file], BadRowPolicy("raise", policy_key=None), "--best-of-n").scan())
    if not all("scores" in row for row in rows):
        settings = [path_override("data.path", file)]
        rows = evaluate(
            load_config(settings, config_name="evaluation", dialect=program_dialect())
        ).rows
    solutions = []
    for row_index, row in enumerate(rows):
        location = f"{file}, row {row_index}"
        row["responses"] = response_texts(row.get("responses"), f"{location}, column 'responses'")
        if len(row["responses"]) != len(row["scores"] or ()):
            raise DataError(f"{location}: 'responses' and 'scores' must be equally long")
        for text in row["responses"]:
            steps = [step for step in text.split(step_separator) if step.strip()] or ["(empty)"]
            solutions.append(
                Solution(row.get(scorer.config.data.prompt_key), steps, [None] * len(steps))
            )
    p_good = iter(scorer.score(solutions))
    model_scores_by_row = [
        [metrics.AGGREGATES[aggregate](next(p_good)) for _ in row["scores"]] for row in rows
    ]
    min_responses = min(len(row["scores"]) for row in rows)
    values_by_metric: dict[str, list[float]] = {
        "mean@1": [float(np.mean(row["scores"])) for row in rows]
    }
    for k in attempt_counts(min_responses):
        for row, row_model_scores in zip(rows, model_scores_by_row, strict=True):
            scores = [float(score) for score in row["scores"][:k]]
            model_scores = row_model_scores[:k]
            votes = [extract_answer(text) for text in row["responses"][:k]]
            weights = model_scores
            if aggregate == "soft_min":  # scores are in −1 … 1, but weights must not be negative
                weights = [(model_score + 1) / 2 for model_score in model_scores]
            values = {
                "oracle": max(scores),
                "best_of_n": metrics.best_of_n_score(scores, model_scores),
                "majority": metrics.weighted_vote(scores, votes, [1.0] * k),
                "weighted_majority": metrics.weighted_vote(scores, votes, weights),
            }
            for name, value in values.items():
                values_by_metric.setdefault(f"{name}@{k}", []).append(value)
    means = bootstrap_estimates(values_by_metric, load_config(config_name="evaluation").metrics)
    estimates = {name: vars(mean) for name, mean in means.items()}
    return {"rows": len(rows), "aggregate": aggregate, "metrics": estimates}
