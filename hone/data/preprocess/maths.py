"""Math datasets: GSM8K in five forms, MATH, benchmarks, DAPO's problems, and Geometry3K."""

from __future__ import annotations

import re
from functools import partial

from hone.data.preprocess.sources import Source, Splits, UpstreamDataset, rows_by_split, task_row
from hone.data.rows import DataError
from hone.types import Fields, JsonValue, Row

GSM8K = UpstreamDataset(("gsm8k", "openai/gsm8k"), "openai/gsm8k", "main")
HASH_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
BACKTICK_HASH_INSTRUCTION = "Let's think step by step and output the final answer after `####`."
EXPERT_SYSTEM = "You are a math expert. Solve the {task} you are given step by step"
CHECK_INSTRUCTION = (
    ". Before you state your final answer, use the `{tool}` tool to check it, and improve the"
    " answer where the tool says that it is wrong. Put the final answer in "
)
GSM8K_TOOL = "calc_gsm8k_reward"
TOOL_SYSTEM = (
    EXPERT_SYSTEM.format(task="question")
    + CHECK_INSTRUCTION.format(tool=GSM8K_TOOL)
    + "the form `#### <answer>`."
)
INTERACTION_SYSTEM = (
    EXPERT_SYSTEM.format(task="question")
    + ", and put the final answer in the form `#### <answer>`. If you"
    " are told that the answer is wrong, think again."
)


def number_after_hashes(answer: str) -> str:
    """Returns the number after `#### `, without commas."""
    match = re.search(r"####\s*(-?[0-9.,]+)", answer)
    if match is None:
        raise DataError(f"a gsm8k answer has no '#### number': {answer[-80:]!r}")
    return match.group(1).replace(",", "")


def gsm8k_row(record: Row, split: str, index: int, *, kind: str) -> Row:
    """Builds a row of kind plain, tool, agent_loop, interaction or conversation."""
    question, answer = record["question"], record["answer"]
    has_backticks = kind not in ("plain", "conversation")
    prompt = f"{question} {BACKTICK_HASH_INSTRUCTION if has_backticks else HASH_INSTRUCTION}"
    if kind == "conversation":
        turns = (("user", prompt), ("assistant", answer))
        return {"messages": [{"role": role, "content": text} for role, text in turns]}
    truth = number_after_hashes(answer)
    extra: Fields = {"answer": answer, "question": question}
    interaction_kwargs = {"query": prompt, "ground_truth": truth}
    system = None
    if kind == "interaction":
        system = INTERACTION_SYSTEM
        extra["interaction_kwargs"] = {"name": "gsm8k", **interaction_kwargs}
    elif kind != "plain":
        system = TOOL_SYSTEM
        extra |= _tool_kwargs(GSM8K_TOOL, truth) | {"interaction_kwargs": interaction_kwargs}
    row = task_row(GSM8K.hub_path, prompt, "math", truth, split, index, system=system, **extra)
    return {"agent_name": "tool_agent", **row} if kind == "agent_loop" else row


def _tool_kwargs(tool: str, ground_truth: str) -> Fields:
    tool_kwargs = {"create_kwargs": {"ground_truth": ground_truth}}
    return {"need_tools_kwargs": True, "tools_kwargs": {tool: tool_kwargs}}


MATH = UpstreamDataset(("math", "MATH-lighteval"), "DigitalLearningGmbH/MATH-lighteval")
BOXED_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def last_boxed(text: str) -> str | None:
    """Returns the content of the last `\\boxed{…}` or `\\fbox{…}`, or of `\\boxed x`."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    argument = text[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if argument.startswith(" "):
        return argument[1:].split("$")[0].strip()
    depth = 0
    for position, character in enumerate(argument):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return argument[1:position] if character == "}" else None
    return None


def math_row(record: Row, split: str, index: int) -> Row | None:
    """Builds a row; returns None if the solution has no boxed answer to compare with."""
    answer = last_boxed(record["solution"])
    prompt = f"{record['problem']} {BOXED_INSTRUCTION}"
    return task_row(MATH.hub_path, prompt, "math", answer, split, index) if answer else None


ANSWER_LINE_PROMPT = (
    "Solve the problem step by step. Write the final answer on the last line, in the form"
    " `Answer: <answer>`.\n\n{problem}"
)
BENCHMARKS = {
    "math500": ("HuggingFaceH4/MATH-500", "HuggingFaceH4/MATH-500", BOXED_INSTRUCTION),
    "aime24": ("aime24", "HuggingFaceH4/aime_2024", ANSWER_LINE_PROMPT),
    "aime25": ("aime25", "math-ai/aime25", ANSWER_LINE_PROMPT),
    "amc23": ("amc23", "math-ai/amc23", BOXED_INSTRUCTION),
    "olympiadbench": ("olympiadbench", "math-ai/olympiadbench", BOXED_INSTRUCTION),
    "minerva_math": ("minerva_math", "math-ai/minervamath", BOXED_INSTRUCTION),
    "svamp": ("svamp", "ChilleD/SVAMP", BOXED_INSTRUCTION),
    "asdiv": ("asdiv", "EleutherAI/asdiv", BOXED_INSTRUCTION),
    "mawps": ("mawps", "MU-NLPC/Calc-mawps", BOXED_INSTRUCTION),
    "dapo_math": ("math_dapo", "BytedTsinghua-SIA/DAPO-Math-17k", ANSWER_LINE_PROMPT),
}
"""Name -> data source, path on the Hub, and the instruction on the scorer's answer format."""


