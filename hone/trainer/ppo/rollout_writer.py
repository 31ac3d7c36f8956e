"""Writes the rollout file of each step in a thread, and deletes old files."""

from __future__ import annotations

import contextlib
import copy
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from hone.config import ConfigError
from hone.config.trainer import TrainerConfig
from hone.protocol import DataProto
from hone.tokenizer import Tokenizer
from hone.tracking import RunFolder, Tracking
from hone.tracking.run_folder import step_files
from hone.trainer.ppo.rollout_file import is_temporary, sample_rows, write_rollouts


class RolloutWriter:
    """Writes the rollout files of a run in a thread, while the next step runs.

    The caller must not change the tensors of a submitted batch. With `trainer.rollout_data_dir`, the files of
    all steps are kept. Otherwise the run folder keeps the files of the last steps, and of the last steps
    before the checkpoint from which a killed run would resume.
    """

    def __init__(self, run: RunFolder, trainer: TrainerConfig, tokenizer: Tokenizer) -> None:
        self._run, self._trainer, self._tokenizer = run, trainer, tokenizer
        self._all_steps_folder = trainer.rollout_data_dir
        self._folder = Path(trainer.rollout_data_dir or run.rollouts).expanduser()
        self._validation_folder = Path(trainer.validation_data_dir or run.validation).expanduser()
        if self._folder.absolute() == self._validation_folder.absolute():
            raise ConfigError(
                f"trainer.rollout_data_dir and trainer.validation_data_dir are both {self._folder}, where "
                "their files step_N.parquet would replace each other; use two folders"
            )
        self._thread_tokenizer: Tokenizer | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rollout-file")
        self._pending_write: Future[None] | None = None
        self._permanent_files: set[Path] = set()
        """Files of an earlier run with `trainer.rollout_data_dir`, which are never deleted."""

    def write(self, batch: DataProto, step: int, tracking: Tracking | None = None) -> None:
        """Logs some rows of a step to trackers that show tables, and starts to write the step's file.

        Raises the error of the previous file if the thread could not write that file.
        """
        self._log_samples("train", batch, step, tracking, self._trainer.log_train_generations)
        if not self._all_steps_folder and self._trainer.rollout_steps_to_keep == 0:
            return
        self.flush()
        columns = batch.batch.clone(recurse=False)
        batch_copy = type(batch)(columns, dict(batch.non_tensor_batch), dict(batch.meta_info))
        self._pending_write = self._executor.submit(self._write, batch_copy, step)

    def write_validation(self, batch: DataProto, step: int, tracking: Tracking | None) -> None:
        """Writes the file of a validation, and logs some rows to trackers that show tables."""
        file = self._validation_folder / self._run.validation_file(step).name
        write_rollouts(file, batch, self._tokenizer, step=step)
        self._log_samples("val", batch, step, tracking, self._trainer.log_val_generations)

    def _log_samples(
        self, split: str, batch: DataProto, step: int, tracking: Tracking | None, count: int
    ) -> None:
        if tracking is not None and count > 0:
            samples = sample_rows(batch, self._tokenizer, count)
            tracking.log_samples(f"{split}/generations", samples, step)

    def flush(self) -> None:
        """Waits for the last file, which must exist before the checkpoint of its step is renamed."""
        pending_write, self._pending_write = self._pending_write, None
        if pending_write is not None:
            pending_write.result()

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *exc: object) -> None:
        """Waits for the last file, so that no file is written after the run has released its folder."""
        with contextlib.suppress(*(() if error_type is None else (Exception,))):
            self.flush()

    def close(self) -> None:
        self._executor.shutdown()

    def _write(self, batch: DataProto, step: int) -> None:
        if self._thread_tokenizer is None:  # fast tokenizers are not thread-safe
            try:
                self._thread_tokenizer = copy.deepcopy(self._tokenizer)
            except Exception:  # a user's Python tokenizer is shared by both threads
                self._thread_tokenizer = self._tokenizer
        file, temporary = self._folder / f"step_{step}.parquet", not self._all_steps_folder
        write_rollouts(file, batch, self._thread_tokenizer, step=step, temporary=temporary)
        if temporary:
            self._remove_old_files(step)

    def _remove_old_files(self, step: int) -> None:
        """Deletes the temporary files of steps before `step` that are not kept."""
        trainer = self._trainer
        kept_steps = steps_to_keep(step, trainer.rollout_steps_to_keep, trainer.save_freq)
        for file_step, file in step_files(self._folder):
            if file_step > step or file_step in kept_steps or file in self._permanent_files:
                continue
            if is_temporary(file):
                file.unlink(missing_ok=True)
            else:
                self._permanent_files.add(file)


def steps_to_keep(step: int, num_steps: int, save_freq: int) -> set[int]:
    """Returns the steps whose files are kept.

    These are the last `num_steps` steps, and the last `num_steps` steps up to the last checkpoint.
    """
    last_saved = (step - 1) // save_freq * save_freq if save_freq > 0 else 0
    return {
        *range(step - num_steps + 1, step + 1),
        *range(last_saved - num_steps + 1, last_saved + 1),
    } - {0}
