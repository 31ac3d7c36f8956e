"""Open-domain questions in Search-R1's form, from one or more of seven datasets."""

from __future__ import annotations

from hone.data.preprocess.sources import Source, Splits, UpstreamDataset, task_row
from hone.data.rows import DataError
from hone.types import Fields, Row


def _upstream(name: str, *folders: str, train: tuple[str, ...] = ()) -> UpstreamDataset:
    test_names = ("test", "test_1000", "dev", "validation")
    splits = {"train": ("train", *train), "test": test_names}
    return UpstreamDataset((name, *folders), "RUC-NLPIR/FlashRAG_datasets", name, splits)


_OTHER_SETS = ("triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
# AmbigNQ uses NQ's questions, so its training file is used if NQ's is missing.
QUESTION_SETS = {"nq": _upstream("nq", "nq_open", train=("ambig_nq/train",))}
QUESTION_SETS |= {name: _upstream(name) for name in _OTHER_SETS}
WIKI_QA = UpstreamDataset(("wiki_corpus",), "", splits={"questions": ("questions",)})
HOLD_OUT_EVERY = 8  # every eighth closed-world question is a test question

_ANSWER_INSTRUCTION = (
    " When you know enough, answer inside <answer> and </answer> without detailed illustration,"
    " for example <answer> Beijing </answer>. Question: {question}\n"
)
SEARCH_PROMPT = (
    "Answer the given question. Each time you receive new information, first reason about it inside"
    " <think> and </think>. Should you need a fact that you do not know, call the search engine"
    " with <search> query </search>; what it finds is returned between <information> and"
    " </information>. Search as many times as you want." + _ANSWER_INSTRUCTION
)
REASON_PROMPT = (
    "Answer the given question. First reason inside <think> and </think>." + _ANSWER_INSTRUCTION
)
TOOL_SYSTEM = (
    "You answer questions with the help of a search tool. Reason before each call, and call the"
    " tool as often as you need."
)
TOOL_PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> each time"
    " you receive new information. Should you need a fact that you do not know, call the search"
    " tool; what it finds is returned between <tool_response> and </tool_response>. Search as many"
    " times as you want." + _ANSWER_INSTRUCTION
)
STYLES = {"search_r1": SEARCH_PROMPT, "reason": REASON_PROMPT, "tool": TOOL_PROMPT}
"""Prompts by style: for Search-R1's loop, without search, and for verl's search tool."""


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
    ground_truth: Fields = {"target": golden_answers(record)}
    if style != "tool":
        return task_row(source, prompt, "fact-reasoning", ground_truth, split, index)
    data_source = f"searchR1_{source}"
    create_kwargs = {"ground_truth": ground_truth, "question": question, "data_source": data_source}
    row = task_row(
        data_source,
        prompt,
        "fact-reasoning",
        ground_truth,
        split,
        index,
        system=TOOL_SYSTEM,
        need_tools_kwargs=True,
        question=question,
        tools_kwargs={"search": {"create_kwargs": create_kwargs}},
    )
    return {**row, "agent_name": "tool_agent", "metadata": None}


def question_splits(
    source: Source,
    *,
    data_sources: str = "nq,hotpotqa",
    style: str = "search_r1",
    template_type: str = "base",
) -> Splits:
    """Builds train and test rows of the named datasets, concatenated in order."""
    if template_type != "base":
        raise DataError(f"template_type {template_type!r} is not known; Search-R1 has only base")
    rows_by_split: Splits = {}
    names = [name for name in map(str.strip, data_sources.split(",")) if name]
    if not names:
        raise DataError(f"data_sources is empty; use {', '.join(QUESTION_SETS)}")
    for name in names:
        if name not in QUESTION_SETS:
            raise DataError(f"question set {name!r} is not known; use {', '.join(QUESTION_SETS)}")
        for split, records in source.existing_splits(QUESTION_SETS[name]).items():
            rows = [qa_row(record, name, split, i, style) for i, record in enumerate(records)]
            rows_by_split.setdefault(split, []).extend(rows)
    return rows_by_split


def closed_world_splits(source: Source, *, style: str = "search_r1") -> Splits:
    """Builds rows of the questions whose answer is in the small Wikipedia corpus."""
    records = source.existing_splits(WIKI_QA)["questions"]
    answerable_records = [record for record in records if record["answer_in_corpus"]]
    rows_by_split: Splits = {"train": [], "test": []}
    for number, record in enumerate(answerable_records, start=1):
        split = "train" if number % HOLD_OUT_EVERY else "test"
        rows = rows_by_split[split]
        rows.append(qa_row(record, record["data_source"], split, len(rows), style))
    return rows_by_split
