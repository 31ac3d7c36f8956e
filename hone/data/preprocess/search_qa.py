"""Open-domain questions in Search-R1's form, from one or more of seven datasets."""

from __future__ import annotations

from hone.data.preprocess.sources import Source, Splits, Upstream, task_row
from hone.data.rows import DataError
from hone.types import Fields, Row


def _upstream(name: str, *folders: str, train: tuple[str, ...] = ()) -> Upstream:
    tests = ("test", "test_1000", "dev", "validation")
    splits = {"train": ("train", *train), "test": tests}
    return Upstream((name, *folders), "RUC-NLPIR/FlashRAG_datasets", name, splits)


_PLAIN = ("triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
# AmbigNQ uses NQ's questions, so it replaces NQ's training file if that is missing.
SETS = {"nq": _upstream("nq", "nq_open", train=("ambig_nq/train",))}
SETS |= {name: _upstream(name) for name in _PLAIN}
WIKI_QA = Upstream(("wiki_corpus",), "", splits={"questions": ("questions",)})
HOLD_OUT_EVERY = 8
"""Every eighth closed-world question is held out."""

_ANSWER = (
    " When you know enough, answer inside <answer> and </answer> without detailed illustration,"
    " for example <answer> Beijing </answer>. Question: {question}\n"
)
SEARCH_PROMPT = (
    "Answer the given question. Each time you receive new information, first reason about it inside"
    " <think> and </think>. Should you need a fact that you do not know, call the search engine"
    " with <search> query </search>; what it finds is returned between <information> and"
    " </information>. Search as many times as you want." + _ANSWER
)
REASON_PROMPT = "Answer the given question. First reason inside <think> and </think>." + _ANSWER
TOOL_SYSTEM = (
    "You answer questions with the help of a search tool. Reason before each call, and call the"
    " tool as often as you need."
)
TOOL_PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> each time"
    " you receive new information. Should you need a fact that you do not know, call the search"
    " tool; what it finds is returned between <tool_response> and </tool_response>. Search as many"
    " times as you want." + _ANSWER
)
STYLES = {"search_r1": SEARCH_PROMPT, "reason": REASON_PROMPT, "tool": TOOL_PROMPT}
"""Prompts by style: Search-R1's, without search, and for verl's search tool."""


def golden_answers(record: Row) -> list[str]:
    for name in ("golden_answers", "answers", "answer"):
        if answers := record.get(name):
            return [answers] if isinstance(answers, str) else [str(answer) for answer in answers]
    raise DataError(f"a question has no answers: {record.get('question')!r}")


def qa_row(record: Row, source: str, split: str, index: int, style: str) -> Row:
    """Builds a row from a question; style `tool` adds the arguments of the search tool."""
    if style not in STYLES:
        raise DataError(f"style {style!r} is not known; use one of {', '.join(STYLES)}")
    question = record["question"].strip()
    question = question if question.endswith("?") else f"{question}?"
    prompt = STYLES[style].format(question=question)
    truth: Fields = {"target": golden_answers(record)}
    if style != "tool":
        return task_row(source, prompt, "fact-reasoning", truth, split, index)
    data_source = f"searchR1_{source}"
    create_kwargs = {"ground_truth": truth, "question": question, "data_source": data_source}
    row = task_row(
        data_source,
        prompt,
        "fact-reasoning",
        truth,
        split,
        index,
        system=TOOL_SYSTEM,
        need_tools_kwargs=True,
        question=question,
        tools_kwargs={"search": {"create_kwargs": create_kwargs}},
    )
    return {**row, "agent_name": "tool_agent", "metadata": None}


def splits(
    source: Source,
    *,
    data_sources: str = "nq,hotpotqa",
    style: str = "search_r1",
    template_type: str = "base",
) -> Splits:
    """Builds train and test rows of the named datasets, concatenated in order."""
    if template_type != "base":
        raise DataError(f"template_type {template_type!r} is not known; Search-R1 has base alone")
    merged: Splits = {}
    for name in filter(None, map(str.strip, data_sources.split(","))):
        if name not in SETS:
            raise DataError(f"question set {name!r} is not known; use {', '.join(SETS)}")
        for split, records in source.need(SETS[name]).items():
            rows = [qa_row(record, name, split, i, style) for i, record in enumerate(records)]
            merged.setdefault(split, []).extend(rows)
    return merged


def closed_world_splits(source: Source, *, style: str = "search_r1") -> Splits:
    """Builds rows of the questions whose answer is in the small Wikipedia corpus."""
    records = source.need(WIKI_QA)["questions"]
    answerable = [record for record in records if record["answer_in_corpus"]]
    merged: Splits = {"train": [], "test": []}
    for number, record in enumerate(answerable, start=1):
        split = "train" if number % HOLD_OUT_EVERY else "test"
        rows = merged[split]
        rows.append(qa_row(record, record["data_source"], split, len(rows), style))
    return merged
