"""The tasks of `hone dpo`: pairs of responses (DPO and others), and labelled responses (KTO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.preference_losses import LossFunction
from hone.config.preference import PreferenceLossConfig
from hone.data.create import encoded_dataset_class
from hone.data.encoded import EncodedRow
from hone.data.labelled import LabelledDataset
from hone.data.loader import Dataset
from hone.data.pairs import PairDataset
from hone.data.rows import DataError, Files
from hone.engine.contract import TrainEngine
from hone.protocol import DataProto
from hone.tokenizer import Tokenizer
from hone.trainer.ranks import sum_over_ranks
from hone.trainer.sft.reference import collate_responses, response_log_probs
from hone.trainer.sft.tasks import DatasetRows, PromptAndResponse, Sums, Task, prompt_length
from hone.workers.preference_objectives import (
    LabelledObjective,
    PairedObjective,
    PreferenceObjective,
)


def preference_task(config: PreferenceLossConfig) -> PreferenceTask:
    """Returns the task of a loss: over pairs, or over labelled responses."""
    loss = LossFunction(config.loss_type)
    return PairedTask(loss, config) if loss.is_paired else LabelledTask(loss, config)


class PreferenceTask(Task):
    """Trains a policy with a preference loss."""

    head = "policy"
    objective: PreferenceObjective

    def __init__(self, loss: LossFunction) -> None:
        self._loss = loss
        self.needs_reference = loss.needs_reference

    def collate(self, rows: Sequence[EncodedRow], pad_token_id: int) -> DataProto:
        sequences = [sequence for row in rows for sequence in self._trained_sequences(row)]
        batch = collate_responses(sequences, pad_token_id)
        if self.needs_reference:
            reference = [
                value for row in rows for value in row["ref_log_probs"][: self.sequences_per_row]
            ]
            batch.batch["ref_response_log_prob"] = torch.tensor(reference)
        return batch

    def _trained_sequences(self, row: EncodedRow) -> list[PromptAndResponse]:
        """Returns the sequences of a row that are trained on, the first of its `reference_sequences`."""
        return self.reference_sequences(row)[: self.sequences_per_row]

    def validation_sums(self, outputs: Mapping[str, Tensor], batch: DataProto) -> Sums:
        outputs = {name: value.double() for name, value in outputs.items()}
        losses, metrics = self.objective.values(outputs, batch)
        return {
            name: (float(values.double().sum()), float(len(values)))
            for name, values in {"loss": losses, **metrics}.items()
        }


class PairedTask(PreferenceTask):
    """Trains on pairs; the prompt of a pair is computed once, since both rows are in one micro-batch."""

    columns = ("input_ids", "rejected_ids", "prompt_tokens", "margin")
    sequences_per_row = 2

    def __init__(self, loss: LossFunction, config: PreferenceLossConfig) -> None:
        super().__init__(loss)
        self.objective = PairedObjective(loss, config)

    def dataset(self, files: Files, config: Any, tokenizer: Tokenizer, max_samples: int) -> Dataset:
        return encoded_dataset_class(config, PairDataset)(files, tokenizer, config, max_samples)

    def num_tokens(self, row: EncodedRow) -> int:
        return len(row["input_ids"]) + len(row["rejected_ids"])

    def reference_sequences(self, row: EncodedRow) -> list[PromptAndResponse]:
        length = prompt_length(row)
        return [(ids[:length], ids[length:]) for ids in (row["input_ids"], row["rejected_ids"])]

    def collate(self, rows: Sequence[EncodedRow], pad_token_id: int) -> DataProto:
        batch = super().collate(rows, pad_token_id)
        margins = torch.tensor([row["margin"][0] for row in rows], dtype=torch.float32)
        if margins.any() and "margin" not in self._loss.arguments:
            raise DataError(
                f"the rows have margins, which algorithm.loss_type={self._loss.name} does not read; use "
                "sigmoid, sigmoid_norm, hinge, robust, simpo or cpo, or name another data.margin_key"
            )
        batch.batch["margin"] = margins.repeat_interleave(2)
        return batch


class RowsWithPartners:
    """Labelled rows with the column `mismatched_ids`: the row's prompt and the response of another row.

    The other row is the nearest earlier one with another prompt, cyclically. A mini-batch estimates the KL
    with these sequences, which are the same in each epoch, so that the reference scores them once.
    """

    def __init__(self, rows: DatasetRows, max_length: int) -> None:
        self._rows, self._max_length = rows, max_length
        prompts = [hash(tuple(_split(rows[i])[0])) for i in range(len(rows))]
        if len(set(prompts)) == 1:
            raise DataError(
                "all rows have the same prompt; the KL of algorithm.loss_type=kto needs prompts that "
                "differ: add rows, or use apo_zero_unpaired"
            )
        self._partners = []
        for i, prompt in enumerate(prompts):
            partner = i - 1
            while prompts[partner] == prompt:
                partner -= 1
            self._partners.append(partner % len(rows))

    @property
    def fingerprint(self) -> str | None:
        return self._rows.fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> EncodedRow:
        row = self._rows[index]
        prompt, _ = _split(row)
        _, response = _split(self._rows[self._partners[index]])
        prompt = prompt[max(0, len(prompt) + len(response) - self._max_length) :]
        mismatched = {"mismatched_ids": prompt + response, "mismatched_prompt": [len(prompt)]}
        return row | mismatched


class LabelledTask(PreferenceTask):
    """Trains on single responses with a label."""

    columns = ("input_ids", "prompt_tokens", "label")

    def __init__(self, loss: LossFunction, config: PreferenceLossConfig) -> None:
        super().__init__(loss)
        self.objective = LabelledObjective(loss, config)
        self._max_length = 0

    def dataset(self, files: Files, config: Any, tokenizer: Tokenizer, max_samples: int) -> Dataset:
        self._max_length = config.max_length
        return encoded_dataset_class(config, LabelledDataset)(files, tokenizer, config, max_samples)

    def with_partners(self, rows: DatasetRows) -> DatasetRows:
        return RowsWithPartners(rows, self._max_length) if self._loss.needs_kl else rows

    def reference_sequences(self, row: EncodedRow) -> list[PromptAndResponse]:
        sequences = [_split(row)]
        if self._loss.needs_kl:
            length = row["mismatched_prompt"][0]
            sequences.append((row["mismatched_ids"][:length], row["mismatched_ids"][length:]))
        return sequences

    def statistics(
        self,
        rows: Sequence[EncodedRow],
        engine: TrainEngine,
        pad_token_id: int,
        *,
        is_counted: bool = True,
    ) -> dict[str, Tensor]:
        """Returns the KL and the shares of the labels, over the mini-batch and all ranks."""
        log_ratios = torch.zeros(len(rows), dtype=torch.float64)
        if self._loss.needs_kl:
            sequences = [self.reference_sequences(row)[1] for row in rows]
            reference = [row["ref_log_probs"][1] for row in rows]
            log_ratios = response_log_probs(engine, sequences, pad_token_id)
            log_ratios = log_ratios - torch.tensor(reference, dtype=torch.float64)
        labels = torch.tensor([float(row["label"][0]) for row in rows])
        weight = float(
            is_counted and engine.mesh.is_collector
        )  # ranks of one slot have the same rows
        sums = (float(log_ratios.sum()), float(labels.sum()), float(len(rows)))
        log_ratio, desirable, count = sum_over_ranks(*(weight * value for value in sums))
        scales = torch.where(
            labels.bool(), count / max(desirable, 1.0), count / max(count - desirable, 1.0)
        )
        kl = torch.full_like(labels, max(log_ratio / count, 0.0))
        return {"label": labels, "label_scale": scales, "kl": kl}


def _split(row: EncodedRow) -> PromptAndResponse:
    """Returns the prompt and the response of a row."""
    length = prompt_length(row)
    return row["input_ids"][:length], row["input_ids"][length:]
