"""What can be known of a run before a model loads, checked all at once.

Every training run goes through it; `hone train --dry-run` stops after it and prints the preview.
Leaves out what the configuration alone shows: `hone.config` has refused that already.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.agents.contract import ServerManager
from hone.agents.loops.listing import LoopNames
from hone.agents.tools.contract import ToolError
from hone.algorithms import advantages
from hone.config.algorithm import WITHOUT_GROUPS
from hone.data.prompts import PromptError, render_prompt
from hone.models.facts import ModelFacts, model_facts
from hone.plugins import PluginError
from hone.tracking import progress
from hone.trainer.ppo.prompt_lengths import Lengths, measure_prompts
from hone.trainer.ppo.trainer import PPOTrainer

TRAINING_BYTES = 16
"""Per parameter: weights and gradients in fp32, and AdamW's two moments."""
CHECKPOINT_BYTES = 16
"""Per parameter: masters, two moments and the Hugging Face export."""
GIB = 2**30


class PreflightError(ValueError):
    """Everything that would stop the run later, one sentence per line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Preview:
    """What a run would do, and what is odd about it without being wrong."""

    lines: tuple[str, ...]
    warnings: tuple[str, ...]


def preflight(trainer: PPOTrainer) -> Preview:
    """Check what is known before models load; PreflightError names every problem."""
    check = _Preflight(trainer)
    problems = [*check.loops(), *check.prompts(), *check.disk()]
    if problems:
        raise PreflightError(problems)
    return Preview(tuple(check.lines()), tuple(check.warnings()))


class _Preflight:
    def __init__(self, trainer: PPOTrainer) -> None:
        self.trainer = trainer
        self.config = trainer.config
        self.facts: ModelFacts = model_facts(self.config.actor_rollout_ref.model.path)
        self.datasets = {"data.train_files": trainer.train_dataset}
        if trainer.val_loader is not None:
            self.datasets["data.val_files"] = trainer.val_dataset
        self.lengths: dict[str, Lengths] = {}
        self.built: dict[str, Any] = {}

    def loops(self) -> Iterator[str]:
        """Each loop that rows ask for is built once, with its tools, parser and interactions."""
        names = LoopNames(self.config.actor_rollout_ref.rollout)
        asked = {names.of_row(name) for name in self._column("agent_name")} or {names.default}
        manager = ServerManager(None, seed=0, max_tokens=1)  # type: ignore[arg-type]

        async def build(name: str) -> Any:
            return names.factory(name)(self.config, manager, self.trainer.tokenizer, None)

        for name in sorted(asked):
            try:
                self.built[name] = asyncio.run(build(name))
            except (PluginError, ToolError, ValueError, OSError) as error:
                yield f"agent loop {name!r} cannot be built: {error}"
        for loop in self.built.values():
            known: dict[str, Any] = getattr(loop, "interactions", {})
            for asked_for in self._interactions() if known else ():
                if asked_for and asked_for not in known:
                    yield (
                        f"rows name the interaction {asked_for!r}, which "
                        f"{self.config.actor_rollout_ref.rollout.multi_turn.interaction_config_path} "
                        f"does not have; it has {', '.join(known)}"
                    )

    def prompts(self) -> Iterator[str]:
        """Every prompt fits `data.max_prompt_length`, and with its response the model's positions."""
        data = self.config.data
        for key, dataset in self.datasets.items():
            if not hasattr(dataset, "store"):
                continue
            with progress(f"measure prompts of {key}", len(dataset)) as bar:
                self.lengths[key] = found = measure_prompts(dataset, advance=bar.advance)
            if found.too_long and data.truncation == "error":
                yield (
                    f"{found.too_long:,} of {len(dataset):,} prompts have more than "
                    f"data.max_prompt_length={data.max_prompt_length} tokens, the longest "
                    f"{found.longest:,} ({found.where}); raise it, or set "
                    "data.filter_overlong_prompts=true or data.truncation=left|right|middle"
                )
                continue
            longest = min(found.longest, data.max_prompt_length) + data.max_response_length
            if self.facts.positions and longest > self.facts.positions:
                yield (
                    f"a prompt of {longest - data.max_response_length:,} tokens ({found.where}) and "
                    f"data.max_response_length={data.max_response_length} exceed the model's "
                    f"{self.facts.positions:,} positions; use data.max_response_length="
                    f"{max(1, self.facts.positions - longest + data.max_response_length)} or less"
                )

    def disk(self) -> Iterator[str]:
        """One checkpoint fits beside those that are kept."""
        if self.config.trainer.save_freq == 0 or not self.facts.parameters:
            return
        needed, free, place = self._disk()
        if needed > free:
            yield (
                f"a checkpoint takes about {needed / GIB:.1f} GiB and {place} has {free / GIB:.1f} GiB "
                "free; free space, name another trainer.default_local_dir, or set trainer.save_freq=0"
            )

    def _disk(self) -> tuple[int, int, Path]:
        folder = Path(self.config.trainer.default_local_dir).expanduser().absolute()
        place = next(p for p in (folder, *folder.parents) if p.exists())
        needed = (
            CHECKPOINT_BYTES * (self.facts.parameters or 0) * (2 if self.trainer.plan.critic else 1)
        )
        return needed, shutil.disk_usage(place).free, place

    def warnings(self) -> Iterator[str]:
        """What rows or settings ask for and nothing answers."""
        yield from self._lone_responses()
        multi_turn = self.config.actor_rollout_ref.rollout.multi_turn
        tool_loops = [loop for loop in self.built.values() if hasattr(loop, "tools")]
        tools = {name for loop in tool_loops for name in loop.tools}
        talks = any(getattr(loop, "interactions", None) for loop in tool_loops)
        if any(self._interactions()) and not talks:
            yield (
                "rows have interaction_kwargs, and no interaction is configured: they are ignored; "
                "set actor_rollout_ref.rollout.multi_turn.interaction_config_path"
            )
        unknown = sorted(self._tool_names() - tools)
        if unknown:
            yield f"rows have tools_kwargs for {', '.join(unknown)}, which is no tool of this run"
        if tool_loops and not tools and not talks:
            yield (
                "tool_agent has neither tools nor interactions: every row is a single turn; set "
                "actor_rollout_ref.rollout.multi_turn.tool_config_path"
            )
        if tools and not self._template_shows_tools(tool_loops[0]):
            yield (
                f"the chat template of {self.config.actor_rollout_ref.model.path} does not show the "
                f"tools to the model; describe them in the prompt, or set a template that does "
                f"(multi_turn.format={multi_turn.format})"
            )

    def _lone_responses(self) -> Iterator[str]:
        """An estimator over groups that has none; those that could not learn at all are refused."""
        estimator = self.config.algorithm.adv_estimator
        compares = estimator not in WITHOUT_GROUPS and advantages.TABLE.is_built_in(estimator)
        alone = self.config.actor_rollout_ref.rollout.n == 1 and not self.config.trainer.val_only
        if compares and alone:
            yield (
                f"algorithm.adv_estimator={estimator} compares the responses of one prompt, and "
                "actor_rollout_ref.rollout.n=1: it trains on raw scores, without a baseline, as verl "
                "does; use actor_rollout_ref.rollout.n=8, for example"
            )

    def lines(self) -> Iterator[str]:
        """What would run, in a few lines."""
        config, trainer = self.config, self.trainer
        rollout, settings = config.actor_rollout_ref.rollout, config.trainer
        size = f", {self.facts.parameters:,} parameters" if self.facts.parameters else ""
        yield (
            f"train {config.actor_rollout_ref.model.path} ({self.facts.family or 'model'}{size}) by "
            f"{config.algorithm.adv_estimator}, {rollout.n} responses per prompt"
        )
        for key, found in self.lengths.items():
            yield f"{key}: {found.rows:,} prompts of {found.shortest:,} to {found.longest:,} tokens"
        prompts = config.data.train_batch_size
        updates = prompts // config.actor_rollout_ref.actor.ppo_mini_batch_size
        yield (
            f"{trainer.total_steps:,} steps of {prompts} prompts × {rollout.n} responses, "
            f"{updates * config.actor_rollout_ref.actor.ppo_epochs} updates per step, "
            f"in {settings.default_local_dir}"
        )
        roles = ", ".join(str(role) for role in trainer.roles)
        yield f"roles: {roles}; {config.world_size} process(es), device {settings.device}"
        if self.facts.parameters:
            models = 2 if trainer.plan.critic else 1
            memory = TRAINING_BYTES * self.facts.parameters * models / config.world_size / GIB
            needed, free, _ = self._disk()
            yield (
                f"about {memory:.2f} GiB per process for weights, gradients and optimizer, activations "
                f"and cache aside; a checkpoint takes about {needed / GIB:.2f} of {free / GIB:.0f} GiB free"
            )

    def _column(self, name: str) -> Iterator[Any]:
        for dataset in self.datasets.values():
            if hasattr(dataset, "store"):
                yield from (row.get(name) for row in dataset.store.scan((name,)))

    def _of_extra_info(self, name: str) -> Iterator[dict[str, Any]]:
        """A field that stands at the top of a row or in its `extra_info`."""
        for value in self._column(name):
            if isinstance(value, dict):
                yield value
        for extra in self._column("extra_info"):
            if isinstance(extra, dict) and isinstance(extra.get(name), dict):
                yield extra[name]

    def _interactions(self) -> set[str]:
        return {str(given.get("name") or "") for given in self._of_extra_info("interaction_kwargs")}

    def _tool_names(self) -> set[str]:
        found = self._of_extra_info("tools_kwargs")
        return {name for given in found for name, value in given.items() if value is not None}

    def _template_shows_tools(self, loop: Any) -> bool:
        if self.config.data.prompt_format != "chat":
            return False
        schemas = [tool.tool_schema.model_dump() for tool in loop.tools.values()]
        try:
            plain, shown = (
                render_prompt("a", self.trainer.tokenizer, "chat", tools=tools)
                for tools in (None, schemas)
            )
        except PromptError:
            return False
        return plain != shown
