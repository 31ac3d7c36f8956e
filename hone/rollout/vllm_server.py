"""The process of a vLLM engine: it reads commands from a socket, decodes, and sends tokens back.

The interpreter of `rollout.vllm.python` runs a copy of this file, so it must not import hone. One thread
reads the socket; the main thread runs commands and decode steps in turn. The process group ends when the
socket is closed.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Frame = dict[str, Any]
_PR_SET_PDEATHSIG = 1  # the option of prctl by which a child gets a signal if its parent dies
_SEND_INTERVAL_S = 0.05
"""The tokens of running requests are sent at this interval: a frame per step would slow the reader down."""


@dataclass
class UnsentOutput:
    """The tokens of a request since the last frame that had tokens of this request."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finished: bool = False
    cached_tokens: int | None = None


class Server:
    """Serves one vLLM engine until the socket closes."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._send_lock = connection, threading.Lock()
        self._commands: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        # Start of the current command or step; None while the server waits.
        self._busy_since: float | None = None
        self._paused = False
        self._vllm_ids: dict[str, str] = {}  # vLLM's id of each request in the engine, by key
        self._unsent_outputs: dict[str, UnsentOutput] = {}  # by key
        self._sent_at = 0.0
        self._updating = False
        self._num_workers = 0
        # Whether the first worker broadcasts each bucket to the others.
        self._distributed = False
        self._llm: Any = None
        self._sampling_params_class: Any = None
        self._lora_request: Any = None

    def _send(self, frame: Frame) -> None:
        with self._send_lock:
            self._connection.send_bytes(json.dumps(frame, separators=(",", ":")).encode())

    def read_commands(self) -> None:
        """Queues commands and answers pings; kills the process group when the parent has exited."""
        try:
            while True:
                frame: Frame = json.loads(self._connection.recv_bytes())
                if frame["verb"] == "ping":
                    busy_since = self._busy_since
                    busy_s = 0.0 if busy_since is None else time.monotonic() - busy_since
                    self._send({"busy_s": busy_s})
                else:
                    self._commands.put(frame)
        except (EOFError, OSError):
            pass
        finally:
            end_process_group()

    def serve(self) -> None:
        """Runs the queued commands, and a decode step whenever the queue is empty."""
        while True:
            self._busy_since = None
            try:
                frame = self._commands.get(block=self._paused or not self._vllm_ids)
            except queue.Empty:
                self._busy_since = time.monotonic()
                self._step()
                continue
            self._busy_since = time.monotonic()
            if frame["verb"] not in ("start", "add", "abort"):
                self._drain()
            self._send_tokens(list(self._unsent_outputs))
            call_id = frame.get("call")  # None for a command that needs no answer
            answer: Frame = {"call": call_id}
            try:
                answer["result"] = getattr(self, frame["verb"])(frame)
            except Exception as error:
                if self._num_workers > 1:  # other workers may have succeeded, or still wait
                    raise
                traceback.print_exc()
                answer["error"] = f"{type(error).__name__}: {error}"
            # A ping right after the answer must not read the duration of this command as a stall.
            self._busy_since = None
            if call_id is not None:
                self._send(answer)

    def _step(self) -> None:
        """Runs one step of the engine core and sends its tokens; `LLM` would build an object per token."""
        finished_keys = []
        for output in self._llm.llm_engine.engine_core.get_output().outputs:
            key = output.request_id.partition("-")[0]  # vLLM appends a dash and random letters
            stats = output.prefill_stats
            unsent = self._unsent_outputs.setdefault(key, UnsentOutput())
            unsent.token_ids += output.new_token_ids
            if output.new_token_ids:
                unsent.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
            if stats is not None:
                unsent.cached_tokens = stats.num_cached_tokens
            if output.finished:
                unsent.finished = True
                finished_keys.append(key)
                del self._vllm_ids[key]
        now = time.monotonic()
        send_all = now - self._sent_at >= _SEND_INTERVAL_S
        self._send_tokens(list(self._unsent_outputs) if send_all else finished_keys)
        if send_all:
            self._sent_at = now

    def _drain(self) -> None:
        """Finishes the batches in the pipeline stages, so that no command changes the weights under them."""
        core = self._llm.llm_engine.engine_core.engine_core
        if core.batch_queue:
            from vllm.v1.core.sched.interface import PauseState

            core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while core.batch_queue:
                self._step()
            core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _send_tokens(self, keys: list[str]) -> None:
        outputs = [(key, self._unsent_outputs.pop(key)) for key in keys]
        if outputs:
            fields = [
                (key, output.token_ids, output.log_probs, output.finished, output.cached_tokens)
                for key, output in outputs
            ]
            self._send({"tokens": fields})

    # -- commands -------------------------------------------------------------------------------

    def start(self, frame: Frame) -> str:
        """Starts vLLM with the arguments in `engine`; returns vLLM's version."""
        import hone_vllm_worker
        import vllm
        from vllm import LLM, SamplingParams
        from vllm.config import WeightTransferConfig

        transfer_config = WeightTransferConfig(backend=hone_vllm_worker.BACKEND)
        self._llm = LLM(
            **frame["engine"],
            worker_extension_cls="hone_vllm_worker.HoneWorker",
            weight_transfer_config=transfer_config,
        )
        self._llm.collective_rpc("allocate_pipeline_stage_input")
        self._llm.collective_rpc("report_log_probs_before_truncation")
        self._llm.collective_rpc("sample_by_seed_and_position")
        self._llm.init_weight_transfer_engine({"init_info": {}})
        workers_are_local = self._llm.collective_rpc(
            "has_folder", args=(str(Path(__file__).parent),)
        )
        self._distributed = frame["weights"] == "distributed" or not all(workers_are_local)
        self._llm.llm_engine.model_executor.register_failure_callback(kill_process_group)
        self._num_workers = len(workers_are_local)

        self._sampling_params_class = SamplingParams
        return str(vllm.__version__)

    def add(self, frame: Frame) -> None:
        """Adds a request to the engine, or sends vLLM's error if it refuses the request."""
        key, engine = frame["key"], self._llm.llm_engine
        prompt = {"prompt_token_ids": frame["prompt"]}
        if (salt := frame.get("cache_salt")) is not None:
            prompt["cache_salt"] = salt
        try:
            request = engine.input_processor.process_inputs(
                key,
                prompt,
                self._sampling_params_class(
                    **frame["sampling"],
                    logprobs=0,
                    ignore_eos=True,  # the end tokens are in stop_token_ids
                    detokenize=False,
                ),
                supported_tasks=engine.get_supported_tasks(),
                lora_request=self._lora_request,
                priority=frame.get("priority", 0),
            )
            engine.input_processor.assign_request_id(request)
            engine.engine_core.add_request(request)
        except Exception as error:
            self._send({"refused": key, "error": f"{type(error).__name__}: {error}"})
        else:
            self._vllm_ids[key] = request.request_id

    def abort(self, frame: Frame) -> None:
        ids = [self._vllm_ids.pop(key) for key in frame["keys"] if key in self._vllm_ids]
        self._llm.llm_engine.engine_core.abort_requests(ids)

    def pause(self, frame: Frame) -> None:
        self._paused = True

    def resume(self, frame: Frame) -> None:
        self._paused = False

    def load(self, frame: Frame) -> None:
        """Loads one bucket; the first bucket (`first`) starts a weight update."""
        if frame["first"]:
            if self._updating:  # the previous update was not finished
                self._llm.finish_weight_update()
            self._llm.start_weight_update()
            self._updating = True
        bucket = frame["bucket"] | {"distributed": self._distributed}
        self._llm.update_weights({"update_info": bucket})

    def finish(self, frame: Frame) -> None:
        """Ends a weight update; running requests recompute their KV cache, unless it is kept."""
        self._llm.finish_weight_update()
        self._updating = False
        self._reset_cache(frame)

    def _reset_cache(self, frame: Frame) -> None:
        """Clears the prefix cache and the KV cache of running requests, unless `keep_kv` is set."""
        if not frame.get("keep_kv"):
            self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    def adapter(self, frame: Frame) -> None:
        """Loads a folder's LoRA adapter for all requests; unloads the previous adapter."""
        from vllm.lora.request import LoRARequest

        engine = self._llm.llm_engine
        if self._lora_request is not None:
            engine.remove_lora(1)
        self._lora_request = LoRARequest("hone", 1, frame["folder"])
        engine.add_lora(self._lora_request)
        self._reset_cache(frame)

    def sleep(self, frame: Frame) -> None:
        """Frees memory; paused requests recompute their KV cache after `wake_up`."""
        self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        if frame["level"]:
            self._llm.sleep(level=frame["level"], mode="keep")

    def wake_up(self, frame: Frame) -> None:
        self._llm.wake_up()


def end_process_group() -> None:
    """Deletes the folder of this process and kills its process group."""
    sys.stderr.flush()
    shutil.rmtree(Path(__file__).parent, ignore_errors=True)
    kill_process_group()


def kill_process_group() -> None:
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: end_process_group())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    server = Server(Connection(int(sys.argv[1])))
    threading.Thread(target=server.read_commands, daemon=True).start()
    try:
        server.serve()
    except BaseException:  # the engine is unusable after a failed step; the parent restarts it
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        kill_process_group()


if __name__ == "__main__":
    main()
