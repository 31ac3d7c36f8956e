"""Checks the agent loops of a run, and the arguments of the loops in the rows, before models load."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hone.agents.contract import AgentLoopBase, ServerManager
from hone.agents.loop_names import LoopNames, loop_arguments
from hone.agents.loops.tool import ToolAgentLoop
from hone.agents.observations import TemplateMismatch, compare_with_template, observation_ids
from hone.agents.tools.contract import BaseTool, ToolError
from hone.config import PPOTrainerConfig
from hone.data.chat_template import BrokenTemplate
from hone.data.dataset import RLHFDataset
from hone.data.loader import Dataset
from hone.data.messages import Prompt, PromptError, Tools, as_messages
from hone.data.prompt_ids import render_prompt
from hone.data.prompts import loop_kwargs, raw_text
from hone.data.row_facts import LoopArguments, RowFacts
from hone.event_loop import run_coroutine
from hone.plugins import PluginError, describe_error_with_location
from hone.tokenizer import Tokenizer
from hone.types import JsonObject, Row

MULTI_TURN_KEY = "actor_rollout_ref.rollout.multi_turn"


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
        if self.config.resolved_controller == "local":  # a cluster's workers run on other machines
            contexts = [getattr(loop, "_hone", None) for loop in self.loops.values()]
            yield from (
                problem for context in contexts if context for problem in context.problems()
            )
        tool_loops = [loop for loop in self.loops.values() if isinstance(loop, ToolAgentLoop)]
        yield from self._tool_config_problems(tool_loops)
        yield from self._turn_problems(tool_loops)
        yield from self._coefficient_problems()
        multi_turn = self.config.actor_rollout_ref.rollout.multi_turn
        for loop in self.loops.values():
            names = getattr(loop, "interactions", {})
            for interaction in self._interaction_names() if names else ():
                if interaction and interaction not in names:
                    yield (
                        f"rows name the interaction {interaction!r}, which "
                        f"{multi_turn.interaction_config_path} does not have; "
                        f"it has {', '.join(names)}"
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

    def _tool_config_problems(self, loops: Sequence[ToolAgentLoop]) -> Iterator[str]:
        """Yields a problem per `tool_config` of a row that the tool agent loop does not support."""
        configs: dict[str, JsonObject] = {}
        for arguments in self._loop_arguments():
            configs |= arguments.tool_configs
        for loop in loops:
            for config in configs.values():
                try:
                    loop.settings_of_row(config)
                except (ToolError, ValueError, TypeError) as error:
                    yield f"a row's {error}"

    def _turn_problems(self, loops: Sequence[ToolAgentLoop]) -> Iterator[str]:
        """Yields a problem if the chat template cannot render the turns that loops append."""
        data = self.config.data
        for loop in loops:
            uses_template = bool(loop.tools) and loop.parser.template_renders_tools
            roles = (("tool", uses_template), ("user", bool(loop.interactions)))
            for role in [role for role, is_used in roles if is_used]:
                try:
                    observation_ids(
                        [{"role": role, "content": "a"}],
                        self.tokenizer,
                        last_token=0,
                        template_kwargs=data.apply_chat_template_kwargs,
                        chat=data.prompt_format == "chat",
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
        for name in {name for facts in self._row_facts() for name in facts.agent_names()}:
            with contextlib.suppress(PluginError):
                names.add(self.loop_names.name_of_row(name))
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
        row_tools = {name for arguments in self._loop_arguments() for name in arguments.tools}
        if unknown_tools := sorted(row_tools - tools):
            yield f"rows have tools_kwargs for {', '.join(unknown_tools)}, but this run has no such tool"
        if tool_loops and not tools and not has_interactions:
            yield (
                "tool_agent has neither tools nor interactions: every row is a single turn; set "
                f"{MULTI_TURN_KEY}.tool_config_path"
            )
        configs = [
            c for arguments in self._loop_arguments() for c in arguments.tool_configs.values()
        ]
        if any(configs) and not tool_loops:
            yield "rows have tool_config, but no row uses the tool agent loop: it is ignored"
        roles = (("tool", bool(tools)), ("user", has_interactions))
        yield from self._template_warnings([role for role, is_used in roles if is_used])
        parsers = [getattr(loop, "parser", None) for loop in tool_loops]
        uses_template = all(getattr(parser, "template_renders_tools", True) for parser in parsers)
        if tools and uses_template and not self._template_shows_tools(tool_loops[0].tools.values()):
            yield (
                f"the chat template of {self.config.actor_rollout_ref.model.path} does not show the "
                f"tools to the model; describe them in the prompt, or set a template that does "
                f"(multi_turn.format={multi_turn.format})"
            )

    def _template_warnings(self, roles: Sequence[str]) -> Iterator[str]:
        """Yields a warning if the chat template renders turns of `roles` differently from the agent loop."""
        data, path = self.config.data, self.config.actor_rollout_ref.model.path
        if data.prompt_format != "chat" or not getattr(self.tokenizer, "chat_template", None):
            return
        for case in compare_with_template(self.tokenizer, data.apply_chat_template_kwargs, roles):
            if isinstance(case, TemplateMismatch):
                yield (
                    f"the chat template of {path} renders earlier turns differently than the model wrote "
                    f"them ({case.case}: {case.problem}); training keeps the tokens that the model wrote. "
                    f"All cases: hone doctor --chat-template {path}"
                )
                return

    def _row_facts(self) -> list[RowFacts]:
        """Returns the facts of the rows of each data set."""
        datasets = self.datasets.values()
        return [dataset.facts for dataset in datasets if isinstance(dataset, RLHFDataset)]

    def _loop_arguments(self) -> list[LoopArguments]:
        """Returns the arguments of agent loops in all rows: of columns first, then of `extra_info`."""
        facts = self._row_facts()
        return [*(f.row_arguments for f in facts), *(f.extra_arguments for f in facts)]

    def _interaction_names(self) -> set[str]:
        """Returns the names in `interaction_kwargs`; "" for a row without a name."""
        return {name for arguments in self._loop_arguments() for name in arguments.interactions}

    def _template_shows_tools(self, tools: Iterable[BaseTool]) -> bool:
        """Returns whether tools change the prompt that the chat template renders."""
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
