"""Which worker plays which role in which pool: the default mapping, and starting the groups."""

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
"""Which class plays a role is the configuration's or the caller's choice."""
GroupClass: TypeAlias = Callable[..., AnyGroup]
"""LocalWorkerGroup, RayWorkerGroup, or one that is made as they are."""
POOL, ROLLOUT_POOL = "global_pool", "rollout_pool"


def default_roles(plan: Plan, *, lora: bool) -> dict[Role, type]:
    """The worker class of each role the plan needs; with LoRA the actor is its own reference."""
    roles: dict[Role, type] = {Role.Actor: ActorWorker, Role.Rollout: RolloutWorker}
    if plan.reference and not lora:
        roles[Role.RefPolicy] = ReferenceWorker
    if plan.critic:
        from hone.workers.critic import CriticWorker

        roles[Role.Critic] = CriticWorker
    if plan.reward_model == "prm":
        from hone.workers.process_reward_model import ProcessRewardModelWorker

        roles[Role.RewardModel] = ProcessRewardModelWorker
    elif plan.reward_model:
        from hone.workers.reward_model import RewardModelWorker

        roles[Role.RewardModel] = RewardModelWorker
    return roles


def default_pools(config: PPOTrainerConfig, roles: Mapping[Role, type]) -> ResourcePoolManager:
    """All roles in one pool of `nnodes` × `n_gpus_per_node` processes, the rollout in one of its own."""
    trainer = config.trainer
    pools = {POOL: [trainer.n_gpus_per_node] * trainer.nnodes}
    mapping = dict.fromkeys(roles, POOL)
    if config.rollout_pool:
        pools[ROLLOUT_POOL] = list(config.rollout_pool)
        mapping[Role.Rollout] = ROLLOUT_POOL
    return ResourcePoolManager(pools, mapping, use_gpu=uses_gpu(trainer.device))


def group_class(config: PPOTrainerConfig) -> GroupClass:
    """`auto` is this process at world size 1, Ray beyond."""
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
    """One group per role; roles of one pool share its processes. Closing `running` stops them all."""
    from hone.workers.actor_rollout_ref import ActorRolloutRefWorker

    by_pool: dict[str, dict[str, ClassWithInitArgs]] = {}
    for role, cls in roles.items():
        plays = {"role": str(role)} if issubclass(cls, ActorRolloutRefWorker) else {}
        members = by_pool.setdefault(pools.mapping[role], {})
        members[str(role)] = ClassWithInitArgs(cls, config=config, **plays)
    if group_cls is not LocalWorkerGroup:
        from hone.controller.ray_start import start_ray, stop_ray

        with progress("wait for Ray"):
            if start_ray(vars(config.ray_kwargs.ray_init), tell=screen().line):
                running.callback(stop_ray, config.ray_kwargs.timeline_json_file)
    trainer = config.trainer
    deadlines = PhaseDeadlines(trainer.phase_deadline_floor_s, trainer.phase_deadline_factor)
    groups: dict[Role, AnyGroup] = {}
    for pool_name, members in by_pool.items():
        pool = pools.create_resource_pool()[pool_name]
        count = f"{pool.world_size} worker process{'es' * (pool.world_size > 1)}"
        what = f"{count} ({', '.join(members)})"
        if group_cls is not LocalWorkerGroup:
            screen().line(f"starting {what}")
        with _shown(f"start {what}", pool.world_size):
            shared = group_cls(
                resource_pool=pool,
                ray_cls_with_init=create_colocated_worker_cls(members),
                start_deadline_s=trainer.ray_wait_register_center_timeout,
                deadlines=deadlines,
                liveness_deadline_s=trainer.liveness_deadline_s,
                threads=trainer.num_threads,
            )
        running.callback(shared.shutdown)
        for name, group in shared.spawn(prefix_set=members).items():
            groups[Role.from_string(name)] = group
    return groups


def policy_groups(
    groups: Mapping[Role, AnyGroup],
) -> tuple[WorkerGroup[ActorWorker], WorkerGroup[RolloutWorker], WorkerGroup[ReferenceWorker]]:
    """Actor, rollout and reference: each its own group, or one of verl's that plays several roles."""
    both = groups.get(Role.ActorRolloutRef) or groups.get(Role.ActorRollout)
    actor, rollout = groups.get(Role.Actor) or both, groups.get(Role.Rollout) or both
    if actor is None or rollout is None:
        raise ValueError(
            f"the roles {sorted(map(str, groups))} have no actor or no rollout; map Role.Actor and "
            "Role.Rollout, or Role.ActorRollout"
        )
    return actor, rollout, groups.get(Role.RefPolicy) or actor


def load_models(groups: Mapping[Role, AnyGroup]) -> None:
    """Load the model of every role; ranks that have theirs are counted."""
    for role, group in groups.items():
        with _shown(f"load the model of {role}, ranks", group.world_size):
            group.init_model()


@contextmanager
def _shown(what: str, ranks: int) -> Iterator[None]:
    """A bar that counts the ranks which have answered."""
    with progress(what, ranks) as bar, listening(lambda done, of: bar.update(done, total=of)):
        yield
