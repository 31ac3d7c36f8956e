"""Maps roles to worker classes and resource pools, and starts the worker groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from hone.config import PPOTrainerConfig
from hone.controller import (
    ClassWithInitArgs,
    LocalWorkerGroup,
    ResourcePoolManager,
    Role,
    WorkerGroup,
    create_colocated_worker_cls,
)
from hone.controller.waiting import PhaseDeadlines, listening
from hone.tracking.console import progress, screen
from hone.trainer.ppo.plan import Plan
from hone.trainer.threads import uses_gpu
from hone.workers.actor import ActorWorker, ReferenceWorker
from hone.workers.rollout_worker import RolloutWorker

AnyGroup: TypeAlias = WorkerGroup[Any]
"""The worker class of a role is chosen by the configuration or the caller."""
GroupClass: TypeAlias = Callable[..., AnyGroup]
"""LocalWorkerGroup, RayWorkerGroup, or a class with the same constructor."""
POOL, ROLLOUT_POOL, REWARD_POOL = "global_pool", "rollout_pool", "reward_pool"


def default_roles(plan: Plan, *, lora: bool) -> dict[Role, type]:
    """Return the worker class of each role the plan needs; with LoRA the actor is also the reference."""
    roles: dict[Role, type] = {Role.Actor: ActorWorker, Role.Rollout: RolloutWorker}
    if plan.reference and not lora:
        roles[Role.RefPolicy] = ReferenceWorker
    if plan.critic:
        from hone.workers.critic import CriticWorker

        roles[Role.Critic] = CriticWorker
    if plan.reward_model == "prm":
        from hone.workers.process_reward_model import ProcessRewardModelWorker

        roles[Role.RewardModel] = ProcessRewardModelWorker
    elif plan.reward_model == "prime":
        from hone.workers.implicit_reward_model import ImplicitRewardModelWorker

        roles[Role.RewardModel] = ImplicitRewardModelWorker
    elif plan.reward_model == "judge" and not plan.served:
        from hone.workers.judge import JudgeWorker

        roles[Role.RewardModel] = JudgeWorker
    elif plan.reward_model and not plan.served:
        from hone.workers.reward_model import RewardModelWorker

        roles[Role.RewardModel] = RewardModelWorker
    return roles


def default_pools(config: PPOTrainerConfig, roles: Mapping[Role, type]) -> ResourcePoolManager:
    """Put all roles in one pool of `nnodes` × `n_gpus_per_node` processes; rollout and reward model may have
    their own."""
    trainer = config.trainer
    pools = {POOL: [trainer.n_gpus_per_node] * trainer.nnodes}
    mapping = dict.fromkeys(roles, POOL)
    if config.rollout_pool:
        pools[ROLLOUT_POOL] = list(config.rollout_pool)
        mapping[Role.Rollout] = ROLLOUT_POOL
    if config.reward_pool and Role.RewardModel in roles:
        pools[REWARD_POOL] = list(config.reward_pool)
        mapping[Role.RewardModel] = REWARD_POOL
    return ResourcePoolManager(pools, mapping, use_gpu=uses_gpu(trainer.device))


def group_class(config: PPOTrainerConfig) -> GroupClass:
    """Return the worker group class; `auto` is local at world size 1, else Ray."""
    if config.uses_controller == "local":
        return LocalWorkerGroup
    from hone.controller.ray import RayWorkerGroup

    return RayWorkerGroup


def start_workers(
    config: PPOTrainerConfig,
    roles: Mapping[Role, type],
    pools: ResourcePoolManager,
    group_cls: GroupClass,
    running: ExitStack,
) -> dict[Role, AnyGroup]:
    """Start one group per role; roles of a pool share its processes. Closing `running` stops them."""
    from hone.workers.actor_rollout_ref import ActorRolloutRefWorker

    by_pool: dict[str, dict[str, ClassWithInitArgs]] = {}
    for role, cls in roles.items():
        plays = {"role": str(role)} if issubclass(cls, ActorRolloutRefWorker) else {}
        members = by_pool.setdefault(pools.mapping[role], {})
        members[str(role)] = ClassWithInitArgs(cls, config=config, **plays)
    if group_cls is not LocalWorkerGroup:
        from hone.controller.ray_placement import require_room
        from hone.controller.ray_start import start_ray, stop_ray

        with progress("wait for Ray"):
            if start_ray(vars(config.ray_kwargs.ray_init), tell=screen().line):
                running.callback(stop_ray, config.ray_kwargs.timeline_json_file)
        require_room([pools.create_resource_pool()[name] for name in by_pool])
    trainer = config.trainer
    deadlines = PhaseDeadlines(trainer.phase_deadline_floor_s, trainer.phase_deadline_factor)
    groups: dict[Role, AnyGroup] = {}
    for pool_name, members in by_pool.items():
        pool = pools.create_resource_pool()[pool_name]
        count = f"{pool.world_size} worker process{'es' * (pool.world_size > 1)}"
        description = f"{count} ({', '.join(members)})"
        if group_cls is not LocalWorkerGroup:
            screen().line(f"starting {description}")
        with _shown(f"start {description}", pool.world_size):
            pool_group = group_cls(
                resource_pool=pool,
                ray_cls_with_init=create_colocated_worker_cls(members),
                start_deadline_s=trainer.ray_wait_register_center_timeout,
                deadlines=deadlines,
                liveness_deadline_s=trainer.liveness_deadline_s,
                threads=trainer.num_threads,
            )
        running.callback(pool_group.shutdown)
        for name, group in pool_group.spawn(prefix_set=members).items():
            groups[Role.from_string(name)] = group
    return groups


def policy_groups(
    groups: Mapping[Role, AnyGroup],
) -> tuple[WorkerGroup[ActorWorker], WorkerGroup[RolloutWorker], WorkerGroup[ReferenceWorker]]:
    """Return the groups of actor, rollout and reference; a worker class of verl may have several roles."""
    hybrid = groups.get(Role.ActorRolloutRef) or groups.get(Role.ActorRollout)
    actor, rollout = groups.get(Role.Actor) or hybrid, groups.get(Role.Rollout) or hybrid
    if actor is None or rollout is None:
        raise ValueError(
            f"the roles {sorted(map(str, groups))} have no actor or no rollout; map Role.Actor and "
            "Role.Rollout, or Role.ActorRollout"
        )
    return actor, rollout, groups.get(Role.RefPolicy) or actor


def trained_groups(groups: Mapping[Role, AnyGroup], plan: Plan) -> dict[str, AnyGroup]:
    """Return the groups with a checkpoint, by the name of its folder."""
    trained = {"actor": policy_groups(groups)[0], "critic": groups.get(Role.Critic)}
    if plan.implicit_rewards:
        trained["reward"] = groups[Role.RewardModel]
    return {name: group for name, group in trained.items() if group is not None}


def load_models(groups: Mapping[Role, AnyGroup]) -> None:
    """Load the model of every role, with a progress bar over ranks."""
    for role, group in groups.items():
        with _shown(f"load the model of {role}, ranks", group.world_size):
            group.init_model()


@contextmanager
def _shown(what: str, ranks: int) -> Iterator[None]:
    """Show a progress bar that counts finished ranks."""
    with progress(what, ranks) as bar, listening(lambda done, of: bar.update(done, total=of)):
        yield
