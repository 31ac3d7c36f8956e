"""Extends vLLM's workers: log-probs of the rollout contract, sampling by position, weight updates.

vLLM imports a copy of this file as `hone_vllm_worker` in each of its workers, in the interpreter of
`rollout.vllm.python`, so it must not import hone. It works with vLLM 0.22 and 0.32.
"""

from __future__ import annotations

import base64
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

BACKEND = "hone_bucket"


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """The backend needs no initialisation."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """A bucket of tensors in a memory file or in GPU memory."""

    tensors: list[tuple[str, str, list[int], int]]
    """Name, dtype, shape and offset in bytes of each tensor."""
    size: int
    path: str | None = None
    cuda: list[Any] | None = None
    """The CUDA IPC handle of the GPU memory; a bytes value in it is encoded as {"bytes": base64}."""
    distributed: bool = False
    """Whether only the first worker can read the memory, and broadcasts the bucket to the others."""


class BucketEngine(WeightTransferEngine):
    """Loads weights by Hugging Face name, bucket by bucket."""

    init_info_cls = NoInitInfo
    update_info_cls = BucketInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None: ...

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def receive_weights(
        self,
        update_info: BucketInfo,
        load_weights: Callable[[list[tuple[str, Tensor]]], object] | None = None,
    ) -> None:
        """Loads one bucket; only vLLM 0.22 passes `load_weights`."""
        memory = _broadcast(update_info) if update_info.distributed else _open_memory(update_info)
        tensors = list(_copy_tensors(update_info, memory))
        if load_weights is None:
            load_weights = self.model.load_weights
        load_weights(tensors)

    def finish_weight_update(self) -> None:
        """Ends a weight update; vLLM 0.22 does not call this, because its worker does the same."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_for_cpu(self.model, self.model_config.hf_text_config.tie_word_embeddings)

    def shutdown(self) -> None: ...

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("hone sends buckets itself")


def _pack_for_cpu(model: Any, tied_embeddings: bool) -> None:
    """Packs experts and a tied output head for the CPU kernels; vLLM's reload leaves these out."""
    for layer in model.modules():
        if "w13_weight" in layer._parameters:
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
    head = getattr(model, "lm_head", None)
    if tied_embeddings and hasattr(head, "weight"):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _open_memory(info: BucketInfo) -> Tensor:
    """Returns the bytes of a bucket from the memory of the rollout worker, which is on this machine."""
    if info.cuda is None:
        assert info.path is not None
        with open(info.path, "rb") as file:
            memory = mmap.mmap(file.fileno(), info.size, prot=mmap.PROT_READ)
        return torch.frombuffer(memory, dtype=torch.uint8)
    torch.cuda.init()
    handle = [
        base64.b64decode(part["bytes"]) if isinstance(part, dict) else part for part in info.cuda
    ]
    handle[0] = torch.cuda.current_device()  # the GPU may have another index in the sender
    storage = torch.UntypedStorage._new_shared_cuda(*handle)
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)


def _broadcast(info: BucketInfo) -> Tensor:
    """Returns the bytes of a bucket, which the first worker broadcasts in vLLM's process group.

    The rollout worker is not in the group: it may share the first worker's GPU, and NCCL allows one rank
    per GPU.
    """
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.rank_in_group == 0:
        memory = _open_memory(info)[: info.size]
    else:
        memory = torch.empty(info.size, dtype=torch.uint8, device=group.device)
    return group.broadcast(memory, 0)


def _copy_tensors(info: BucketInfo, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields copies of the tensors, because vLLM may use a tensor after the bucket was refilled."""
    for name, dtype_name, shape, offset in info.tensors:
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        yield name, memory[offset : offset + size].clone().view(dtype).reshape(shape)
    if memory.is_cuda:
        torch.cuda.synchronize()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketEngine)


class HoneWorker:
    """Methods that vLLM's worker inherits."""

    model_runner: Any

    def has_folder(self, folder: str) -> bool:
        """Whether this worker can read the folder, and so is on the machine of the rollout worker."""
        return os.path.isdir(folder)

    def allocate_pipeline_stage_input(self) -> None:
        """Allocates the input of a pipeline stage if no warm-up has done so.

        On a CPU with `enforce_eager` vLLM has no warm-up, and its first step would fail.
        """
        from vllm.distributed.parallel_state import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )

    def report_log_probs_before_truncation(self) -> None:
        """Reports log-probs of softmax(logits / temperature), before top-k, top-p and min-p.

        Greedy requests report them at temperature 1. vLLM's `logprobs_mode` offers only log-probs without
        temperature, or after truncation.
        """
        sampler = self.model_runner.sampler
        temperature: Tensor | None = None

        def record_temperature(
            module: object, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            nonlocal temperature
            metadata: Any = kwargs.get("sampling_metadata") or args[1]
            temperature = metadata.temperature

        def compute_logprobs(logits: Tensor) -> Tensor:
            scaled_logits = logits.float()
            if temperature is not None:
                divisor = torch.where(temperature < 1e-5, 1.0, temperature)
                scaled_logits = scaled_logits / divisor.unsqueeze(1)
            return scaled_logits.log_softmax(-1)

        if not hasattr(sampler, "compute_logprobs") or sampler.logprobs_mode != "raw_logprobs":
            raise RuntimeError(f"hone does not support vLLM's sampler {type(sampler).__name__}")
        sampler.register_forward_pre_hook(record_temperature, with_kwargs=True)
        sampler.compute_logprobs = compute_logprobs

    def sample_by_seed_and_position(self) -> None:
        """Samples every token by (seed, absolute position), as the native engine does.

        vLLM's own sampler has a generator per seeded request, and runs a kernel for each in every step. The
        seed is `hone_seed` in the `extra_args` of the request's SamplingParams.
        """
        from hone_counter_rng import uniform
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        def forward(
            logits: Tensor,
            generators: dict[int, torch.Generator],
            k: Tensor | None,
            p: Tensor | None,
        ) -> tuple[Tensor, None]:
            probs = apply_top_k_top_p(logits, k, p).softmax(-1, dtype=torch.float32)
            cumulative = probs.cumsum_(-1)
            runner = self.model_runner
            seeds = [0] * len(cumulative)  # vLLM's warm-up has no requests
            for row, request_id in enumerate(runner.input_batch.req_ids[: len(cumulative)]):
                seeds[row] = runner.requests[request_id].sampling_params.extra_args["hone_seed"]
            positions = runner.input_batch.num_tokens_no_spec[: len(cumulative)]
            random_numbers = uniform(torch.tensor(seeds), torch.from_numpy(positions).long())
            total = cumulative[:, -1:]
            random_numbers = random_numbers.to(cumulative.device).unsqueeze(1)
            threshold = (random_numbers * total.double()).float()
            tokens = torch.searchsorted(cumulative, threshold, right=True)
            # Rounding may lift the threshold to the total, and so the index past the last possible token.
            last_tokens = torch.searchsorted(cumulative, total.contiguous())
            return torch.minimum(tokens, last_tokens).view(-1), None

        self.model_runner.sampler.topk_topp_sampler.forward = forward
