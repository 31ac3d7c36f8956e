"""Defines the tasks of `hone sft`, `train-prm` and `train-rm`; preferences.py has those of `hone dpo`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopOutput
from hone.data.create import create_sft_dataset, encoded_dataset_class
from hone.data.encoded import EncodedRow
from hone.data.loader import Dataset
from hone.data.pairs import PairDataset
from hone.data.rows import DataError, Files
from hone.data.steps import StepDataset
from hone.engine.contract import Objective, TrainEngine
from hone.protocol import DataProto
from hone.tokenizer import Tokenizer
from hone.workers.objectives import (
    PairObjective,
    StepObjective,
    SupervisedObjective,
    score_gaps,
)

PromptAndResponse = tuple[list[int], list[int]]
"""The token ids of a prompt and of a response."""
Sums = dict[str, tuple[float, float]]
"""{metric: (sum, count)}; sums and counts add up over batches and ranks."""


class EncodedRows(Protocol):
    """Rows of encoded columns, such as `input_ids` and `loss_mask`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> EncodedRow: ...


class DatasetRows(EncodedRows, Protocol):
    """The encoded rows of a dataset."""

    @property
    def fingerprint(self) -> str | None:
        """The hash of the data; None if the dataset has none."""


class CustomRows:
    """The rows of a user's dataset class (`data.custom_cls`), converted to lists without padding.

    As in verl, a user's row may hold tensors; `attention_mask` is then 0 for padding tokens.
    """

    def __init__(self, dataset: Dataset, columns: Sequence[str]) -> None:
        self._dataset, self._columns = dataset, columns
        self.fingerprint: str | None = getattr(dataset, "fingerprint", None)
        for method in ("__len__", "__getitem__"):
            if not hasattr(dataset, method):
                raise DataError(f"data.custom_cls: {type(dataset).__name__} has no {method}")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> EncodedRow:
        row = {
            name: values.tolist() if hasattr(values, "tolist") else values
            for name, values in self._dataset[index].items()
        }
        if attention_mask := row.pop("attention_mask", None):
            row |= {
                name: list(compress(values, attention_mask))
                for name, values in row.items()
                if isinstance(values, list) and len(values) == len(attention_mask)
            }
        if problem := self._problem(row):
            raise DataError(
                f"data.custom_cls: row {index} of {type(self._dataset).__name__} {problem}"
            )
        return row

    def _problem(self, row: EncodedRow) -> str | None:
        """Returns why a row cannot be used, or None."""
        missing_columns = [name for name in self._columns if name not in row]
        if missing_columns:
            return f"has no {' and no '.join(missing_columns)}"
        num_tokens, mask = len(row["input_ids"]), row.get("loss_mask")
        if num_tokens < 2:
            return f"has {num_tokens} tokens; at least 2 are needed"
        if mask is not None and len(mask) != num_tokens:
            return f"has {num_tokens} input_ids and {len(mask)} values of loss_mask"
        if not set(mask or ()) <= {0, 1}:
            return "has other values than 0 and 1 in loss_mask"
        return None


