"""The worker of the judge's model (`reward_model.type=judge`), which only completes texts.

The trainer writes the prompts and parses the grades.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace

from hone.agents.loop_thread import run_with_engine
from hone.config import PPOTrainerConfig
from hone.controller import Dispatch, Worker, WorkerGroup, register
from hone.data.chat_template import apply_template
from hone.engine.offload import Offload, build_offload
from hone.event_loop import run_coroutine
from hone.models.from_config import import_external
from hone.models.load import eos_ids, load_causal_lm, load_tokenizer
from hone.models.policy import PolicyModel
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.rewards.failures import Failed
from hone.rewards.judge import Request, truncated
from hone.rollout.build import build_native
from hone.rollout.contract import RolloutSpec, Sampling, StopReason, trajectory_seed
from hone.workers.device import pick_device, pick_dtype, prepare_process


class JudgeWorker(Worker):
    """The judge's model; `param_offload` keeps it on the host between batches."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        run_config, config = self.config, self.config.reward_model
        self.device = pick_device(run_config.trainer.device, self.local_rank)
        fsdp_config, path = config.model.fsdp_config, str(config.model.path)
        timeout_s = run_config.actor_rollout_ref.nccl_timeout
        prepare_process(self.device, self.world_size, timeout_s, [fsdp_config])
        import_external(config.model.external_lib)
        self.tokenizer = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
        dtype = pick_dtype(fsdp_config.dtype, self.device)
        lm = load_causal_lm(path, dtype=dtype, device=self.device)
        policy = PolicyModel(lm.to(self.device).eval()).requires_grad_(False)
        text_config, max_tokens = lm.config.get_text_config(), config.judge.max_tokens
        # A model without max_position_embeddings, such as a recurrent one, has no limit of its own.
        max_positions = getattr(text_config, "max_position_embeddings", None) or 1 << 20
        max_row_length = run_config.data.max_prompt_length + run_config.data.max_response_length
        # The judge's tokenizer may need more tokens than the policy's, and the judge's prompt adds a task.
        max_length = config.max_length or 2 * max_row_length + 1024
        self._max_prompt_length = min(max_length, max_positions - max_tokens)
        if self._max_prompt_length < 1:
            raise ValueError(
                f"reward_model.judge.max_tokens={max_tokens} leaves no room for a prompt in "
                f"the judge's {max_positions:,} positions; lower it"
            )
        max_model_len = self._max_prompt_length + max_tokens
        rollout = run_config.actor_rollout_ref.rollout
        spec = RolloutSpec(
            replace(rollout, exact=False, max_model_len=max_model_len),
            model_path=path,
            load_policy=lambda: policy,
            dtype=dtype,
            device=self.device,
            tokenizer=self.tokenizer,
            eos_ids=tuple(eos_ids(lm.config, lm.generation_config, self.tokenizer)),
        )
        self.engine = build_native(spec)
        run_coroutine(self.engine.sleep())
        self._offload = build_offload(policy, None, fsdp_config) or Offload()
        self._offload.start()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def complete(self, requests: DataProto) -> DataProto:
        """Returns the `completion` of each row's `text`, or its failure.

        The column `vote` numbers the completions of one text; the number is part of the completion's seed.
        """
        columns = requests.non_tensor_batch

        async def complete_all() -> list[str | Failed]:
            pairs = zip(columns["text"], columns["vote"], strict=True)
            return list(await asyncio.gather(*(self._complete_one(*pair) for pair in pairs)))

        with self._offload.on_device():
            run_coroutine(self.engine.wake_up())
            try:
                completions = run_with_engine(self.engine, complete_all())
            finally:
                run_coroutine(self.engine.sleep())
        return DataProto(None, {"completion": object_array(completions)})

    async def _complete_one(self, text: str, vote: int) -> str | Failed:
        """Returns a completion of the text, or a failure if the text or the completion is too long."""
        tokenizer = self.tokenizer
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": text}]
            text = str(
                apply_template(messages, tokenizer, tokenize=False, add_generation_prompt=True)
            )
        ids = tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template)
        if len(ids) > self._max_prompt_length:
            message = "the text is longer than the judge accepts; see reward_model.max_length"
            return Failed("too_long", message)
        uid = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        judge = self.config.reward_model.judge
        seed = trajectory_seed(self.config.sampling_seed, uid, int(vote))
        sampling = Sampling(judge.max_tokens, judge.temperature, seed)
        output = await self.engine.generate(ids, sampling, f"{uid}/{vote}")
        completion = str(tokenizer.decode(output.token_ids, skip_special_tokens=True))
        return truncated(completion) if output.stop_reason is StopReason.LENGTH else completion

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        if hasattr(self, "engine"):
            run_coroutine(self.engine.close())


class JudgeWorkerClient:
    """Completes texts with the judge's workers; equal requests are completed once."""

    def __init__(self, group: WorkerGroup[JudgeWorker] | None) -> None:
        self._group = group

    async def complete(self, requests: Sequence[Request]) -> list[str | Failed]:
        """Returns the completion of each request, which is a text and the number of its vote."""
        unique_requests = list(dict.fromkeys(requests))
        if not unique_requests:
            return []
        assert self._group is not None, "the judge's workers do not exist before the run starts"
        texts, votes = zip(*unique_requests, strict=True)
        columns = {"text": object_array(list(texts)), "vote": object_array(list(votes))}
        result = self._group.call(JudgeWorker.complete, DataProto(None, columns))
        completions = dict(zip(unique_requests, result.non_tensor_batch["completion"], strict=True))
        return [completions[request] for request in requests]

    def pop_metrics(self) -> dict[str, float]:
        return {}
