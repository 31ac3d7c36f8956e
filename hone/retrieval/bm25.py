"""BM25 with the bm25s library; the index is built once per corpus and memory-mapped."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import bm25s
import numpy as np
from numpy.typing import NDArray

from hone.retrieval.corpus import Corpus, CorpusError, Hit

log = logging.getLogger(__name__)


class BM25Index:
    """Ranks passages by the words that they share with a query; rare words count more."""

    def __init__(self, index: bm25s.BM25) -> None:
        self._index = index

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        words = bm25s.tokenize(list(queries), return_ids=False, show_progress=False)
        return [self._top_hits(self._index.get_tokens_ids(query), topk) for query in words]

    def _top_hits(self, word_ids: list[int], topk: int) -> list[Hit]:
        """Returns up to `topk` passages that share a word with the query, by score, then by number."""
        if not word_ids:
            return []
        scores: NDArray[np.float32] = self._index.get_scores_from_ids(word_ids)
        indices = np.flatnonzero(scores)
        positive_scores = scores[indices]
        if len(positive_scores) > topk:
            threshold = np.partition(positive_scores, -topk)[-topk]
            indices = indices[positive_scores >= threshold]
        order = np.lexsort((indices, -scores[indices]))[:topk]
        return [Hit(int(indices[i]), float(scores[indices[i]])) for i in order]


def build_bm25(corpus: Corpus, folder: Path) -> None:
    """Writes the index of the corpus to `folder`."""
    texts = []
    for count, passage in enumerate(corpus):
        texts.append(passage.contents)
        if count % 5000 == 0:
            log.info("reading passages: %s of %s", f"{count:,}", f"{len(corpus):,}")
    log.info("splitting the passages into words")
    words = bm25s.tokenize(texts, show_progress=False)
    if not any(words.ids):
        raise CorpusError(f"no passage of {corpus.file} has a word; stop words do not count")
    log.info("counting words")
    index = bm25s.BM25(dtype=str(np.dtype(np.float32)))
    index.index(words, show_progress=False)
    temporary = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    index.save(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)
    log.info("indexed %s passages", f"{len(corpus):,}")


def open_bm25(folder: Path) -> BM25Index:
    return BM25Index(bm25s.BM25.load(folder, mmap=True, load_corpus=False))
