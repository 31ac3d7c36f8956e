"""A supervised run: model, data and engine from the config; steps, validation, checkpoints, trackers.

The loop itself is trainer.py's. Every rank runs this; the first alone writes what is not a shard.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

from hone.config import config_to_dict, replace
from hone.config.sft import SFTConfig, SFTDataConfig
from hone.controller.threads import fix_threads
from hone.data.create import create_sft_dataset
from hone.data.loader import Dataset
from hone.data.rows import DataError
from hone.data.sft import SFTDataset
from hone.engine.build import build_strategy
from hone.engine.contract import EngineSpec, TrainEngine
from hone.engine.microbatch import MicroBatchRule
from hone.models.from_config import adapters_of, build_tokenizer
from hone.tracking import RunFolder, Tracking, progress
from hone.tracking.console import screen
from hone.tracking.lock import lock_folder
from hone.trainer.earlier_config import SFT_KEYS, changed_settings
from hone.trainer.interrupt import GracefulStop
from hone.trainer.ppo import checkpoint
from hone.trainer.ranks import Ranks, sum_over_ranks
from hone.trainer.sft.order import batches_in
from hone.trainer.sft.trainer import SFTTrainer
from hone.trainer.threads import resolve_threads
from hone.types import Settings
from hone.workers.device import make_deterministic, pick_device, pick_dtype

log = logging.getLogger(__name__)

Numbers = dict[str, float]


class SFTRun:
    """Everything around the loop of one `hone sft`."""

    def __init__(
        self, config: SFTConfig, ranks: Ranks, origins: Mapping[str, str] | None = None
    ) -> None:
        self.ranks = ranks
        self._origins = origins
        self.folder = RunFolder(config.trainer.default_local_dir)
        config, threads = resolve_threads(config, ranks.local_world_size, tells=ranks.is_first)
        fix_threads(threads)
        self.tokenizer = build_tokenizer(config.model)
        data = config.data
        self.rows = self._encoded("train rows", data, data.train_files, data.train_max_samples)
        self.val_rows = None
        if data.val_files:
            self.val_rows = self._encoded(
                "validation rows", data, data.val_files, data.val_max_samples
            )
        self.epoch_steps = batches_in(len(self.rows), data.train_batch_size)
        all_epochs = self.epoch_steps * config.trainer.total_epochs
        self.total_steps = config.trainer.total_training_steps or all_epochs
        if config.optim.total_training_steps <= 0:
            config = replace(config, "optim.total_training_steps", self.total_steps)
        self.config = config
        self.trainer = self._build_trainer()

    def _encoded(
        self, what: str, data: SFTDataConfig, files: tuple[str, ...], max_samples: int
    ) -> Dataset:
        """The rows of these files, all of them encoded: none is found bad in the middle of a run."""
        rows = create_sft_dataset(files, data, self.tokenizer, max_samples)
        if not isinstance(rows, SFTDataset):
            return rows  # a user's own class may encode as it likes
        with self._progress(f"encode {what}", len(rows)) as advance:
            rows.encode_all(advance)
        if self.ranks.is_first and rows.bad_rows.total:
            bad = rows.bad_rows
            reasons = ", ".join(f"{reason}: {n}" for reason, n in sorted(bad.counts.items()))
            example = bad.examples[0]
            log.warning("left out %d bad %s (%s), such as: %s", bad.total, what, reasons, example)
        return rows

    @contextmanager
    def _progress(self, what: str, total: int) -> Iterator[Callable[[int], None] | None]:
        """How far a long wait has come, shown by the first rank alone."""
        if not self.ranks.is_first:
            yield None
            return
        with progress(what, total) as bar:
            yield bar.advance

    def _build_engine(self) -> TrainEngine:
        model, trainer, data = self.config.model, self.config.trainer, self.config.data
        device = pick_device(trainer.device, self.ranks.local_rank)
        if self.config.engine.full_determinism:
            make_deterministic(self.config.engine.seed)

        def rule(ranks: int) -> MicroBatchRule:
            return MicroBatchRule(data.sequences_per_micro_batch(ranks), data.max_token_len_per_gpu)

        spec = EngineSpec(
            head="policy",
            model_path=model.path,
            device=device,
            dtype=pick_dtype(self.config.engine.dtype, device),
            fsdp=self.config.engine,
            train_rule=rule,
            infer_rule=rule,
            response_width=data.max_length,
            optim=self.config.optim,
            grad_clip=self.config.optim.clip_grad,
            override_config=model.override_config,
            gradient_checkpointing=model.enable_gradient_checkpointing,
            adapters=adapters_of(model),
            seed=trainer.seed,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
        )
        return build_strategy(self.config.engine.strategy, spec)

    def _build_trainer(self) -> SFTTrainer:
        config, data = self.config, self.config.data
        return SFTTrainer(
            self._build_engine(),
            self.rows,
            pad_token_id=self.tokenizer.pad_token_id,
            batch_rows=data.train_batch_size,
            seed=data.seed if data.seed is not None else config.trainer.seed,
            shuffle=data.shuffle,
            balance_tokens=data.balance_dp_token,
        )

    def fit(self) -> None:
        """Train to the last step; resumes where an earlier process stopped."""
        with lock_folder(self.folder.path) if self.ranks.is_first else nullcontext():
            self.resume()
            self._go_on()

    def _go_on(self) -> None:
        if self.trainer.step_number >= self.total_steps:
            return
        with GracefulStop() as stop, self._tracking() as tracking:
            while self.trainer.step_number < self.total_steps:
                measured = self._timed_step() | self.validate_if_due()
                step = self.trainer.step_number
                if tracking is not None:
                    tracking.log(measured, step)
                stop.agree(sum_over_ranks)
                self.save_if_due(now=stop.requested)
                stop.raise_if_requested(step)
        if self.ranks.is_first and "console" in self.config.trainer.logger:
            checkpoint.tell_result(self.folder, self.trainer.step_number)

    def _timed_step(self) -> Numbers:
        started = time.perf_counter()
        measured = self.trainer.step()
        seconds = time.perf_counter() - started
        return measured | {
            "train/epoch": float(self.trainer.order.epoch),
            "timing_s/step": seconds,
            "perf/throughput": measured["train/global_tokens"] / seconds / self.ranks.world_size,
        }

    def validate_if_due(self) -> Numbers:
        return self.validate() if self._due(self.config.trainer.test_freq) else {}

    def _due(self, every: int | Literal["after_each_epoch"]) -> bool:
        """Whether what is done every so many updates, or after each epoch, is due now."""
        step = self.trainer.step_number
        steps = self.epoch_steps if every == "after_each_epoch" else every
        return step >= self.total_steps or (steps > 0 and step % steps == 0)

    def validate(self) -> Numbers:
        """The loss on every validation row."""
        if self.val_rows is None:
            return {}
        count = self.config.data.train_batch_size
        with self._progress("validate", len(self.val_rows)) as advance:
            return {"val/loss": self.trainer.validation_loss(self.val_rows, count, advance)}

    @contextmanager
    def _tracking(self) -> Iterator[Tracking | None]:
        """The trackers, on the first rank."""
        if not self.ranks.is_first:
            yield None
            return
        resolved, trainer = config_to_dict(self.config), self.config.trainer
        self.folder.write_config(resolved, self._origins)
        with Tracking(
            trainer.project_name,
            trainer.experiment_name,
            trainer.logger,
            resolved,
            self.folder,
            total_steps=self.total_steps,
            resumed_from=self.trainer.step_number or None,
            prints_everything=trainer.console == "full",
        ) as tracking:
            yield tracking

    # -- state --------------------------------------------------------------------------------

    def save_if_due(self, now: bool = False) -> None:
        if now or self._due(self.config.trainer.save_freq):
            self.save()

    def save(self) -> None:
        """Everything the next process needs to go on as if nothing had happened."""
        step, contents = self.trainer.step_number, self.config.checkpoint.save_contents
        with self._writing(step) as folder:
            self.trainer.engine.save(folder, contents)
            if "hf_model" in contents:
                self.trainer.engine.export(folder, self.tokenizer)
            if self.ranks.is_first:
                state = {
                    "step": step,
                    "order": self.trainer.order.state_dict(),
                    "data": self._data_fingerprint(),
                    "model": self.config.model.path,
                }
                checkpoint.write_state(folder, state)
            self.ranks.wait_for_all()
        if self.ranks.is_first:
            checkpoint.prune(self.folder, self.config.trainer.max_ckpt_to_keep)
        self.ranks.wait_for_all()

    @contextmanager
    def _writing(self, step: int) -> Iterator[Path]:
        """The folder that all ranks fill; the first makes it, and seals it when all are done."""
        first = self.ranks.is_first
        with checkpoint.writing(self.folder, step) if first else nullcontext() as folder:
            self.ranks.wait_for_all()
            yield folder if folder is not None else checkpoint.unfinished(self.folder, step)

    def resume(self) -> None:
        """Load the newest sound checkpoint, and forget what was logged after it."""
        found = self._begin()
        if found is None:
            return
        step, folder = found
        state = checkpoint.read_state(folder, "order")
        self.trainer.order.load_state_dict(state["order"])
        self._refuse_other_data(state, folder)
        self.trainer.engine.load(folder, self.config.checkpoint.load_contents)
        self.trainer.step_number = step
        if self.ranks.is_first:
            self._tell_resumed(folder, began_with=state.get("model", self.config.model.path))

    def _data_fingerprint(self) -> str | None:
        """None for a user's own class that names none: such data are not compared."""
        return getattr(self.rows, "fingerprint", None)

    def _refuse_other_data(self, state: Settings, folder: Path) -> None:
        was, now = state.get("data"), self._data_fingerprint()
        if was is not None and now is not None and was != now:
            raise DataError(
                f"the data differ from those that {folder} was trained on ({was[:8]} then, "
                f"{now[:8]} now); restore data.train_files and the data.* settings, or set another "
                "trainer.default_local_dir for a run of its own (trainer.resume_mode=disable starts "
                "anew in this one)"
            )

    def _tell_resumed(self, folder: Path, began_with: str) -> None:
        checkpoint.tell_resumed(folder, self.trainer.step_number, self.total_steps)
        path = self.config.model.path
        if path != began_with:
            screen().line(
                f"its weights go back to model.path={began_with}, not to {path}: to train that one, "
                "set another trainer.default_local_dir"
            )
        before = RunFolder(folder.parent).earlier_config()
        for change in changed_settings(before, config_to_dict(self.config), SFT_KEYS):
            screen().line(f"from {folder.name} on: {change}")

    def _begin(self) -> tuple[int, Path] | None:
        """Where to go on. The first rank clears the folder before the others look into it."""
        trainer = self.config.trainer
        how = (self.folder, trainer.resume_mode, trainer.resume_from_path)
        found = checkpoint.begin(*how) if self.ranks.is_first else None
        self.ranks.wait_for_all()
        return found if self.ranks.is_first else checkpoint.chosen(*how)
