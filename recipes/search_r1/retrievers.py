"""The retrievers of the ablation: real (BM25), oracle (a passage with the answer first), and random.

python recipes/search_r1/retrievers.py real --world OUT --corpus passages.jsonl.gz --port 8001
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import bm25s
import numpy as np

from hone.retrieval.corpus import Hit, Index
from hone.retrieval.serve import IndexOptions, answer_requests, open_index
from hone.retrieval.server import Service


class OracleIndex:
    """For the question that a query is most like: its passage with the answer, then what BM25 finds."""

    def __init__(self, real: Index, file: Path) -> None:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        self._real, self._gold = real, [line["passages"] for line in lines]
        self._questions = bm25s.BM25()
        words = bm25s.tokenize([line["question"] for line in lines], show_progress=False)
        self._questions.index(words, show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        words = bm25s.tokenize(list(queries), return_ids=False, show_progress=False)
        return [
            self._answer(query_words, hits, topk)
            for query_words, hits in zip(words, self._real.search(queries, topk), strict=True)
        ]

    def _answer(self, words: list[str], hits: list[Hit], topk: int) -> list[Hit]:
        ids = self._questions.get_tokens_ids(words)
        scores = self._questions.get_scores_from_ids(ids) if ids else np.zeros(1)
        gold = self._gold[int(scores.argmax())] if scores.any() else []
        first = [Hit(number, 1000.0) for number in gold]
        return [*first, *(hit for hit in hits if hit.number not in gold)][:topk]


class RandomIndex:
    """Passages drawn by the query alone, so that a query finds the same ones each time."""

    def __init__(self, passages: int) -> None:
        self._passages = passages

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        drawn = [random.Random(query).sample(range(self._passages), topk) for query in queries]
        return [[Hit(number, 0.0) for number in numbers] for numbers in drawn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=["real", "oracle", "random"])
    parser.add_argument("--world", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    corpus, real = open_index(IndexOptions(options.corpus, folder=options.world / "index"))
    index: Index = real
    if options.kind == "oracle":
        index = OracleIndex(real, options.world / "oracle.jsonl")
    elif options.kind == "random":
        index = RandomIndex(len(corpus))
    answer_requests(Service(corpus, index, topk=3), "127.0.0.1", options.port, [])


if __name__ == "__main__":
    main()