def tidy_answer(answer: JsonValue) -> str:
    """Removes a trailing unit in brackets and a trailing `.0`."""
    text = re.sub(r"(?<=\d)\s*\([^()]*\)$", "", str(answer).strip())
    return re.sub(r"^(-?\d+)\.0$", r"\1", text)


_DAPO_START = (
    "Solve the following math problem step by step. The last line of your response should be of the"
    " form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_END = '\n\nRemember to put your answer on its own line after "Answer:".'
_PROBLEM_COLUMNS = ("problem", "question", "Question")
_BODY_COLUMNS = ("body", "Body")  # of ASDiv and SVAMP: the text before the question
_ANSWER_COLUMNS = ("answer", "Answer", "final_answer", "result")  # the last is MAWPS's


def problem_and_answer(record: Row) -> tuple[JsonValue, JsonValue]:
    """Returns the problem and the answer in the columns of any benchmark; None for a missing one."""
    problem, body, answer = (
        next((record[name] for name in names if record.get(name) not in (None, "")), None)
        for names in (_PROBLEM_COLUMNS, _BODY_COLUMNS, _ANSWER_COLUMNS)
    )
    if isinstance(answer, list):  # OlympiadBench
        answer = ", ".join(map(str, answer))
    return (f"{body.strip()} {problem}" if body and problem else problem), answer


def dapo_problem_and_answer(record: Row) -> tuple[JsonValue, JsonValue]:
    """Returns the problem and the answer of a row of DAPO, which has verl's schema on the Hub."""
    prompt = str(record["prompt"][-1]["content"])
    problem = prompt.removeprefix(_DAPO_START).removesuffix(_DAPO_END)
    return problem, record["reward_model"].get("ground_truth")


def benchmark_splits(source: Source, *, name: str) -> Splits:
    """Builds the test set of a benchmark, or DAPO's training set."""
    data_source, hub_path, instruction = BENCHMARKS[name]
    if name == "dapo_math":
        upstream = UpstreamDataset((name,), hub_path, splits={"train": ("train",)})
    else:
        upstream = UpstreamDataset(
            ("math_eval", name), hub_path, splits={"test": (name, "test", "validation", "train")}
        )
    dapo_problems: set[JsonValue] = set()

    def make_row(record: Row, split: str, index: int) -> Row | None:
        is_dapo_row = name == "dapo_math" and isinstance(record.get("reward_model"), dict)
        read = dapo_problem_and_answer if is_dapo_row else problem_and_answer
        problem, answer = read(record)
        if problem is None or answer is None:
            missing, columns = "answer" if problem else "problem", ", ".join(map(str, record))
            raise DataError(f"record {index} of {data_source} has no {missing}, but {columns}")
        if is_dapo_row:  # the Hub has each of DAPO's problems a hundred times
            if problem in dapo_problems:
                return None
            dapo_problems.add(problem)
        if instruction is ANSWER_LINE_PROMPT:
            prompt = instruction.format(problem=problem)
        else:
            prompt = f"{problem} {instruction}"
        return task_row(data_source, prompt, "math", tidy_answer(answer), split, index)

    return source.build_rows(upstream, make_row)


GEO3K = UpstreamDataset(
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
GEO3K_SYSTEM = (
    EXPERT_SYSTEM.format(task="geometry problem")
    + CHECK_INSTRUCTION.format(tool=GEO3K_TOOL)
    + "\\boxed{}."
)
HOLD_OUT_EVERY = 5  # every fifth problem of a source without splits is a test problem


def geo3k_row(record: Row, split: str, index: int, *, with_tool: bool) -> Row:
    answer, problem = record["answer"], record["problem"]
    extra: Fields = {"answer": answer, "question": problem}
    if with_tool:
        extra |= _tool_kwargs(GEO3K_TOOL, answer)
    prompt = f"{problem} {GEO3K_INSTRUCTION}"
    system = GEO3K_SYSTEM if with_tool else None
    row = task_row(GEO3K.hub_path, prompt, "math", answer, split, index, system=system, **extra)
    return {**row, "images": record["images"]}  # objects with bytes and path


def _geo3k_example(record: Row, source: Source) -> Row:
    """Converts an upstream record: a question with four choices and a diagram named by its id."""
    file = source.split_file(GEO3K, "examples")
    assert file is not None
    name = f"{record['id']}.png"
    return {
        "problem": f"<image>{record['problem_text']}",
        "answer": record["choices"]["ABCD".index(record["answer"])],
        "images": [{"bytes": (file.parent / "images" / name).read_bytes(), "path": name}],
    }


def geo3k_splits(source: Source, *, with_tool: bool) -> Splits:
    splits = source.existing_splits(GEO3K)
    if "examples" in splits:
        examples = [_geo3k_example(record, source) for record in splits.pop("examples")]
        test = examples[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY]
        train = [example for i, example in enumerate(examples) if (i + 1) % HOLD_OUT_EVERY]
        splits = {"train": train, "test": test, **splits}
    return rows_by_split(splits, partial(geo3k_row, with_tool=with_tool))
