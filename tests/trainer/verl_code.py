"""What a user of verl brings along: loops, a tool, a parser, a data set, a manager and a tracker.

Written against verl's classes as its documents show them, with the package name changed.
"""

# mypy: ignore-errors
from typing import Any
from uuid import uuid4

from hone.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from hone.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from hone.experimental.reward_loop.reward_manager import register as register_manager
from hone.experimental.reward_loop.reward_manager.base import RewardManagerBase
from hone.tools.base_tool import BaseTool
from hone.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from hone.tools.utils.tool_registry import initialize_tools_from_config
from hone.utils.dataset.rl_dataset import RLHFDataset
from hone.utils.profiler import simple_timer
from hone.utils.rollout_trace import rollout_trace_op
from hone.workers.rollout.replica import TokenOutput

from hone import DataProto


@register("verl_single_turn")
class SingleTurn(AgentLoopBase):
    @classmethod
    def init_class(cls, config, tokenizer, processor, **kwargs):
        if cls._class_initialized:
            return
        cls._class_initialized = True
        cls.stamp = config.actor_rollout_ref.rollout.response_length

    def __init__(self, *args, counter=None, limits=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.prompt_length = self.rollout_config.prompt_length
        self.response_length = self.config.actor_rollout_ref.rollout.response_length
        self.counter, self.limits = counter, limits

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        multi_modal_data = await self.process_vision_info(messages)
        images, videos = multi_modal_data.get("images"), multi_modal_data.get("videos")
        prompt_ids = await self.apply_chat_template(messages, images=images, videos=videos)
        metrics = {}
        with simple_timer("generate_sequences", metrics):
            output: TokenOutput = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=prompt_ids,
                sampling_params=sampling_params,
                image_data=images,
                video_data=videos,
            )
        if metrics.get("num_preempted") is None:
            metrics["num_preempted"] = (
                output.num_preempted if output.num_preempted is not None else -1
            )
        extra = {
            "seen": kwargs["doubled"],
            "stamp": self.stamp,
            "counted": self.counter["start"],
            "most": self.limits.most,
        }
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids[: self.response_length],
            response_mask=[1] * len(output.token_ids[: self.response_length]),
            response_logprobs=output.log_probs[: self.response_length]
            if output.log_probs
            else None,
            routed_experts=output.routed_experts,
            multi_modal_data=multi_modal_data,
            num_turns=2,
            metrics=metrics,
            extra_fields={**output.extra_fields, **extra},
        )


@register("verl_tools")
class Tools(AgentLoopBase):
    """Two turns with a call between them, whatever the model says."""

    def __init__(self, trainer_config, server_manager, tokenizer, processor, **kwargs):
        super().__init__(trainer_config, server_manager, tokenizer, processor, **kwargs)
        multi_turn = trainer_config.config.actor_rollout_ref.rollout.multi_turn
        tools = initialize_tools_from_config(multi_turn.tool_config_path)
        self.tools = {tool.name: tool for tool in tools}
        self.tool_schemas = [
            t.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for t in tools
        ]
        self.tool_parser = ToolParser.get_tool_parser("verl_always", self.tokenizer)

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        request_id, messages = uuid4().hex, list(kwargs["raw_prompt"])
        prompt_ids = await self.ct_build_initial_tokens(messages, tools=None)
        ids, mask, log_probs, rewards = list(prompt_ids), [], [], []
        for turn in range(2):
            output = await self.server_manager.generate(
                request_id=request_id,
                prompt_ids=ids,
                sampling_params={**sampling_params, "max_tokens": 2},
            )
            merged, mask, log_probs = await self.ct_merge_assistant_token(
                ids, output.token_ids, mask, log_probs, assistant_logprobs=output.log_probs
            )
            ids = merged.token_ids
            content, calls = await self.tool_parser.extract_tool_calls(output.token_ids)
            if turn == 1:
                break
            (call,) = calls
            tool = self.tools[call.name]
            instance_id, _ = await tool.create(create_kwargs={})
            response, reward, _ = await tool.execute(instance_id, {"text": content})
            await tool.release(instance_id)
            rewards.append(reward)
            message = {"role": "assistant", "content": content}
            result = {"role": "tool", "content": response.text, "tool_call_id": call.tool_call_id}
            merged, mask, log_probs = await self.ct_merge_context_msg(
                [*messages, message], [*messages, message, result], ids, mask, log_probs
            )
            ids = merged.token_ids
        return AgentLoopOutput(
            prompt_ids=ids[: len(ids) - len(mask)],
            response_ids=ids[len(ids) - len(mask) :],
            response_mask=mask,
            response_logprobs=log_probs,
            num_turns=4,
            metrics={"tool_calls": 0.5, "num_preempted": -1},
            extra_fields={"tool_rewards": rewards, "seen": kwargs["doubled"]},
        )


@ToolParser.register("verl_always")
class Always(ToolParser):
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[OpenAIFunctionToolSchema] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        return text, [FunctionCall(name="echo", arguments="{}", tool_call_id="call-0")]


class Echo(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    async def create(self, instance_id=None, **kwargs):
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = kwargs.get("create_kwargs", {})
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=parameters["text"][::-1]), 0.25, {}

    async def release(self, instance_id, **kwargs):
        del self._instance_dict[instance_id]


class Dataset(RLHFDataset):
    """Rows with another prompt, less one, and with a column more."""

    def maybe_filter_out_long_prompts(self, dataframe=None):
        return [row for row in dataframe if row["extra_info"]["index"] != 3]

    def _build_messages(self, example: dict):
        messages = super()._build_messages(example)
        messages[-1]["content"] += " "
        return messages

    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["doubled"] = 2 * row["index"]
        return row


@register_manager("verl_manager")
class Manager(RewardManagerBase):
    async def run_single(self, data: DataProto) -> dict:
        data_item = data[0]
        response_ids = data_item.batch["responses"]
        length = data_item.batch["attention_mask"][-response_ids.shape[-1] :].sum()
        text = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.decode(response_ids[:length], skip_special_tokens=True)
        )
        score = float(len(set(text)))
        return {"reward_score": score, "reward_extra_info": {"letters": score}}
