"""The client of a running vLLM OpenAI server.

The server loads new weights from a checkpoint folder that client and server can read. For that it needs its
development routes (VLLM_SERVER_DEV_MODE=1 in its environment); without these routes it only generates.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass

from hone.rollout.contract import RolloutError, Sampling
from hone.rollout.http_server import Event, HttpServer, ServerLost
from hone.rollout.requests import Chunk, Request
from hone.types import Fields, Settings

_MIN_TEMPERATURE = 0.01
"""vLLM replaces a lower temperature by this one."""


def vllm_sampling_params(request_id: str, sampling: Sampling, eos_ids: Collection[int]) -> Fields:
    """Returns the arguments of vLLM's SamplingParams, without the seed; raises if vLLM would change one."""
    if 0 < sampling.temperature < _MIN_TEMPERATURE:
        raise RolloutError(
            f"request {request_id}: vLLM raises temperature={sampling.temperature} to {_MIN_TEMPERATURE}; "
            f"use 0, or {_MIN_TEMPERATURE} or more"
        )
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "stop_token_ids": [*(() if sampling.ignore_eos else eos_ids), *sampling.stop_token_ids],
    }


@dataclass(eq=False)
class VLLMServer(HttpServer):
    """The client of one vLLM OpenAI server."""

    model_name: str = ""
    tied_embeddings: bool = False
    """Whether input and output embeddings are tied."""
    has_dev_routes: bool = False
    """Whether the server has the development routes, which weight updates need."""
    device_type: str = ""

    kind = "vLLM"
    log_prob_hint = "start it with --logprobs-mode processed_logprobs"
    honors_seeds = True

    async def connect(self) -> None:
        response = await self.call("/v1/models", get=True)
        with self.wrap_parse_errors(response):
            self.model_name = str(response["data"][0]["id"])
        self.has_dev_routes = (await self._request("GET", "/is_paused"))[0] == 200
        if self.has_dev_routes:
            await self.resume()  # a killed run may have left the server paused
            self.expected_version = await self.weight_version()
            info = await self.call("/server_info?config_format=json", get=True)
            with self.wrap_parse_errors(info):
                self.device_type = str(info["vllm_config"]["device_config"]["device"])
                scheduler_config = info["vllm_config"].get("scheduler_config", {})
                self.orders_by_priority = scheduler_config.get("policy") == "priority"
        await self.detect_log_prob_mode()

    # -- requests -------------------------------------------------------------------------------

    def _request_body(self, prompt: list[int], sampling: Settings) -> Settings:
        return {
            "model": self.model_name,
            "prompt": prompt,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            # By default, the server takes the penalties from the generation_config.json of the model.
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **sampling,
        }

    async def stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        body = self._request_body(
            [*request.prompt_ids, *request.token_ids],
            {
                "stream": True,
                "logprobs": 0,
                "seed": sampling.seed,
                "ignore_eos": sampling.ignore_eos,
                # Servers without priority scheduling refuse other priorities than 0.
                "priority": request.priority if self.orders_by_priority else 0,
                **vllm_sampling_params(request.request_id, sampling, self.eos_ids),
            },
        )
        # vLLM aborts a request when its connection closes.
        async with aclosing(self.events("/v1/completions", body)) as events:
            async for event in events:
                with self.wrap_parse_errors(event):
                    chunk = self._parse_chunk(event)
                yield chunk
                if chunk.finished:
                    return

    def _parse_chunk(self, event: Event) -> Chunk:
        choices = event.get("choices")
        if not choices:  # the event has only usage statistics
            return Chunk([], [])
        ids, log_probs = self._parse_tokens(choices[0])
        reason = choices[0].get("finish_reason")
        if reason == "abort":
            raise ServerLost(self, "aborted a request")
        if reason not in (None, "stop", "length"):
            raise RolloutError(
                f"{self.safe_url}/v1/completions ended a request with the finish_reason {reason!r}"
            )
        return Chunk(ids, log_probs, finished=reason is not None)

    def _parse_tokens(self, choice: Event) -> tuple[list[int], list[float]]:
        ids = choice.get("token_ids")
        if ids is None:
            raise RolloutError(
                f"{self.safe_url}/v1/completions sent no token_ids (return_token_ids): the server needs vLLM "
                "0.10.2 or later"
            )
        log_probs = (choice.get("logprobs") or {}).get("token_logprobs")
        if ids and log_probs is None:
            raise RolloutError(f"{self.safe_url}/v1/completions sent tokens without log-probs")
        return list(ids), list(log_probs or [])

    async def sample_one_token(self, prompt: list[int], sampling: Settings) -> tuple[float, float]:
        body = self._request_body(prompt, {"max_tokens": 1, "logprobs": 1, "seed": 0, **sampling})
        response = await self.call("/v1/completions", body)
        with self.wrap_parse_errors(response):
            choice = response["choices"][0]
            _, (log_prob,) = self._parse_tokens(choice)
            return log_prob, max(choice["logprobs"]["top_logprobs"][0].values())

    # -- control --------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Pauses with `keep`, which does not abort the requests of other clients."""
        if self.has_dev_routes:
            await self.call("/pause?mode=keep", {})

    async def resume(self) -> None:
        if self.has_dev_routes:
            await self.call("/resume", {})

    async def weight_version(self) -> str | None:
        response = await self.call("/weight_info", get=True)
        with self.wrap_parse_errors(response):
            version = response["weight_version"]
        return None if version is None else str(version)

    def check_updates_supported(self) -> None:
        if not self.has_dev_routes:
            raise RolloutError(
                f"{self.safe_url} cannot load new weights, which training and LoRA adapters need; start vLLM "
                "with VLLM_SERVER_DEV_MODE=1, or use rollout.name=vllm without rollout.server.urls"
            )
        if self.tied_embeddings and self.device_type == "cpu":
            raise RolloutError(
                f"{self.safe_url} runs on a CPU, where vLLM keeps the old output head of a model with tied "
                "embeddings after an update; use rollout.name=vllm without rollout.server.urls"
            )

    async def load_folder(self, folder: str, version: str) -> None:
        await self.call(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        )
        response = await self.call("/reset_prefix_cache?reset_running_requests=true", {})
        if not isinstance(response, dict) or not response.get("success", True):
            raise RolloutError(f"{self.safe_url} did not drop its KV cache: {response}")
        await self.call("/update_weight_version", {"new_version": version})
