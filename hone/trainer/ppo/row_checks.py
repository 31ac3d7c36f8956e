"""Checks the agent loops, tools, scorers and prompt lengths of a run's rows before models load."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hone.agents.contract import AgentLoopBase, ServerManager
from hone.agents.loop_names import LoopNames, loop_arguments
from hone.agents.loops.tool import ToolAgentLoop
from hone.agents.observations import Drift, drifts, observation_ids
from hone.agents.tools.contract import BaseTool, ToolError
from hone.config import PPOTrainerConfig
from hone.data.chat_template import BrokenTemplate
from hone.data.dataset import SINGLE_TURN_AGENT, RLHFDataset, loop_kwargs
from hone.data.loader import Dataset
from hone.data.prompts import (
    Prompt,
    PromptError,
    PromptTooLong,
    Tools,
    as_messages,
    raw_text,
    render_prompt,
)
from hone.data.rows import DataError
from hone.event_loop import run_coroutine
from hone.plugins import PluginError, describe_error_with_location
from hone.rewards.answers import is_missing
from hone.rewards.managers.rule import AbstractRewardManager, RuleRewardManager
from hone.rewards.trial import TrialRow, Verdict, try_scorer
from hone.tokenizer import Tokenizer
from hone.tracking import atomic_write_text
from hone.types import JsonObject, JsonValue, Row

MULTI_TURN_KEY = "actor_rollout_ref.rollout.multi_turn"
MAX_SOURCES = 16
"""The maximum number of data sources whose scorer is tried, on three rows of each source."""
PROMPTS_PER_PROGRESS_UPDATE = 256
"""Prompts per update of the progress bar."""


class AgentChecks:
    """Checks the agent loops of a run and the arguments in its rows."""

    def __init__(
        self, config: PPOTrainerConfig, tokenizer: Tokenizer, datasets: Mapping[str, Dataset]
    ) -> None:
        self.config, self.tokenizer, self.datasets = config, tokenizer, datasets
        self.loop_names = LoopNames(config.actor_rollout_ref.rollout)
        self.loops: dict[str, AgentLoopBase] = {}

    def problems(self) -> Iterator[str]:
        """Builds the agent loops that rows name, with tools and interactions, and yields the problems."""
        for name in sorted(self._loop_names_in_rows()):
            try:
                self.loops[name] = run_coroutine(self._build_loop(name))
            except (PluginError, ToolError, ValueError, OSError) as error:
                yield f"agent loop {name!r} cannot be built: {error}"
            except Exception as error:  # a user's loop or tool may raise anything
                yield f"agent loop {name!r} cannot be built: {describe_error_with_location(error)}"
        if (
            self.config.resolved_controller == "local"
        ):  # on a cluster, workers run on other machines
            loops = [loop for loop in self.loops.values() if isinstance(loop, AgentLoopBase)]
            yield from (problem for loop in loops for problem in loop.problems())
        yield from self._tool_config_problems()
        yield from self._turn_problems()
        yield from self._coefficient_problems()
        for loop in self.loops.values():
            names = getattr(loop, "interactions", {})
            for interaction in self._interaction_names() if names else ():
                if interaction and interaction not in names:
                    yield (
                        f"rows name the interaction {interaction!r}, which "
                        f"{self.config.actor_rollout_ref.rollout.multi_turn.interaction_config_path} "
                        f"does not have; it has {', '.join(names)}"
                    )

    def set_prompt_rendering(self) -> None:
        """Makes the data sets render prompts as tool agent loops do, with tools in the chat template."""
        if any(isinstance(loop, ToolAgentLoop) for loop in self.loops.values()):
            for dataset in self.datasets.values():
                if isinstance(dataset, RLHFDataset):
                    dataset.set_prompt_builder(self._build_prompt)

    def _build_prompt(self, row: Row) -> tuple[Prompt, Tools | None] | None:
        """Returns the prompt and the tools of a row if it uses the tool agent loop, or else None."""
        data = self.config.data
        parse_prompt = raw_text if data.prompt_format == "raw" else as_messages
        try:
            loop = self.loops.get(self.loop_names.name_of_row(row.get("agent_name")))
            if isinstance(loop, ToolAgentLoop):
                prompt = parse_prompt(row[data.prompt_key])
                return loop.whole_prompt(prompt, loop_kwargs(row, "tool_config"))
        except (PluginError, ToolError, ValueError, TypeError):
            pass  # reported when the row is checked or rendered
        return None

    def _tool_config_problems(self) -> Iterator[str]:
        """Yields a problem per `tool_config` of a row that the tool agent loop does not support."""
        configs = {json.dumps(config): config for config in self._extra_info_field("tool_config")}
        loops = [loop for loop in self.loops.values() if isinstance(loop, ToolAgentLoop)]
        for loop in loops:
            for config in configs.values():
                try:
                    loop.settings_of_row(config)
                except (ToolError, ValueError, TypeError) as error:
                    yield f"a row's {error}"

    def _turn_problems(self) -> Iterator[str]:
        """Yields a problem if the chat template cannot render the turns that loops append."""
        uses_chat_template = self.config.data.prompt_format == "chat"
        for loop in self.loops.values():
            if not isinstance(loop, ToolAgentLoop):
                continue
            uses_template = bool(loop.tools) and loop.parser.template_renders_tools
            roles = (("tool", uses_template), ("user", bool(loop.interactions)))
            for role in [role for role, is_used in roles if is_used]:
                try:
                    observation_ids(
                        [{"role": role, "content": "a"}],
                        self.tokenizer,
                        last_token=0,
                        template_kwargs=self.config.data.apply_chat_template_kwargs,
                        chat=uses_chat_template,
                    )
                except (PromptError, BrokenTemplate) as error:
                    yield str(error)

    def _coefficient_problems(self) -> Iterator[str]:
        """Yields a problem per reward coefficient without a tool or interaction of that name."""
        names = {
            name
            for loop in self.loops.values()
            for name in (*getattr(loop, "tools", ()), *getattr(loop, "interactions", ()))
        }
        for key in ("turn_reward_coef", "trajectory_reward_coef"):
            for name in self.config.reward_model[key]:
                if name not in names:
                    yield (
                        f"reward_model.{key}.{name}: no tool or interaction of this run has that name; "
                        f"there are {', '.join(sorted(names)) or 'none'}"
                    )

    def _loop_names_in_rows(self) -> set[str]:
        """Returns the names of the agent loops in the rows; `check_rows` reports unknown names."""
        names = set()
        column = self._column("agent_name")
        for name in {name if isinstance(name, str) else None for name in column}:
            try:
                names.add(self.loop_names.name_of_row(name))
            except PluginError:
                continue
        return names or {self.loop_names.default}

    async def _build_loop(self, name: str) -> AgentLoopBase:
        manager = ServerManager(None, seed=0, max_tokens=1)  # type: ignore[arg-type]
        arguments = loop_arguments(self.config, self.tokenizer)
        return self.loop_names.factory(name)(server_manager=manager, **arguments)

    def warnings(self) -> Iterator[str]:
        """Yields warnings about rows and settings that have no effect."""
        multi_turn = self.config.actor_rollout_ref.rollout.multi_turn
        tool_loops = [loop for loop in self.loops.values() if hasattr(loop, "tools")]
        tools = {name for loop in tool_loops for name in loop.tools}
        has_interactions = any(getattr(loop, "interactions", None) for loop in tool_loops)
        if any(self._interaction_names()) and not has_interactions:
            yield (
                "rows have interaction_kwargs, but no interaction is configured: they are ignored; "
                f"set {MULTI_TURN_KEY}.interaction_config_path"
            )
        arguments = self._extra_info_field("tools_kwargs")
        names = {name for row in arguments for name, value in row.items() if value is not None}
        if unknown_tools := sorted(names - tools):
            yield f"rows have tools_kwargs for {', '.join(unknown_tools)}, but this run has no such tool"
        if tool_loops and not tools and not has_interactions:
            yield (
                "tool_agent has neither tools nor interactions: every row is a single turn; set "
                f"{MULTI_TURN_KEY}.tool_config_path"
            )
        if any(self._extra_info_field("tool_config")) and not tool_loops:
            yield "rows have tool_config, but no row uses the tool agent loop: it is ignored"
        yield from self._template_warnings(
            uses_tools=bool(tools), uses_interactions=has_interactions
        )
        parsers = [getattr(loop, "parser", None) for loop in tool_loops]
        uses_template = all(getattr(parser, "template_renders_tools", True) for parser in parsers)
        if tools and uses_template and not self._template_shows_tools(tool_loops[0].tools.values()):
            yield (
                f"the chat template of {self.config.actor_rollout_ref.model.path} does not show the "
                f"tools to the model; describe them in the prompt, or set a template that does "
                f"(multi_turn.format={multi_turn.format})"
            )

    def _template_warnings(self, *, uses_tools: bool, uses_interactions: bool) -> Iterator[str]:
        """Yields a warning if the chat template renders turns differently from the agent loop."""
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        if self.config.data.prompt_format != "chat" or not has_template:
            return
        roles = [
            role for role, is_used in (("tool", uses_tools), ("user", uses_interactions)) if is_used
        ]
        kwargs = self.config.data.apply_chat_template_kwargs
        cases = [case for case in drifts(self.tokenizer, kwargs, roles) if isinstance(case, Drift)]
        if cases:
            path = self.config.actor_rollout_ref.model.path
            yield (
                f"the chat template of {path} renders earlier turns differently than the model wrote them "
                f"({cases[0].case}: {cases[0].problem}); training keeps the tokens that the model wrote. "
                f"All cases: hone doctor --chat-template {path}"
            )

    def _column(self, name: str) -> Iterator[JsonValue]:
        for dataset in self.datasets.values():
            if isinstance(dataset, RLHFDataset):
                yield from (row.get(name) for row in dataset.store.scan((name,)))

    def _extra_info_field(self, name: str) -> Iterator[JsonObject]:
        """Yields the dict `name` of each row that has one, as a column or in `extra_info`."""
        yield from (value for value in self._column(name) if isinstance(value, dict))
        for extra in self._column("extra_info"):
            if isinstance(extra, dict) and isinstance(value := extra.get(name), dict):
                yield value

    def _interaction_names(self) -> set[str]:
        return {str(row.get("name") or "") for row in self._extra_info_field("interaction_kwargs")}

    def _template_shows_tools(self, tools: Iterable[BaseTool]) -> bool:
        if self.config.data.prompt_format != "chat":
            return False
        schemas = [tool.tool_schema.model_dump() for tool in tools]
        try:
            ids_without_tools, ids_with_tools = (
                render_prompt("a", self.tokenizer, "chat", tools=tools) for tools in (None, schemas)
            )
        except PromptError:
            return False
        return ids_without_tools != ids_with_tools


def try_scorers(
    manager: AbstractRewardManager, dataset: Dataset, config: PPOTrainerConfig
) -> Iterator[Verdict]:
    """Calls each scorer on a few rows, and yields verdicts on the scorers and on missing ground truths."""
    if not isinstance(manager, RuleRewardManager) or not isinstance(dataset, RLHFDataset):
        return
    key, default_loop = manager.reward_fn_key, config.actor_rollout_ref.rollout.default_loop
    used_positions, store = set(dataset.positions), dataset.store
    candidate_positions: dict[str, list[int]] = {}
    unscorable_positions: list[int] = []
    positions_without_truth: dict[str, list[int]] = {}
    num_rows = 0
    for position, row in enumerate(store.scan((key, "reward_model", "agent_name"))):
        reward_model = row.get("reward_model") or {}
        is_single_turn = (row.get("agent_name") or default_loop) == SINGLE_TURN_AGENT
        source, truth = str(row.get(key)), reward_model.get("ground_truth")
        has_rule = reward_model.get("style") != "model" and manager.knows(source)
        if position in used_positions and is_single_turn and has_rule:
            if manager.lacks_ground_truth(source, truth):
                unscorable_positions.append(position)
            num_rows += 1
            positions_by_source = (
                positions_without_truth if is_missing(truth) else candidate_positions
            )
            positions_by_source.setdefault(source, []).append(position)
    for source, positions in positions_without_truth.items():
        # With a reward model, rows without a ground truth are tried only if no row of the source has one.
        if not manager.skips_rows_without_truth:
            candidate_positions[source] = sorted([*candidate_positions.get(source, ()), *positions])
        elif not manager.lacks_ground_truth(source, None):
            candidate_positions.setdefault(source, positions)
    for positions in list(candidate_positions.values())[:MAX_SOURCES]:
        trial_positions = dict.fromkeys(
            (positions[0], positions[len(positions) // 2], positions[-1])
        )
        keys = key, config.data.prompt_key
        yield try_scorer(
            manager, [TrialRow.of(store[p], store.where(p), *keys) for p in trial_positions]
        )
    if unscorable_positions:
        problem = (
            f"{len(unscorable_positions):,} of {num_rows:,} rows have no reward_model.ground_truth to "
            f"compare with (the first: {store.where(unscorable_positions[0])})"
        )
        if manager.skips_rows_without_truth:
            yield Verdict(warning=f"{problem}: only the reward model scores them")
        elif manager.failure_policy.on_failure == "raise":
            yield Verdict(problem=f"{problem}; write them, or leave these rows out")
        else:
            yield Verdict(
                warning=f"{problem}: each scores {manager.failure_policy.failure_score:g}"
            )


@dataclass(frozen=True)
class PromptLengths:
    """Prompt lengths in tokens, over all rows of a data set."""

    rows: int
    shortest: int
    longest: int
    """A lower bound if the prompt is far above the limit."""
    too_long: int
    """The number of prompts longer than `data.max_prompt_length`."""
    where: str
    """The file and row of the longest prompt."""


def measure_prompts(dataset: RLHFDataset, *, advance: Callable[[int], None]) -> PromptLengths:
    """Measures the length of every prompt; the result is cached on disk."""
    cache_file = _cache_file(dataset)
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        cached = json.loads(cache_file.read_text())
        # The file may have moved, so the cache has the position of the longest prompt.
        return PromptLengths(**cached["lengths"], where=dataset.where(cached["longest_position"]))
    max_length = dataset.settings.max_prompt_length
    lengths: list[int] = []
    for index, length in enumerate(dataset.prompt_lengths()):
        if isinstance(length, PromptTooLong):
            length = 2 * max_length + 65  # a lower bound: tokenization stops there
        elif isinstance(length, PromptError):
            raise DataError(f"{dataset.where(index)}: {length}") from length
        lengths.append(length)
        if index % PROMPTS_PER_PROGRESS_UPDATE == PROMPTS_PER_PROGRESS_UPDATE - 1:
            advance(PROMPTS_PER_PROGRESS_UPDATE)
    longest = max(lengths)
    longest_position = lengths.index(longest)
    summary = {
        "rows": len(lengths),
        "shortest": min(lengths),
        "longest": longest,
        "too_long": sum(length > max_length for length in lengths),
    }
    with contextlib.suppress(OSError):  # without the cache the next run is only slower
        cached = {"lengths": summary, "longest_position": longest_position}
        atomic_write_text(cache_file, json.dumps(cached))
    return PromptLengths(**summary, where=dataset.where(longest_position))


def _added_text(dataset: RLHFDataset) -> str:
    """Returns a text that changes with what tool agent loops add to prompts, for the cache's name."""
    if dataset.prompt_builder is None:
        return ""
    names = {row.get("agent_name") for row in dataset.store.scan(("agent_name",))}
    loop_names = sorted(name for name in names if isinstance(name, str))
    rows = ({"agent_name": name, dataset.prompt_key: "a"} for name in (None, *loop_names))
    return repr([dataset.prompt_builder(row) for row in rows])


def _cache_file(dataset: RLHFDataset) -> Path:
    """Returns the cache file, named by a hash of rows, tokenizer and all settings that affect lengths."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    tokenizer, config = dataset.tokenizer, dataset.settings
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = (
        dataset.fingerprint,
        backend.to_str() if backend is not None else repr(tokenizer),
        str(getattr(tokenizer, "chat_template", None)),
        repr(config.apply_chat_template_kwargs),
        json.dumps(dataset.tools, sort_keys=True, default=str),
        _added_text(dataset),
        config.prompt_key,
        config.prompt_format,
        str(config.max_prompt_length),
    )
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=16)
    return Path(root) / "hone" / "prompt_lengths" / f"{digest.hexdigest()}.json"
