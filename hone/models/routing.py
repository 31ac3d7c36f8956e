"""Expert routing of mixture-of-experts models: records and replays the experts of each token.

Rollout and trainer compute the same token with different kernels, so their routers may choose different
experts if scores are nearly equal. A replay uses the recorded experts, with gates from the router logits of
its own forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hone.models.families import FAMILIES_WITHOUT_REPLAY, UnsupportedModel, config_field

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hone.ops.rows import PackedRows

NOT_RECORDED = -1
"""Marks experts that were not recorded for a token; in a replay, the router chooses experts there."""
EXPERT_DTYPE = torch.int16
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K_FIELDS = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k")

ExpertRecorder = Callable[[int, Tensor], None]
"""Receives the index of a MoE layer and the experts [N, k] of its tokens."""


def routing_shape(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Returns the number of experts and top-k; None for a model without experts."""
    text_config = config.get_text_config()

    def first_integer(names: tuple[str, ...]) -> int:
        values = (config_field(text_config, name) for name in names)
        return next((value for value in values if isinstance(value, int)), 0)

    num_experts, top_k = first_integer(_EXPERT_FIELDS), first_integer(_TOP_K_FIELDS)
    return (num_experts, top_k) if num_experts > 1 and top_k else None


class Routing:
    """The routers of one decoder; `record` and `replay` apply to every forward pass until they are reset."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        shape = routing_shape(decoder.config)
        blocks = [
            module
            for module in decoder.modules()
            if isinstance(getattr(module, "experts", None), nn.Module)
        ]
        family = decoder.config.model_type
        if shape is None or not blocks or family in FAMILIES_WITHOUT_REPLAY:
            raise UnsupportedModel(
                f"a {family} model has no experts whose routing can be replayed; use "
                "actor.router_replay.mode=disabled"
            )
        self.num_experts, self.top_k = shape
        self.layers = len(blocks)
        self.record: ExpertRecorder | None = None
        """Called by each MoE layer; None if experts are not recorded."""
        self.replay: Tensor | None = None
        """The experts [N, layers, k] that the next forward pass uses; None if the routers choose."""
        self._agreement: dict[int, Tensor] = {}
        for layer, block in enumerate(blocks):
            block.forward = partial(self._forward, block.forward, layer)

    def start(self, replay: Tensor | None, *, record: bool) -> dict[int, Tensor]:
        """Prepares a forward pass of the trainer and returns a dict of experts by layer.

        With `record`, the forward pass writes the experts [N, k] of each layer to the dict; without, the dict
        stays empty. `replay` stays set until the
        engine resets it, because the backward pass computes checkpointed layers again.
        """
        self.replay, self._agreement = replay, {}
        experts_by_layer: dict[int, Tensor] = {}
        self.record = experts_by_layer.__setitem__ if record else None
        return experts_by_layer

    def outputs(self, packed: PackedRows, experts_by_layer: dict[int, Tensor]) -> dict[str, Tensor]:
        """Returns the outputs of a forward pass.

        A replay gives `routing_agreement` [B, T], the share of replayed experts that the router would have
        chosen; a recording gives `routed_experts` [B, P+T, layers, k].
        """
        out: dict[str, Tensor] = {}
        if self.replay is not None:
            agreement = torch.stack(list(self._agreement.values())).mean(0)
            out["routing_agreement"] = packed.unpack(
                agreement.index_select(0, packed.predicting_position)
            )
        if self.record is not None:
            self.record = None
            experts = torch.stack([experts_by_layer[i] for i in range(self.layers)], 1).to(
                EXPERT_DTYPE
            )
            out["routed_experts"] = packed.pad(experts, NOT_RECORDED)
        if not torch.is_grad_enabled():
            self.replay = None  # no backward pass follows
        return out

    def _forward(
        self, forward: Callable[..., Any], layer: int, *inputs: Any, **options: Any
    ) -> Any:
        if self.record is None and self.replay is None:
            return forward(*inputs, **options)
        with _TopKOverride(self, layer) as override:
            output = forward(*inputs, **options)
        if not override.was_applied:
            raise UnsupportedModel(
                f"layer {layer} does not choose its experts by top-k over {self.num_experts}, so its routing "
                "cannot be replayed; use actor.router_replay.mode=disabled"
            )
        return output

    def route(self, layer: int, experts: Tensor) -> Tensor:
        """Returns and records the experts [N, k] of a layer; `experts` is the choice of its router."""
        if self.replay is not None:
            experts, self._agreement[layer] = replay_experts(experts, self.replay[:, layer])
        if self.record is not None:
            self.record(layer, experts)
        return experts


def replay_experts(choice: Tensor, recorded: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the recorded experts [N, k], and the share [N] of them that the router chose.

    `choice` has the router's experts, which are used where no expert was recorded.
    """
    recorded = recorded.to(choice.dtype)
    experts = torch.where(recorded >= 0, recorded, choice)
    return experts, (choice[:, :, None] == experts[:, None]).any(1).float().mean(1)


class _TopKOverride(TorchFunctionMode):
    """Replaces the result of `topk`, with which the router of every supported family chooses experts."""

    def __init__(self, routing: Routing, layer: int) -> None:
        super().__init__()
        self._routing, self._layer = routing, layer
        self.was_applied = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk):
            return out
        scores, routing = args[0], self._routing
        indices = out[1]
        if scores.shape[1:] != (routing.num_experts,) or indices.shape[1] != routing.top_k:
            return out
        self.was_applied = True
        experts = routing.route(self._layer, indices)
        if experts is indices:
            return out
        return torch.return_types.topk((scores.gather(1, experts), experts))


def expert_load_metrics(routed_experts: Tensor, mask: Tensor, experts: int) -> dict[str, float]:
    """Returns the load balance of the experts per layer, over the tokens in the mask [B, S].

    `routed_experts` holds the experts [B, S, layers, k] of each token; `experts` is the number of experts.
    `max_load` is the load of the busiest expert divided by the mean load; `entropy` is the entropy of the
    loads divided by its maximum.
    """
    masked_experts = routed_experts[mask.bool()].long()  # [N, layers, k]
    metrics: dict[str, float] = {}
    for layer in range(masked_experts.shape[1]):
        indices = masked_experts[:, layer].flatten()
        loads = torch.bincount(indices[indices >= 0], minlength=experts).double()
        shares = loads / loads.sum().clamp(min=1)
        entropy = -(shares * shares.clamp(min=1e-12).log()).sum()
        metrics[f"moe/layer_{layer}/max_load"] = float(shares.max() * experts)
        metrics[f"moe/layer_{layer}/entropy"] = float(entropy / torch.tensor(experts).log())
    return metrics
