"""Profiles the steps in `global_profiler.steps`, on the ranks of each role's `profiler` block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hone.config import PPOTrainerConfig
from hone.config.engine import ProfilerConfig
from hone.controller import Role, WorkerGroup, profiling
from hone.controller.worker import Worker
from hone.tracking.console import screen
from hone.trainer.ppo.memory import explain_out_of_memory


def profiled_ranks(config: PPOTrainerConfig, role: Role) -> tuple[int, ...] | None:
    """Returns which ranks of a role are profiled; None means all."""
    policy = config.actor_rollout_ref
    blocks: dict[Role, ProfilerConfig] = {
        Role.Rollout: policy.rollout.profiler,
        Role.RefPolicy: policy.ref.profiler,
        Role.Critic: config.critic.profiler,
        Role.RewardModel: config.reward_model.profiler,
    }
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
        self._config = config.global_profiler
        self._groups = groups
        self._ranks: dict[Role, list[int]] = {}
        for role, group in groups.items():
            ranks = profiled_ranks(config, role)
            all_ranks = range(group.world_size)
            self._ranks[role] = [r for r in all_ranks if ranks is None or r in ranks]
        self._has_ranks = any(self._ranks.values())
        if self._config.steps and self._config.tool and not self._has_ranks:
            screen().line(
                "global_profiler.steps records nothing: profiler.enable and profiler.ranks choose no rank "
                "of this run's roles"
            )

    @contextmanager
    def step(self, step_number: int) -> Iterator[None]:
        """Profiles the enclosed block if the config lists this step; a failed step writes no file."""
        config = self._config
        with explain_out_of_memory(f"step {step_number}"):
            if step_number in (config.steps or ()) and config.tool and self._has_ranks:
                with self._profile(config.tool, step_number):
                    yield
            else:
                yield

    @contextmanager
    def _profile(self, tool: str, step_number: int) -> Iterator[None]:
        for role, group in self._groups.items():
            group.call(Worker.start_profile, tool, step_number, str(role), self._ranks[role])
        try:
            yield
        except BaseException:
            profiling.discard()
            raise
        for group in self._groups.values():
            group.call(Worker.stop_profile, self._config.save_path)
        if tool == "torch":
            screen().line(f"step {step_number}: traces in {self._config.save_path}")
