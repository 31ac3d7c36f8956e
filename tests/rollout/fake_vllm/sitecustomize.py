"""A vLLM of a hundred lines for tests: it says its position plus the first number of its weights.

Python imports this file at its start where it is on the path. A prompt with token 93 makes a step fail, one
with 96 is refused, and one with 97 makes a step take very long. `model` says how it starts. Requests wait
after FAKE_VLLM_TOKENS tokens until the file FAKE_VLLM_GATE is there, if the environment names one.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from types import ModuleType, SimpleNamespace


class LogProbs:
    """A column of log-probs, without numpy."""

    def __getitem__(self, index):
        return self

    def tolist(self):
        return [-0.5]


class Engine:
    def __init__(self) -> None:
        self.requests, self.weight, self.resets, self.adapters = {}, 0, 0, 0

    @property
    def input_processor(self):
        return self

    engine_core = model_executor = input_processor
    batch_queue = None

    def register_failure_callback(self, callback): ...

    def get_supported_tasks(self):
        return ("generate",)

    def add_lora(self, request):
        """The first number of the first matrix A shifts the tokens."""
        with open(f"{request.folder}/adapter_model.safetensors", "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            (name,) = [n for n in header if n.endswith("lora_A.weight")]
            file.seek(header[name]["data_offsets"][0], 1)
            (number,) = struct.unpack("<f", file.read(4))
        assert self.adapters == 0, "one adapter is there"
        self.adapters, self.weight = 1, int(number)

    def remove_lora(self, number):
        self.adapters = 0

    def process_inputs(self, key, prompt, params, supported_tasks, lora_request, priority):
        if 96 in prompt["prompt_token_ids"]:
            raise ValueError("96 is refused")
        return SimpleNamespace(request_id=key, state=[prompt["prompt_token_ids"], params, 0])

    def assign_request_id(self, request):
        request.request_id += "-0f"

    def add_request(self, request):
        self.requests[request.request_id] = request.state

    def abort_requests(self, keys):
        for key in keys:
            del self.requests[key]

    def reset_prefix_cache(self, reset_running_requests):
        self.resets += reset_running_requests

    def get_output(self):
        time.sleep(0.002)
        gate = os.environ.get("FAKE_VLLM_GATE")
        closed = gate is not None and not os.path.exists(gate)
        outputs = []
        for key, state in list(self.requests.items()):
            prompt, params, count = state
            if closed and count == int(os.environ["FAKE_VLLM_TOKENS"]):
                continue
            if 93 in prompt and count == 3:
                raise RuntimeError("the kernel failed")
            if 97 in prompt:
                time.sleep(1000)
            state[2] = count = count + 1
            token = (len(prompt) + count - 1 + self.weight) % 90
            finished = count == params["max_tokens"] or token in params["stop_token_ids"]
            if finished:
                del self.requests[key]
            outputs.append(
                SimpleNamespace(
                    request_id=key,
                    new_token_ids=[token],
                    new_logprobs=SimpleNamespace(logprobs=LogProbs()),
                    finished=finished,
                    prefill_stats=SimpleNamespace(num_cached_tokens=0) if count == 1 else None,
                )
            )
        return SimpleNamespace(outputs=outputs)


class LLM:
    def __init__(self, model, **arguments) -> None:
        if model == "broken":
            raise ValueError("no such model")
        if model == "slow":
            time.sleep(1000)
        self.llm_engine, self.updating = Engine(), False
        self.workers = {"two workers": [True, True], "two machines": [True, False]}.get(
            model, [True]
        )

    def collective_rpc(self, name, args=()):
        return self.workers

    def init_weight_transfer_engine(self, request):
        pass

    def start_weight_update(self):
        assert not self.updating, "an update is under way"
        self.updating = True

    def update_weights(self, request):
        assert self.updating
        info = request["update_info"]
        assert info["distributed"] is not all(self.workers), "how a worker gets the bucket"
        with open(info["path"], "rb") as file:
            content = file.read(info["size"])
        for name, _, _, offset in info["tensors"]:
            if name == "shift":
                self.llm_engine.weight = int(struct.unpack_from("f", content, offset)[0])

    def finish_weight_update(self):
        assert self.updating
        self.updating = False

    def sleep(self, level, mode="abort"):
        if mode == "abort":
            self.llm_engine.requests.clear()
        if level == 2:
            self.llm_engine.weight = 40  # the weights are lost

    def wake_up(self): ...


def module(name, **contents):
    sys.modules[name] = made = ModuleType(name)
    vars(made).update(contents)
    made.__path__ = []
    return made


if not sys.argv[0].endswith("-c"):
    factory = SimpleNamespace(_registry={}, register_engine=lambda name, engine: None)
    base = type("Base", (), {})
    names = ("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo")
    module("torch", Tensor=object)
    module("vllm", LLM=LLM, SamplingParams=lambda **params: params, __version__="fake")
    module("vllm.config", WeightTransferConfig=lambda backend: backend)
    module("vllm.lora")
    module(
        "vllm.lora.request",
        LoRARequest=lambda name, number, folder: SimpleNamespace(folder=folder),
    )
    module("vllm.distributed")
    module("vllm.distributed.weight_transfer", WeightTransferEngineFactory=factory)
    module("vllm.distributed.weight_transfer.base", **dict.fromkeys(names, base))
