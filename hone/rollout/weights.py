"""Weight updates of an engine's policy: begin, load by Hugging Face name, commit."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutError


class WeightUpdate:
    """The state of an update; an engine samples no token between begin and commit."""

    def __init__(self) -> None:
        self.under_way = False
        self._refused: Exception | None = None

    def begin(self, running: int) -> None:
        """Starts an update, or restarts an uncommitted one; raises if `running` requests are not paused."""
        if running:
            raise RolloutError(
                f"begin_update while {running} requests run; pause the engine, or wait for them"
            )
        self.under_way, self._refused = True, None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Wraps one `load`; after an error the update must begin again."""
        self._require("load")
        try:
            yield
        except Exception as error:
            self._refused = error
            raise

    def commit(self) -> None:
        with self.committing():
            pass

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Wraps the end of an update; after an error the update must begin again."""
        self._require("commit")
        if self._refused is not None:
            raise RolloutError(
                f"commit of an update that was refused ({self._refused}); call begin_update and load "
                "all weights again"
            )
        with self.loading():
            yield
        self.under_way = False

    def refuse_tokens(self, what: str) -> None:
        """Raises while an update is incomplete."""
        if self.under_way:
            raise RolloutError(
                f"{what} between begin_update and commit: the engine has half of the new weights"
            )

    def _require(self, verb: str) -> None:
        if not self.under_way:
            raise RolloutError(f"{verb} without begin_update; an update is begin, load, commit")


@torch.no_grad()
def load_weights(policy: PolicyModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies each tensor into its parameter; raises for an unknown name or another shape."""
    parameters: dict[str, Tensor] = {}
    for name, tensor in weights:
        parameters = parameters or dict(policy.lm.named_parameters(remove_duplicate=False))
        refuse_unknown(name, tensor, parameters)
        parameters[name].copy_(tensor)


def refuse_unknown(name: str, tensor: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Raises for a tensor that is no parameter by its name, or has another shape."""
    if name not in parameters:
        near = difflib.get_close_matches(name, parameters, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RolloutError(f"load got {name!r}, which the model does not have.{hint}")
    if parameters[name].shape != tensor.shape:
        raise RolloutError(
            f"load got {name!r} with shape {tuple(tensor.shape)}; the model's has "
            f"{tuple(parameters[name].shape)}"
        )
