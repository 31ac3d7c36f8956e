"""The reference of preference training: the policy as it starts, as one number per response.

The training engine computes the log-probabilities before the first update, so there is no second model. They
are kept in the run folder under a hash of the token ids and the model's files, and a resumed run reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopOutput
from hone.config.sft import SupervisedConfig
from hone.data.encoded import EncodedRow
from hone.data.rows import DataError
from hone.engine.contract import Options, TrainEngine
from hone.models.load import resolve_model_path
from hone.ops.rows import masked_sum
from hone.protocol import DataProto
from hone.tracking import atomic_path
from hone.trainer.ranks import sum_over_ranks
from hone.trainer.sft.tasks import DatasetRows, EncodedRows, PromptAndResponse, Task

FILE = "reference.safetensors"
_OPTIONS: Options = {"temperature": 1.0, "with_entropy": False}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".json")
_CHUNK_BYTES = 1 << 24


def collate_responses(sequences: Sequence[PromptAndResponse], pad_token_id: int) -> DataProto:
    """Builds a batch in which every response token has a loss."""
    outputs = [
        AgentLoopOutput(prompt, response, [1] * len(response)) for prompt, response in sequences
    ]
    return collate_outputs(outputs, pad_token_id=pad_token_id)


def response_log_probs(
    engine: TrainEngine, sequences: Sequence[PromptAndResponse], pad_token_id: int
) -> Tensor:  # [N] float64
    """Returns the log-probability of each response under the weights that the engine has now."""
    batch = collate_responses(sequences, pad_token_id)
    log_probs = engine.infer(batch, **_OPTIONS)["log_probs"].double()
    return masked_sum(log_probs, batch.batch["response_mask"], 1)


class RowsWithReference:
    """Encoded rows with the column `ref_log_probs`."""

    def __init__(self, rows: DatasetRows, log_probs: Tensor) -> None:
        self._rows, self._log_probs = rows, log_probs

    @property
    def fingerprint(self) -> str | None:
        return self._rows.fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> EncodedRow:
        return self._rows[index] | {"ref_log_probs": self._log_probs[index].tolist()}


class Reference:
    """The log-probabilities of the rows of each split, and the hash of what they were computed from."""

    def __init__(
        self, splits: Mapping[str, EncodedRows], task: Task, key: str, pad_token_id: int
    ) -> None:
        self.key = key
        self.log_probs: dict[str, Tensor] = {}  # [rows, sequences per row] float64
        self.is_stored = False
        self._splits, self._task, self._pad_token_id = splits, task, pad_token_id

    @classmethod
    def of(
        cls,
        splits: Mapping[str, EncodedRows],
        task: Task,
        config: SupervisedConfig,
        pad_token_id: int,
    ) -> Reference:
        return cls(splits, task, _key(splits["train"], task, config), pad_token_id)

    def read(self, folder: Path, is_first_rank: bool) -> bool:
        """Reads the file on the first rank, for all ranks; returns whether it has the values of the key."""
        from safetensors import safe_open

        path, values = folder / FILE, {}
        if is_first_rank and path.is_file():
            with safe_open(path, "pt") as file:
                if file.metadata() == self._metadata():
                    values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        (is_complete,) = sum_over_ranks(float(values.keys() == self._splits.keys()))
        if not is_complete:
            return False
        for name, rows in self._splits.items():
            width = len(self._task.reference_sequences(rows[0]))
            empty = torch.zeros(len(rows), width, dtype=torch.float64)
            self.log_probs[name] = _sum_tensor(values.get(name, empty))
        self.is_stored = True
        return True

    def compute(
        self,
        engine: TrainEngine,
        rows_per_batch: int,
        on_batch: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Computes the values; each data-parallel slot scores its part of every batch."""
        mesh = engine.mesh
        rank, num_ranks = mesh.data_parallel_rank, mesh.data_parallel_size
        for name, rows in self._splits.items():
            width = len(self._task.reference_sequences(rows[0]))
            values = torch.zeros(len(rows), width, dtype=torch.float64)
            for start in range(0, len(rows), rows_per_batch):
                indices = range(start, min(start + rows_per_batch, len(rows)))
                rank_indices = list(indices[rank::num_ranks])
                # All ranks must join each collective, so a rank without rows scores one that is not counted.
                sequences = [
                    sequence
                    for i in rank_indices or [start]
                    for sequence in self._task.reference_sequences(rows[i])
                ]
                scores = response_log_probs(engine, sequences, self._pad_token_id)
                if rank_indices and mesh.is_collector:
                    values[rank_indices] = scores.view(-1, width)
                on_batch(len(indices))
            self.log_probs[name] = _sum_tensor(values)

    def write(self, folder: Path) -> None:
        """Writes the values, unless they were read."""
        from safetensors.torch import save_file

        if self.is_stored:
            return
        with atomic_path(folder / FILE) as temporary:
            save_file(self.log_probs, temporary, metadata=self._metadata())

    def require_same(self, saved_key: str | None, checkpoint: Path) -> None:
        """Raises an error unless a checkpoint was trained with this reference."""
        if saved_key != self.key:
            raise DataError(
                f"{checkpoint} was trained with another reference: the starting model, its dtype or the "
                f"tokens of the rows have changed since; restore them, or set another "
                "trainer.default_local_dir for a new run (trainer.resume_mode=disable starts anew in "
                "this one)"
            )

    def _metadata(self) -> dict[str, str]:
        splits = {name: _hash_of_rows(rows, self._task) for name, rows in self._splits.items()}
        return {"key": self.key, "rows": json.dumps(splits, sort_keys=True)}


def _key(rows: EncodedRows, task: Task, config: SupervisedConfig) -> str:
    """Returns a hash of the training rows and of the model as it starts."""
    model = config.model
    digest = hashlib.blake2b(digest_size=16)
    settings = [config.engine.dtype, dict(model.override_config), _hash_of_rows(rows, task)]
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for path in filter(None, (model.path, model.lora_adapter_path)):
        folder = Path(resolve_model_path(path) if path == model.path else path).expanduser()
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if file.suffix in _WEIGHT_SUFFIXES:
                digest.update(file.name.encode())
                for chunk in _chunks(file):
                    digest.update(chunk)
        if not folder.is_dir():  # a name on the hub
            digest.update(str(path).encode())
    return digest.hexdigest()


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


def _hash_of_rows(rows: EncodedRows, task: Task) -> str:
    """Returns a hash of the token ids that the reference scores."""
    digest = hashlib.blake2b(digest_size=16)
    for i in range(len(rows)):
        for prompt, response in task.reference_sequences(rows[i]):
            lengths_and_ids = [len(prompt), len(response), *prompt, *response]
            digest.update(np.array(lengths_and_ids, np.int32).tobytes())
    return digest.hexdigest()


def _sum_tensor(values: Tensor) -> Tensor:
    """Returns the sum of a tensor over the ranks."""
    return torch.tensor(sum_over_ranks(*values.flatten().tolist()), dtype=torch.float64).view(
        values.shape
    )
