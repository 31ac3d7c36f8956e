"""The judge's model in a worker: continues texts with our own engine, for `reward_model.type=judge`.

The trainer writes what the judge reads, and reads its grades; this worker only generates.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from hone.agents.loop_thread import run_beside
from hone.config import PPOTrainerConfig
from hone.controller import Dispatch, Worker, WorkerGroup, register
from hone.data.chat_template import apply_template
from hone.engine.offload import OffloadedTensors
from hone.event_loop import run_coroutine
from hone.models.from_config import import_external
from hone.models.load import eos_ids, load_causal_lm, load_tokenizer
from hone.models.policy import PolicyModel
from hone.ops.counter_rng import trajectory_seed
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.rewards.failures import Failed
from hone.rewards.judge import Request
from hone.rollout.build import build_native
from hone.rollout.contract import RolloutSpec, Sampling
from hone.workers.device import pick_device, pick_dtype, prepare_process


class JudgeWorker(Worker):
    """Holds the judge's model; `param_offload` keeps it on the host between batches."""

    def __init__(self, config: PPOTrainerConfig) -> None:
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        whole, config = self.config, self.config.reward_model
        self.device = pick_device(whole.trainer.device, self.local_rank)
        sharding, path = config.model.fsdp_config, str(config.model.path)
        timeout_s = whole.actor_rollout_ref.nccl_timeout
        prepare_process(self.device, self.world_size, timeout_s, [sharding])
        import_external(config.model.external_lib)
        self.tokenizer = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
        dtype = pick_dtype(sharding.dtype, self.device)
        lm = load_causal_lm(path, dtype=dtype, device=self.device)
        policy = PolicyModel(lm.to(self.device).eval()).requires_grad_(False)
        positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
        longest = whole.data.max_prompt_length + whole.data.max_response_length
        self._longest_prompt = min(
            config.max_length or 2 * longest + 1024, positions - config.judge.max_tokens
        )
        if self._longest_prompt < 1:
            raise ValueError(
                f"reward_model.judge.max_tokens={config.judge.max_tokens} fills the judge's {positions:,} "
                "positions; use fewer"
            )
        self.engine = build_native(
            RolloutSpec(
                replace(
                    whole.actor_rollout_ref.rollout,
                    exact=False,
                    max_model_len=self._longest_prompt + config.judge.max_tokens,
                ),
                model_path=path,
                load_policy=lambda: policy,
                dtype=dtype,
                device=self.device,
                tokenizer=self.tokenizer,
                eos_ids=tuple(eos_ids(lm.config, lm.generation_config, self.tokenizer)),
            )
        )
        run_coroutine(self.engine.sleep())
        self._offloaded = OffloadedTensors(policy.parameters) if sharding.param_offload else None
        if self._offloaded is not None:
            self._offloaded.to_host()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def complete(self, requests: DataProto) -> DataProto:
        """Returns the `completion` of each `text`; None for a text that is too long."""
        columns = requests.non_tensor_batch
        pairs = list(zip(columns["text"], columns["vote"], strict=True))
        present: AbstractContextManager[None] = nullcontext()
        if self._offloaded is not None:
            present = self._offloaded.present()
        with present:
            run_coroutine(self.engine.wake_up())
            try:
                texts = run_beside(self.engine, self._all(pairs))
            finally:
                run_coroutine(self.engine.sleep())
        return DataProto(None, {"completion": object_array(texts)})

    async def _all(self, requests: Sequence[Request]) -> list[str | None]:
        return list(await asyncio.gather(*map(self._one, requests)))

    async def _one(self, request: Request) -> str | None:
        text, vote = request
        if self.tokenizer.chat_template:
            turns = [{"role": "user", "content": text}]
            text = str(
                apply_template(turns, self.tokenizer, tokenize=False, add_generation_prompt=True)
            )
        ids = self.tokenizer.encode(text, add_special_tokens=not self.tokenizer.chat_template)
        if len(ids) > self._longest_prompt:
            return None
        uid = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        judge = self.config.reward_model.judge
        seed = trajectory_seed(self.config.sampling_seed, uid, int(vote))
        sampling = Sampling(judge.max_tokens, judge.temperature, seed)
        output = await self.engine.generate(ids, sampling, f"{uid}/{vote}")
        return str(self.tokenizer.decode(output.token_ids, skip_special_tokens=True))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        if hasattr(self, "engine"):
            run_coroutine(self.engine.close())


class WorkerCompletions:
    """Lets the workers of a judge continue texts; equal requests are generated once."""

    def __init__(self, group: WorkerGroup[JudgeWorker] | None) -> None:
        self._group = group

    async def complete(self, requests: Sequence[Request]) -> list[str | Failed]:
        unique = list(dict.fromkeys(requests))
        if not unique:
            return []
        assert self._group is not None, "before the run starts there is no judge"
        columns = zip(*unique, strict=True)
        names = dict(zip(("text", "vote"), (object_array(list(c)) for c in columns), strict=True))
        answer = self._group.call(JudgeWorker.complete, DataProto(None, names))
        texts = dict(zip(unique, answer.non_tensor_batch["completion"], strict=True))
        late = Failed(
            "too_long", "the text is longer than the judge reads; see reward_model.max_length"
        )
        return [late if texts[request] is None else texts[request] for request in requests]

    def pop_metrics(self) -> dict[str, float]:
        return {}
