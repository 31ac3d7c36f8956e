"""Maps roles to worker classes and resource pools, and starts the worker groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from hone.config import PPOTrainerConfig
from hone.controller import (
    ClassWithInitArgs,
    LocalWorkerGroup,
    ResourcePoolManager,
    Role,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
)
from hone.controller.progress import on_wait_progress
from hone.event_loop import PhaseDeadlines
from hone.rewards.managers.rule import RuleRewardManager
from hone.tokenizer import Tokenizer
from hone.tracking.console import progress, screen
from hone.trainer.ppo.plan import Plan
from hone.trainer.threads import uses_gpu
from hone.workers.actor import ActorWorker, ReferenceWorker
from hone.workers.critic import CriticWorker
from hone.workers.judge import JudgeWorker, JudgeWorkerClient
from hone.workers.process_reward_model import ImplicitRewardModelWorker, ProcessRewardModelWorker
from hone.workers.reward_model import RewardModelWorker
from hone.workers.rollout_worker import RolloutWorker

if TYPE_CHECKING:
    from hone.rewards.served import ModelRewardManager

AnyGroup: TypeAlias = WorkerGroup[Any]
"""A worker group whose class depends on the configuration or the caller."""
RewardModel: TypeAlias = WorkerGroup[RewardModelWorker] | RuleRewardManager
"""The workers of a reward model, or the manager of a reward model on a server."""
GroupClass: TypeAlias = Callable[..., AnyGroup]
"""LocalWorkerGroup, RayWorkerGroup, or a class with the same constructor."""
REWARD_WORKERS: dict[str, type] = {
    "orm": RewardModelWorker,
    "prm": ProcessRewardModelWorker,
    "prime": ImplicitRewardModelWorker,
    "judge": JudgeWorker,
}
"""The worker class by `reward_model.type`."""


def default_roles(plan: Plan, *, lora: bool) -> dict[Role, type]:
    """Returns the worker class of each role that the plan needs; with `lora`, the actor is the reference."""
    roles: dict[Role, type] = {Role.Actor: ActorWorker, Role.Rollout: RolloutWorker}
    if plan.needs_reference and not lora:
        roles[Role.RefPolicy] = ReferenceWorker
    if plan.needs_critic:
        roles[Role.Critic] = CriticWorker
    if plan.reward_model in ("prm", "prime") or (plan.reward_model and not plan.has_reward_server):
        roles[Role.RewardModel] = REWARD_WORKERS[plan.reward_model]
    return roles


def default_pools(config: PPOTrainerConfig, roles: Mapping[Role, type]) -> ResourcePoolManager:
    """Returns the global pool, and the pools of rollout and reward model if these are configured."""
    trainer = config.trainer
    pools = {"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes}
    mapping = dict.fromkeys(roles, "global_pool")
    for role, name, processes in (
        (Role.Rollout, "rollout_pool", config.rollout_pool),
        (Role.RewardModel, "reward_pool", config.reward_pool),
    ):
        if processes and role in roles:
            pools[name], mapping[role] = list(processes), name
    return ResourcePoolManager(pools, mapping, use_gpu=uses_gpu(trainer.device))


def group_class(config: PPOTrainerConfig) -> GroupClass:
    """Returns the worker group class that `trainer.controller` selects."""
    if config.resolved_controller == "local":
        return LocalWorkerGroup
    from hone.controller.ray import RayWorkerGroup

    return RayWorkerGroup


def start_workers(
    config: PPOTrainerConfig,
    roles: Mapping[Role, type],
    pools: ResourcePoolManager,
    group_cls: GroupClass,
    stack: ExitStack,
) -> dict[Role, AnyGroup]:
    """Starts one group per role; roles of a pool share its processes. Closing `stack` stops the groups."""
    is_local = group_cls is LocalWorkerGroup
    pool_members: dict[str, dict[str, ClassWithInitArgs]] = {}
    for role, cls in roles.items():
        role_argument = {"role": str(role)} if issubclass(cls, Worker) and cls.takes_role else {}
        members = pool_members.setdefault(pools.mapping[role], {})
        members[str(role)] = ClassWithInitArgs(cls, config=config, **role_argument)
    if not is_local:
        from hone.controller.ray_placement import check_pools_fit
        from hone.controller.ray_start import start_ray, stop_ray

        with progress("wait for Ray"):
            if start_ray(vars(config.ray_kwargs.ray_init), report=screen().line):
                stack.callback(stop_ray, config.ray_kwargs.timeline_json_file)
        check_pools_fit([pools.create_resource_pool()[name] for name in pool_members])
    trainer = config.trainer
    deadlines = PhaseDeadlines(trainer.phase_deadline_floor_s, trainer.phase_deadline_factor)
    groups: dict[Role, AnyGroup] = {}
    for pool_name, members in pool_members.items():
        pool = pools.create_resource_pool()[pool_name]
        processes = f"{pool.world_size} worker process{'es' * (pool.world_size > 1)}"
        description = f"{processes} ({', '.join(members)})"
        if not is_local:
            screen().line(f"starting {description}")
        with _rank_progress(f"start {description}", pool.world_size):
            pool_group = group_cls(
                resource_pool=pool,
                ray_cls_with_init=create_colocated_worker_cls(members),
                start_deadline_s=trainer.ray_wait_register_center_timeout,
                deadlines=deadlines,
                liveness_deadline_s=trainer.liveness_deadline_s,
                threads=trainer.num_threads,
            )
        stack.callback(pool_group.shutdown)
        named_groups = pool_group.spawn(prefix_set=members)
        groups |= {Role.from_string(name): group for name, group in named_groups.items()}
    return groups


def policy_groups(
    groups: Mapping[Role, AnyGroup],
) -> tuple[WorkerGroup[ActorWorker], WorkerGroup[RolloutWorker], WorkerGroup[ReferenceWorker]]:
    """Returns the groups of actor, rollout and reference; these may be the same group, as in verl."""
    shared = groups.get(Role.ActorRolloutRef) or groups.get(Role.ActorRollout)
    actor, rollout = groups.get(Role.Actor) or shared, groups.get(Role.Rollout) or shared
    if actor is None or rollout is None:
        raise ValueError(
            f"the roles {sorted(map(str, groups))} have no actor or no rollout; map Role.Actor and "
            "Role.Rollout, or Role.ActorRollout"
        )
    return actor, rollout, groups.get(Role.RefPolicy) or actor


def trained_groups(groups: Mapping[Role, AnyGroup], plan: Plan) -> dict[str, AnyGroup]:
    """Returns the groups of trained roles, by the name of their checkpoint folder."""
    trained = {"actor": policy_groups(groups)[0]}
    if Role.Critic in groups:
        trained["critic"] = groups[Role.Critic]
    if plan.needs_implicit_rewards:
        trained["reward"] = groups[Role.RewardModel]
    return trained


def load_models(groups: Mapping[Role, AnyGroup]) -> None:
    """Loads the model of every role, with a progress bar over ranks."""
    for role, group in groups.items():
        with _rank_progress(f"load the model of {role}, ranks", group.world_size):
            group.init_model()


@contextmanager
def _rank_progress(description: str, ranks: int) -> Iterator[None]:
    """Shows a progress bar that counts finished ranks."""
    with (
        progress(description, ranks) as bar,
        on_wait_progress(lambda done, total: bar.update(done, total=total)),
    ):
        yield


def get_reward_model(
    config: PPOTrainerConfig, plan: Plan, tokenizer: Tokenizer, groups: Mapping[Role, AnyGroup]
) -> RewardModel | None:
    """Returns the workers of the reward model, or the manager of an external one (a server or a judge)."""
    group = None if plan.needs_implicit_rewards else groups.get(Role.RewardModel)
    if plan.has_external_reward_model:
        return load_external_reward_model(config, tokenizer, group)
    return group


def load_external_reward_model(
    config: PPOTrainerConfig, tokenizer: Tokenizer, group: WorkerGroup[JudgeWorker] | None
) -> ModelRewardManager:
    """Returns the manager of a served reward model or a judge; without a server, a judge runs in `group`."""
    from hone.models.load import load_tokenizer
    from hone.rewards.loading import load_model_manager

    model = config.reward_model
    if model.type == "judge":
        judge_client = None if model.server.url else JudgeWorkerClient(group)
        return load_model_manager(config, tokenizer, None, judge_client)
    path, trust = model.model.path, model.model.trust_remote_code
    model_tokenizer = load_tokenizer(path, trust_remote_code=trust) if path else None
    return load_model_manager(config, tokenizer, model_tokenizer)
