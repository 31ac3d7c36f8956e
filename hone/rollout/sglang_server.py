"""The client of an SGLang server, written from its documentation; not tested against SGLang itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from torch import Tensor

from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.http_server import Event, HttpServer, ServerLost, shorten
from hone.rollout.requests import Chunk, ConnectionLost, Request
from hone.rollout.server_weights import as_payload
from hone.types import Settings

_IDLE_TIMEOUT_S, _POLL_S = 5.0, 0.05
"""How long, and how often, to check that the server is idle before memory is released."""


@dataclass(eq=False)
class SGLangServer(HttpServer):
    """One SGLang server."""

    eos_ids: tuple[int, ...] = ()
    tensor_parallel: int = 1
    takes_adapters: bool = False
    """Whether an update is a LoRA adapter over unchanged base weights."""
    adapter: str | None = None
    """The name of the adapter that requests use."""

    kind = "SGLang"
    can_read_weights = True
    log_prob_hint = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"

    async def connect(self) -> None:
        info = await self.server_info()
        self.tensor_parallel = int(info.get("tp_size") or 1)
        # Only then SGLang samples by (seed, position).
        self.seeded = self.positional = bool(info.get("enable_deterministic_inference"))
        self.can_release_memory = bool(info.get("enable_memory_saver"))
        await self.resume()  # a killed run may have left the server paused
        self.weights = await self.weight_version()
        await self.detect_log_prob_mode()

    async def server_info(self) -> Event:
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
        rid = f"hone-{uuid4().hex}"  # unique, because SGLang aborts every id with a given prefix
        body: Event = {
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
        if self.seeded:
            body["sampling_params"]["sampling_seed"] = sampling.seed
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        finished = False
        tokens: list[int] = []  # of this stream
        try:
            async with aclosing(self.events("/generate", body)) as events:
                async for event in events:
                    chunk = self._chunk(event, rid, tokens)
                    tokens.extend(chunk.token_ids)
                    finished = chunk.finished
                    yield chunk
                    if finished:
                        return
        finally:
            if not finished:
                with suppress(ConnectionLost, RolloutError):
                    await self.call("/abort_request", {"rid": rid})

    def _chunk(self, event: Event, rid: str, tokens: list[int]) -> Chunk:
        """Returns the new tokens of an event, which has all tokens so far or only the new ones."""
        meta = event.get("meta_info")
        if not isinstance(meta, dict):
            raise RolloutError(f"{self.safe_url}/generate sent an event without meta_info")
        reason = meta.get("finish_reason")
        finish = reason.get("type") if isinstance(reason, dict) else reason
        if meta.get("id") != rid:
            raise RolloutError(
                f"{self.safe_url}/generate answered request {meta.get('id')!r} in the stream of {rid!r}"
            )
        if finish == "abort":
            raise ServerLost(self, f"aborted a request: {(reason or {}).get('message', '')}")
        if finish not in (None, "stop", "length"):
            raise RolloutError(f"{self.safe_url}/generate ended a request for {reason!r}")
        pairs = meta.get("output_token_logprobs")
        ids, total = event.get("output_ids"), meta.get("completion_tokens")
        if pairs is None or not isinstance(ids, list) or not isinstance(total, int):
            raise RolloutError(
                f"{self.safe_url}/generate sent tokens without output_ids, completion_tokens or "
                "output_token_logprobs (return_logprob)"
            )
        received = len(tokens)
        if received and len(pairs) < total:  # only the new tokens
            repeated = tokens[received - len(pairs) :]
            if total == received and [pair[1] for pair in pairs] == repeated:
                pairs, ids = [], []  # the last event again
        else:
            if [pair[1] for pair in pairs[:received]] != tokens:
                raise RolloutError(
                    f"{self.safe_url}/generate changed tokens that it had sent before"
                )
            pairs, ids = pairs[received:], ids[received:]
        new = [pair[1] for pair in pairs]
        if finish is None:
            ids = ids[: len(new)]  # ids may arrive before their log-probs
            complete = received + len(new) >= total
        else:
            complete = received + len(new) == total
        if ids != new or not complete:
            raise RolloutError(
                f"{self.safe_url}/generate counts {total} tokens, sent {received + len(ids)} ids and "
                f"{received + len(new)} log-probs, or their ids differ"
            )
        version = meta.get("weight_version")
        if self.weights is not None and str(version) != self.weights:
            raise ServerLost(
                self,
                f"has weights {version!r} instead of {self.weights!r}: it was restarted or updated",
            )
        return Chunk(
            new,
            [pair[0] for pair in pairs],
            finished=finish is not None,
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
        try:
            meta = response["meta_info"]
            return float(meta["output_token_logprobs"][0][0]), float(
                meta["output_top_logprobs"][0][0][0]
            )
        except (KeyError, IndexError, TypeError) as error:
            raise RolloutError(
                f"{self.safe_url}/generate returned no log-probs ({type(error).__name__}: {error})"
            ) from error

    # -- control --------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Pauses with `retract`, so that the cache may be flushed and other clients keep their tokens."""
        await self._call_control("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self._call_control("/continue_generation", {})

    async def _call_control(self, path: str, body: Settings) -> None:
        """Calls an endpoint; raises RolloutError if the status in its response is not ok."""
        response = await self.call(path, body)
        if isinstance(response, dict) and response.get("status", "ok") != "ok":
            raise RolloutError(f"{self.safe_url}{path} was not acknowledged: {response}")

    async def release_memory(self, tags: Sequence[str]) -> bool:
        """Waits until the server is idle, and releases memory.

        SGLang exits if memory is released while a request runs, and it acknowledges an abort before the
        request has ended.
        """
        for _ in range(round(_IDLE_TIMEOUT_S / _POLL_S)):
            if (await self._request("POST", "/flush_cache", {}))[0] == 200:  # only while it is idle
                await self.call("/release_memory_occupation", {"tags": list(tags)})
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def resume_memory(self, tags: Sequence[str]) -> None:
        await self.call("/resume_memory_occupation", {"tags": list(tags)})

    # -- weights --------------------------------------------------------------------------------

    async def load_folder(self, folder: str, version: str) -> None:
        if self.takes_adapters:
            await self._load_adapter(folder)
            await self.end_update(version)
            return
        body = {"model_path": folder, "weight_version": version, "flush_cache": True}
        await self.call_checked("/update_weights_from_disk", body)

    async def _load_adapter(self, folder: str) -> None:
        """Loads an adapter under a new name, so that it does not reuse the KV cache of another."""
        old, name = self.adapter, f"hone-{uuid4().hex}"
        await self.call_checked("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        self.adapter = name
        await self._unload_adapter(old)

    async def _unload_adapter(self, name: str | None) -> None:
        if name is not None:
            with suppress(RolloutError):  # a restarted server does not have it
                await self.call("/unload_lora_adapter", {"lora_name": name})

    async def close(self) -> None:
        with suppress(ServerLost):
            await self._unload_adapter(self.adapter)
        await super().close()

    async def send_tensors(self, bucket: Mapping[str, Tensor]) -> None:
        payload = await asyncio.to_thread(as_payload, bucket)
        body = {"serialized_named_tensors": [payload] * self.tensor_parallel, "flush_cache": False}
        await self.call_checked("/update_weights_from_tensor", body)

    async def end_update(self, version: str) -> None:
        await self.call(f"/flush_cache?timeout={self.timeouts.call_timeout_s:g}", {})
        body = {"new_version": version, "abort_all_requests": False}
        await self.call_checked("/update_weight_version", body)

    async def call_checked(self, path: str, body: Settings) -> None:
        """Calls an endpoint; raises RolloutError if its response has no `success`."""
        response = await self.call(path, body)
        if not isinstance(response, dict) or response.get("success") is not True:
            raise RolloutError(f"{self.safe_url}{path} did not succeed: {shorten(str(response))}")

    async def read_weight(self, name: str, count: int) -> Any:
        status, text = await self._request(
            "POST", "/get_weights_by_name", {"name": name, "truncate_size": count}
        )
        return json.loads(text) if status == 200 else None
