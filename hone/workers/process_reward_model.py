"""Process reward models: a frozen model that scores every reasoning step, and PRIME's implicit model.

The frozen model is a token classifier of two labels (PURE), or a causal language model whose logits of two
tokens give the score (Math-Shepherd). A step ends at a token whose text ends in `split_step_char`, and at the
end of the response. The model reads `step_separator` in place of that token and scores the step there. If the
policy has another vocabulary, the response is decoded, split by characters and encoded step by step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress

import torch
from torch import Tensor

from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopOutput
from hone.algorithms.credit import mean_contrast_logits, outcome_losses, step_ends, step_rewards
from hone.algorithms.policy_losses.policy_loss import agg_loss
from hone.columns import require
from hone.config import ConfigError
from hone.config.engine import CheckpointConfig
from hone.config.reward import RewardModelModelConfig
from hone.controller import Dispatch, register
from hone.data.messages import Prompt, as_messages
from hone.data.prompt_ids import render_prompt
from hone.data.response_steps import (
    TokenTextSplitter,
    blank_ids,
    separator_ids,
    split_steps,
    written_ends,
)
from hone.data.steps import build_step_separator, unescape_newlines
from hone.engine.build import build_strategy
from hone.engine.contract import ObjectiveOutput, Options
from hone.models.from_config import import_external
from hone.models.load import load_config, load_tokenizer
from hone.ops.rows import masked_sum, split_at_response
from hone.protocol import DataProto
from hone.workers.actor import end_updates, minibatches
from hone.workers.engine_specs import implicit_reward_spec, process_reward_spec
from hone.workers.objectives import TokenObjective
from hone.workers.train_worker import TrainWorker

logger = logging.getLogger(__name__)

OUTCOME, GROUP = "outcome", "group"
_REFERENCE_COLUMN, _CONTRAST_COLUMN = "reference_log_probs", "contrast_logits"
_LOG_PROB_OPTIONS: Options = {"temperature": 1.0, "with_entropy": False}


@dataclass(frozen=True)
class StepRow:
    """The reward model's input tokens of one row, and the ends of its steps."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    """The response as the reward model reads it, with separators."""
    score_positions: Sequence[int]
    """The index in `response_ids` at which each step is scored."""
    policy_positions: Sequence[int]
    """The index in the policy's response of the token that ends each step."""


