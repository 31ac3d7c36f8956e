"""The process reward model (PURE): scores every reasoning step with a token classifier of two labels, or by
the logits of two tokens of a causal language model (Math-Shepherd).

A step ends at a token whose text ends in `split_step_char`, and at the end of the response; the model reads
`step_separator` in its place and scores the step there. With another vocabulary than the policy's, the
response is decoded, split by characters and encoded step by step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress

import torch

from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopOutput
from hone.algorithms.credit import assign_credit, step_ends, step_rewards
from hone.config import ConfigError
from hone.controller import Dispatch, register
from hone.data.prompts import Prompt, as_messages, render_prompt
from hone.data.response_steps import TokenTexts, separator_ids, split_steps
from hone.data.steps import step_mark, typed_text
from hone.models.from_config import import_external
from hone.models.load import load_config, load_tokenizer
from hone.ops.masked import split_at_response
from hone.protocol import DataProto
from hone.workers.engine_specs import step_model_spec
from hone.workers.train import TrainWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRow:
    """The model's input tokens of one row, and the ends of the response's steps."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    ends: Sequence[int]
    """Index in `tokens` at which each step is scored."""
    columns: Sequence[int]
    """Index in the policy's response of the token that ends each step."""


class ProcessRewardModelWorker(TrainWorker):
    """A frozen token classifier on the training engine: packed rows, sharded over the ranks."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        config = self.config.reward_model
        path, trusted = str(config.model.path), config.model.trust_remote_code
        import_external(config.model.external_lib)
        _check_head(path, config.step_labels)
        self.tokenizer = load_tokenizer(path, trust_remote_code=trusted)
        self._split_text = typed_text(config.split_step_char)
        self._mark = step_mark(
            self.tokenizer, config.step_separator, config.step_labels, "reward_model"
        )
        name = config.model.input_tokenizer
        policy_tokenizer = load_tokenizer(name, trust_remote_code=trusted) if name else None
        self._texts = TokenTexts(policy_tokenizer or self.tokenizer)
        self._separator_ids = separator_ids(self.tokenizer, self._split_text)
        vocabulary = self.tokenizer.get_vocab().items()
        self._has_policy_vocabulary = (
            policy_tokenizer is None or policy_tokenizer.get_vocab().items() <= vocabulary
        )
        self._has_warned = False
        spec = partial(step_model_spec, label_tokens=self._mark.labels)
        self.build_engine("fsdp2", spec, config.model.fsdp_config)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Returns `process_scores` [B, T] after credit assignment, and `step_mask` [B, T] of scored steps."""
        config = self.config.reward_model
        # Without a token that ends in the separator, steps are split by characters.
        has_separators = len(self._separator_ids) > 0 and len(self._mark.tokens) == 1
        by_ids = self._has_policy_vocabulary and has_separators
        rows = self._rows_from_ids(data) if by_ids else self._rows_from_text(data)
        inputs, columns = self._engine_inputs(rows)
        truncated = sum(len(row.ends) - len(x) for row, x in zip(rows, columns, strict=True))
        if truncated and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "reward_model.max_length=%s truncates %d steps of this batch, which get no reward",
                config.max_length,
                truncated,
            )
        batch = collate_outputs(inputs, pad_token_id=self.tokenizer.pad_token_id)
        rewards = step_rewards(self.engine.infer(batch)["scores"])
        scores = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
        steps = torch.zeros(scores.shape, dtype=torch.bool)
        row_indices = [row for row, scored in enumerate(columns) for _ in scored]
        positions = [position for scored in columns for position in scored]
        ends = [column for scored in columns for column in scored.values()]
        scores[row_indices, ends] = rewards[row_indices, positions]
        steps[row_indices, ends] = True
        if not scores.isfinite().all():
            raise ValueError(
                f"reward_model.model.path={config.model.path} gave a score that is not finite; check its "
                "weights, or use reward_model.model.fsdp_config.dtype=fp32"
            )
        credit = assign_credit(scores, steps, config.credit_assignment)
        return DataProto.from_dict({"process_scores": credit, "step_mask": steps})

    def _engine_inputs(
        self, rows: Sequence[StepRow]
    ) -> tuple[list[AgentLoopOutput], list[dict[int, int]]]:
        """Returns the rows for the engine, and for each the map {scored position: response column}.

        The engine returns the score of the previous token at each token, hence the padding token at the end.
        """
        max_length, pad = self.config.reward_model.max_length, self.tokenizer.pad_token_id
        inputs, columns = [], []
        for row in rows:
            ids = [*row.prompt, *row.tokens]
            excess = max(0, len(ids) - (max_length or len(ids)))
            ids, start = ids[excess:], max(1, len(row.prompt) - excess)
            shift = len(row.prompt) - excess + 1 - start
            # Positions before the first token have been truncated.
            pairs = zip(row.ends, row.columns, strict=True)
            scored = {end + shift: column for end, column in pairs if end + shift + start > 0}
            response = [*ids[start:], pad]
            mask = [0] * len(response)
            for position in scored:
                mask[position] = 1
            inputs.append(AgentLoopOutput(ids[:start], response, mask))
            columns.append(scored)
        self._check_token_budget(max(len(row.prompt_ids) + len(row.response_ids) for row in inputs))
        return inputs, columns

    def _rows_from_ids(self, data: DataProto) -> list[StepRow]:
        """Returns the policy's tokens with the separator in place of every token that ends a step."""
        columns = data.batch
        responses = columns["responses"]
        ends = step_ends(responses, columns["response_mask"], self._separator_ids)
        # A policy with more embeddings than tokens can sample ids outside the vocabulary.
        is_valid = responses < self.engine.facts.vocabulary
        responses = torch.where(is_valid, responses, self.tokenizer.pad_token_id)
        separated = torch.where(ends, self._mark.tokens[0], responses).tolist()
        positions: list[list[int]] = [[] for _ in separated]
        for row, position in ends.nonzero().tolist():
            positions[row].append(position)
        return [
            StepRow(prompt, tokens[: row_ends[-1] + 1 if row_ends else 0], row_ends, row_ends)
            for prompt, tokens, row_ends in zip(_prompts(data), separated, positions, strict=True)
        ]

    def _rows_from_text(self, data: DataProto) -> list[StepRow]:
        """Renders the prompts and encodes each step with the reward model's tokenizer."""
        batch = data.batch
        _, exists = split_at_response(batch["attention_mask"].bool(), batch["responses"])
        prompts = _prompts(data) if self._has_policy_vocabulary else self._render_prompts(data)
        rows = []
        for row, prompt in enumerate(prompts):
            ids = batch["responses"][row][exists[row]].tolist()
            policy_mask = batch["response_mask"][row][exists[row]].tolist()
            tokens: list[int] = []
            ends, columns = [], []
            for column, step in split_steps(self._texts(ids), policy_mask, self._split_text):
                # Text that spells a special token is encoded as text.
                tokens += self.tokenizer.encode(
                    step.strip(), add_special_tokens=False, split_special_tokens=True
                )
                ends.append(len(tokens) + self._mark.scored)
                tokens += self._mark.tokens
                columns.append(column)
            rows.append(StepRow(prompt, tokens, ends, columns))
        return rows

    def _render_prompts(self, data: DataProto) -> list[list[int]]:
        """Returns the prompts in the reward model's chat template, or as plain text if it has none."""
        prompt_format = self.config.data.prompt_format
        as_text = prompt_format == "chat" and not self.tokenizer.chat_template

        def render(prompt: Prompt) -> list[int]:
            if as_text and not isinstance(prompt, str):
                prompt = "\n\n".join(str(message["content"]) for message in as_messages(prompt))
            return render_prompt(prompt, self.tokenizer, prompt_format)

        return [render(prompt) for prompt in data.non_tensor_batch["raw_prompt"]]

    def _check_token_budget(self, tokens: int) -> None:
        config = self.config.reward_model
        budget, rows = config.forward_max_token_len_per_gpu, config.sequences_per_micro_batch(1)
        ranks = self.engine.mesh.sequence_size
        if rows is None and tokens > budget * ranks:
            raise ConfigError(
                f"a row has {tokens} tokens of the reward model, more than "
                f"reward_model.forward_max_token_len_per_gpu={budget}; raise it, or truncate rows from "
                f"the left with reward_model.max_length={budget * ranks - 1}"
            )


def _prompts(data: DataProto) -> list[list[int]]:
    """Returns the prompt tokens of each row without padding."""
    columns = data.batch
    exists, _ = split_at_response(columns["attention_mask"].bool(), columns["responses"])
    rows = zip(columns["prompts"].tolist(), exists.tolist(), strict=True)
    return [list(compress(ids, mask)) for ids, mask in rows]


def _check_head(path: str, step_labels: tuple[str, str] | None) -> None:
    architecture = (load_config(path).architectures or ["model"])[0]
    if step_labels is None and not architecture.endswith("ForTokenClassification"):
        raise ConfigError(
            f"reward_model.model.path={path} is a {architecture} without the head of a process reward "
            "model; give a token classifier of two labels (bad, good), train one with hone train-prm, or "
            "set reward_model.step_labels for a causal model with a token per label"
        )
    if step_labels is not None and "Classification" in architecture:
        raise ConfigError(
            f"reward_model.step_labels is for causal models, and reward_model.model.path={path} is a "
            f"{architecture}; leave it null"
        )
