"""The RL training loop: `PPOTrainer.step` lists the phases, and each phase calls another package."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from hone.agents.collate import DERIVED_COLUMNS
from hone.agents.contract import validation_sampling
from hone.algorithms.kl import get_kl_controller
from hone.checks.row_checks import routes_by_style
from hone.columns import add_columns, require, write
from hone.config import ConfigError, PPOTrainerConfig, config_to_dict
from hone.config.checks import batch_size_problems
from hone.controller import ResourcePoolManager, Role, WorkerGroup
from hone.data.create import create_run_dataset, create_train_loader, create_val_loader
from hone.data.loader import Dataset
from hone.protocol import DataProto
from hone.protocol.rows import row_dicts
from hone.tokenizer import Processor, Tokenizer
from hone.tracking import RunFolder, Tracking, progress
from hone.tracking.console import Bar
from hone.tracking.lock import lock_folder
from hone.trainer.ppo import checkpoint, credit, metrics, off_policy, roles, selection
from hone.trainer.ppo.alarms import Alarms, StepWarnings
from hone.trainer.ppo.collector import Collector, create_ledger
from hone.trainer.ppo.implicit_reward import train_implicit_reward_model
from hone.trainer.ppo.ledger import ledger_state
from hone.trainer.ppo.managers import load_managers
from hone.trainer.ppo.memory import freeze_garbage_collection
from hone.trainer.ppo.plan import Plan, set_schedule_lengths
from hone.trainer.ppo.profiling import StepProfiler
from hone.trainer.ppo.publish_probe import PublishProbe
from hone.trainer.ppo.publisher import Publisher
from hone.trainer.ppo.response_metrics import response_metrics
from hone.trainer.ppo.restarts import graceful_stop
from hone.trainer.ppo.rollout_writer import RolloutWriter
from hone.trainer.ppo.source import TrajectorySource, mean_over_ranks, traffic_metrics
from hone.trainer.ppo.validation import run_validation
from hone.trainer.threads import resolve_threads
from hone.types import Fields, Function
from hone.workers.actor import ActorWorker, ReferenceWorker
from hone.workers.critic import CriticWorker
from hone.workers.train_worker import TrainWorker


class PPOTrainer:
    """Trains a policy with PPO, GRPO or a related algorithm, as configured."""

    def __init__(
        self,
        config: PPOTrainerConfig,
        tokenizer: Tokenizer,
        role_worker_mapping: Mapping[Role, type] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        ray_worker_group_cls: roles.GroupClass | None = None,
        processor: Processor | None = None,
        reward_fn: Function | None = None,
        val_reward_fn: Function | None = None,
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
    ) -> None:
        self.tokenizer, self.plan = tokenizer, Plan.of(config)
        data, trainer, num_prompts = config.data, config.trainer, config.data.prompts_per_generation
        dataset_inputs = data, tokenizer, processor
        self.train_dataset = create_run_dataset(train_dataset, *dataset_inputs, is_train=True)
        self.loader = create_train_loader(data, self.train_dataset, num_prompts, trainer.seed)
        self.val_dataset: Dataset | None = None
        if data.val_files or val_dataset is not None:
            self.val_dataset = create_run_dataset(val_dataset, *dataset_inputs, is_train=False)
            self.val_loader = create_val_loader(data, self.val_dataset, trainer.seed)
        steps_of_epochs = self.loader.batches_per_epoch * trainer.total_epochs
        self.total_steps = trainer.total_training_steps or steps_of_epochs
        scheduled_config = set_schedule_lengths(config, self.total_steps)
        self.config, _ = resolve_threads(scheduled_config, trainer.n_gpus_per_node)
        self.reward_fn, self.val_reward_fn = load_managers(
            config, tokenizer, reward_fn, val_reward_fn, self.train_dataset, self.val_dataset
        )
        self.route_by_style = routes_by_style(config, self.train_dataset, self.val_dataset)
        uses_lora = config.actor_rollout_ref.model.uses_lora
        self.roles = dict(role_worker_mapping or roles.default_roles(self.plan, lora=uses_lora))
        self.pools = resource_pool_manager or roles.default_pools(config, self.roles)
        self.group_cls = ray_worker_group_cls or roles.group_class(config)
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        self.run_folder = RunFolder(trainer.default_local_dir, trainer.default_hdfs_dir)
        self.rollout_writer = RolloutWriter(self.run_folder, trainer, tokenizer)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.alarms = Alarms(trainer.alarms, self.run_folder)
        self.warnings = StepWarnings(is_group_relative=self.plan.compares_scores_only)
        self.tracking: Tracking | None = None
        self.bar = Bar("train")
        self._stack = ExitStack()
        self.global_step = 0

    def init_workers(self) -> None:
        """Starts every role and loads its model."""
        config, rollout = self.config, self.config.actor_rollout_ref.rollout
        groups = roles.start_workers(config, self.roles, self.pools, self.group_cls, self._stack)
        self.profiler = StepProfiler(config, groups)
        self.traffic = [group.traffic for group in groups.values()]
        roles.load_models(groups)
        self.actor, self.rollout, self.reference = roles.policy_groups(groups)
        if problems := list(batch_size_problems(config, self.actor.data_parallel_size)):
            raise ConfigError(problems)
        self.critic: WorkerGroup[CriticWorker] | None = groups.get(Role.Critic)
        self.reward_model = roles.get_reward_model(config, self.plan, self.tokenizer, groups)
        self.scoring_options = self.reward_model, config.reward_model, self.route_by_style
        self.trained_groups = roles.trained_groups(groups, self.plan)
        self.source = TrajectorySource(
            self.rollout,
            run_seed=config.sampling_seed,
            pad_token_id=self.tokenizer.pad_token_id,
            keep_log_probs=rollout.calculate_log_probs,
        )
        self.ledger = create_ledger(config)
        self.collector = Collector(
            config,
            self.loader,
            self.ledger,
            self.source,
            score=self.score,
            phase=self.phase,
            needs_greedy_baselines=self.plan.needs_greedy_baselines,
        )
        probe = PublishProbe(self.actor, self.rollout, config.actor_rollout_ref, self.tokenizer)
        self.publisher = Publisher(self.actor, self.rollout, rollout.checkpoint_engine, probe)
        self.publisher.publish()

    def fit(self, origins: Mapping[str, str] | None = None) -> None:
        """Trains to the last step; `origins` maps each config key to the file or argument that set it."""
        trainer = self.config.trainer
        with lock_folder(self.run_folder.path):
            will_train = self.resume()
            if self.global_step > 0 and not (will_train or trainer.val_only):
                return
            # A run that only validates does not replace the config of the run that trained here.
            if will_train or not self.run_folder.config_file.exists():
                self.run_folder.write_config(config_to_dict(self.config), origins)
            tracking = Tracking(
                trainer.project_name,
                trainer.experiment_name,
                trainer.logger,
                config_to_dict(self.config),
                self.run_folder,
                total_steps=self.total_steps,
                resumed_from=self.global_step or None,
                will_train=will_train,
                prints_every_metric=trainer.console == "full",
            )
            steps = progress("step", self.total_steps, has_step_line=True)
            frozen_gc, writer = freeze_garbage_collection(), self.rollout_writer
            with graceful_stop() as stop, steps as bar, tracking, frozen_gc as freeze, writer:
                self.tracking, self.bar = tracking, bar
                validate_first = self.global_step == 0 and trainer.val_before_train
                if (validate_first or trainer.val_only) and (val_metrics := self.validate()):
                    tracking.log(val_metrics | metrics.pop_timing(self.seconds), self.global_step)
                if trainer.val_only:
                    return
                while self.global_step < self.total_steps:
                    with self.timer("step"), self.profiler.step(self.global_step + 1):
                        batch, step_metrics = self.step()
                    self.warnings.observe(step_metrics, self.global_step)
                    step_metrics |= self.after_step(batch)
                    step_metrics |= self.alarms.observe(step_metrics, self.global_step)
                    with self.checkpoint_if_due(stop.is_requested) as is_saved:
                        timing, ranks = metrics.pop_timing(self.seconds), self.actor.world_size
                        step_metrics |= timing | metrics.throughput_metrics(batch, timing, ranks)
                        tracking.log(step_metrics, self.global_step)
                    freeze()
                    self.alarms.raise_if_stopped()
                    if is_saved:
                        stop.raise_if_requested(self.global_step)
            if "console" in trainer.logger:
                checkpoint.print_result(self.run_folder, self.global_step)

    def step(self) -> tuple[DataProto, dict[str, float]]:
        """Runs one step of the loop, and returns its batch and metrics."""
        self.global_step += 1
        traffic_metrics(
            self.traffic
        )  # drops that of validation and checkpoints since the last step
        batch = self.collect()
        batch = self.estimate(batch)
        batch = self.assign_credit(batch)
        step_metrics = self.update(self.resample_and_balance(batch))
        self.ledger.step_done()
        return batch, step_metrics | self.report(batch)

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Adds the seconds of the block to the metric `timing_s/<name>`, even if the block raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase of the step, and shows the phase in the progress bar."""
        self.bar.done, self.bar.note = self.global_step - 1, name
        with self.timer(name):
            yield

    def collect(self) -> DataProto:
        """Returns the scored trajectories of a step."""
        return self.collector.collect()

    def score(self, batch: DataProto) -> DataProto:
        """Writes each reward part to a column, and their weighted sum to `token_level_scores`."""
        with self.phase("reward"):
            return credit.score(batch, self.reward_fn, *self.scoring_options)

    def estimate(self, batch: DataProto) -> DataProto:
        """Computes the log-probs, values and implicit rewards that the algorithm reads."""
        plan = self.plan
        for name in plan.columns & DERIVED_COLUMNS.keys():
            write(batch, name, DERIVED_COLUMNS[name](batch))
        if plan.log_prob_columns:
            with self.phase("old_log_prob"):
                options = {"with_sum_pi_squared": "sum_pi_squared" in plan.log_prob_columns}
                output = self.actor.call(ActorWorker.compute_log_prob, batch, **options)
                add_columns(batch, output, plan.log_prob_columns)
        if self.config.algorithm.rollout_correction.bypass_mode:
            write(batch, "old_log_probs", require(batch, "rollout_log_probs").clone())
        if plan.needs_reference:
            with self.phase("ref"):
                add_columns(batch, self.reference.call(ReferenceWorker.compute_ref_log_prob, batch))
        if plan.needs_critic and self.critic is not None:
            with self.phase("values"):
                add_columns(batch, self.critic.call(CriticWorker.compute_values, batch))
        if plan.needs_implicit_rewards:
            with self.phase("update_rm"):
                train_implicit_reward_model(batch, self.trained_groups["reward"], self.config)
        return batch

    def assign_credit(self, batch: DataProto) -> DataProto:
        """Computes rewards (minus the KL penalty), importance weights, advantages and returns."""
        algorithm = self.config.algorithm
        with self.timer("adv"):
            step_metrics = credit.apply_kl_in_reward(batch, algorithm, self.kl_controller)
            if self.plan.corrects_for_rollout:
                step_metrics |= off_policy.correct_for_rollout(batch, algorithm.rollout_correction)
            credit.estimate_advantages(batch, self.plan.estimator, self.config)
        batch.meta_info.setdefault("metrics", {}).update(step_metrics)
        return batch

    def resample_and_balance(self, batch: DataProto) -> DataProto:
        """Returns the batch of the update: resampled if PF-PPO is enabled, and ordered by rank."""
        trainer, ranks = self.config.trainer, self.actor.data_parallel_size
        with self.timer("adv"):
            train_batch = batch
            if self.config.algorithm.use_pf_ppo:
                train_batch = selection.resample(batch, self.config, step=self.global_step)
            train_batch, balance_metrics = credit.balance(
                train_batch, ranks, self.plan.rows_per_update, by_length=trainer.balance_batch
            )
        batch.meta_info["metrics"].update(balance_metrics)
        return train_batch

    def update(self, batch: DataProto) -> dict[str, float]:
        """Updates the critic, then (after `critic_warmup`) the actor, and publishes the actor's weights."""
        step_metrics: dict[str, float] = {}
        options = {"total_rows": int(batch.batch["global_row"].max()) + 1}
        if self.plan.needs_critic and self.critic is not None:
            with self.phase("update_critic"):
                output = self.critic.call(CriticWorker.update_critic, batch, **options)
                step_metrics |= mean_over_ranks(output.meta_info["metrics"])
        if self.global_step > self.config.trainer.critic_warmup:
            with self.phase("update_actor"):
                output = self.actor.call(ActorWorker.update_actor, batch, **options)
                step_metrics |= mean_over_ranks(output.meta_info["metrics"])
            with self.phase("update_weights"):
                step_metrics |= self.publisher.publish()
        return step_metrics

    def report(self, batch: DataProto) -> dict[str, float]:
        """Returns the metrics that are computed from the batch of a step."""
        data = self.config.data
        recomputes_log_probs = "old_log_probs" in self.plan.log_prob_columns
        result = {
            "training/global_step": self.global_step,
            "training/epoch": self.loader.epoch,
            "training/old_log_probs_recomputed": float(recomputes_log_probs),
            **credit.data_metrics(batch, data.max_prompt_length, data.max_response_length),
            # In bypass mode the old log-probs are the rollout's, so there is nothing to compare.
            **(off_policy.agreement_metrics(batch) if recomputes_log_probs else {}),
            **credit.signal_metrics(batch),
            **metrics.distinct_answers(batch),
            **self.publisher.staleness(batch),
            **traffic_metrics(self.traffic),
            **mean_over_ranks(batch.meta_info.get("metrics", {})),
        }
        if batch.has_column("routed_experts"):
            result |= metrics.routing_metrics(batch, self.config.actor_rollout_ref.model.path)
        if self.plan.logs_response_metrics:
            with self.timer("compute_additional_metrics"):
                result |= response_metrics(batch, self.tokenizer, self.config, self.route_by_style)
        return result | credit.pop_manager_metrics(self.reward_fn, self.reward_model)

    def after_step(self, batch: DataProto) -> dict[str, float]:
        """Writes the rollout file, calls `on_batch_end`, and returns the metrics of a due validation."""
        self.rollout_writer.write(batch, self.global_step, self.tracking)
        self.loader.on_batch_end(batch)
        test_freq = self.config.trainer.test_freq
        is_due = test_freq > 0 and self.global_step % test_freq == 0
        return self.validate() if is_due or self.global_step >= self.total_steps else {}

    def validate(self) -> dict[str, float]:
        """Validates on every validation row, greedily or as `val_kwargs` configures."""
        if self.val_dataset is None:
            return {}
        rollout = self.config.actor_rollout_ref.rollout
        n, sampling = rollout.val_kwargs.n, validation_sampling(rollout)

        def generate(prompts: Mapping[str, np.ndarray]) -> DataProto:
            rows = row_dicts(prompts)
            numbers = self.ledger.reserve_numbers(len(rows))
            batch = self.source.generate(dict(zip(numbers, rows, strict=True)), [sampling] * n)
            return credit.score(batch, self.val_reward_fn, *self.scoring_options)

        with self.timer("testing"), progress("validate", len(self.val_dataset)) as bar:
            val_metrics, batch = run_validation(self.val_loader.first_epoch(), generate, n, bar)
        self.rollout_writer.write_validation(batch, self.global_step, self.tracking)
        manager_metrics = credit.pop_manager_metrics(self.val_reward_fn, self.reward_model)
        return val_metrics | {f"val-aux/{name}": value for name, value in manager_metrics.items()}

    @contextmanager
    def checkpoint_if_due(self, stop_requested: bool) -> Iterator[bool]:
        """Writes the checkpoint of the step if it is due, and yields whether it is due.

        The block logs the step's metrics. The temporary checkpoint gets its name only after the block, so
        that no checkpoint lacks the metrics of its step.
        """
        trainer = self.config.trainer
        is_due = trainer.save_freq > 0 and self.global_step % trainer.save_freq == 0
        is_last = trainer.save_freq != 0 and self.global_step >= self.total_steps
        if not (is_due or is_last or stop_requested):
            yield False
            return
        with checkpoint.atomic_folder(self.run_folder, self.global_step) as folder:
            self.save(folder)
            yield True
        protected = self.alarms.protected_steps(self.global_step)
        checkpoint.prune(self.run_folder, trainer.checkpoints_to_keep, protected)

    def save(self, folder: Path) -> None:
        """Saves the full state of the run, so that a resumed run computes the same numbers."""
        self.rollout_writer.flush()
        with self.phase("save_checkpoint"):
            for role, group in self.trained_groups.items():
                group.call_all(TrainWorker.save_checkpoint, str(folder / role))
            state: Fields = {"step": self.global_step, "loader": self.loader.state_dict()}
            state |= {"ledger": self.ledger.state_dict(), "alarms": self.alarms.state_dict()}
            state |= {"kl_controller": self.kl_controller.state_dict()}
            checkpoint.write_state(folder, state)

    def resume(self) -> bool:
        """Loads the checkpoint, if any; returns whether the run will train, which deletes later files."""
        trainer, run = self.config.trainer, self.run_folder
        source = checkpoint.find_resume_source(run, trainer.resume_mode, trainer.resume_from_path)
        if source is not None:
            self._load(*source)
        if will_train := self.global_step < self.total_steps and not trainer.val_only:
            checkpoint.discard_after(run, source)
        return will_train

    def _load(self, step: int, folder: Path) -> None:
        for role, group in self.trained_groups.items():
            group.call_all(TrainWorker.load_checkpoint, str(folder / role))
        self.publisher.publish()
        state = checkpoint.read_state(folder, "loader", "kl_controller")
        self.loader.load_state_dict(state["loader"])
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.ledger.load_state_dict(state.get("ledger") or ledger_state(state))
        self.alarms.load_state_dict(state.get("alarms"))
        self.global_step = step
        total_steps = None if self.config.trainer.val_only else self.total_steps
        checkpoint.print_resumed(folder, step, total_steps)

    def shutdown(self) -> None:
        """Stops the workers and the scoring processes."""
        with self._stack:  # stops the workers even if a manager cannot be closed
            for closable in (self.reward_fn, self.val_reward_fn, self.rollout_writer):
                if hasattr(closable, "close"):
                    closable.close()
