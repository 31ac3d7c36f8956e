"""Evaluates a process reward model: on ProcessBench, on rankings of responses, on labelled steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hone.config import load_config
from hone.config.sft import PRMConfig
from hone.data.rows import BadRowPolicy, DataError, read_rows
from hone.data.steps import Solution, StepDataset, step_mark
from hone.models.from_config import build_tokenizer
from hone.ops.at_n import sizes
from hone.tracking import progress
from hone.trainer import step_scores as metrics
from hone.trainer.evaluation import answer_of, evaluate, intervals
from hone.trainer.ranks import Ranks
from hone.trainer.sft.run import build_engine
from hone.trainer.sft.tasks import StepTask
from hone.types import Fields

TUNING_SUBSET = "gsm8k"
"""The subset on which the threshold is tuned, as in the paper; without it, the first file is used."""
BATCH_ROWS = 256


class StepScorer:
    """A process reward model that scores the steps of solutions on packed rows."""

    def __init__(self, config: PRMConfig) -> None:
        self.config, self.tokenizer = config, build_tokenizer(config.model)
        self._task, data = StepTask(), config.data
        mark = step_mark(self.tokenizer, data.step_separator, data.step_labels)
        self._task.label_tokens = mark.labels
        self._engine = build_engine(config, Ranks(), self._task, is_trained=False)

    def score(self, solutions: Sequence[Solution]) -> list[np.ndarray]:
        """Returns p(good) of every step of each solution."""
        rows = [
            {"prompt": s.prompt, "completions": s.steps, "labels": [1] * len(s.steps)}
            for s in solutions
        ]
        # A step beyond data.max_length would have no score, so a row that is too long is an error.
        settings = dataclasses.replace(
            self.config.data,
            format="steps",
            prompt_key="prompt",
            completions_key="completions",
            labels_key="labels",
            truncation="error",
            on_bad_row="raise",
        )
        encoded = StepDataset(None, self.tokenizer, settings, rows=rows)
        encoded.encode_all()
        # Sorted by length, micro-batches have similar numbers of rows.
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]["input_ids"]))
        scores: dict[int, np.ndarray] = {}
        with progress("score steps", len(order)) as bar:
            for start in range(0, len(order), BATCH_ROWS):
                part = order[start : start + BATCH_ROWS]
                pad = self.tokenizer.pad_token_id
                batch = self._task.collate([encoded[i] for i in part], pad)
                p_good = self._engine.infer(batch)["scores"].double().sigmoid()
                masks = batch.batch["response_mask"] == 1
                scores |= {i: p[m].numpy() for i, p, m in zip(part, p_good, masks, strict=True)}
                bar.advance(len(part))
        return [scores[i] for i in range(len(order))]

    def read(self, files: Sequence[str], **changes: Any) -> list[Solution]:
        """Returns the labelled solutions of these files."""
        settings = dataclasses.replace(self.config.data, **changes)
        rows = StepDataset(files, self.tokenizer, settings, self.config.data.val_max_samples)
        return [rows.solution(rows.store[position]) for position in rows.positions]


def process_bench(scorer: StepScorer, files: Sequence[str]) -> Fields:
    """Returns ProcessBench's results per file, with threshold 0.5 and with one tuned on a subset."""
    subsets: dict[str, tuple[list[np.ndarray], np.ndarray]] = {}
    for file in files:
        solutions = scorer.read([file], format="processbench")
        labels = [s.labels.index(0.0) if 0.0 in s.labels else -1 for s in solutions]
        name = Path(file).name.partition(".")[0]
        name = file if name in subsets else name
        subsets[name] = scorer.score(solutions), np.array(labels)
    tuned_on = TUNING_SUBSET if TUNING_SUBSET in subsets else next(iter(subsets))
    threshold = metrics.best_threshold(*subsets[tuned_on])
    results: dict[str, Fields] = {}
    for name, (scores, first) in subsets.items():
        wrong = int((first >= 0).sum())
        result: Fields = {"wrong": wrong, "right": len(first) - wrong}
        for suffix, limit in (("", 0.5), ("_tuned", threshold)):
            answers = metrics.first_errors(scores, limit)
            values = metrics.process_bench(answers, first)
            result |= {f"{key}{suffix}": value for key, value in values.items()}
            result[f"f1{suffix}_interval"] = list(metrics.bootstrap_f1(answers, first))
        result["lenient_f1"] = metrics.lenient_f1(scores, first)
        result["chance_f1"] = metrics.chance_f1(np.array([len(p) for p in scores]), first)
        result["step_auc"] = _step_auc(scores, first)
        results[name] = result
    keys = ("f1", "f1_tuned", "lenient_f1", "chance_f1")
    mean = {key: float(np.mean([result[key] for result in results.values()])) for key in keys}
    thresholds: Fields = {"threshold": 0.5, "threshold_tuned": threshold, "tuned_on": tuned_on}
    return thresholds | {"subsets": results, "mean": mean}


