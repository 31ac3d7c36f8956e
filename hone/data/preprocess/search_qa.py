"""Open-domain questions in Search-R1's form: one or several of seven sets, merged.

`ground_truth` is {target: list of accepted answers}. `style=search_r1` asks in one user message;
`style=tool` is verl's tool-calling form. Leaves out the corpus and the search engine.
"""

from __future__ import annotations

from collections.abc import Callable

from hone.data.preprocess.sources import Source, Upstream
from hone.data.rows import DataError
from hone.types import Row

HUB = "RUC-NLPIR/FlashRAG_datasets"


def _upstream(name: str, *folders: str, train: tuple[str, ...] = ()) -> Upstream:
    tests = ("test", "test_1000", "dev", "validation")
    splits = {"train": ("train", *train), "test": tests}
    return Upstream(folders=(name, *folders), splits=splits, hub=HUB, config=name)


# AmbigNQ's questions are NQ's: they stand in where NQ's own training file is not at hand.
SETS = {
    "nq": _upstream("nq", "nq_open", train=("ambig_nq/train",)),
    "triviaqa": _upstream("triviaqa"),
    "popqa": _upstream("popqa"),
    "hotpotqa": _upstream("hotpotqa"),
    "2wikimultihopqa": _upstream("2wikimultihopqa"),
    "musique": _upstream("musique"),
    "bamboogle": _upstream("bamboogle"),
}
WIKI_QA = Upstream(
    folders=("wiki_corpus",), splits={"questions": ("questions",)}, hub="", config=None
)
# Of the closed-world questions each eighth is held out.
HOLD_OUT_EVERY = 8

_ANSWER = (
    " When you know enough, answer inside <answer> and </answer> without detailed illustration,"
    " for example <answer> Beijing </answer>. Question: {question}\n"
)
SEARCH_PROMPT = (
    "Answer the given question. Each time you receive new information, first reason about it inside"
    " <think> and </think>. Should you need a fact that you do not know, call the search engine with"
    " <search> query </search>; what it finds is returned between <information> and </information>."
    " Search as many times as you want." + _ANSWER
)
REASON_PROMPT = "Answer the given question. First reason inside <think> and </think>." + _ANSWER
TOOL_SYSTEM = (
    "You answer questions with the help of a search tool. Reason before each call, and call the tool"
    " as often as you need."
)
TOOL_PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> each time you"
    " receive new information. Should you need a fact that you do not know, call the search tool;"
    " what it finds is returned between <tool_response> and </tool_response>. Search as many times as"
    " you want." + _ANSWER
)


def asked(question: str) -> str:
    question = question.strip()
    return question if question.endswith("?") else f"{question}?"


def golden_answers(record: Row) -> list[str]:
    for name in ("golden_answers", "answers", "answer"):
        if record.get(name):
            found = record[name]
            return [found] if isinstance(found, str) else [str(answer) for answer in found]
    raise DataError(f"a question has no answers: {record.get('question')!r}")


def message_row(template: str) -> Callable[[Row, str, str, int], Row]:
    """Search-R1's row: one user message that holds the whole instruction."""

    def row(record: Row, source: str, split: str, index: int) -> Row:
        content = template.format(question=asked(record["question"]))
        return {
            "data_source": source,
            "prompt": [{"role": "user", "content": content}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": golden_answers(record)}},
            "extra_info": {"split": split, "index": index},
        }

    return row


def tool_row(record: Row, source: str, split: str, index: int) -> Row:
    """verl's row for a search tool, with what the tool is created with."""
    question = asked(record["question"])
    ground_truth = {"target": golden_answers(record)}
    tagged = f"searchR1_{source}"
    create_kwargs = {"ground_truth": ground_truth, "question": question, "data_source": tagged}
    return {
        "data_source": tagged,
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": TOOL_SYSTEM},
            {"role": "user", "content": TOOL_PROMPT.format(question=question)},
        ],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {
            "index": index,
            "need_tools_kwargs": True,
            "question": question,
            "split": split,
            "tools_kwargs": {"search": {"create_kwargs": create_kwargs}},
        },
        "metadata": None,
    }


STYLES = {
    "search_r1": message_row(SEARCH_PROMPT),
    "reason": message_row(REASON_PROMPT),
    "tool": tool_row,
}


def maker(style: str) -> Callable[[Row, str, str, int], Row]:
    if style not in STYLES:
        raise DataError(f"style {style!r} is not known; use one of {', '.join(STYLES)}")
    return STYLES[style]


def splits(
    source: Source, *, data_sources: str = "nq,hotpotqa", style: str = "search_r1"
) -> dict[str, list[Row]]:
    """Train and test rows of the named sets, one after the other."""
    make = maker(style)
    names = [name.strip() for name in data_sources.split(",") if name.strip()]
    merged: dict[str, list[Row]] = {}
    for name in names:
        if name not in SETS:
            raise DataError(f"question set {name!r} is not known; use {', '.join(SETS)}")
        for split, records in source.need(SETS[name], "train", "test").items():
            rows = [make(record, name, split, index) for index, record in enumerate(records)]
            merged.setdefault(split, []).extend(rows)
    return merged


def closed_world_splits(source: Source, *, style: str = "search_r1") -> dict[str, list[Row]]:
    """Questions whose answer stands in the small Wikipedia corpus: a search task that fits here."""
    make = maker(style)
    records = source.need(WIKI_QA, "questions")["questions"]
    answerable = [record for record in records if record["answer_in_corpus"]]
    merged: dict[str, list[Row]] = {"train": [], "test": []}
    for number, record in enumerate(answerable, start=1):
        split = "train" if number % HOLD_OUT_EVERY else "test"
        rows = merged[split]
        rows.append(make(record, record["data_source"], split, len(rows)))
    return merged
