"""A closed world of questions and passages: RL rows, SFT demonstrations, and the oracle's passages.

From `passages.jsonl.gz` and `questions.jsonl.gz` of a folder, each eighth answerable question held out:
    python recipes/search_r1/world.py WIKI_CORPUS OUT
A made-up world of the same form, for a fresh model of a few hundred thousand parameters on a CPU:
    python recipes/search_r1/world.py --made-up OUT --demonstrations 6000
The demonstrations teach the tags alone: each third searches and then answers, the others answer at once.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hone.agents.loops.search import INFORMATION_END, INFORMATION_START, format_passages
from hone.data.preprocess.search_qa import HOLD_OUT_EVERY
from hone.retrieval.corpus import Corpus, Index
from hone.retrieval.serve import IndexOptions, open_index
from hone.rewards.scores.qa_em import normalize_answer

SEARCHED = 200
SEARCH_EVERY = 3
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
RELATIONS = ("capital", "river", "king", "colour")
Row = dict[str, Any]


class Question(NamedTuple):
    source: str
    text: str
    answers: list[str]
    titles: frozenset[str]


def prompt(question: str) -> str:
    return f"Question: {question}\n"


def asked(question: str) -> str:
    question = question.strip()
    return question if question.endswith("?") else f"{question}?"


def read_questions(file: Path) -> list[Question]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [
        Question(
            record["data_source"],
            asked(record["question"]),
            record["answers"],
            frozenset(record.get("gold_titles", ())),
        )
        for record in records
        if record["answer_in_corpus"]
    ]


def made_up(out: Path, seed: int, facts: int = 2400) -> list[Question]:
    """Facts about names of two syllables, one passage each; the questions ask for the value."""
    rng = random.Random(f"facts:{seed}")
    names = ["".join(pair) for pair in itertools.product(SYLLABLES, repeat=2)]
    titles = rng.sample(names, facts)
    questions = []
    with gzip.open(out / "passages.jsonl.gz", "wt", encoding="utf-8") as file:
        for number, name in enumerate(titles):
            relation, value = rng.choice(RELATIONS), rng.choice(names)
            text = f"{relation} of {name} is {value}"
            file.write(json.dumps({"id": str(number), "title": name, "text": text}) + "\n")
            questions.append(Question("nq", f"{relation} of {name}?", [value], frozenset()))
    return questions


class World:
    """Questions, passages, and which passages answer which question."""

    def __init__(
        self, questions: Sequence[Question], corpus: Corpus, index: Index, topk: int
    ) -> None:
        self.questions, self.corpus, self.topk = questions, corpus, topk
        self.words = [f" {normalize_answer(passage.contents)} " for passage in corpus]
        ranked = index.search([question.text for question in questions], SEARCHED)
        self.found = [[hit.number for hit in hits] for hits in ranked]
        self.gold = [self._gold(*pair) for pair in zip(questions, self.found, strict=True)]

    def _gold(self, question: Question, numbers: Sequence[int]) -> list[int]:
        """The best ranked passage with an answer in it; of titles that are known to answer, if it can."""
        containing = [n for n in numbers if answer_in(question.answers, self.words[n])]
        titled = [n for n in containing if self._title(n) in question.titles]
        return (titled or containing)[:1]

    def _title(self, number: int) -> str:
        return self.corpus[number].contents.partition("\n")[0].strip('"')

    def short_repr(self, at: int, rng: random.Random) -> list[int]:
        """What a search shows: its best passages, a gold one among them."""
        numbers, gold = self.found[at][: self.topk], self.gold[at]
        if gold and gold[0] not in numbers:
            numbers = [*numbers[: self.topk - 1], gold[0]]
            rng.shuffle(numbers)
        return numbers


def answer_in(answers: Iterable[str], words: str) -> str | None:
    """The first answer that a normalised passage contains."""
    return next((a for a in answers if (n := normalize_answer(a)) and f" {n} " in words), None)


def rl_row(question: Question, split: str, index: int) -> Row:
    return {
        "data_source": question.source,
        "prompt": prompt(question.text),
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": question.answers}},
        "extra_info": {"split": split, "index": index},
    }


def demonstrations(world: World, numbers: Sequence[int], count: int, seed: int) -> Iterator[Row]:
    """`count` demonstrations in turn: one that searches is two rows, one that answers at once is one."""
    rng = random.Random(f"demonstrations:{seed}")
    usable = [n for n in numbers if world.gold[n]]
    rng.shuffle(usable)
    for made, at in zip(range(count), itertools.cycle(usable), strict=False):
        question, gold = world.questions[at], world.gold[at][0]
        contents = world.corpus[gold].contents
        answer = answer_in(question.answers, world.words[gold])
        final = f"<answer> {answer} </answer>"
        if made % SEARCH_EVERY:
            yield {
                "prompt": prompt(question.text),
                "response": f"<think> I know this. </think>\n{final}",
            }
            continue
        query = question.text.rstrip("?")
        first = f"<think> I look it up. </think>\n<search> {query} </search>"
        yield {"prompt": prompt(question.text), "response": first}
        passages = format_passages(
            [world.corpus[n].contents for n in world.short_repr(at, rng)]
        ).strip()
        title = contents.partition("\n")[0].strip('"')
        yield {
            "prompt": f"{prompt(question.text)}{first}{INFORMATION_START}{passages}{INFORMATION_END}",
            "response": f"<think> {title} says it. </think>\n{final}",
        }


def write(file: Path, rows: Iterable[Row]) -> int:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, nargs="?", help="folder of passages and questions")
    parser.add_argument("out", type=Path)
    parser.add_argument("--made-up", action="store_true")
    parser.add_argument("--demonstrations", type=int, default=768)
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    if options.made_up:
        options.source, questions = out, made_up(out, options.seed)
    else:
        questions = read_questions(options.source / "questions.jsonl.gz")
    passages = options.source / "passages.jsonl.gz"
    corpus, index = open_index(IndexOptions(passages, folder=out / "index"))
    world = World(questions, corpus, index, options.topk)
    numbers: dict[str, list[int]] = {"train": [], "test": []}
    for at in range(len(questions)):
        numbers["train" if (at + 1) % HOLD_OUT_EVERY else "test"].append(at)
    sizes = {
        split: write(
            out / f"{split}.jsonl", (rl_row(questions[n], split, i) for i, n in enumerate(some))
        )
        for split, some in numbers.items()
    }
    rows = demonstrations(world, numbers["train"], options.demonstrations, options.seed)
    sizes["sft"] = write(out / "sft.jsonl", rows)
    golden = zip(questions, world.gold, strict=True)
    write(out / "oracle.jsonl", ({"question": q.text, "passages": gold} for q, gold in golden))
    known = sum(map(bool, world.gold))
    (out / "world.json").write_text(
        json.dumps({**sizes, "passages": len(corpus), "gold": known}) + "\n"
    )


if __name__ == "__main__":
    main()