def _step_auc(scores: Sequence[np.ndarray], labels: np.ndarray) -> float | None:
    """Returns the area under the ROC curve of right against first wrong steps; later steps do not count."""
    pairs = [
        (p[i], i != label)
        for p, label in zip(scores, labels, strict=True)
        for i in range(len(p) if label < 0 else label + 1)
    ]
    return metrics.area_under_curve(
        np.array([s for s, _ in pairs]), np.array([g for _, g in pairs])
    )


def labelled_steps(scorer: StepScorer) -> Fields:
    """Returns accuracy and area under the ROC curve over the labelled steps of data.val_files."""
    solutions = scorer.read(scorer.config.data.val_files or ())
    scores, labels = [], []
    for solution, p_good in zip(solutions, scorer.score(solutions), strict=True):
        for label, p in zip(solution.labels, p_good, strict=True):
            if label is not None:
                scores.append(p)
                labels.append(label > 0.5)
    good, predicted_good = np.array(labels), np.array(scores) > 0.5
    hits = good == predicted_good
    return {
        "steps": len(good),
        "good": int(good.sum()),
        "accuracy": vars(metrics.wilson(int(hits.sum()), len(hits))),
        "accuracy_of_good_steps": float(hits[good].mean()) if good.any() else None,
        "accuracy_of_bad_steps": float(hits[~good].mean()) if not good.all() else None,
        "auc": metrics.area_under_curve(np.array(scores), good),
        "majority_accuracy": float(max(good.mean(), 1 - good.mean())),
    }


def best_of_n(scorer: StepScorer, file: str, aggregate: str, split: str) -> Fields:
    """Returns the score of the response that the model ranks first, and of majority votes that it weights.

    Rows have n responses, and either `scores` or the columns that `hone eval` needs. For k < n, the first k
    responses are used.
    """
    rows = list(read_rows([file], BadRowPolicy("raise", skip_key=None), "--best-of-n").scan())
    if not all("scores" in row for row in rows):
        rows = evaluate(load_config([f"data.path='{file}'"], config_name="evaluation")).rows
    solutions = []
    for number, row in enumerate(rows):
        if not row.get("responses") or len(row["responses"]) != len(row["scores"]):
            raise DataError(f"{file}, row {number}: 'responses' and 'scores' must be equally long")
        for text in row["responses"]:
            steps = [step for step in text.split(split) if step.strip()] or ["(empty)"]
            solutions.append(
                Solution(row.get(scorer.config.data.prompt_key), steps, [None] * len(steps))
            )
    p_good = iter(scorer.score(solutions))
    ranked = [[metrics.AGGREGATES[aggregate](next(p_good)) for _ in row["scores"]] for row in rows]
    min_responses = min(len(row["scores"]) for row in rows)
    columns: dict[str, list[float]] = {"mean@1": [float(np.mean(row["scores"])) for row in rows]}
    for k in sizes(min_responses):
        for name in ("oracle", "best_of_n", "majority", "weighted_majority"):
            columns[f"{name}@{k}"] = []
        for row, ranks in zip(rows, ranked, strict=True):
            scores, ranks = list(map(float, row["scores"][:k])), ranks[:k]
            votes = [answer_of(text) for text in row["responses"][:k]]
            # PURE's soft minimum is in −1 … 1, but the weight of a vote must not be negative.
            weights = [(r + 1) / 2 for r in ranks] if aggregate == "soft_min" else ranks
            columns[f"oracle@{k}"].append(max(scores))
            columns[f"best_of_n@{k}"].append(metrics.best_of(scores, ranks))
            columns[f"majority@{k}"].append(metrics.weighted_vote(scores, votes, [1.0] * k))
            columns[f"weighted_majority@{k}"].append(metrics.weighted_vote(scores, votes, weights))
    means = intervals(columns, load_config(config_name="evaluation").metrics)
    estimates = {name: vars(mean) for name, mean in means.items()}
    return {"rows": len(rows), "aggregate": aggregate, "metrics": estimates}