class ProcessRewardModelWorker(TrainWorker):
    """A frozen process reward model on the training engine, with packed rows, sharded over the ranks."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        config = self.config.reward_model
        path, trust_remote_code = str(config.model.path), config.model.trust_remote_code
        import_external(config.model.external_lib)
        _check_head(path, config.step_labels)
        self.tokenizer = policy_tokenizer = load_tokenizer(
            path, trust_remote_code=trust_remote_code
        )
        if name := config.model.input_tokenizer:
            policy_tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        self._step_end_text = unescape_newlines(config.split_step_char)
        self._separator = build_step_separator(
            self.tokenizer, config.step_separator, config.step_labels, "reward_model"
        )
        self._token_texts = TokenTextSplitter(policy_tokenizer)
        self._step_end_ids = separator_ids(self.tokenizer, self._step_end_text)
        self._blank_ids = blank_ids(self.tokenizer)
        vocabulary = self.tokenizer.get_vocab().items()
        self._has_policy_vocabulary = policy_tokenizer.get_vocab().items() <= vocabulary
        self._has_warned = False
        spec = partial(process_reward_spec, label_tokens=self._separator.label_tokens)
        self.build_engine("fsdp2", spec, config.model.fsdp_config)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Returns `step_rewards` [B, T], before credit assignment, and `step_mask` [B, T]."""
        config = self.config.reward_model
        # If no token ends in split_step_char, or the separator is several tokens, text is split instead.
        can_split_ids = len(self._step_end_ids) > 0 and len(self._separator.tokens) == 1
        splits_ids = self._has_policy_vocabulary and can_split_ids
        rows = self._rows_from_ids(data) if splits_ids else self._rows_from_text(data)
        inputs, position_maps = self._engine_inputs(rows)
        total_steps = sum(len(row.score_positions) for row in rows)
        truncated_steps = total_steps - sum(len(positions) for positions in position_maps)
        if truncated_steps and not self._has_warned:
            self._has_warned = True
            message = (
                "reward_model.max_length=%s truncates %d steps of this batch, which get no reward"
            )
            logger.warning(message, config.max_length, truncated_steps)
        batch = collate_outputs(inputs, pad_token_id=self.tokenizer.pad_token_id)
        rewards = step_rewards(self.engine.infer(batch)["scores"])
        scores = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
        step_mask = torch.zeros(scores.shape, dtype=torch.bool)
        row_indices = [i for i, positions in enumerate(position_maps) for _ in positions]
        score_positions = [score_i for positions in position_maps for score_i in positions]
        policy_positions = [
            policy_i for positions in position_maps for policy_i in positions.values()
        ]
        scores[row_indices, policy_positions] = rewards[row_indices, score_positions]
        step_mask[row_indices, policy_positions] = True
        if not scores.isfinite().all():
            raise ValueError(
                f"reward_model.model.path={config.model.path} gave a score that is not finite; check its "
                "weights, or use reward_model.model.fsdp_config.dtype=fp32"
            )
        return DataProto.from_dict({"step_rewards": scores, "step_mask": step_mask})

    def _engine_inputs(
        self, rows: Sequence[StepRow]
    ) -> tuple[list[AgentLoopOutput], list[dict[int, int]]]:
        """Returns the rows for the engine, and for each row the map {score position: policy position}.

        At each token, the engine returns the score of the previous token, so a padding token is appended.
        """
        max_length, pad_id = self.config.reward_model.max_length, self.tokenizer.pad_token_id
        inputs, position_maps = [], []
        for row in rows:
            ids = [*row.prompt_ids, *row.response_ids]
            excess = max(0, len(ids) - (max_length or len(ids)))
            offset = (
                len(row.prompt_ids) - excess
            )  # index i in `response_ids` is i + offset in `ids`
            ids, start = ids[excess:], max(1, offset)
            response = [*ids[start:], pad_id]
            pairs = zip(row.score_positions, row.policy_positions, strict=True)
            kept_pairs = [(i + offset, policy_i) for i, policy_i in pairs if i + offset >= 0]
            # Index k in `ids` is k - start in `response`; its score is one token later.
            positions = {k - start + 1: policy_i for k, policy_i in kept_pairs}
            mask = [int(position in positions) for position in range(len(response))]
            inputs.append(AgentLoopOutput(ids[:start], response, mask))
            position_maps.append(positions)
        row_length = max(len(row.prompt_ids) + len(row.response_ids) for row in inputs)
        config, ranks = self.config.reward_model, self.engine.mesh.sequence_size
        budget = config.forward_max_token_len_per_gpu
        uses_token_budget = config.sequences_per_micro_batch(ranks=1) is None
        if uses_token_budget and row_length > budget * ranks:
            per_rank = f" on each of {ranks} ranks" if ranks > 1 else ""
            raise ConfigError(
                f"a row has {row_length} tokens of the reward model, more than reward_model."
                f"forward_max_token_len_per_gpu={budget}{per_rank}; raise it, or truncate rows from "
                f"the left with reward_model.max_length={budget * ranks - 1}"
            )
        return inputs, position_maps

    def _rows_from_ids(self, data: DataProto) -> list[StepRow]:
        """Returns rows of the policy's tokens, with the separator in place of each token that ends a step."""
        columns = data.batch
        responses = columns["responses"]
        is_step_end = step_ends(responses, columns["response_mask"], self._step_end_ids)
        # A policy with more embeddings than tokens can sample ids outside the vocabulary.
        is_valid = responses < self.engine.model_facts.vocab_size
        is_blank = ~is_valid | torch.isin(responses, self._blank_ids)
        is_written = columns["response_mask"].bool() & ~is_blank
        responses = torch.where(is_valid, responses, self.tokenizer.pad_token_id)
        responses = torch.where(is_step_end, self._separator.tokens[0], responses)
        end_positions = [
            written_ends(is_end.nonzero().squeeze(1).tolist(), written)
            for is_end, written in zip(is_step_end, is_written.tolist(), strict=True)
        ]
        rows = zip(_prompt_ids(data), responses.tolist(), end_positions, strict=True)
        return [
            StepRow(prompt_ids, response_ids[: ends[-1] + 1 if ends else 0], ends, ends)
            for prompt_ids, response_ids, ends in rows
        ]

    def _rows_from_text(self, data: DataProto) -> list[StepRow]:
        """Splits the text of the responses and encodes each step with the reward model's tokenizer."""
        columns = data.batch
        _, is_token = split_at_response(columns["attention_mask"].bool(), columns["responses"])
        prompts = _prompt_ids(data) if self._has_policy_vocabulary else self._render_prompts(data)
        rows = []
        for index, prompt_ids in enumerate(prompts):
            ids = columns["responses"][index][is_token[index]].tolist()
            policy_mask = columns["response_mask"][index][is_token[index]].tolist()
            token_texts = self._token_texts(ids)
            response_ids: list[int] = []
            score_positions, policy_positions = [], []
            steps = split_steps(token_texts, policy_mask, self._step_end_text)
            is_written = [
                bool(is_policy and text.strip())
                for is_policy, text in zip(policy_mask, token_texts, strict=True)
            ]
            ends = set(written_ends([position for position, _ in steps], is_written))
            for position, step in steps:
                if position not in ends or not step.strip():
                    continue
                # Text such as "<|im_end|>" is encoded as text, not as the special token.
                response_ids += self.tokenizer.encode(
                    step.strip(), add_special_tokens=False, split_special_tokens=True
                )
                score_positions.append(len(response_ids) + self._separator.score_index)
                response_ids += self._separator.tokens
                policy_positions.append(position)
            rows.append(StepRow(prompt_ids, response_ids, score_positions, policy_positions))
        return rows

    def _render_prompts(self, data: DataProto) -> list[list[int]]:
        """Returns the prompts in the reward model's chat template; without a template, as plain text."""
        prompt_format = self.config.data.prompt_format
        lacks_template = prompt_format == "chat" and not self.tokenizer.chat_template

        def render(prompt: Prompt) -> list[int]:
            if lacks_template and not isinstance(prompt, str):
                prompt = "\n\n".join(str(message["content"]) for message in as_messages(prompt))
            return render_prompt(prompt, self.tokenizer, prompt_format)

        return [render(prompt) for prompt in data.non_tensor_batch["raw_prompt"]]


