"""A small real HTTP server that keeps SGLang's written interface, and can be told to break it.

Its tokens, log-probs and weight updates are those of our own engine over a tiny model. It proves the
adapter against the written interface only: SGLang itself has not been run.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import pickle
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch
from aiohttp import web
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.distributed import distributed_c10d, rendezvous
from transformers import AutoModelForCausalLM

from hone.models.lora import merged_weights
from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutError, Sampling, StopReason, TokenDelta
from hone.rollout.native.core import NativeCore
from hone.rollout.native.engine import NativeRollout

from .contract_faults import Body, Faults
from .models import EOS, TOKENIZER, next_probabilities

_TOKENS_PER_EVENT = 2
"""The most tokens of an event, so that a busy machine does not send a short response in one event."""


class ContractServer(Faults):
    """A server with SGLang's HTTP interface, in a thread of its own."""

    def __init__(
        self,
        policy: PolicyModel,
        *,
        max_num_seqs: int = 64,
        deterministic: bool = True,
        incremental: bool = True,
        api_key: str | None = None,
        port: int = 0,
        eos: int = EOS,
    ) -> None:
        self.policy, self.port = policy, port
        self.initial = {name: p.detach().clone() for name, p in policy.lm.named_parameters()}
        self.deterministic, self.incremental, self.api_key = deterministic, incremental, api_key
        super().__init__()
        self.calls: list[str] = []
        self.bodies: list[Body] = []
        self.version, self.paused, self.released = "default", "", set[str]()
        self.dead = self.hung = False
        self.running: set[str] = set()
        self.abort_s = 0.02
        """Seconds between the answer to an abort and the end of the request."""
        self.groups: dict[str, Any] = {}
        self.lora, self.max_lora_rank, self.dp_size = False, 16, 1
        """The arguments --enable-lora, --max-lora-rank and --dp-size."""
        self.lora_target_modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
        self.lora_target_modules += ["gate_proj", "up_proj", "down_proj"]
        self.base = self.initial
        """The weights to which adapters are added."""
        self.adapters: list[str] = []
        core = NativeCore(
            policy,
            eos_ids=(eos,),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            tokenizer=TOKENIZER,
        )
        self.engine = NativeRollout(core)
        self._ended = threading.Event()
        self._driver = threading.Thread(
            target=self.engine.drive, args=(self._ended.is_set,), daemon=True
        )
        self._driver.start()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)

    async def _listen(self) -> str:
        app = web.Application(middlewares=[self._guard], client_max_size=2**30)
        for method, path in (
            ("GET", "health"),
            ("GET", "server_info"),
            ("GET", "weight_version"),
            ("POST", "generate"),
            ("POST", "abort_request"),
            ("POST", "pause_generation"),
            ("POST", "continue_generation"),
            ("POST", "flush_cache"),
            ("POST", "update_weights_from_disk"),
            ("POST", "update_weights_from_tensor"),
            ("POST", "init_weights_update_group"),
            ("POST", "update_weights_from_distributed"),
            ("POST", "destroy_weights_update_group"),
            ("POST", "update_weight_version"),
            ("POST", "get_weights_by_name"),
            ("POST", "load_lora_adapter"),
            ("POST", "unload_lora_adapter"),
            ("POST", "release_memory_occupation"),
            ("POST", "resume_memory_occupation"),
        ):
            app.router.add_route(method, f"/{path}", getattr(self, f"_{path}"))
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def close(self) -> None:
        async def end() -> None:
            await self.engine.close()
            await self._runner.shutdown()
            await self._runner.cleanup()
            other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in other_tasks:
                task.cancel()
            await asyncio.gather(*other_tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)
        self._ended.set()
        self.engine.notify()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._driver.join(10)

    def die(self) -> None:
        """Breaks every connection, as a crash does; afterwards the server has the weights of its start."""
        self.dead = True

    def _scheduler_ends(self, request: web.Request) -> web.Response:
        """An error in the scheduler ends the server."""
        self.die()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    def come_back(self) -> None:
        async def restart() -> None:
            await self.engine.abort()
            await self.engine.pause(keep=False)
            await self._load(self.initial)
            await self.engine.resume()
            self.version, self.paused, self.dead = "default", "", False
            self.adapters, self.released, self.base = [], set(), self.initial
            self.running.clear()

        asyncio.run_coroutine_threadsafe(restart(), self._loop).result(30)

    @web.middleware
    async def _guard(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        self.calls.append(request.path)
        while self.hung:
            await asyncio.sleep(0.05)
        if self.dead:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if request.path != "/health" and self.fails("503 at a call"):
            return web.Response(text="starting", status=503)
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    # -- state ----------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.fails("unhealthy") else 200)

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "tp_size": 1,
                "enable_deterministic_inference": self.deterministic,
                "dp_size": self.dp_size,
                "enable_lora": self.lora,
                "max_lora_rank": self.max_lora_rank,
                "lora_target_modules": self.lora_target_modules,
                "enable_memory_saver": True,
                "enable_priority_scheduling": True,
            }
        )

    async def _weight_version(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _release_memory_occupation(self, request: web.Request) -> web.Response:
        if self.running and self.paused != "retract":
            return self._scheduler_ends(request)  # the scheduler of SGLang asserts that it is idle
        self.released |= set((await request.json())["tags"])
        if "kv_cache" in self.released:
            await self.engine.sleep()
        if "weights" in self.released:
            await self._load({name: value * 0 for name, value in self.initial.items()})
        return web.json_response(None)

    async def _resume_memory_occupation(self, request: web.Request) -> web.Response:
        tags = set((await request.json())["tags"])
        if not tags <= self.released:
            return self._scheduler_ends(request)
        self.released -= tags
        await self.engine.wake_up()
        return web.json_response(None)

    async def _pause_generation(self, request: web.Request) -> web.Response:
        if self.fails("pause is not acknowledged"):
            return web.json_response({"status": "failed", "message": "busy"})
        self.paused = (await request.json()).get("mode", "abort")
        await self.engine.pause(keep=self.paused != "abort")
        return web.json_response({"status": "ok", "message": "Generation paused."})

    async def _continue_generation(self, request: web.Request) -> web.Response:
        self.paused = ""
        await self.engine.resume()
        return web.json_response({"status": "ok", "message": "Generation continued."})

    async def _flush_cache(self, request: web.Request) -> web.Response:
        deadline = time.monotonic() + float(request.query.get("timeout", 0))
        while self.running and self.paused != "retract" and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        if self.fails("flush is refused") or (self.running and self.paused != "retract"):
            return web.Response(text="Flush cache failed.\n", status=400)
        return web.Response(text="Cache flushed.\n")

    async def _abort_request(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        if not self.fails("abort is ignored"):
            await self.engine.abort({r for r in self.running if r.startswith(rid)})
        return web.Response()

    # -- weights --------------------------------------------------------------------------------

    async def _load(self, weights: dict[str, Any]) -> None:
        if self.fails("weights are applied in part"):
            weights = dict(list(weights.items())[::2])
        await self.engine.begin_update()
        await self.engine.load(self._by_parameter(weights).items())
        await self.engine.commit(0)

    def _by_parameter(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Reads tensors by their names in a checkpoint; those of experts are not the module's."""
        lm = self.policy.lm
        if weights.keys() <= dict(lm.named_parameters(remove_duplicate=False)).keys():
            return weights
        with tempfile.TemporaryDirectory() as folder:
            save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
            lm.config.save_pretrained(folder)
            return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())

    async def _updated(self, weights: dict[str, Any], body: Body) -> web.Response:
        if self.fails("update fails"):
            return web.json_response({"success": False, "message": "no space left"}, status=400)
        if self.fails("update does not succeed"):
            return web.json_response({"success": False, "message": "3 of 12 tensors"})
        if "weights" in self.released:
            return web.json_response({"success": False, "message": "no memory"}, status=400)
        try:
            await self._load(weights)
        except RolloutError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        self.base = {name: p.detach().clone() for name, p in self.policy.lm.named_parameters()}
        if body.get("weight_version") and not self.fails("version stays old"):
            self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded."})

    async def _update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.fails("dies in an update"):
            self._scheduler_ends(request)
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        weights = {name: t for file in files for name, t in load_file(file).items()}
        return await self._updated(weights, body)

    async def _update_weights_from_tensor(self, request: web.Request) -> web.Response:
        body = await request.json()
        named = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        return await self._updated(dict(named), body)

    async def _init_weights_update_group(self, request: web.Request) -> web.Response:
        body = await request.json()

        def join() -> Any:
            place = f"tcp://{body['master_address']}:{body['master_port']}"
            timeout = timedelta(seconds=30)
            store, rank, size = next(
                rendezvous(place, body["rank_offset"], body["world_size"], timeout=timeout)
            )
            named = distributed_c10d.PrefixStore(body["group_name"], store)
            group, _ = distributed_c10d._new_process_group_helper(
                size, rank, [], body["backend"], named, body["group_name"], timeout=timeout
            )
            distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
            return group

        self.groups[body["group_name"]] = await asyncio.to_thread(join)
        return web.json_response({"success": True, "message": "Succeeded."})

    async def _update_weights_from_distributed(self, request: web.Request) -> web.Response:
        body = await request.json()
        group = self.groups[body["group_name"]]

        def receive() -> dict[str, Any]:
            received = {}
            for name, dtype, shape in zip(
                body["names"], body["dtypes"], body["shapes"], strict=True
            ):
                received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                group.broadcast(received[name], 0).wait()
            return received

        return await self._updated(await asyncio.to_thread(receive), body)

    async def _destroy_weights_update_group(self, request: web.Request) -> web.Response:
        group = self.groups.pop((await request.json())["group_name"])
        distributed_c10d.destroy_process_group(group)
        return web.json_response({"success": True, "message": "Succeeded."})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        if not self.fails("version stays old"):
            self.version = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.version})

    async def _load_lora_adapter(self, request: web.Request) -> web.Response:
        """Merges the adapter into the base model; the server has one adapter at a time."""
        body = await request.json()
        file = Path(body["lora_path"]) / "adapter_config.json"
        config = json.loads(file.read_text())
        targets = {name.rpartition(".")[2] for name in config["target_modules"]}
        fits = config["r"] <= self.max_lora_rank and targets <= set(self.lora_target_modules)
        if not self.lora or self.dp_size > 1 or not fits or body["lora_name"] in self.adapters:
            return web.json_response({"success": False, "error_message": "no LoRA"}, status=400)
        # SGLang scales by alpha / r and ignores the other scalings of the file.
        config |= {"use_rslora": False, "alpha_pattern": {}, "rank_pattern": {}}
        file.write_text(json.dumps(config))
        base = copy.deepcopy(self.policy.lm)
        base.load_state_dict(self.base, strict=False)
        await self._load(dict(merged_weights(PeftModel.from_pretrained(base, body["lora_path"]))))
        self.adapters.append(body["lora_name"])
        return web.json_response({"success": True, "loaded_adapters": self.adapters})

    async def _unload_lora_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if name not in self.adapters:
            return web.json_response({"success": False, "error_message": "unknown"}, status=400)
        self.adapters.remove(name)
        return web.json_response({"success": True, "loaded_adapters": self.adapters})

    async def _get_weights_by_name(self, request: web.Request) -> web.Response:
        body = await request.json()
        value = dict(self.policy.lm.named_parameters(remove_duplicate=False)).get(body["name"])
        if value is None:
            return web.json_response({"error": "no such weight"}, status=400)
        return web.json_response(value[: body["truncate_size"]].tolist())

    # -- tokens ---------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if body.get("stream") and self.fails("500 at the start"):
            return web.Response(text="internal error", status=500)
        if (name := body.get("lora_path")) is not None and name not in self.adapters:
            return web.json_response({"error": {"message": f"no adapter {name}"}}, status=400)
        if not body.get("input_ids"):
            return web.json_response({"error": {"message": "no input_ids"}}, status=400)
        if self.released:
            return self._scheduler_ends(request)
        if body.get("stream"):
            self.running.add(body["rid"])
            try:
                return await self._stream(request, body)
            finally:
                self._loop.call_later(self.abort_s, self.running.discard, body["rid"])
                await asyncio.shield(self.engine.abort({body["rid"]}))
        sampling = self._sampling(body)
        out = await self.engine.generate(body["input_ids"], sampling, body["rid"])
        best = next_probabilities(self.policy, body["input_ids"], sampling.temperature or 1.0).max()
        meta = self._meta(body, out.token_ids, out.log_probs, out.stop_reason)
        meta["output_top_logprobs"] = [[[float(best.log()), 0, None]]]
        return web.json_response({"output_ids": out.token_ids, "meta_info": meta})

    def _sampling(self, body: Body) -> Sampling:
        params = body["sampling_params"]
        seed = params.get("sampling_seed") if self.deterministic else None
        return Sampling(
            max_tokens=params["max_new_tokens"],
            temperature=params["temperature"],
            seed=Random().getrandbits(60) if seed is None else seed,
            top_k=params.get("top_k", -1),
            top_p=params.get("top_p", 1.0),
            min_p=params.get("min_p", 0.0),
            stop_token_ids=() if params["ignore_eos"] else tuple(params["stop_token_ids"]),
            ignore_eos=params["ignore_eos"],
        )

    def _meta(
        self, body: Body, ids: list[int], log_probs: list[float], reason: StopReason | None
    ) -> Body:
        finish = reason and {"type": reason.value, "message": "Aborted"}
        return {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": [[x, t, None] for x, t in zip(log_probs, ids, strict=True)],
        }

    async def _stream(self, request: web.Request, body: Body) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        if self.fails("the first token comes too late"):
            await asyncio.sleep(3600)
        deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()
        job = asyncio.ensure_future(
            self.engine.generate(
                body["input_ids"],
                self._sampling(body),
                body["rid"],
                priority=-body["priority"],  # the highest number goes first
                on_tokens=deltas.put_nowait,
            )
        )
        ids: list[int] = []
        log_probs: list[float] = []
        sent, reason, has_sent_reason = 0, None, False
        while reason is None:
            arrival = asyncio.ensure_future(deltas.get())
            try:
                await asyncio.wait({job, arrival}, return_when=asyncio.FIRST_COMPLETED)
                new: list[TokenDelta] = [arrival.result()] if arrival.done() else []
            finally:
                arrival.cancel()
            while not deltas.empty():
                new.append(deltas.get_nowait())
            ids += [token for delta in new for token in delta.token_ids]
            log_probs += [x for delta in new for x in delta.log_probs]
            if job.done() and deltas.empty():
                reason = job.result().stop_reason
            while sent < len(ids) or (reason is not None and not has_sent_reason):
                if self.dead:
                    assert request.transport is not None
                    request.transport.abort()
                    return answer
                begin, sent = sent, min(sent + _TOKENS_PER_EVENT, len(ids))
                has_sent_reason = reason is not None and sent == len(ids)
                meta = self._meta(
                    body, ids[:sent], log_probs[:sent], reason if has_sent_reason else None
                )
                event = {"output_ids": ids[:sent], "meta_info": meta}
                if self.incremental:
                    event["output_ids"] = ids[begin:sent]
                    meta["output_token_logprobs"] = meta["output_token_logprobs"][begin:]
                if await self._breaks(request, answer, event, sent):
                    return answer
                await answer.write(f"data: {json.dumps(event)}\n\n".encode())
                if self.incremental and sent > 3 and self.fails("an event comes twice"):
                    await answer.write(f"data: {json.dumps(event)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer
