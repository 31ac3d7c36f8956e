"""Mistakes in a user's own code: score functions, tools, interactions, loops."""

from __future__ import annotations

from .cases import MULTI_TURN, ROLLOUT, SCORER, TOOL_LOOP, Mistake, eight, train

TOOL_LIST = f"{MULTI_TURN}.tool_config_path=tools.yaml"
FUNCTIONS = f"{MULTI_TURN}.function_tool_path=mytools.py"
ECHO = '''from hone.agents.tools.function_tool import function_tool

@function_tool
def echo(text: str) -> str:
    """Say it again.

    Args:
        text: what to say
    """
    return text
'''
TALK = (
    "interaction:\n  - name: polite\n"
    "    class_name: hone.agents.interactions.gsm8k.Gsm8kInteraction\n    config: {}\n"
)


def scorer(body: str) -> dict[str, str | bytes]:
    return {"reward.py": SCORER + body + "\n"}


MISTAKES = [
    Mistake(
        "a reward file that is not there",
        train("custom_reward_function.path=rewards.py"),
        ("custom_reward_function.path=rewards.py", "no such file"),
    ),
    Mistake(
        "a score function of another name",
        train("custom_reward_function.name=score"),
        ("'reward.py' has no 'score'", "it has compute_score"),
    ),
    Mistake(
        "a syntax error in the reward file",
        train(),
        ("reward.py, line 1: SyntaxError",),
        files={"reward.py": "def compute_score(:\n"},
    ),
    Mistake(
        "a reward file that imports what is not installed",
        train(),
        ("reward.py, line 1: ModuleNotFoundError", "no_such_package", "install it"),
        files={"reward.py": "import no_such_package\n"},
    ),
    Mistake(
        "a reward file that fails while it is loaded",
        train(),
        ("reward.py, line 1: NameError: name 'undefined' is not defined",),
        files={"reward.py": "x = undefined\n"},
    ),
    Mistake(
        "a reward file that ends the program",
        train(),
        ("exits the program while it is loaded", "reward.py"),
        files={"reward.py": "import sys\nsys.exit(0)\n"},
    ),
    Mistake(
        "a reward function of TRL",
        train(),
        ("reward.py:1", "cannot be called", "write it as def compute_score(", "TRL"),
        files={"reward.py": "def compute_score(completions, **kwargs):\n    return [1.0]\n"},
    ),
    Mistake(
        "a score function that always raises",
        train(),
        ("row 0", "whatever the response", "ZeroDivisionError", "reward.py:2"),
        files=scorer("return 1 / 0"),
    ),
    Mistake(
        "a score function that returns text",
        train(),
        ("row 0", "whatever the response", "reward.py:1: text ('good'), not a number"),
        files=scorer("return 'good'"),
    ),
    Mistake(
        "a score that is not a number",
        train(),
        ("row 0", "whatever the response", "reward.py:1: the score is NaN"),
        files=scorer("return float('nan')"),
    ),
    Mistake(
        "a score function that parses a form of its own",
        train(),
        ("failed on rows.jsonl, row 0", "IndexError", "such a response scores 0"),
        files=scorer("return float(solution_str.split('@@')[1] == ground_truth)"),
        code=0,
    ),
    Mistake(
        "rows without a ground truth",
        train("custom_reward_function.path=null"),
        ("row 0", "whatever the response", "reward_model.ground_truth is None"),
        files={"rows.jsonl": eight(data_source="openai/gsm8k", reward_model={"style": "rule"})},
    ),
    Mistake(
        "an argument that the score function does not take",
        train("+custom_reward_function.reward_kwargs.weight=2"),
        ("reward.py:1", "weight"),
    ),
    Mistake(
        "a misspelt reward manager",
        train("reward_model.reward_manager=naiv"),
        ("naiv", "Did you mean 'naive'"),
    ),
    Mistake(
        "a score function of rows for the batch manager",
        train("reward_model.reward_manager=batch"),
        ("reward.py:1", "data_sources", "reward_model.reward_manager=naive"),
    ),
    Mistake(
        "a tool list that is not there",
        train(TOOL_LOOP, f"{MULTI_TURN}.tool_config_path=none.yaml"),
        (f"{MULTI_TURN}.tool_config_path=none.yaml", "does not exist"),
    ),
    Mistake(
        "a tool list without tools",
        train(TOOL_LOOP, TOOL_LIST),
        ("tools.yaml has no list `tools:`",),
        files={"tools.yaml": "tool:\n  - a\n"},
    ),
    Mistake(
        "a misspelt tool class",
        train(TOOL_LOOP, TOOL_LIST),
        ("'mytools.py' has no 'Eco'", "it has Echo"),
        files={
            "tools.yaml": "tools:\n  - class_name: mytools.py:Eco\n    config: {type: native}\n",
            "mytools.py": "class Echo: ...\n",
        },
    ),
    Mistake(
        "a tool schema with a part missing",
        train(TOOL_LOOP, TOOL_LIST),
        ("tools.yaml", "function"),
        files={
            "tools.yaml": "tools:\n  - class_name: hone.agents.tools.gsm8k.Gsm8kTool\n"
            "    config: {type: native}\n    tool_schema: {type: function}\n"
        },
    ),
    Mistake(
        "a file of tools without one",
        train(TOOL_LOOP, FUNCTIONS),
        ("mytools.py has no tool", "@function_tool"),
        files={"mytools.py": "def echo(text):\n    return text\n"},
    ),
    Mistake(
        "a misspelt parser",
        train(TOOL_LOOP, f"{MULTI_TURN}.format=hermess", FUNCTIONS),
        ("hermess", "Did you mean 'hermes'"),
        files={"mytools.py": ECHO},
    ),
    Mistake(
        "a misspelt loop",
        train(f"{ROLLOUT}.agent.default_agent_loop=tool_agnt"),
        ("tool_agnt", "Did you mean 'tool_agent'"),
    ),
    Mistake(
        "a loop that rows name and nothing defines",
        train(),
        ("row 0", "agent_name='my_loop' names no agent loop of this run", "agent_loop_config_path"),
        files={"rows.jsonl": eight(agent_name="my_loop")},
    ),
    Mistake(
        "a loop class without its method",
        train(f"{ROLLOUT}.agent.default_agent_loop=loops.py:Mine"),
        ("agent loop 'loops.py:Mine' cannot be built: TypeError", "run"),
        files={
            "loops.py": "from hone.agents.contract import AgentLoopBase\n\n"
            "class Mine(AgentLoopBase):\n    pass\n"
        },
    ),
    Mistake(
        "an interaction that is not configured",
        train(TOOL_LOOP, f"{MULTI_TURN}.interaction_config_path=talk.yaml"),
        ("rows name the interaction 'nag'", "talk.yaml", "it has polite"),
        files={"talk.yaml": TALK, "rows.jsonl": eight(interaction_kwargs={"name": "nag"})},
    ),
    Mistake(
        "rows for an interaction, and none configured",
        train(),
        ("interaction_kwargs", "ignored", f"{MULTI_TURN}.interaction_config_path"),
        files={"rows.jsonl": eight(interaction_kwargs={"name": "nag"})},
        code=0,
    ),
    Mistake(
        "rows for a tool that is not there",
        train(TOOL_LOOP, FUNCTIONS),
        ("tools_kwargs for calc", "no such tool"),
        files={
            "mytools.py": ECHO,
            "rows.jsonl": eight(tools_kwargs={"calc": {"create_kwargs": {}}}),
        },
        code=0,
    ),
    Mistake(
        "the tool loop without a tool",
        train(TOOL_LOOP),
        ("neither tools nor interactions", f"{MULTI_TURN}.tool_config_path"),
        code=0,
    ),
    Mistake(
        "tools that the chat template does not show",
        train(TOOL_LOOP, FUNCTIONS),
        ("chat template of model does not show the tools",),
        files={"mytools.py": ECHO},
        code=0,
    ),
]