def _prompt_ids(data: DataProto) -> list[list[int]]:
    """Returns the prompt tokens of each row without padding."""
    columns = data.batch
    is_token, _ = split_at_response(columns["attention_mask"].bool(), columns["responses"])
    rows = zip(columns["prompts"].tolist(), is_token.tolist(), strict=True)
    return [list(compress(ids, mask)) for ids, mask in rows]


def _check_head(path: str, step_labels: tuple[str, str] | None) -> None:
    """Raises ConfigError if the model's head does not match `reward_model.step_labels`."""
    architecture = (load_config(path).architectures or ["model"])[0]
    if step_labels is None and not architecture.endswith("ForTokenClassification"):
        raise ConfigError(
            f"reward_model.model.path={path} is a {architecture} without the head of a process reward "
            "model; use a token classifier of two labels (bad, good), train one with hone train-prm, or "
            "set reward_model.step_labels for a causal model with a token per label"
        )
    if step_labels is not None and "Classification" in architecture:
        raise ConfigError(
            f"reward_model.step_labels is for causal models, and reward_model.model.path={path} is a "
            f"{architecture}; leave it null"
        )


class OutcomeObjective(TokenObjective):
    """The mean of `outcome_losses` over responses."""

    reads = ("response_mask", OUTCOME, GROUP, _REFERENCE_COLUMN, _CONTRAST_COLUMN)
    options = _LOG_PROB_OPTIONS

    def __init__(self, config: RewardModelModelConfig) -> None:
        self._beta = config.beta_train
        self.needs_batch_statistics = config.loss_type == "dpo"

    def prepare(self, outputs: Mapping[str, Tensor], batch: DataProto) -> dict[str, Tensor]:
        log_ratio = outputs["log_probs"] - require(batch, _REFERENCE_COLUMN)
        logit = self._beta * masked_sum(log_ratio, self.mask(batch), -1)
        outcome, group = require(batch, OUTCOME), require(batch, GROUP)
        return {_CONTRAST_COLUMN: mean_contrast_logits(logit, outcome, group)}

    def __call__(self, outputs: Mapping[str, Tensor], batch: DataProto) -> ObjectiveOutput:
        mask = self.mask(batch)
        log_ratio = outputs["log_probs"] - require(batch, _REFERENCE_COLUMN)
        contrast_logits = batch.column(_CONTRAST_COLUMN) if self.needs_batch_statistics else None
        outcome = require(batch, OUTCOME)
        losses = outcome_losses(log_ratio, outcome, mask, self._beta, contrast_logits)
        per_token = losses[:, None] * mask / mask.sum(-1, keepdim=True).clamp(min=1)
        loss = agg_loss(per_token, mask, "seq-mean-token-sum")
        return ObjectiveOutput(loss, {"reward_model/dpo_loss": loss.detach()})


class ImplicitRewardModelWorker(TrainWorker):
    """PRIME's reward model: a language model that is trained in every step, and its frozen copy.

    The reward of a token is the log-ratio of the two models' probabilities.
    """

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
    def update_rm(self, data: DataProto, *, total_rows: int) -> DataProto:
        """Trains on the columns `outcome` and `group` of the rows; returns `log_ratio` [B, T].

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
                total_rows=total_rows,
            )
            objective = OutcomeObjective(config.model)
            with self.engine.on_device(optimizer=True):
                updates = [self.engine.train_minibatch(batch, objective) for batch in batches]
            metrics = end_updates(self.engine, "reward_model", updates)
        if log_probs is None:
            log_probs = self.engine.infer(data, **_LOG_PROB_OPTIONS)["log_probs"]
        log_ratio = (log_probs - reference_log_probs) * data.batch["response_mask"]
        return DataProto.from_dict({"log_ratio": log_ratio}, meta_info={"metrics": metrics})
