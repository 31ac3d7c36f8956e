"""Math datasets: GSM8K in five forms, MATH, benchmarks, DAPO's problems, and Geometry3K."""

from __future__ import annotations

import re
from functools import partial

from hone.data.preprocess.sources import Source, Splits, Upstream, rows_by_split, task_row
from hone.data.rows import DataError
from hone.types import Fields, JsonValue, Row

GSM8K = Upstream(("gsm8k", "openai/gsm8k"), "openai/gsm8k", "main")
HASHES = 'Let\'s think step by step and output the final answer after "####".'
TICKED_HASHES = "Let's think step by step and output the final answer after `####`."
EXPERT = "You are a math expert. Solve the {task} you are given step by step"
CHECK = (
    ". Before you state your final answer, use the `{tool}` tool to check it, and improve the"
    " answer where the tool says that it is wrong. Put the final answer in "
)
GSM8K_TOOL = "calc_gsm8k_reward"
TOOL_SYSTEM = (
    EXPERT.format(task="question") + CHECK.format(tool=GSM8K_TOOL) + "the form `#### <answer>`."
)
INTERACTION_SYSTEM = (
    EXPERT.format(task="question")
    + ", and put the final answer in the form `#### <answer>`. If you"
    " are told that the answer is wrong, think again."
)


def final_answer(answer: str) -> str:
    """Returns the number after `#### `, without commas."""
    match = re.search(r"####\s*(-?[0-9.,]+)", answer)
    if match is None:
        raise DataError(f"a gsm8k answer has no '#### number': {answer[-80:]!r}")
    return match.group(1).replace(",", "")


def gsm8k_row(record: Row, split: str, index: int, *, kind: str) -> Row:
    """Builds a row of kind plain, tool, agent_loop, interaction or conversation."""
    question, answer = record["question"], record["answer"]
    prompt = f"{question} {HASHES if kind in ('plain', 'conversation') else TICKED_HASHES}"
    if kind == "conversation":
        turns = (("user", prompt), ("assistant", answer))
        return {"messages": [{"role": role, "content": text} for role, text in turns]}
    truth = final_answer(answer)
    extra: Fields = {"answer": answer, "question": question}
    interaction = {"query": prompt, "ground_truth": truth}
    system = None
    if kind == "interaction":
        system = INTERACTION_SYSTEM
        extra["interaction_kwargs"] = {"name": "gsm8k", **interaction}
    elif kind != "plain":
        system = TOOL_SYSTEM
        extra |= _tool_kwargs(GSM8K_TOOL, truth) | {"interaction_kwargs": interaction}
    row = task_row(GSM8K.hub, prompt, "math", truth, split, index, system=system, **extra)
    return {"agent_name": "tool_agent", **row} if kind == "agent_loop" else row


def _tool_kwargs(tool: str, ground_truth: str) -> Fields:
    create = {"create_kwargs": {"ground_truth": ground_truth}}
    return {"need_tools_kwargs": True, "tools_kwargs": {tool: create}}


MATH = Upstream(("math", "MATH-lighteval"), "DigitalLearningGmbH/MATH-lighteval")
BOXED = "Let's think step by step and output the final answer within \\boxed{}."


