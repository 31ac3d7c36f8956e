"""Checks a run before any model loads, and reports all problems together.

Every training run starts with these checks; `hone train --dry-run` prints a preview and stops. `hone.config`
has already checked the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from hone.checks import Facts
from hone.checks.agent_checks import AgentChecks
from hone.checks.model_checks import MODEL_CHECKS, megatron_notes
from hone.checks.row_checks import PromptLengths, measure_prompts, try_scorers
from hone.config import PPOTrainerConfig
from hone.data.create import create_run_dataset
from hone.data.dataset import RLHFDataset
from hone.data.loader import Dataset
from hone.data.rows import DataError
from hone.errors import UserError
from hone.models.facts import model_facts
from hone.models.from_config import build_tokenizer
from hone.rewards import load_reward_manager
from hone.rewards.managers.rule import AbstractRewardManager
from hone.rewards.trial import Verdict
from hone.tokenizer import Tokenizer
from hone.tracking import progress
from hone.tracking.tracking import check_trackers
from hone.trainer.command_line import check_output_folder, user_error_message
from hone.trainer.ppo.checkpoint import EarlierRun
from hone.trainer.ppo.device_check import device_problem, device_warning
from hone.trainer.ppo.managers import load_validation_manager
from hone.trainer.ppo.plan import Plan
from hone.trainer.ppo.preview import ResourceEstimate, preview_lines
from hone.trainer.ppo.remote_checkpoints import check_store
from hone.trainer.ppo.roles import load_external_reward_model
from hone.trainer.ppo.trainer import PPOTrainer
from hone.types import Function

TRAIN_KEY, VALIDATION_KEY = "data.train_files", "data.val_files"
T = TypeVar("T")


class PreflightError(UserError, ValueError):
    """Lists all problems that would stop the run, one per line."""

    skips_error_log = True
    """Nothing is written to the run folder, since the run has not started."""

    def __init__(self, problems: list[str]) -> None:
        count = f"{len(problems)} problems"
        super().__init__(problems[0] if len(problems) == 1 else "\n- ".join([count, *problems]))
        self.problems = problems


@dataclass(frozen=True)
class Preview:
    """The lines that summarize a run, and the warnings about it."""

    lines: tuple[str, ...]
    warnings: tuple[str, ...]


def prepare(
    config: PPOTrainerConfig, compute_score: Function | None = None
) -> tuple[PPOTrainer, Preview]:
    """Returns the trainer, without models, and the preview of a run; raises one error for all problems.

    `compute_score` replaces the score function of the configuration.
    """
    preflight = _Preflight(config, compute_score)
    try:
        return preflight.run()
    except BaseException:
        for manager in preflight.managers.values():  # managers may have scoring processes
            if manager is not None and hasattr(manager, "close"):
                manager.close()
        raise


class _Preflight:
    """Builds and checks the parts of a run; an error in one part does not stop the checks of others."""

    def __init__(self, config: PPOTrainerConfig, compute_score: Function | None) -> None:
        self.config = config
        self.compute_score = compute_score
        self.problems: list[str] = []
        self._errors: list[Exception] = []
        self.warnings: list[str] = []
        self.folder_facts = model_facts(config.actor_rollout_ref.model.path)
        self.lengths: dict[str, PromptLengths] = {}
        self.managers: dict[str, AbstractRewardManager | None] = {}

    def run(self) -> tuple[PPOTrainer, Preview]:
        """Returns the trainer and the preview; raises the recorded errors together."""
        config, attempt = self.config, self._attempt
        folder, model = config.trainer.default_local_dir, config.actor_rollout_ref.model
        attempt(lambda: check_output_folder(folder, "trainer.default_local_dir"))
        attempt(lambda: check_store(config.trainer.default_hdfs_dir))
        attempt(lambda: check_trackers(config.trainer.logger))
        tokenizer_config = replace(model, trust_remote_code=config.data.trust_remote_code)
        tokenizer = attempt(lambda: build_tokenizer(tokenizer_config))
        plan = attempt(lambda: Plan.of(config))
        self._add_problems(filter(None, [attempt(lambda: device_problem(config))]))
        self._check_models(plan)
        datasets = self._create_datasets(tokenizer)
        agent_checks, agent_problems = None, []
        if tokenizer is not None:
            agent_checks = attempt(lambda: AgentChecks(config, tokenizer, datasets))
        if agent_checks is not None:
            agent_problems = list(agent_checks.problems())  # also builds the agent loops
            attempt(agent_checks.set_prompt_rendering)  # needs the agent loops
        load_train = partial(load_reward_manager, num_examine=0)
        load_val = partial(load_validation_manager, dataset=datasets.get(VALIDATION_KEY))
        for key, load in {TRAIN_KEY: load_train, VALIDATION_KEY: load_val}.items():
            load_manager = partial(load, config, tokenizer, compute_score=self.compute_score)
            self.managers[key] = attempt(load_manager)
        earlier_run = attempt(lambda: EarlierRun(config))
        if earlier_run is not None and plan is not None:
            self._add_problems(earlier_run.problems(plan))
            attempt(lambda: earlier_run.require_same_data(datasets.get(TRAIN_KEY)))
        resources = None
        if plan is not None:
            resources = ResourceEstimate(config, plan, self.folder_facts)
            self._add_problems(resources.disk_problems())
        if agent_checks is not None:
            self._add_problems(agent_problems)
            self.warnings += agent_checks.warnings()
        if tokenizer is not None:
            self._add_problems(self._prompt_problems(datasets))
            if plan is not None and plan.has_external_reward_model:
                manager = attempt(lambda: load_external_reward_model(config, tokenizer, None))
                if manager is not None and (reason := manager.scorer.connection_error()):
                    self.warnings.append(f"the reward model's server cannot be reached ({reason})")
        self._try_scorers(datasets)
        trainer = self._build_trainer(tokenizer, datasets)
        if len(self.problems) == len(self._errors) == 1:
            vars(self._errors[0])["skips_error_log"] = True
            raise self._errors[0]
        if self.problems:
            raise PreflightError(self.problems) from next(iter(self._errors), None)
        assert trainer is not None
        assert resources is not None
        assert earlier_run is not None
        self.warnings += earlier_run.changes(trainer.total_steps)
        self.warnings += self._setting_warnings(trainer.plan)
        lines = preview_lines(trainer, resources, self.lengths)
        return trainer, Preview(tuple(lines), tuple(self.warnings))

    def _attempt(self, action: Callable[[], T]) -> T | None:
        """Returns the result of `action`, or None after a user error, which is recorded."""
        try:
            return action()
        except Exception as error:
            message = user_error_message(error)
            if message is None:
                raise
            if self._add_problems([message]):
                self._errors.append(error)
            return None

    def _add_problems(self, messages: Iterable[str]) -> bool:
        """Adds each message whose cause is not recorded yet; returns whether a message was added."""
        count_before = len(self.problems)
        for message in messages:
            # A bad file may be reported by its own check and by AgentChecks, as "agent loop NAME cannot be
            # built: CAUSE" for each agent loop that needs the file.
            cause = message.rpartition("cannot be built: ")[2]
            if not any(cause in problem for problem in self.problems):
                self.problems.append(message)
        return len(self.problems) > count_before

    def _check_models(self, plan: Plan | None) -> None:
        """Runs the checks of the models to load, none of which loads weights."""
        facts = Facts(self.config, plan)
        for check in MODEL_CHECKS:
            for problem in check(facts):
                self._attempt(problem.throw)
        self.warnings += megatron_notes(facts)

    def _create_datasets(self, tokenizer: Tokenizer | None) -> dict[str, Dataset]:
        """Creates the data sets, by config key; without a tokenizer, prompts are not filtered by length."""
        data = self.config.data
        if tokenizer is None:
            data = replace(data, filter_overlong_prompts=False)
        create = partial(create_run_dataset, None, data, tokenizer)
        datasets = {TRAIN_KEY: self._attempt(partial(create, is_train=True))}
        if data.val_files:
            datasets[VALIDATION_KEY] = self._attempt(partial(create, is_train=False))
        return {key: dataset for key, dataset in datasets.items() if dataset is not None}

    def _prompt_problems(self, datasets: dict[str, Dataset]) -> Iterator[str]:
        """Yields a problem per data set with prompts that exceed `data.max_prompt_length` or the model."""
        data, overrides = self.config.data, self.config.actor_rollout_ref.model.override_config
        positions = overrides.get(
            "max_position_embeddings", self.folder_facts.max_position_embeddings
        )
        for key, dataset in datasets.items():
            if not isinstance(dataset, RLHFDataset):
                continue
            try:
                with progress(f"measure prompts of {key}", len(dataset)) as bar:
                    self.lengths[key] = lengths = measure_prompts(dataset, advance=bar.advance)
            except DataError as error:
                yield str(error)
                continue
            response_tokens = data.max_response_length
            refuses_overlong = lengths.too_long > 0 and data.truncation == "error"
            # A higher data.max_prompt_length is no remedy if the response takes all other positions.
            limit_is_full = data.max_prompt_length + response_tokens >= (positions or math.inf)
            is_response_too_long = limit_is_full and lengths.longest < positions
            if refuses_overlong and not is_response_too_long:
                measured = "" if lengths.rows == len(dataset) else "the first "
                yield (
                    f"{lengths.too_long:,} of {measured}{lengths.rows:,} prompts have more than "
                    f"data.max_prompt_length={data.max_prompt_length} tokens, the longest "
                    f"{lengths.longest:,} ({lengths.where}); raise it, or set "
                    "data.filter_overlong_prompts=true or data.truncation=left|right|middle"
                )
                continue
            prompt_tokens = lengths.longest
            if not refuses_overlong:
                prompt_tokens = min(prompt_tokens, data.max_prompt_length)
            if positions and prompt_tokens + response_tokens > positions:
                yield (
                    f"a prompt of {prompt_tokens:,} tokens ({lengths.where}) and "
                    f"data.max_response_length={response_tokens} exceed the model's {positions:,} "
                    f"positions; use data.max_response_length={max(1, positions - prompt_tokens)} or less"
                )

    def _try_scorers(self, datasets: dict[str, Dataset]) -> None:
        """Calls the scorers on a few rows of each data set, and records the problems and warnings."""
        for key, dataset in datasets.items():
            manager = self.managers[key]
            if manager is None:
                continue
            verdicts = try_scorers(manager, dataset, self.config)
            for verdict in self._attempt(partial(list[Verdict], verdicts)) or ():
                self._add_problems([verdict.problem] if verdict.problem else ())
                self.warnings += [verdict.warning] if verdict.warning else []

    def _build_trainer(
        self, tokenizer: Tokenizer | None, datasets: dict[str, Dataset]
    ) -> PPOTrainer | None:
        """Returns the trainer, whose constructor checks that the parts match; None if a part is missing."""
        required_keys = {TRAIN_KEY, VALIDATION_KEY} if self.config.data.val_files else {TRAIN_KEY}
        managers = [self.managers[TRAIN_KEY], self.managers[VALIDATION_KEY]]
        if tokenizer is None or None in managers or required_keys != set(datasets):
            return None
        return self._attempt(
            lambda: PPOTrainer(
                self.config,
                tokenizer,
                reward_fn=managers[0],
                val_reward_fn=managers[1],
                train_dataset=datasets[TRAIN_KEY],
                val_dataset=datasets.get(VALIDATION_KEY),
            )
        )

    def _setting_warnings(self, plan: Plan) -> Iterator[str]:
        """Yields a warning per combination of settings that is allowed but rarely intended."""
        config, rollout = self.config, self.config.actor_rollout_ref.rollout
        if (warning := device_warning(config)) is not None:
            yield warning
        if config.algorithm.use_kl_in_reward and config.actor_rollout_ref.actor.use_kl_loss:
            yield (
                "algorithm.use_kl_in_reward=true and actor_rollout_ref.actor.use_kl_loss=true: the KL to "
                "the reference counts twice, in the reward and in the loss; one of them is enough"
            )
        if config.curriculum_learning.enable and config.reward_manager.name == "blank":
            yield (
                "curriculum_learning.enable=true and reward_manager.name=blank: no rule scores the rows, so "
                "curriculum learning removes no group unless the agent loop returns scores"
            )
        has_single_responses = rollout.n == 1 and not config.trainer.val_only
        if plan.estimator.group_use == "compared" and has_single_responses:
            yield (
                f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares the responses of "
                "one prompt, and actor_rollout_ref.rollout.n=1: it trains on raw scores, without a "
                "baseline, as verl does; use actor_rollout_ref.rollout.n=8, for example"
            )
