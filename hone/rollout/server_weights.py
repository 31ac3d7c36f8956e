"""Passes new weights to vLLM and SGLang: in a checkpoint folder, a request's payload, or shared memory."""

from __future__ import annotations

import base64
import io
import json
import mmap
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hone.models.lora import adapter_weights
from hone.rollout.contract import RolloutError, Weights
from hone.rollout.owned_folder import OwnedFolder
from hone.types import Fields
from hone.weights.contract import share_gpu_memory

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_FOLDER_PREFIX = "hone-server-weights-"
_ALIGNMENT = 64
"""The offset of a tensor in a bucket is a multiple of this number of bytes."""
UPDATABLE_MODEL_TYPES = frozenset({"qwen3_moe"})
"""Model types with experts whose updates are tested against vLLM's own process."""


class WeightFolder:
    """A folder with two Hugging Face checkpoints: the last complete weights and the current update."""

    def __init__(self, parent: str | None, model_path: str) -> None:
        """Creates a folder in `parent`, which trainer and servers share; None is shared memory."""
        if parent is None:
            self._folder = OwnedFolder(_FOLDER_PREFIX)
        else:
            parent_folder = Path(parent).expanduser().absolute()
            parent_folder.mkdir(parents=True, exist_ok=True)
            self._folder = OwnedFolder(_FOLDER_PREFIX, parent_folder)
            self._folder.path.chmod(0o755)  # the servers may run as another user
        self.root = self._folder.path
        self._model_folder = Path(model_path)
        self.current_checkpoint: Path | None = None
        self._update_checkpoint: Path | None = None
        self._weight_map: dict[str, str] = {}
        """The file of each tensor of the current checkpoint."""
        self._update_map: dict[str, str] = {}

    def begin(self) -> None:
        """Creates an empty checkpoint for an update; deletes the checkpoint of an uncommitted update."""
        if self._update_checkpoint is not None:
            shutil.rmtree(self._update_checkpoint, ignore_errors=True)
        self._update_checkpoint = Path(tempfile.mkdtemp(prefix="update-", dir=self.root))
        self._update_checkpoint.chmod(0o755)
        self._update_map = {}

    def add(self, bucket: Mapping[str, Tensor]) -> None:
        assert self._update_checkpoint is not None, "call begin() first"
        file_name = f"model-{len(set(self._update_map.values())) + 1:05}.safetensors"
        self._save(bucket, self._update_checkpoint / file_name)
        self._update_map |= dict.fromkeys(bucket, file_name)

    def _save(self, bucket: Mapping[str, Tensor], file: Path) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket.items()}
        try:
            save_file(tensors, file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise RolloutError(
                f"new weights do not fit into {self.root} ({error}); set rollout.server.weights_folder"
            ) from error

    def commit(self) -> Path:
        """Makes the update the current checkpoint and returns it; deletes the previous checkpoint."""
        assert self._update_checkpoint is not None, "call begin() first"
        self._finish_checkpoint(self._update_checkpoint)
        if self.current_checkpoint is not None:
            shutil.rmtree(self.current_checkpoint, ignore_errors=True)
        self.current_checkpoint, self._update_checkpoint = self._update_checkpoint, None
        self._weight_map = self._update_map
        return self.current_checkpoint

    def _finish_checkpoint(self, folder: Path) -> None:
        """Writes the files that a checkpoint has besides the added tensors."""
        index = {"metadata": {}, "weight_map": self._update_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for file in self._model_folder.glob("*.json"):
            if not file.name.endswith("index.json"):
                shutil.copy(file, folder / file.name)

    def shards(self) -> Iterator[dict[str, Tensor]]:
        """Yields the current weights, one file at a time."""
        assert self.current_checkpoint is not None, "call commit() first"
        for file in sorted(self.current_checkpoint.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                yield {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118

    def sample_weights(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """Yields about `count` of the current weights, evenly spread by name."""
        assert self.current_checkpoint is not None, "call commit() first"
        names = sorted(self._weight_map)
        for name in names[:: max(1, len(names) // count)]:
            with safe_open(self.current_checkpoint / self._weight_map[name], "pt") as tensors:
                yield name, tensors.get_tensor(name)

    def close(self) -> None:
        self._folder.close()


class AdapterFolder(WeightFolder):
    """A folder with two LoRA adapters in PEFT's format: the last complete adapter and the current update."""

    def __init__(self, parent: str | None, lm: PeftModel) -> None:
        super().__init__(parent, "")
        self.parameters = {name: tensor.to("meta") for name, tensor in adapter_weights(lm)}
        self._config = lm.peft_config[lm.active_adapter]
        self._adapter_infix = f".{lm.active_adapter}."  # PEFT's files omit it from names
        self._tensors: dict[str, Tensor] = {}

    def add(self, bucket: Mapping[str, Tensor]) -> None:
        for name, tensor in bucket.items():
            self._tensors[name.replace(self._adapter_infix, ".")] = tensor.detach().to(
                "cpu", copy=True
            )

    def _finish_checkpoint(self, folder: Path) -> None:
        self._save(self._tensors, folder / "adapter_model.safetensors")
        self._config.save_pretrained(folder)

    def sample_weights(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """Yields nothing, because no server returns adapter weights."""
        return iter(())


def split_into_buckets(weights: Weights, bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yields tensors in buckets of up to `bucket_bytes`; a larger tensor gets a bucket of its own."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def split_experts(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yields every expert as a view with its name in a checkpoint; yields other tensors unchanged.

    The trainer has one tensor for all experts of a layer; a checkpoint has one tensor per expert.
    """
    for name, tensor in weights:
        layer, _, suffix = name.rpartition(".experts.")
        if layer and suffix == "gate_up_proj":  # [experts, 2 * intermediate, hidden]
            for i, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                yield f"{layer}.experts.{i}.gate_proj.weight", gate
                yield f"{layer}.experts.{i}.up_proj.weight", up
        elif layer and suffix == "down_proj":  # [experts, hidden, intermediate]
            for i, expert in enumerate(tensor):
                yield f"{layer}.experts.{i}.down_proj.weight", expert
        else:
            yield name, tensor


def fill_buckets(weights: Weights, device: torch.device, bucket_bytes: int) -> Iterator[Fields]:
    """Yields buckets in memory that vLLM's workers can open: a memory file, or GPU memory by CUDA IPC.

    A bucket has the arguments of `BucketInfo` in vllm_worker.py. All buckets use the same memory.
    """
    on_gpu = device.type == "cuda"
    file_descriptor = -1 if on_gpu else os.memfd_create("hone-vllm")
    buffer = torch.empty(0, dtype=torch.uint8)
    try:
        for bucket in split_into_buckets(weights, bucket_bytes):
            tensors, size = [], 0  # (name, dtype, shape, offset) of each tensor
            for name, tensor in bucket.items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                tensors.append((name, dtype, list(tensor.shape), size))
                size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            if len(buffer) < size and on_gpu:
                buffer = torch.empty(size, dtype=torch.uint8, device=device)
            elif len(buffer) < size:
                os.ftruncate(file_descriptor, size)
                buffer = torch.frombuffer(mmap.mmap(file_descriptor, size), dtype=torch.uint8)
            for (_, _, _, offset), tensor in zip(tensors, bucket.values(), strict=True):
                content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                buffer[offset : offset + len(content)].copy_(content)
            memory: Fields = {"path": f"/proc/{os.getpid()}/fd/{file_descriptor}"}
            if on_gpu:
                torch.cuda.synchronize(device)
                memory = {"cuda": share_gpu_memory(buffer)}
            yield {"tensors": tensors, "size": len(buffer), **memory}
    finally:
        if not on_gpu:
            os.close(file_descriptor)


def serialize_for_sglang(bucket: Mapping[str, Tensor]) -> str:
    """Serializes tensors for SGLang: CUDA tensors as IPC handles, other tensors as their bytes."""
    named_tensors = [(name, tensor.detach()) for name, tensor in bucket.items()]
    if all(tensor.is_cuda for _, tensor in named_tensors):
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(named_tensors)
        torch.cuda.synchronize()
        content = buffer.getvalue()
    else:
        content = pickle.dumps([(name, tensor.cpu().clone()) for name, tensor in named_tensors])
    return base64.b64encode(content).decode()


def meta_model(model_path: str) -> PreTrainedModel:
    """Returns the model with all parameters on the meta device."""
    from transformers import AutoModelForCausalLM

    from hone.models.load import load_config

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(load_config(model_path))


def checkpoint_tensors(lm: PreTrainedModel, bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors with their names in a checkpoint, where each expert has tensors of its own."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors: dict[str, Tensor] = revert_weight_conversion(lm, dict(bucket))
    return tensors
