"""Runs SFT from a config: model, data, engine, validation, checkpoints and trackers.

trainer.py has one step of training. Every rank runs this file; only the first rank writes files other than
shards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from hone.config import config_to_dict, replace
from hone.config.engine import sequence_parallel
from hone.config.sft import SupervisedConfig
from hone.controller.threads import set_thread_count
from hone.data.encoded import EncodedDataset
from hone.data.rows import DataError
from hone.engine.build import build_strategy
from hone.engine.contract import EngineSpec, TrainEngine
from hone.engine.optimizer import optimizer_class
from hone.models.from_config import build_tokenizer, lora_adapters_or_none
from hone.ops.rows import MicroBatchRule
from hone.tracking import RunFolder, Tracking, progress
from hone.tracking.console import Bar, screen
from hone.tracking.lock import lock_folder
from hone.tracking.tracking import check_trackers
from hone.trainer.interrupt import GracefulStop
from hone.trainer.ppo import checkpoint
from hone.trainer.ranks import Ranks, sum_over_ranks
from hone.trainer.sft.order import batches_per_epoch
from hone.trainer.sft.reference import Reference, RowsWithReference
from hone.trainer.sft.tasks import CustomRows, DatasetRows, SupervisedTask, Task
from hone.trainer.sft.trainer import SFTTrainer
from hone.trainer.threads import resolve_threads
from hone.workers.device import make_deterministic, pick_device, pick_dtype

log = logging.getLogger(__name__)

Metrics = dict[str, float]

_DATA_KEYS = (
    "train_batch_size", "max_length", "truncation", "custom_cls", "chat_template",
    "apply_chat_template_kwargs", "prompt_format", "prompt_key", "prompt_dict_keys", "multiturn",
    "response_key", "response_dict_keys", "chosen_key", "rejected_key", "margin_key", "format",
    "completions_key", "labels_key", "neutral_label", "step_separator", "ignore_input_ids_mismatch",
    "completion_key", "label_key",
)  # fmt: skip
_MODEL_KEYS = ("override_config", "lora_alpha", "lora_dropout", "custom_chat_template")
_RESUME_KEYS = (
    "optim",
    "engine.dtype",
    "trainer.seed",
    "algorithm",
    *(f"model.{name}" for name in _MODEL_KEYS),
    *(f"data.{name}" for name in _DATA_KEYS),
)
"""Keys and blocks that affect the updates; a resumed run prints those that have changed."""


class SFTRun:
    """One run of `hone sft`, `dpo`, `train-prm` or `train-rm`: the loop with files and trackers."""

    def __init__(
        self,
        config: SupervisedConfig,
        ranks: Ranks,
        origins: Mapping[str, str] | None = None,
        task: Task | None = None,
    ) -> None:
        self.ranks, self._origins = ranks, origins
        self._task = task or SupervisedTask()
        self.folder = RunFolder(config.trainer.default_local_dir, config.trainer.default_hdfs_dir)
        self.config, threads = resolve_threads(config, ranks.local_world_size, warn=ranks.is_first)
        set_thread_count(threads)
        if config.engine.strategy in ("fsdp", "fsdp2"):
            optimizer_class(config.optim)  # raises for an unknown name, before the rows are encoded
        if ranks.is_first:
            check_trackers(config.trainer.logger)
        data, trainer = config.data, config.trainer
        self.tokenizer = build_tokenizer(config.model)
        self._reference: Reference | None = None
        self.rows = self._encode("train rows", data.train_files, data.train_max_samples)
        self.val_rows = None
        if data.val_files:
            self.val_rows = self._encode("validation rows", data.val_files, data.val_max_samples)
        self.steps_per_epoch = batches_per_epoch(len(self.rows), data.train_batch_size)
        self.total_steps = (
            trainer.total_training_steps or self.steps_per_epoch * trainer.total_epochs
        )
        if config.optim.total_training_steps <= 0:
            self.config = replace(self.config, "optim.total_training_steps", self.total_steps)
        self.trainer = SFTTrainer(
            build_engine(self.config, ranks, self._task),
            self.rows,
            pad_token_id=self.tokenizer.pad_token_id,
            rows_per_batch=data.train_batch_size,
            seed=data.seed if data.seed is not None else trainer.seed,
            shuffle=data.shuffle,
            balance_tokens=data.balance_dp_token,
            task=self._task,
        )

    def _encode(self, description: str, files: tuple[str, ...], max_samples: int) -> DatasetRows:
        """Reads and encodes the rows of the files; bad rows are left out, with a warning.

        The rows of a user's dataset class (`CustomRows`) are encoded when they are read.
        """
        dataset = self._task.dataset(files, self.config.data, self.tokenizer, max_samples)
        if not isinstance(dataset, EncodedDataset):
            return self._task.with_partners(CustomRows(dataset, self._task.columns))
        with self._progress(f"encode {description}", len(dataset)) as bar:
            dataset.encode_all(bar.advance)
        bad_rows = dataset.bad_rows
        if self.ranks.is_first and bad_rows.total:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in sorted(bad_rows.counts.items()))
            log.warning(
                "left out %d bad %s (%s), such as: %s",
                bad_rows.total, description, reasons, bad_rows.examples[0],
            )  # fmt: skip
        return self._task.with_partners(dataset)

    def _progress(self, description: str, total: int) -> AbstractContextManager[Bar]:
        """Returns a progress bar, which only the first rank shows."""
        if not self.ranks.is_first:
            return nullcontext(Bar(description))
        return progress(description, total)

    def fit(self) -> None:
        """Trains to the last step; a run with checkpoints is resumed."""
        with lock_folder(self.folder.path) if self.ranks.is_first else nullcontext():
            if self._task.needs_reference:
                self._add_reference()  # the model still has the weights that it starts with
            self.resume()
            if self._reference is not None and self.ranks.is_first:
                self._reference.write(self.folder.path)
            if self.trainer.step_number < self.total_steps:
                self._train()

    def _add_reference(self) -> None:
        """Adds the log-probabilities of the reference to all rows, from the run folder or computed."""
        splits = {"train": self.rows}
        if self.val_rows is not None:
            splits["val"] = self.val_rows
        self._reference = reference = Reference.of(
            splits, self._task, self.config, self.tokenizer.pad_token_id
        )
        total = sum(map(len, splits.values()))
        if not reference.read(self.folder.path, self.ranks.is_first):
            with self._progress("reference log-probabilities", total) as bar:
                rows_per_batch = self.config.data.train_batch_size
                reference.compute(self.trainer.engine, rows_per_batch, bar.advance)
        self.trainer.rows = RowsWithReference(self.rows, reference.log_probs["train"])
        if self.val_rows is not None:
            self.val_rows = RowsWithReference(self.val_rows, reference.log_probs["val"])

    def _train(self) -> None:
        """Trains, validates and saves until the last step, or until a signal requests a stop."""
        with GracefulStop() as stop, self._tracking() as tracking:
            while self.trainer.step_number < self.total_steps:
                start = time.perf_counter()
                metrics = self.trainer.step()
                seconds = time.perf_counter() - start
                tokens_per_rank = metrics["train/global_tokens"] / self.ranks.world_size
                metrics |= {
                    "train/epoch": float(self.trainer.order.epoch),
                    "timing_s/step": seconds,
                    "perf/throughput": tokens_per_rank / seconds,
                }
                if self._is_due(self.config.trainer.test_freq):
                    metrics |= self.validate()
                step = self.trainer.step_number
                if tracking is not None:
                    tracking.log(metrics, step)
                stop.sync_ranks(sum_over_ranks)
                if stop.is_requested or self._is_due(self.config.trainer.save_freq):
                    self.save()
                stop.raise_if_requested(step)
        if self.ranks.is_first and "console" in self.config.trainer.logger:
            checkpoint.print_result(self.folder, self.trainer.step_number)

    def _is_due(self, frequency: int | Literal["after_each_epoch"]) -> bool:
        """Whether validation or a checkpoint is due after this step; both are due after the last step."""
        step = self.trainer.step_number
        interval = self.steps_per_epoch if frequency == "after_each_epoch" else frequency
        return step >= self.total_steps or (interval > 0 and step % interval == 0)

    def validate(self) -> Metrics:
        """Returns the task's metrics over all validation rows."""
        if self.val_rows is None:
            return {}
        rows_per_batch = self.config.data.train_batch_size
        with self._progress("validate", len(self.val_rows)) as bar:
            metrics = self.trainer.validate(self.val_rows, rows_per_batch, bar.advance)
        return {f"val/{name}": value for name, value in metrics.items()}

    @contextmanager
    def _tracking(self) -> Iterator[Tracking | None]:
        """Yields the trackers of the run; None if this is not the first rank."""
        if not self.ranks.is_first:
            yield None
            return
        config, trainer = config_to_dict(self.config), self.config.trainer
        self.folder.write_config(config, self._origins)
        with Tracking(
            trainer.project_name,
            trainer.experiment_name,
            trainer.logger,
            config,
            self.folder,
            total_steps=self.total_steps,
            resumed_from=self.trainer.step_number or None,
            prints_every_metric=trainer.console == "full",
        ) as tracking:
            yield tracking

    def save(self) -> None:
        """Saves the full state of the run, so that a resumed run computes the same numbers."""
        step, contents = self.trainer.step_number, self.config.checkpoint.save_contents
        with self._checkpoint_folder(step) as folder:
            self.trainer.engine.save(folder, contents)
            if "hf_model" in contents:
                self.trainer.engine.export(folder, self.tokenizer)
            if self.ranks.is_first:
                state = {
                    "step": step,
                    "order": self.trainer.order.state_dict(),
                    "data": self.rows.fingerprint,
                    "model": self.config.model.path,
                    "reference": self._reference and self._reference.key,
                }
                checkpoint.write_state(folder, state)
            self.ranks.barrier()
        if self.ranks.is_first:
            checkpoint.prune(self.folder, self.config.trainer.max_ckpt_to_keep)
        self.ranks.barrier()

    @contextmanager
    def _checkpoint_folder(self, step: int) -> Iterator[Path]:
        """Yields the temporary folder that all ranks write to; the first rank renames it at the end."""
        if self.ranks.is_first:
            with checkpoint.atomic_folder(self.folder, step) as folder:
                self.ranks.barrier()
                yield folder
        else:
            self.ranks.barrier()
            yield checkpoint.temporary_folder(self.folder, step)

    def resume(self) -> None:
        """Loads the checkpoint that `trainer.resume_mode` selects, if there is one.

        If the run has steps left, later checkpoints and metrics are discarded.
        """
        trainer, is_first_rank = self.config.trainer, self.ranks.is_first
        resume_arguments = (self.folder, trainer.resume_mode, trainer.resume_from_path)
        # The first rank downloads a newer checkpoint before the others read the folder.
        source = checkpoint.find_resume_source(*resume_arguments) if is_first_rank else None
        self.ranks.barrier()
        source = source if is_first_rank else checkpoint.resume_source(*resume_arguments)
        if source is not None:
            self._load(*source)
        self.ranks.barrier()  # the first rank discards checkpoints only after all ranks have loaded
        if is_first_rank and self.trainer.step_number < self.total_steps:
            checkpoint.discard_after(self.folder, source)

    def _load(self, step: int, folder: Path) -> None:
        """Loads the state of the run from the checkpoint of a step."""
        state = checkpoint.read_state(folder, "order")
        self.trainer.order.load_state_dict(state["order"])
        self._require_same_data(state, folder)
        if self._reference is not None:
            self._reference.require_same(state.get("reference"), folder)
        self.trainer.engine.load(folder, self.config.checkpoint.load_contents)
        self.trainer.step_number = step
        if self.ranks.is_first:
            self._print_resumed(folder, state.get("model", self.config.model.path))

    def _require_same_data(self, state: Mapping[str, Any], folder: Path) -> None:
        """Raises an error if the run was saved with other data; a user's dataset may have no fingerprint."""
        saved_fingerprint, fingerprint = state.get("data"), self.rows.fingerprint
        if saved_fingerprint and fingerprint and saved_fingerprint != fingerprint:
            raise DataError(
                f"the data differ from those that {folder} was trained on ({saved_fingerprint[:8]} then, "
                f"{fingerprint[:8]} now); restore data.train_files and the data.* settings, or set another "
                "trainer.default_local_dir for a run of its own (trainer.resume_mode=disable starts "
                "anew in this one)"
            )

    def _print_resumed(self, folder: Path, base_model: str) -> None:
        """Prints the resumed step, and the settings that have changed since the checkpoint."""
        checkpoint.print_resumed(folder, self.trainer.step_number, self.total_steps)
        path = self.config.model.path
        if path != base_model:
            screen().line(
                f"{folder} was trained from model.path={base_model}, not from {path}; to train {path}, "
                "set another trainer.default_local_dir"
            )
        old_config = RunFolder(folder.parent).read_config_or_empty()
        config = config_to_dict(self.config)
        for change in checkpoint.changed_settings(old_config, config, _RESUME_KEYS):
            screen().line(f"from {folder.name} on: {change}")


