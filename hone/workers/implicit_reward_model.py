"""PRIME's reward model: a language model and its frozen copy.

The reward of a token is the log-ratio of their probabilities. The model is trained in
every step, on the outcomes of the step's responses.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hone.algorithms.aggregation import agg_loss
from hone.algorithms.credit import outcome_losses, rival_logits
from hone.columns import require
from hone.config.engine import CheckpointConfig
from hone.config.reward import RewardModelModelConfig
from hone.controller import Dispatch, register
from hone.engine.build import build_strategy
from hone.engine.contract import ObjectiveOutput, Options
from hone.models.from_config import import_external
from hone.ops.masked import masked_sum
from hone.protocol import DataProto
from hone.workers.engine_specs import implicit_reward_spec
from hone.workers.objectives import TokenObjective, minibatches
from hone.workers.train import TrainWorker

OUTCOME, GROUP = "outcome", "group"
_REFERENCE_COLUMN, _RIVALS_COLUMN = "reference_log_probs", "rival_logits"
_LOG_PROB_OPTIONS: Options = {"temperature": 1.0, "with_entropy": False}


class OutcomeObjective(TokenObjective):
    """The mean of `outcome_losses` over responses."""

    reads = ("response_mask", OUTCOME, GROUP, _REFERENCE_COLUMN, _RIVALS_COLUMN)
    options = _LOG_PROB_OPTIONS

    def __init__(self, config: RewardModelModelConfig) -> None:
        self._beta = config.beta_train
        self.needs_batch_statistics = config.loss_type == "dpo"

    def prepare(self, outputs: Mapping[str, Tensor], batch: DataProto) -> dict[str, Tensor]:
        log_ratio = outputs["log_probs"] - require(batch, _REFERENCE_COLUMN)
        logit = self._beta * masked_sum(log_ratio, self.mask(batch), -1)
        return {_RIVALS_COLUMN: rival_logits(logit, require(batch, OUTCOME), require(batch, GROUP))}

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> ObjectiveOutput:
        mask = self.mask(batch)
        log_ratio = outputs["log_probs"] - require(batch, _REFERENCE_COLUMN)
        rivals = batch.column(_RIVALS_COLUMN) if self.needs_batch_statistics else None
        losses = outcome_losses(log_ratio, require(batch, OUTCOME), mask, self._beta, rivals)
        per_token = losses[:, None] * mask / mask.sum(-1, keepdim=True).clamp(min=1)
        loss = agg_loss(per_token, mask, "seq-mean-token-sum")
        return ObjectiveOutput(loss, {"reward_model/dpo_loss": loss.detach()})


class ImplicitRewardModelWorker(TrainWorker):
    """PRIME's reward model under training, and its frozen reference."""

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.config.actor_rollout_ref.actor.checkpoint

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        model = self.config.reward_model.model
        strategy = self.config.actor_rollout_ref.actor.strategy
        import_external(model.external_lib)
        self.build_engine(strategy, implicit_reward_spec, model.fsdp_config)
        reference_spec = implicit_reward_spec(self.config, self, self.engine.device, frozen=True)
        self._reference = build_strategy(strategy, reference_spec)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_rm(self, data: DataProto, *, num_step_rows: int) -> DataProto:
        """Trains on the columns `outcome` and `group` of a step's rows; returns `log_ratio` [B, T].

        `reward_model.model.update` says when the model is updated: before `log_ratio` is computed (`before`),
        afterwards (`after`, `reverse`) or never (`none`).
        """
        config = self.config.reward_model
        update_mode, metrics = config.model.update, {}
        reference_log_probs = self._reference.infer(data, **_LOG_PROB_OPTIONS)["log_probs"]
        data.batch[_REFERENCE_COLUMN] = reference_log_probs
        log_probs = None
        if update_mode in ("after", "reverse"):
            log_probs = self.engine.infer(data, **_LOG_PROB_OPTIONS)["log_probs"]
        if update_mode != "none":
            batches = minibatches(
                data,
                rows_per_update=config.mini_batch_size,
                epochs=1,
                shuffle_seed=None,
                num_step_rows=num_step_rows,
            )
            objective = OutcomeObjective(config.model)
            with self.engine.on_device(optimizer=True):
                updates = [self.engine.train_minibatch(batch, objective) for batch in batches]
            metrics = self.end_updates("reward_model", updates)
        if log_probs is None:
            log_probs = self.engine.infer(data, **_LOG_PROB_OPTIONS)["log_probs"]
        log_ratio = (log_probs - reference_log_probs) * data.batch["response_mask"]
        return DataProto.from_dict({"log_ratio": log_ratio}, meta_info={"metrics": metrics})
