"""The client of an SGLang server, written from SGLang's documentation; not tested against SGLang itself."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.http_server import Event, HttpServer, ServerLost
from hone.rollout.requests import Chunk, ConnectionLost, Request
from hone.rollout.server_weights import WeightFolder, serialize_for_sglang
from hone.types import Fields, Settings

log = logging.getLogger(__name__)

_IDLE_TIMEOUT_S = 5.0
"""The longest wait until the server is idle; a busy server cannot release memory."""
_IDLE_POLL_INTERVAL_S = 0.05
_NUM_CHECKED_WEIGHTS = 8
"""Number of weights that are read back after an update."""
_NUM_CHECKED_ROWS = 4
"""Number of rows that are read back from each of these weights."""


@dataclass(eq=False)
class SGLangServer(HttpServer):
    """The client of one SGLang server."""

    loads_adapters: bool = False
    """Whether an update is a LoRA adapter over unchanged base weights."""
    adapter_name: str | None = None
    """The name of the adapter that requests use."""

    kind = "SGLang"
    highest_priority_first = True
    """Whether the server starts the request with the highest number first, SGLang's default."""
    can_read_weights = True
    """Whether updates are checked by values; False for adapters, or if the server has returned no weights."""
    log_prob_hint = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"

    async def connect(self) -> None:
        info = await self.server_info()
        self.tensor_parallel_size = int(info.get("tp_size") or 1)
        # Without deterministic inference, SGLang does not sample by (seed, position).
        self.honors_seeds = self.samples_by_position = bool(
            info.get("enable_deterministic_inference")
        )
        self.can_release_memory = bool(info.get("enable_memory_saver"))
        self.orders_by_priority = bool(info.get("enable_priority_scheduling"))
        self.highest_priority_first = not info.get("schedule_low_priority_values_first")
        await self.resume()  # a killed run may have left the server paused
        self.expected_version = await self.weight_version()
        await self.detect_log_prob_mode()

    async def server_info(self) -> Fields:
        for path in ("/server_info", "/get_server_info"):
            if (await self._request("GET", path))[0] != 404:
                info = await self.call(path, get=True)
                if isinstance(info, dict):
                    return info
        raise RolloutError(
            f"{self.safe_url} has no /server_info; is it an SGLang server? For a vLLM server set "
            "rollout.name=vllm"
        )

    async def weight_version(self) -> str | None:
        response = await self.call("/weight_version", get=True)
        if not isinstance(response, dict) or "weight_version" not in response:
            raise RolloutError(
                f"{self.safe_url}/weight_version has no weight_version: {response!r}"
            )
        return str(response["weight_version"])

    # -- requests -------------------------------------------------------------------------------

    async def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        rid = f"hone-{uuid4().hex}"  # unique, because an abort ends all requests with this prefix
        body: Fields = {
            "input_ids": [*request.prompt_ids, *request.token_ids],
            "rid": rid,
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": -1,
            "sampling_params": {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "stop_token_ids": [*self.eos_ids, *sampling.stop_token_ids],
                "ignore_eos": sampling.ignore_eos,
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
        }
        if self.honors_seeds:
            body["sampling_params"]["sampling_seed"] = sampling.seed
        if self.orders_by_priority:  # other servers refuse a priority
            sign = -1 if self.highest_priority_first else 1
            body["priority"] = sign * request.priority
        if self.adapter_name is not None:
            body["lora_path"] = self.adapter_name
        finished = False
        token_ids: list[int] = []  # of this stream
        try:
            async with aclosing(self.events("/generate", body)) as events:
                async for event in events:
                    with self.wrap_parse_errors(event):
                        chunk = self._parse_chunk(event, rid, token_ids)
                    token_ids.extend(chunk.token_ids)
                    finished = chunk.finished
                    yield chunk
                    if finished:
                        return
        finally:
            if not finished:
                with suppress(ConnectionLost, RolloutError):
                    await self.call("/abort_request", {"rid": rid})

    def _parse_chunk(self, event: Event, rid: str, received_ids: list[int]) -> Chunk:
        """Returns the new tokens of an event, which has all tokens of the stream or only the new ones."""
        meta = event.get("meta_info")
        if not isinstance(meta, dict):
            raise RolloutError(f"{self.safe_url}/generate sent an event without meta_info")
        reason = meta.get("finish_reason")
        reason_type = reason.get("type") if isinstance(reason, dict) else reason
        if meta.get("id") != rid:
            raise RolloutError(
                f"{self.safe_url}/generate answered request {meta.get('id')!r} in the stream of {rid!r}"
            )
        if reason_type == "abort":
            raise ServerLost(self, f"aborted a request: {(reason or {}).get('message', '')}")
        if reason_type not in (None, "stop", "length"):
            raise RolloutError(
                f"{self.safe_url}/generate ended a request with the finish_reason {reason!r}"
            )
        log_probs = meta.get("output_token_logprobs")  # (log-prob, token id, …) per token
        ids, total = event.get("output_ids"), meta.get("completion_tokens")
        if log_probs is None or not isinstance(ids, list) or not isinstance(total, int):
            raise RolloutError(
                f"{self.safe_url}/generate sent tokens without output_ids, completion_tokens or "
                "output_token_logprobs (return_logprob)"
            )
        num_received = len(received_ids)
        if num_received and len(log_probs) < total:  # the event has only the new tokens
            last_ids = received_ids[num_received - len(log_probs) :]
            if total == num_received and [entry[1] for entry in log_probs] == last_ids:
                log_probs, ids = [], []  # the event repeats the previous event
        else:
            if [entry[1] for entry in log_probs[:num_received]] != received_ids:
                raise RolloutError(
                    f"{self.safe_url}/generate changed tokens that it had sent before"
                )
            log_probs, ids = log_probs[num_received:], ids[num_received:]
        new_ids = [entry[1] for entry in log_probs]
        if reason_type is None:
            ids = ids[: len(new_ids)]  # ids may arrive before their log-probs
            is_complete = num_received + len(new_ids) >= total
        else:
            is_complete = num_received + len(new_ids) == total
        if ids != new_ids or not is_complete:
            raise RolloutError(
                f"{self.safe_url}/generate counts {total} tokens, and sent {num_received + len(ids)} ids and "
                f"{num_received + len(new_ids)} log-probs: the numbers or the ids differ"
            )
        self.check_version(str(meta.get("weight_version")))
        return Chunk(
            new_ids,
            [entry[0] for entry in log_probs],
            finished=reason_type is not None,
            cached_tokens=meta.get("cached_tokens"),
        )

    async def sample_one_token(self, prompt: list[int], sampling: Settings) -> tuple[float, float]:
        response = await self.call(
            "/generate",
            {
                "input_ids": prompt,
                "rid": f"hone-{uuid4().hex}",
                "return_logprob": True,
                "top_logprobs_num": 1,
                "sampling_params": {"max_new_tokens": 1, "ignore_eos": True, **sampling},
            },
        )
        with self.wrap_parse_errors(response):
            meta = response["meta_info"]
            log_prob, highest = meta["output_token_logprobs"][0], meta["output_top_logprobs"][0][0]
            return float(log_prob[0]), float(highest[0])

    # -- control --------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Pauses with `retract`, which allows a cache flush and keeps the requests of other clients."""
        await self._call_control("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self._call_control("/continue_generation", {})

    async def _call_control(self, path: str, body: Settings) -> None:
        """Calls an endpoint; raises RolloutError if the response has another `status` than ok."""
        response = await self.call(path, body)
        if isinstance(response, dict) and response.get("status", "ok") != "ok":
            raise RolloutError(f"{self.safe_url}{path} was not acknowledged: {response}")

    async def release_memory(self, tags: Sequence[str]) -> bool:
        """Waits until the server is idle and releases memory; returns False after `_IDLE_TIMEOUT_S`.

        SGLang exits if memory is released while a request runs, and it acknowledges an abort before the
        request has ended.
        """
        for _ in range(round(_IDLE_TIMEOUT_S / _IDLE_POLL_INTERVAL_S)):
            status, _ = await self._request("POST", "/flush_cache", {})
            if status == 200:  # a busy server answers another status
                await self.call("/release_memory_occupation", {"tags": list(tags)})
                return True
            await asyncio.sleep(_IDLE_POLL_INTERVAL_S)
        return False

    async def resume_memory(self, tags: Sequence[str]) -> None:
        await self.call("/resume_memory_occupation", {"tags": list(tags)})

    # -- weights --------------------------------------------------------------------------------

    async def load_folder(self, folder: str, version: str) -> None:
        if not self.loads_adapters:
            body = {"model_path": folder, "weight_version": version, "flush_cache": True}
            await self.call_checked("/update_weights_from_disk", body)
            return
        # The adapter gets a new name, so that no request reuses the KV cache of the old adapter.
        old_name, name = self.adapter_name, f"hone-{uuid4().hex}"
        await self.call_checked("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        self.adapter_name = name
        await self._unload_adapter(old_name)
        await self.end_update(version)

    async def _unload_adapter(self, name: str | None) -> None:
        if name is not None:
            with suppress(RolloutError):  # a restarted server lacks the adapter
                await self.call("/unload_lora_adapter", {"lora_name": name})

    async def close(self) -> None:
        with suppress(ServerLost):
            await self._unload_adapter(self.adapter_name)
        await super().close()

    async def send_tensors(self, bucket: Mapping[str, Tensor]) -> None:
        payload = await asyncio.to_thread(serialize_for_sglang, bucket)
        body = {
            "serialized_named_tensors": [payload] * self.tensor_parallel_size,
            "flush_cache": False,
        }
        await self.call_checked("/update_weights_from_tensor", body)

    async def end_update(self, version: str) -> None:
        await self.call(f"/flush_cache?timeout={self.call_timeout_s:g}", {})
        body = {"new_version": version, "abort_all_requests": False}
        await self.call_checked("/update_weight_version", body)

    async def check_weights(self, version: str, folder: WeightFolder | None) -> None:
        await super().check_weights(version, folder)
        if folder is None:
            return
        num_checked = 0
        for name, tensor in folder.sample_weights(_NUM_CHECKED_WEIGHTS):
            rows = await self.read_weight(name)
            if rows is None:
                continue
            num_checked += 1
            expected = tensor[:_NUM_CHECKED_ROWS].float().flatten()
            with self.wrap_parse_errors(rows):
                # A server with several replicas returns the rows of each.
                values = torch.tensor(rows).flatten()[: len(expected)].float()
            if values.shape != expected.shape or not torch.allclose(
                values, expected, rtol=2e-2, atol=1e-6
            ):
                raise RolloutError(
                    f"{self.safe_url} acknowledged new weights, but {name!r} has other values: the update "
                    "was applied in part"
                )
        if not num_checked and self.can_read_weights:
            self.can_read_weights = False  # warn once
            log.warning(
                "%s returned none of the weights that hone reads after an update; updates are checked only "
                "by their version",
                self.safe_url,
            )

    async def read_weight(self, name: str) -> Any:
        """Returns the first rows of one weight; None if the server does not return weights."""
        body = {"name": name, "truncate_size": _NUM_CHECKED_ROWS}
        status, text = await self._request("POST", "/get_weights_by_name", body)
        with self.wrap_parse_errors(text):
            return json.loads(text) if status == 200 else None