def build_engine(
    config: SupervisedConfig, ranks: Ranks, task: Task, *, is_trained: bool = True
) -> TrainEngine:
    """Builds the training engine of a task; it has an optimizer only if `is_trained`."""
    model, data = config.model, config.data
    device = pick_device(config.trainer.device, ranks.local_rank)
    if config.engine.full_determinism:
        make_deterministic(config.engine.seed)

    def micro_batch_rule(slots: int) -> MicroBatchRule:
        sequences = data.sequences_per_micro_batch(slots)
        # Unless the head is a policy's, `collate_scored_tokens` appends a padding token to each sequence.
        padding_tokens = 0 if task.head == "policy" else task.sequences_per_row
        max_tokens = data.max_token_len_per_gpu + padding_tokens
        return MicroBatchRule(sequences, max_tokens, task.sequences_per_row)

    spec = EngineSpec(
        head=task.head,
        trained_part=task.trained_part,
        label_tokens=task.label_tokens,
        model_path=model.path,
        device=device,
        dtype=pick_dtype(config.engine.dtype, device),
        fsdp=config.engine,
        train_micro_batch_rule=micro_batch_rule,
        infer_micro_batch_rule=micro_batch_rule,
        response_width=data.max_length,
        optim=config.optim if is_trained else None,
        grad_clip=config.optim.clip_grad,
        override_config=model.override_config,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        adapters=lora_adapters_or_none(model),
        seed=config.trainer.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
        sequence_parallel=sequence_parallel(config, config.engine),
        tensor_parallel=config.engine.tensor_parallel_size,
    )
    return build_strategy(config.engine.strategy, spec)