class Task(ABC):
    """The data, the head, the objective and the validation metrics of a supervised run."""

    head: Literal["policy", "step_scores", "score"]
    """The head of the model: next token, p(good) of each step, or one score per sequence."""
    trained_part: Literal["all", "head"] = "all"
    """Whether all parameters are trained, or only those of the head."""
    label_tokens: tuple[int, int] | None = None
    """The tokens whose logits are the step scores of a causal process reward model."""
    columns: tuple[str, ...]
    """The columns of an encoded row that `collate` reads."""
    sequences_per_row = 1
    """All sequences of a row are in one micro-batch."""
    needs_reference = False
    """Whether a row needs the log-probabilities of its `reference_sequences` under the policy as it starts;
    they are the row's column `ref_log_probs`."""
    objective: Objective

    @abstractmethod
    def dataset(self, files: Files, config: Any, tokenizer: Tokenizer, max_samples: int) -> Dataset:
        """Returns the data set of the files; `config` is the data block, `max_samples` -1 means all rows."""

    @abstractmethod
    def collate(self, rows: Sequence[EncodedRow], pad_token_id: int) -> DataProto:
        """Builds a batch of encoded rows."""

    def with_partners(self, rows: DatasetRows) -> DatasetRows:
        """Returns the encoded rows, with columns that are made of other rows."""
        return rows

    def reference_sequences(self, row: EncodedRow) -> list[PromptAndResponse]:
        """Returns the sequences of a row that the reference scores, the same number for each row."""
        return []

    def statistics(
        self,
        rows: Sequence[EncodedRow],
        engine: TrainEngine,
        pad_token_id: int,
        *,
        is_counted: bool = True,
    ) -> dict[str, Tensor]:
        """Returns the columns that depend on the mini-batch of all ranks; every rank must call this.

        Rows that are not `is_counted` only take part in the collectives.
        """
        return {}

    @abstractmethod
    def validation_sums(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Sums:
        """Computes the validation metrics of a batch from the outputs of the engine."""

    def num_tokens(self, row: EncodedRow) -> int:
        """Returns the number of tokens of a row."""
        return len(row["input_ids"])


class SupervisedTask(Task):
    """Trains next-token prediction on the tokens that the loss mask selects."""

    head = "policy"
    columns = ("input_ids", "loss_mask")
    objective = SupervisedObjective()

    def dataset(self, files: Files, config: Any, tokenizer: Tokenizer, max_samples: int) -> Dataset:
        return create_sft_dataset(files, config, tokenizer, max_samples)

    def collate(self, rows: Sequence[EncodedRow], pad_token_id: int) -> DataProto:
        """Builds a batch; the response begins with the first token after token 0 that has a loss."""
        outputs = []
        for row in rows:
            ids, mask = row["input_ids"], row["loss_mask"]
            # A row of a user's dataset may have no token with a loss.
            start = mask.index(1, 1) if 1 in mask[1:] else len(ids) - 1
            outputs.append(AgentLoopOutput(ids[:start], ids[start:], mask[start:]))
        return collate_outputs(outputs, pad_token_id=pad_token_id)

    def validation_sums(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Sums:
        mask = batch.batch["response_mask"]
        loss = -float((outputs["log_probs"].double() * mask).sum())
        return {"loss": (loss, float(mask.sum()))}


@dataclass(frozen=True)
class ScoredTokens:
    """A sequence, and a mask that is 1 for the tokens whose hidden states are scored."""

    ids: list[int]
    mask: list[int]
    prompt_length: int
    """Number of prompt tokens; only the last of them and later tokens are scored."""


def collate_scored_tokens(rows: Sequence[ScoredTokens], pad_token_id: int) -> DataProto:
    """Builds a batch; the engine's score at response position t is the score of the token before it.

    One padding token is added to each response, so that its last token is scored too.
    """
    return collate_outputs(
        [
            AgentLoopOutput(
                row.ids[: row.prompt_length],
                [*row.ids[row.prompt_length :], pad_token_id],
                row.mask[row.prompt_length - 1 :],
            )
            for row in rows
        ],
        pad_token_id=pad_token_id,
    )


def prompt_length(row: EncodedRow) -> int:
    """Returns the number of prompt tokens, which the column `prompt_tokens` has as a list of one."""
    return int(row["prompt_tokens"][0])


class StepTask(Task):
    """Trains a process reward model on labelled steps: in PURE's first stage only the head, then all."""

    head = "step_scores"
    columns = ("input_ids", "loss_mask", "labels", "prompt_tokens")
    objective = StepObjective()

    def __init__(self, trained_part: Literal["all", "head"] = "all") -> None:
        self.trained_part = trained_part
        self._datasets: dict[tuple[str, int], Dataset] = {}

    def next_stage(self) -> StepTask:
        """Returns the task of PURE's second stage, which trains all parameters on the same encoded rows."""
        task = StepTask()
        task._datasets = self._datasets
        return task

    def dataset(self, files: Files, config: Any, tokenizer: Tokenizer, max_samples: int) -> Dataset:
        """Returns the data set of the files; both stages share it, so that rows are encoded once."""
        key = (str(files), max_samples)
        if key not in self._datasets:
            dataset_class = encoded_dataset_class(config, StepDataset)
            self._datasets[key] = dataset_class(files, tokenizer, config, max_samples)
        return self._datasets[key]

    def collate(self, rows: Sequence[EncodedRow], pad_token_id: int) -> DataProto:
        sequences = [
            ScoredTokens(row["input_ids"], row["loss_mask"], prompt_length(row)) for row in rows
        ]
        batch = collate_scored_tokens(sequences, pad_token_id)
        labels = torch.zeros(batch.batch["response_mask"].shape)
        for labels_of_row, row in zip(labels, rows, strict=True):
            response_labels = row["labels"][prompt_length(row) - 1 :]
            labels_of_row[: len(response_labels)] = torch.tensor(response_labels)
        batch.batch["labels"] = labels
        return batch

    def validation_sums(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Sums:
        mask = batch.batch["response_mask"].bool()
        scores = outputs["scores"][mask].double()
        labels = batch.batch["labels"][mask].double()
        loss = F.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
        is_good = labels > 0.5
        is_correct = (scores > 0) == is_good
        selections = {
            "accuracy": torch.ones_like(is_good),
            "accuracy_of_good_steps": is_good,
            "accuracy_of_bad_steps": ~is_good,
        }
        sums = {"loss": (float(loss), float(mask.sum()))}
        for metric, is_selected in selections.items():
            sums[metric] = float(is_correct[is_selected].sum()), float(is_selected.sum())
        return sums


class PairTask(Task):
    """Trains an outcome reward model on pairs of responses (Bradley–Terry)."""

    head = "score"
    columns = ("input_ids", "rejected_ids", "prompt_tokens", "margin")
    sequences_per_row = 2
    objective = PairObjective()

    def dataset(self, files: Files, config: Any, tokenizer: Tokenizer, max_samples: int) -> Dataset:
        return encoded_dataset_class(config, PairDataset)(files, tokenizer, config, max_samples)

    def num_tokens(self, row: EncodedRow) -> int:
        return len(row["input_ids"]) + len(row["rejected_ids"])

    def collate(self, rows: Sequence[EncodedRow], pad_token_id: int) -> DataProto:
        sequences = [
            ScoredTokens(ids, [0] * (len(ids) - 1) + [1], prompt_length(row))
            for row in rows
            for ids in (row["input_ids"], row["rejected_ids"])
        ]
        batch = collate_scored_tokens(sequences, pad_token_id)
        margins = [row["margin"][0] for row in rows]
        batch.batch["margin"] = torch.tensor(margins).repeat_interleave(2)
        return batch

    def validation_sums(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Sums:
        gaps = score_gaps(outputs["scores"].double(), batch.batch["response_mask"])
        loss = F.softplus(batch.batch["margin"][::2] - gaps)
        count = float(len(gaps))
        return {
            "loss": (float(loss.sum()), count),
            "accuracy": (float((gaps > 0).sum()), count),
            "score_gap": (float(gaps.sum()), count),
        }
