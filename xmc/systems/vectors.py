"""Documents as the linear rankers read them: TF-IDF, vectors of an encoder, or both; and a matcher's best clusters.

The same network runs over the shards of a corpus in Ray Data's actors and over new texts in a loaded model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp

from raycluster.inference import write_vectors
from raycluster.stages import Stage
from xmc.corpus.tfidf import Tfidf
from xmc.corpus.tokens import Sequences, SubwordEncoder, TokensConfig, read_manifest
from xmc.errors import InputError
from xmc.labels.topk import TopK
from xmc.linear.inputs import Inputs, combine, unit_rows
from xmc.nn.encoders import EncoderConfig, load_encoder
from xmc.nn.engine import EngineConfig
from xmc.nn.heads.matcher import MatcherHead, MatcherModule
from xmc.systems.neural import for_prediction, outputs_by_length, prediction_device

# What a ranker reads of a document.
Kind = Literal["tfidf", "embedding", "both"]
VECTORS, CLUSTERS, SCORES = "vectors", "clusters", "scores"


class Embedder:
    """Vectors (n × d) of n sequences; with a matcher's head also their `beam` best clusters and margins."""

    def __init__(
        self, module: MatcherModule, padding: tuple[int, str], head: MatcherHead | None = None, beam: int = 0
    ) -> None:
        self._module, self._padding, self._head, self._beam = module, padding, head, beam

    def __call__(self, sequences: Sequences) -> dict[str, np.ndarray]:
        count = len(sequences)
        found = {VECTORS: np.empty((count, self._module.encoder.width), np.float32)}
        if self._head is not None:
            found[CLUSTERS] = np.empty((count, self._beam), np.int32)
            found[SCORES] = np.empty((count, self._beam), np.float32)
        for rows, outputs in outputs_by_length(self._module, sequences, self._padding):
            found[VECTORS][rows] = outputs[0].float().cpu().numpy()
            if self._head is not None:
                scores, clusters = self._head.top_k(outputs, self._beam)
                found[SCORES][rows], found[CLUSTERS][rows] = scores.cpu().numpy(), clusters.cpu().numpy()
        return found


def pretrained(encoder: EncoderConfig, seed: int, padding: tuple[int, str]) -> Embedder:
    """The encoder as it is, without training."""
    module = MatcherModule(load_encoder(encoder, seed)).to(prediction_device())
    for_prediction(module, EngineConfig())
    return Embedder(module, padding)


def vectors_stage(
    name: str,
    make: Callable[[Mapping[str, Path], tuple[int, str]], Embedder],
    settings: Mapping[str, Any],
    inputs: tuple[str, ...],
) -> Stage:
    """What `make(inputs, padding)`, called in each actor, gives for the training documents of the stage `tokens`."""

    def run(out: Path, given: Mapping[str, Path]) -> None:
        tokens = (given["tokens"] / "train").resolve()
        manifest = read_manifest(tokens)
        padding = (manifest["pad_id"], manifest["padding_side"])
        resolved = {key: path.resolve() for key, path in given.items()}
        write_vectors(tokens, partial(make, resolved, padding), out.resolve(), name)

    return Stage(name, settings, run, inputs, resumes=True)


def ranker_inputs(kind: Kind, tfidf: sp.csr_matrix | None, vectors: np.ndarray | None) -> Inputs:
    """N documents as a ranker reads them, rows of unit length."""
    if kind == "tfidf":
        return Inputs(unit_rows(tfidf), None)
    assert vectors is not None
    if kind == "embedding":
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return Inputs(None, vectors / np.maximum(norms, 1e-12))
    return combine(tfidf, vectors)


class TextReader:
    """New texts as a ranker reads them. `tfidf` and `embedder` may be None where `kind` does without."""

    def __init__(
        self, kind: Kind, tfidf: Tfidf | None, subwords: SubwordEncoder | None, embedder: Embedder | None
    ) -> None:
        self._kind, self._tfidf, self._subwords, self._embedder = kind, tfidf, subwords, embedder

    def read(self, texts: Sequence[str]) -> tuple[Inputs, TopK | None]:
        """The ranker's inputs, and a matcher's best clusters with their margins."""
        if self._tfidf is None and self._kind != "embedding":
            raise InputError("this model was trained on a corpus of features without texts: give it features")
        sparse = self._tfidf.transform_texts(texts) if self._tfidf is not None else None
        if self._embedder is None or self._subwords is None:
            return ranker_inputs(self._kind, sparse, None), None
        found = self._embedder(self._subwords.encode_texts(texts))
        clusters = TopK(found[CLUSTERS], found[SCORES]) if CLUSTERS in found else None
        return ranker_inputs(self._kind, sparse, found[VECTORS]), clusters


def load_subwords(tokenizer: Path, max_tokens: int) -> tuple[SubwordEncoder, tuple[int, str]]:
    """A saved tokenizer, and its (pad id, side)."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    subwords = SubwordEncoder(loaded, TokensConfig(tokenizer="saved", max_tokens=max_tokens))
    return subwords, (subwords.pad_id, loaded.padding_side)
