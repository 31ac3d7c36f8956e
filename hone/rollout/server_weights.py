"""New weights for inference servers: as a checkpoint folder, or as the payload of a request."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import io
import json
import pickle
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hone.rollout.contract import RolloutError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

Weights = Iterable[tuple[str, Tensor]]
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "hone-server-weights-"


class WeightFolder:
    """The last complete weights as a Hugging Face checkpoint, and those of the current update."""

    def __init__(self, parent: str | None, model_path: str) -> None:
        """`parent` is a folder that trainer and servers share; None: a new folder in shared memory."""
        self._is_temporary = parent is None
        if parent is None:
            memory = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
            _delete_abandoned(memory)
            # Hidden from `_delete_abandoned` until it is locked.
            hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=memory))
            self._lock = _lock_folder(hidden)
            self.root = hidden.rename(memory / hidden.name[1:])
        else:
            self.root = Path(parent).expanduser().absolute()
            self.root.mkdir(parents=True, exist_ok=True)
        self._model = Path(model_path)
        self.current: Path | None = None
        self._next: Path | None = None
        self._index: dict[str, str] = {}

    def begin(self) -> None:
        if self._next is not None:
            shutil.rmtree(self._next, ignore_errors=True)
        self._next = Path(tempfile.mkdtemp(prefix="update-", dir=self.root))
        self._next.chmod(0o755)
        self._index = {}

    def add(self, bucket: Mapping[str, Tensor]) -> None:
        assert self._next is not None, "call begin() first"
        name = f"model-{len(set(self._index.values())) + 1:05}.safetensors"
        self._save(
            {key: tensor.detach().cpu() for key, tensor in bucket.items()}, self._next / name
        )
        self._index |= dict.fromkeys(bucket, name)

    def _save(self, bucket: Mapping[str, Tensor], file: Path) -> None:
        tensors = {key: tensor.contiguous() for key, tensor in bucket.items()}
        try:
            save_file(tensors, file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise RolloutError(
                f"new weights do not fit into {self.root} ({error}); set rollout.server.weights_folder"
            ) from error

    def commit(self) -> Path:
        """Makes the update the current weights, and deletes the previous ones."""
        assert self._next is not None, "call begin() first"
        self._complete(self._next)
        if self.current is not None:
            shutil.rmtree(self.current, ignore_errors=True)
        self.current, self._next = self._next, None
        return self.current

    def _complete(self, folder: Path) -> None:
        """Writes the files of a checkpoint that are not tensors."""
        index = {"metadata": {}, "weight_map": self._index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for file in self._model.glob("*.json"):
            if not file.name.endswith("index.json"):
                shutil.copy(file, folder / file.name)

    def shards(self) -> Iterator[dict[str, Tensor]]:
        """Yields the current weights, one file at a time."""
        assert self.current is not None, "call commit() first"
        for file in sorted(self.current.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                yield {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118

    def sample(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """Yields about `count` of the current weights, evenly spread by name."""
        assert self.current is not None, "call commit() first"
        names = sorted(self._index)
        for name in names[:: max(1, len(names) // count)]:
            with safe_open(self.current / self._index[name], "pt") as tensors:
                yield name, tensors.get_tensor(name)

    def close(self) -> None:
        if self._is_temporary:
            shutil.rmtree(self.root, ignore_errors=True)
            self._lock.close()
        else:
            for folder in (self.current, self._next):
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)


class AdapterFolder(WeightFolder):
    """The last complete LoRA adapter in PEFT's format, and that of the current update."""

    def __init__(self, parent: str | None, lm: PeftModel) -> None:
        super().__init__(parent, "")
        self._config, self._infix = lm.peft_config[lm.active_adapter], f".{lm.active_adapter}."
        self._tensors: dict[str, Tensor] = {}

    def add(self, bucket: Mapping[str, Tensor]) -> None:
        for name, tensor in bucket.items():
            self._tensors[name.replace(self._infix, ".")] = tensor.detach().to("cpu", copy=True)

    def _complete(self, folder: Path) -> None:
        self._save(self._tensors, folder / "adapter_model.safetensors")
        self._config.save_pretrained(folder)

    def sample(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """Yields nothing, because no server returns adapter weights."""
        return iter(())


def in_buckets(weights: Weights, capacity: int) -> Iterator[dict[str, Tensor]]:
    """Yields tensors in buckets of about `capacity` bytes; a larger tensor is a bucket of its own."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > capacity:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def as_payload(bucket: Mapping[str, Tensor]) -> str:
    """Returns tensors serialized for SGLang: CUDA tensors as IPC handles, others by their bytes."""
    named = [(name, tensor.detach()) for name, tensor in bucket.items()]
    if all(tensor.is_cuda for _, tensor in named):
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(named)
        torch.cuda.synchronize()
        content = buffer.getvalue()
    else:
        content = pickle.dumps([(name, tensor.cpu().clone()) for name, tensor in named])
    return base64.b64encode(content).decode()


def meta_model(model_path: str) -> PreTrainedModel:
    """Returns the model on the meta device."""
    from transformers import AutoModelForCausalLM

    from hone.models.load import load_config

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(load_config(model_path))


def meta_parameters(model_path: str) -> dict[str, Tensor]:
    """Returns every parameter of a model by name, on the meta device."""
    return dict(meta_model(model_path).named_parameters(remove_duplicate=False))


def checkpoint_tensors(lm: PreTrainedModel, bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns parameters by their names in a checkpoint, where every expert has its own tensors."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors: dict[str, Tensor] = revert_weight_conversion(lm, dict(bucket))
    return tensors


def _lock_folder(folder: Path) -> IO[bytes]:
    """Returns a lock file, which locks until it is closed; raises OSError if the folder is locked."""
    file = (folder / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def _delete_abandoned(memory: Path) -> None:
    """Deletes the folders of killed processes, whose locks are free."""
    for folder in memory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _lock_folder(folder):
            shutil.rmtree(folder, ignore_errors=True)
