"""The optimizer: any torch optimizer by import path, with float32 master weights and a schedule.

An update with a non-finite gradient is skipped and counted. A learning-rate schedule is a pure function of
the training step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from hone.config.engine import OptimConfig
from hone.plugins import PluginError, Table, load_object
from hone.types import Fields

Schedule = Callable[[int, int, OptimConfig], float]
"""Maps the training step (from 0), the number of training steps and the config to a fraction of `lr`.

A schedule is called after warm-up only.
"""

SCHEDULES: Table[Schedule] = Table(
    "learning-rate schedule",
    {name: f"{__name__}:{name}" for name in ("constant", "cosine", "linear", "wsd")},
)


_LOAD_BYTES = 16
"""The kernel that adds gradients loads 16 bytes at once, from aligned addresses."""


def warmup_steps(config: OptimConfig, total_steps: int) -> int:
    """Returns the number of warm-up steps: `lr_warmup_steps`, else a share of all training steps."""
    if config.lr_warmup_steps > 0:
        return config.lr_warmup_steps
    return int(config.lr_warmup_steps_ratio * max(total_steps, 0))


def lr_factor(step: int, total_steps: int, config: OptimConfig, schedule: Schedule) -> float:
    """Returns the fraction of the peak learning rate at a step (from 0); `schedule` begins after warm-up."""
    num_warmup_steps = warmup_steps(config, total_steps)
    if step < num_warmup_steps:
        return (step + 1) / (num_warmup_steps + 1)
    if total_steps <= 0:
        return 1.0
    return schedule(step, total_steps, config)


def constant(step: int, total_steps: int, config: OptimConfig) -> float:
    """Stays at the peak learning rate."""
    return 1.0


def cosine(step: int, total_steps: int, config: OptimConfig) -> float:
    """Decays from the peak to `min_lr_ratio` along a cosine."""
    num_warmup_steps, floor = warmup_steps(config, total_steps), config.min_lr_ratio
    progress = min(1.0, (step - num_warmup_steps) / max(1, total_steps - num_warmup_steps))
    factor = 0.5 * (1.0 + math.cos(2.0 * math.pi * config.num_cycles * progress))
    return floor + (1.0 - floor) * factor


def linear(step: int, total_steps: int, config: OptimConfig) -> float:
    """Decays linearly from the peak to `min_lr_ratio`."""
    num_warmup_steps = warmup_steps(config, total_steps)
    progress = min(1.0, (step - num_warmup_steps) / max(1, total_steps - num_warmup_steps))
    return 1.0 - (1.0 - config.min_lr_ratio) * progress


def wsd(step: int, total_steps: int, config: OptimConfig) -> float:
    """Stays at the peak, then decays linearly to `min_lr_ratio` (warm-up, stable, decay)."""
    decay_steps = max(1, int(config.lr_decay_steps_ratio * total_steps))
    progress = min(1.0, max(0, step - (total_steps - decay_steps)) / decay_steps)
    return 1.0 - (1.0 - config.min_lr_ratio) * progress


class Optimizer:
    """Adds a schedule, clipping, master weights and a check for non-finite gradients to a torch optimizer."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimConfig,
        *,
        grad_clip: float,
        total_steps: int,
    ) -> None:
        trainable = [(name, p) for name, p in parameters if p.requires_grad]
        self._parameters = [p for _, p in trainable]
        self._config = config
        self._grad_clip = grad_clip
        self._total_steps = total_steps
        self._schedule = SCHEDULES.get(config.lr_scheduler_type)
        self.updates = 0
        self.skipped_updates = 0
        self.schedule_step = 0
        # torch's checkpoint code reads the weights' names from a module; the names may not contain '.'.
        # The weights are added one by one, because ParameterDict(dict) would sort them by name.
        self.masters = nn.ParameterDict()
        for name, p in trainable:
            master = p if p.dtype == torch.float32 else nn.Parameter(p.float())
            self.masters[name.replace(".", "/")] = master
        self.torch_optimizer: torch.optim.Optimizer = build_optimizer(
            list(self.masters.values()), config
        )

    @property
    def lr(self) -> float:
        """The learning rate of the current training step."""
        factor = lr_factor(self.schedule_step, self._total_steps, self._config, self._schedule)
        return self._config.lr * factor

    @property
    def configured_settings(self) -> set[str]:
        """The names of the settings that the config sets, without the learning rate."""
        return {"weight_decay", "betas", *(self._config.override_optimizer_config or {})}

    def advance_schedule(self) -> None:
        """Advances the schedule by one training step; a training step may have several updates."""
        self.schedule_step += 1

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for parameter, master in self._parameters_and_masters():
            parameter.grad = master.grad = None

    def accumulate_gradients(self) -> None:
        """Adds the gradients of one backward pass to the gradients of the master weights, in float32."""
        master_grads: list[Tensor] = []
        new_grads: list[Tensor] = []
        for parameter, master in self._parameters_and_masters():
            if parameter is master or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master_grads.append(local_shard(master.grad))
                new_grads.append(local_shard(parameter.grad))
            parameter.grad = None
        _accumulate(master_grads, new_grads)

    def step(self) -> dict[str, float]:
        """Clips the gradients and updates the weights, unless a gradient is not finite.

        Returns `grad_norm`, `lr` and the number of updates skipped so far.
        """
        self.accumulate_gradients()
        grads = [master.grad for master in self.masters.values() if master.grad is not None]
        norm = self.total_norm(grads)
        lr = self.lr
        if torch.isfinite(norm):
            if 0 < self._grad_clip < norm:
                scale = (self._grad_clip / norm).item()
                torch._foreach_mul_([local_shard(grad) for grad in grads], scale)
            for group in self.torch_optimizer.param_groups:
                group["lr"] = lr
            self.torch_optimizer.step()
            self._copy_masters_to_parameters()
            self.updates += 1
        else:
            self.skipped_updates += 1
        self.zero_grad()
        return {"grad_norm": norm.item(), "lr": lr, "skipped_updates": float(self.skipped_updates)}

    def total_norm(self, grads: list[Tensor]) -> Tensor:
        """Returns the norm of all gradients over all ranks."""
        norm = nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def state_dict(self) -> dict[str, int]:
        return {
            "updates": self.updates,
            "skipped": self.skipped_updates,
            "schedule_step": self.schedule_step,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.updates = int(state["updates"])
        self.skipped_updates = int(state["skipped"])
        self.schedule_step = int(state["schedule_step"])

    def master_copies(self) -> dict[str, Tensor]:
        """Returns the master weights that are copies; a float32 parameter is its own master weight."""
        pairs = zip(self.masters.items(), self._parameters, strict=True)
        return {
            name: master.detach() for (name, master), parameter in pairs if master is not parameter
        }

    @torch.no_grad()
    def _copy_masters_to_parameters(self) -> None:
        pairs = [(p, master) for p, master in self._parameters_and_masters() if p is not master]
        if pairs:
            parameters = [local_shard(parameter) for parameter, _ in pairs]
            torch._foreach_copy_(parameters, [local_shard(master) for _, master in pairs])

    @torch.no_grad()
    def copy_weights_to_masters(self) -> None:
        """Copies the parameters into the master weights, for a checkpoint without master weights."""
        for parameter, master in self._parameters_and_masters():
            if parameter is not master:
                master.copy_(parameter)

    def _parameters_and_masters(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yields each trained parameter with its master weight; a float32 parameter is its own master."""
        return zip(self._parameters, self.masters.values(), strict=True)


@torch.no_grad()
def _accumulate(sums: list[Tensor], gradients: list[Tensor]) -> None:
    """Adds gradients to float32 sums, on a GPU with one kernel for all tensors.

    `torch._foreach_add_` adds tensors of different dtypes one by one, without vectorised loads.
    """
    if _can_use_kernel(sums, gradients):
        from hone.ops.training_triton import add_all

        add_all(sums, gradients)
    elif sums:
        torch._foreach_add_(sums, gradients)


def _can_use_kernel(sums: list[Tensor], gradients: list[Tensor]) -> bool:
    """Returns whether all tensors are suitable for the kernel's vectorised loads."""
    return len(sums) > 1 and all(
        total.is_cuda
        and total.dtype == torch.float32
        and gradient.dtype == gradients[0].dtype
        and total.is_contiguous()
        and gradient.is_contiguous()
        and total.data_ptr() % _LOAD_BYTES == 0
        and gradient.data_ptr() % _LOAD_BYTES == 0
        for total, gradient in zip(sums, gradients, strict=True)
    )


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, or the tensor itself; foreach operators need plain tensors."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def optimizer_class(config: OptimConfig) -> type[torch.optim.Optimizer]:
    """Returns the optimizer class that the config names; raises PluginError for one that cannot be used."""
    is_path = ":" in config.optimizer  # pkg.mod:Class ignores optimizer_impl
    path = config.optimizer if is_path else f"{config.optimizer_impl}:{config.optimizer}"
    try:
        cls: type[torch.optim.Optimizer] = load_object(path)
    except PluginError as error:
        raise PluginError(
            f"optim.optimizer={config.optimizer} was not found (optimizer_impl="
            f"{config.optimizer_impl}): {error}"
        ) from error
    if problem := _settings_problem(cls, config):
        raise PluginError(f"optim.optimizer={config.optimizer} cannot be used: {problem}")
    return cls


def _settings_problem(cls: type[torch.optim.Optimizer], config: OptimConfig) -> str | None:
    """Returns why the optimizer would fail at its first update or ignore a setting, or None."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "it computes the loss several times per update; use one without a closure"
    overrides = config.override_optimizer_config or {}
    if "lr" in overrides:
        return "the schedule would replace override_optimizer_config.lr; set optim.lr"
    parameter = inspect.signature(cls).parameters.get("betas")
    default, betas = getattr(parameter, "default", None), overrides.get("betas", config.betas)
    if isinstance(default, tuple) and len(betas) != len(default):
        return f"betas={tuple(betas)} has {len(betas)} numbers; give {len(default)}"
    return None


def build_optimizer(parameters: list[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """Returns the optimizer that the config names, with the arguments that its class accepts."""
    cls = optimizer_class(config)
    accepted_arguments = inspect.signature(cls).parameters
    arguments: Fields = {"lr": config.lr}
    overrides = dict(config.override_optimizer_config or {})
    optional = {"weight_decay": config.weight_decay, "betas": tuple(config.betas)}
    is_sharded = any(hasattr(p, "full_tensor") for p in parameters)
    supports_fused = not is_sharded or cls in (torch.optim.Adam, torch.optim.AdamW)
    excludes_fused = "foreach" in overrides or "differentiable" in overrides
    if supports_fused and not excludes_fused:
        optional["fused"] = True
    arguments.update(
        {name: value for name, value in optional.items() if name in accepted_arguments}
    )
    arguments.update(overrides)
    try:
        optimizer: torch.optim.Optimizer = cls(parameters, **arguments)
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"optim.optimizer={config.optimizer} refuses its settings ({error}); correct optim.lr, "
            "weight_decay, betas or override_optimizer_config"
        ) from error
    return optimizer
