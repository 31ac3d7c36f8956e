"""Weight updates of an engine: begin, load by Hugging Face name, commit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutError, Weights
from hone.suggestions import suggestion


class WeightUpdate:
    """The state of the current weight update; an engine samples no token between `begin` and `commit`."""

    def __init__(self) -> None:
        self.in_progress = False
        self._load_error: Exception | None = None

    def begin(self, num_running: int) -> None:
        """Starts a weight update, or restarts an uncommitted one; raises if requests are running."""
        if num_running:
            raise RolloutError(
                f"cannot begin_update while {num_running} requests run; pause the engine, or wait for them"
            )
        self.in_progress, self._load_error = True, None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Wraps one `load`; if the block raises, `begin` must be called again."""
        self._raise_unless_in_progress("load")
        try:
            yield
        except Exception as error:
            self._load_error = error
            raise

    def commit(self) -> None:
        with self.committing():
            pass

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Wraps the end of a weight update; if the block raises, `begin` must be called again."""
        self._raise_unless_in_progress("commit")
        if self._load_error is not None:
            raise RolloutError(
                f"the update has failed ({self._load_error}); call begin_update and load "
                "all weights again"
            )
        with self.loading():
            yield
        self.in_progress = False

    def raise_if_in_progress(self, call: str) -> None:
        if self.in_progress:
            raise RolloutError(
                f"{call} is refused between begin_update and commit: the engine has half of the new "
                "weights"
            )

    def _raise_unless_in_progress(self, call: str) -> None:
        if not self.in_progress:
            raise RolloutError(
                f"cannot {call} without begin_update; call begin_update, load, commit"
            )


@torch.no_grad()
def load_weights(policy: PolicyModel, weights: Weights) -> None:
    """Copies each tensor into its parameter; raises for an unknown name or a wrong shape."""
    parameters: dict[str, Tensor] = {}
    for name, tensor in weights:
        parameters = parameters or dict(policy.lm.named_parameters(remove_duplicate=False))
        check_name_and_shape(name, tensor, parameters)
        parameters[name].copy_(tensor)


def check_name_and_shape(name: str, tensor: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Raises for an unknown name or a wrong shape."""
    if name not in parameters:
        hint = suggestion(name, parameters)
        raise RolloutError(f"load got {name!r}, which the model does not have.{hint}")
    if parameters[name].shape != tensor.shape:
        raise RolloutError(
            f"load got {name!r} with shape {tuple(tensor.shape)}; the model's has "
            f"{tuple(parameters[name].shape)}"
        )


def check_all_loaded(loaded_names: Collection[str], parameters: Mapping[str, Tensor]) -> None:
    """Raises if an update lacks a parameter; of tied parameters, the update needs only one name."""
    loaded_ids = {id(parameters[name]) for name in loaded_names}
    if missing := [name for name, p in parameters.items() if id(p) not in loaded_ids]:
        raise RolloutError(
            f"an update has {len(loaded_names)} of {len(parameters)} tensors and lacks {len(missing)}, for "
            f"example {min(missing)!r}"
        )
