"""Profiles the steps in `global_profiler.steps`, on the ranks of each role's `profiler` block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hone.config import PPOTrainerConfig
from hone.controller import Role, WorkerGroup, profiling
from hone.controller.worker import Worker
from hone.tracking.console import screen
from hone.trainer.ppo.memory import explain_out_of_memory


def profiled_ranks(config: PPOTrainerConfig, role: Role) -> tuple[int, ...] | None:
    """Returns which ranks of a role are profiled; None means all."""
    policy = config.actor_rollout_ref
    blocks = {Role.Rollout: policy.rollout.profiler, Role.RefPolicy: policy.ref.profiler}
    blocks |= {Role.Critic: config.critic.profiler, Role.RewardModel: config.reward_model.profiler}
    block = blocks.get(role, policy.actor.profiler)
    is_any_enabled = any(other.enable for other in (policy.actor.profiler, *blocks.values()))
    if block.enable is False or (is_any_enabled and not block.enable):
        return ()
    if block.all_ranks or not (block.enable or block.ranks):
        return None
    return block.ranks or (0,)


class StepProfiler:
    """Profiles the listed steps in the worker processes."""

    def __init__(
        self, config: PPOTrainerConfig, groups: Mapping[Role, WorkerGroup[Worker]]
    ) -> None:
        self._groups, profiler = groups, config.global_profiler
        self._tool, self._folder = profiler.tool, profiler.save_path
        self._ranks: dict[Role, list[int]] = {}
        for role, group in groups.items():
            ranks, all_ranks = profiled_ranks(config, role), range(group.world_size)
            self._ranks[role] = [rank for rank in all_ranks if ranks is None or rank in ranks]
        self._steps = (profiler.steps or ()) if self._tool else ()
        if self._steps and not any(self._ranks.values()):
            self._steps = ()
            screen().line(
                "global_profiler.steps records nothing: profiler.enable and profiler.ranks choose no rank "
                "of this run's roles"
            )

    @contextmanager
    def step(self, step_number: int) -> Iterator[None]:
        """Profiles the enclosed block if the config lists this step; a failed step writes no file."""
        with explain_out_of_memory(f"step {step_number}"):
            if self._tool is None or step_number not in self._steps:
                yield
                return
            for role, group in self._groups.items():
                ranks = self._ranks[role]
                group.call(Worker.start_profile, self._tool, step_number, str(role), ranks)
            try:
                yield
            except BaseException:
                profiling.discard()
                raise
            for group in self._groups.values():
                group.call(Worker.stop_profile, self._folder)
            if self._tool == "torch":
                screen().line(f"step {step_number}: traces in {self._folder}")
