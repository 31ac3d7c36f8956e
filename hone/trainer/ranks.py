"""Several processes of one program: each runs the same loop on its share of the rows.

torchrun (or anything that sets RANK and WORLD_SIZE) starts them; launcher.py does it where the user only
asked for `trainer.n_gpus_per_node`. Leaves out sharding the model: that is the engine's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


class LaunchError(ValueError):
    """The ranks that were asked for are not the ranks that run."""


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @staticmethod
    def here() -> Ranks:
        """As the launcher set them in the environment; alone without one."""

        def number(name: str, otherwise: int) -> int:
            return int(os.environ.get(name, otherwise))

        world_size = number("WORLD_SIZE", 1)
        return Ranks(
            number("RANK", 0),
            world_size,
            number("LOCAL_RANK", 0),
            number("LOCAL_WORLD_SIZE", world_size),
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def join(self) -> None:
        """Make the group of the ranks, for `wait_for_all`; a sharded engine makes its own."""
        if self.world_size > 1:
            import torch

            from hone.engine.sharding import join_group

            join_group(torch.device("cpu"))

    def wait_for_all(self) -> None:
        """Return when every rank is here."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier()

    def leave(self) -> None:
        """End the group, if there is one."""
        if self.world_size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()


def sum_over_ranks(*values: float) -> list[float]:
    """Each value summed over the ranks of the group, or as it is without one."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def must_launch(wanted: int, nnodes: int, program: str) -> bool:
    """Whether this process has to start the ranks itself; a sentence where it cannot."""
    if "WORLD_SIZE" in os.environ:
        running = Ranks.here().world_size
        if wanted not in (1, running):
            raise LaunchError(
                f"trainer.nnodes x trainer.n_gpus_per_node asks for {wanted} ranks, but {running} "
                "were started; leave both at 1 under torchrun, or make them agree"
            )
        return False
    if wanted == 1:
        return False
    if nnodes > 1:
        raise LaunchError(
            f"trainer.nnodes={nnodes}: start the program on every machine with torchrun "
            f"--nnodes={nnodes} --nproc_per_node={wanted // nnodes} --rdzv_endpoint=HOST:PORT "
            f"-m {program} …"
        )
    return True
