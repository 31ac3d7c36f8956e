"""hone's optimizer over megatron-core's distributed-optimizer shards.

megatron-core's DDP keeps parameters and float32 gradients in flat buckets and reduce-scatters them over the
data-parallel ranks. Each rank updates its shard of every bucket, and the new parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hone.config.engine import OptimConfig
from hone.engine.optimizer import Optimizer, build_optimizer
from hone.plugins import PluginError
from hone.types import Fields

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

_ELEMENTWISE_OPTIMIZERS = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
    torch.optim.SGD,
)  # fmt: skip
"""Optimizers that update each element from its own gradient only, so that flat shards suffice."""


@dataclass(frozen=True)
class BucketShard:
    """This rank's part of one bucket; experts have their own buckets and data-parallel ranks."""

    parameters: Tensor  # [n] view of the bucket
    gradients: Tensor  # [n] float32 view of the bucket
    group: dist.ProcessGroup
    ranges: tuple[tuple[nn.Parameter, int, int], ...]
    """The parameters of the bucket, each with its start and end in the bucket."""

    @property
    def start(self) -> int:
        """The offset of this shard in the bucket."""
        return self.group.rank() * self.parameters.numel()

    def pieces(self, flat_shard: Tensor) -> Iterator[tuple[nn.Parameter, Tensor, slice]]:
        """Yields each parameter in the shard, its piece of `flat_shard`, and the slice of its elements."""
        for parameter, start, end in self.ranges:
            low, high = max(start, self.start), min(end, self.start + flat_shard.numel())
            if low < high:
                yield (
                    parameter,
                    flat_shard[low - self.start : high - self.start],
                    slice(low - start, high - start),
                )


def bucket_shards(model: DistributedDataParallel) -> list[BucketShard]:
    """Returns this rank's shard of every bucket."""
    shards = []
    for buffer in (*model.buffers, *model.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            ranges = []
            for parameter in bucket.params_list:
                start, end, _ = buffer.param_index_map[parameter]
                ranges.append((parameter, start - bucket.offset, end - bucket.offset))
            parameters, gradients = (
                x.chunk(group.size())[group.rank()] for x in (bucket.param_data, bucket.grad_data)
            )
            shards.append(BucketShard(parameters, gradients, group, tuple(ranges)))
    return shards


class ShardedOptimizer(Optimizer):
    """The schedule, clipping and non-finite check of `Optimizer`, over the shards of this rank."""

    def __init__(
        self,
        model: DistributedDataParallel,
        config: OptimConfig,
        *,
        grad_clip: float,
        total_steps: int,
    ) -> None:
        self.model = model
        self.shards = bucket_shards(model)
        self._ranges = {
            parameter: (i, start, end)
            for i, shard in enumerate(self.shards)
            for parameter, start, end in shard.ranges
        }
        named_shards = (
            (f"shard{i}", nn.Parameter(s.parameters)) for i, s in enumerate(self.shards)
        )
        super().__init__(named_shards, config, grad_clip=grad_clip, total_steps=total_steps)
        if not isinstance(self.torch_optimizer, _ELEMENTWISE_OPTIMIZERS):
            raise PluginError(
                f"optim.optimizer={config.optimizer} may need whole matrices, but strategy=megatron "
                "updates flat shards; use an optimizer of torch.optim such as AdamW, or strategy=fsdp2"
            )

    def zero_grad(self) -> None:
        super().zero_grad()
        self.model.zero_grad_buffer()

    def step(self) -> dict[str, float]:
        for shard, master in zip(self.shards, self.masters.values(), strict=True):
            master.grad = shard.gradients
        previous_updates = self.updates
        metrics = super().step()
        if self.updates > previous_updates:
            self.model.start_param_sync(force_sync=True)
        return metrics

    def state_schema(self, device: torch.device | str = "cpu") -> tuple[list[str], Fields]:
        """Returns the keys of the elementwise state (moments), and the rest (step counts) after one step."""
        probe = nn.Parameter(torch.zeros(2, device=device))
        probe.grad = torch.zeros_like(probe)
        optimizer = build_optimizer([probe], self._config)
        optimizer.step()
        state = optimizer.state[probe]
        element_keys = [
            key
            for key, value in state.items()
            if isinstance(value, Tensor) and value.shape == probe.shape
        ]
        return element_keys, {key: state[key] for key in state if key not in element_keys}

    def total_norm(self, grads: list[Tensor]) -> Tensor:
        """Returns the norm over all ranks; a parameter that several ranks hold is counted once."""
        squares = torch.zeros((), dtype=torch.float32, device=grads[0].device)
        for shard in self.shards:
            pieces = [
                piece
                for parameter, piece, _ in shard.pieces(shard.gradients)
                if self._is_counted(parameter)
            ]
            if pieces:
                squares += torch.stack(torch._foreach_norm(pieces)).square().sum()
        dist.all_reduce(squares)
        return squares.sqrt()

    def gather(self, parameter: nn.Parameter, flat_shards: list[Tensor]) -> Tensor:
        """Returns the full tensor of one parameter from flat shards; all ranks of its bucket must call this.

        A whole bucket is never gathered, because it may be as large as the stage.
        """
        index, start, end = self._ranges[parameter]
        group, flat = self.shards[index].group, flat_shards[index]
        full_tensor, size = flat.new_empty(end - start), flat.numel()
        for owner_rank in range(start // size, -(-end // size)):
            low, high = max(start, owner_rank * size), min(end, (owner_rank + 1) * size)
            piece = full_tensor[low - start : high - start]
            if owner_rank == group.rank():
                piece.copy_(flat[low - owner_rank * size : high - owner_rank * size])
            dist.broadcast(piece, group=group, group_src=owner_rank)
        return full_tensor.view(parameter.shape)

    def scatter(self, tensors: dict[nn.Parameter, Tensor], flat_shards: list[Tensor]) -> None:
        """Writes this rank's parts of full tensors into flat shards."""
        for shard, flat in zip(self.shards, flat_shards, strict=True):
            for parameter, piece, elements in shard.pieces(flat):
                piece.copy_(tensors[parameter].reshape(-1)[elements])

    def _is_counted(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts its part of the parameter in the norm.

        Of the tensor-parallel ranks, only the first counts a parameter that is not sharded over them.
        """
        if getattr(parameter, "shared", False):  # the copy of a tied embedding
            return False
        return getattr(parameter, "tensor_model_parallel", False) or self.model.tp_group.rank() == 0
