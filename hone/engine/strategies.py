"""From `strategy` to an engine: ours by name, another as `pkg.mod:Class` or `file.py:Class`."""

from __future__ import annotations

from collections.abc import Callable

from hone.engine.contract import EngineSpec, TrainEngine
from hone.plugins import PluginError, Table

STRATEGIES: Table[Callable[[EngineSpec], TrainEngine]] = Table(
    "training engine", {"fsdp": "hone.engine.build:build", "fsdp2": "hone.engine.build:build"}
)
_MEMBERS = sorted(name for name in vars(TrainEngine) if not name.startswith("_"))


def build_strategy(name: str, spec: EngineSpec) -> TrainEngine:
    """The engine that `strategy` names, built from the spec alone; it must keep the whole contract."""
    engine = STRATEGIES.get(name)(spec)
    if missing := [member for member in _MEMBERS if not hasattr(engine, member)]:
        raise PluginError(
            f"strategy={name} built a {type(engine).__name__} without {', '.join(missing)}; an engine has "
            "every member of hone.engine.contract.TrainEngine"
        )
    mesh = engine.mesh
    if mesh.data_parallel_size * mesh.ranks_per_slot != spec.world_size:
        raise PluginError(
            f"strategy={name} stands on {mesh}, which has {mesh.data_parallel_size} × "
            f"{mesh.ranks_per_slot} ranks, and {spec.world_size} run; a mesh has every rank once"
        )
    return engine