def last_boxed(text: str) -> str | None:
    """Returns the content of the last balanced `\\boxed{…}` or `\\fbox{…}`, or of `\\boxed x`."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    after = text[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if after.startswith(" "):
        return after[1:].split("$")[0].strip()
    depth = 0
    for position, character in enumerate(after):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return after[1:position] if character == "}" else None
    return None


def math_row(record: Row, split: str, index: int) -> Row | None:
    """Builds a row; returns None if the solution has no boxed answer to compare with."""
    answer = last_boxed(record["solution"])
    prompt = f"{record['problem']} {BOXED}"
    return task_row(MATH.hub, prompt, "math", answer, split, index) if answer else None


ANSWER_LINE = (
    "Solve the problem step by step. Write the final answer on the last line, in the form"
    " `Answer: <answer>`.\n\n{problem}"
)
BENCHMARKS = {
    "math500": ("HuggingFaceH4/MATH-500", "HuggingFaceH4/MATH-500", BOXED),
    "aime24": ("aime24", "HuggingFaceH4/aime_2024", ANSWER_LINE),
    "aime25": ("aime25", "math-ai/aime25", ANSWER_LINE),
    "amc23": ("amc23", "math-ai/amc23", BOXED),
    "olympiadbench": ("olympiadbench", "math-ai/olympiadbench", BOXED),
    "minerva_math": ("minerva_math", "math-ai/minervamath", BOXED),
    "svamp": ("svamp", "ChilleD/SVAMP", BOXED),
    "asdiv": ("asdiv", "EleutherAI/asdiv", BOXED),
    "mawps": ("mawps", "MU-NLPC/Calc-mawps", BOXED),
    "dapo_math": ("math_dapo", "BytedTsinghua-SIA/DAPO-Math-17k", ANSWER_LINE),
}
"""Name -> data source, path on the Hub, and the answer format that the scorer reads."""


def tidy_answer(answer: JsonValue) -> str:
    """Removes a trailing unit in brackets and a trailing `.0`."""
    text = re.sub(r"(?<=\d)\s*\([^()]*\)$", "", str(answer).strip())
    return re.sub(r"^(-?\d+)\.0$", r"\1", text)


def benchmark(source: Source, *, name: str) -> Splits:
    """Builds a test set, or DAPO's training set."""
    data_source, hub, form = BENCHMARKS[name]
    if name == "dapo_math":
        upstream = Upstream((name,), hub, splits={"train": ("train",)})
    else:
        upstream = Upstream(("math_eval", name), hub, splits={"test": (name, "test", "train")})

    def row(record: Row, split: str, index: int) -> Row:
        problem = record.get("problem") or record.get("question")
        if not problem:
            raise DataError(f"record {index} of {data_source} has no problem")
        prompt = form.format(problem=problem) if form is ANSWER_LINE else f"{problem} {form}"
        return task_row(data_source, prompt, "math", tidy_answer(record["answer"]), split, index)

    return source.rows(upstream, row)


GEO3K = Upstream(
    ("geometry3k", "geo3k"),
    "hiyouga/geometry3k",
    splits={
        "train": ("train",),
        "validation": ("validation", "val"),
        "test": ("test",),
        "examples": ("examples",),
    },
)
GEO3K_INSTRUCTION = (
    "Think the problem through first and write the reasoning inside <think> </think> tags. Then"
    " give the final answer in \\boxed{}."
)
GEO3K_TOOL = "calc_geo3k_reward"
GEO3K_SYSTEM = EXPERT.format(task="geometry problem") + CHECK.format(tool=GEO3K_TOOL) + "\\boxed{}."
HOLD_OUT_EVERY = 5
"""Every fifth problem of a source without splits is held out."""


def geo3k_row(record: Row, split: str, index: int, *, with_tool: bool) -> Row:
    answer, problem = record["answer"], record["problem"]
    extra: Fields = {"answer": answer, "question": problem}
    if with_tool:
        extra |= _tool_kwargs(GEO3K_TOOL, answer)
    prompt = f"{problem} {GEO3K_INSTRUCTION}"
    system = GEO3K_SYSTEM if with_tool else None
    row = task_row(GEO3K.hub, prompt, "math", answer, split, index, system=system, **extra)
    return {**row, "images": record["images"]}  # as {bytes, path}


def _geo3k_example(record: Row, source: Source) -> Row:
    """Converts an upstream record: a question with four choices and a diagram named by its id."""
    file = source.path(GEO3K, "examples")
    assert file is not None
    name = f"{record['id']}.png"
    return {
        "problem": f"<image>{record['problem_text']}",
        "answer": record["choices"]["ABCD".index(record["answer"])],
        "images": [{"bytes": (file.parent / "images" / name).read_bytes(), "path": name}],
    }


def geo3k(source: Source, *, with_tool: bool) -> Splits:
    splits = source.need(GEO3K)
    if "examples" in splits:
        examples = [_geo3k_example(record, source) for record in splits.pop("examples")]
        test = examples[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY]
        train = [example for i, example in enumerate(examples) if (i + 1) % HOLD_OUT_EVERY]
        splits = {"train": train, "test": test, **splits}
    return rows_by_split(splits, partial(geo3k_row, with_tool=with_tool))
