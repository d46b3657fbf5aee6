"""Corpus build and TF-IDF on debian-deps: documents a second, beside scikit-learn's TfidfVectorizer in one process.

    python -m benchmarks.corpus_tfidf

Both fit on the training part and transform training and test part, with the settings of the shared peers. What runs
on Ray is timed twice: cold, when its workers start and load (once ever: compile) their kernels, and warm.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer

from benchmarks.record import SHARED_DATA, record
from raycluster import session
from xmc.corpus.build import build
from xmc.corpus.settings import CorpusConfig
from xmc.corpus.store import Corpus
from xmc.corpus.tfidf import Tfidf, TfidfConfig, fit_transform, load_matrix

DATA = SHARED_DATA / "debian-deps"
CONFIG = TfidfConfig(ngram_max=2, min_df=2, max_features=300_000, sublinear_tf=True)
NUM_CPUS = 2


def _build(directory: Path) -> float:
    start = time.perf_counter()
    # A few packages have an id twice, and some label is its own parent.
    build(DATA, directory, CorpusConfig(valid_fraction=0.0, on_bad_row="skip"))
    return time.perf_counter() - start


def _ours(corpus: Corpus, directory: Path) -> tuple[float, Tfidf]:
    start = time.perf_counter()
    tfidf = fit_transform(corpus.shards("train"), CONFIG, directory / "train")
    tfidf.transform(corpus.shards("test"), directory / "test")
    return time.perf_counter() - start, tfidf


def _scikit_learn(
    train: list[str], test: list[str]
) -> tuple[float, TfidfVectorizer, list[sparse.csr_matrix]]:
    vectorizer = TfidfVectorizer(
        ngram_range=(CONFIG.ngram_min, CONFIG.ngram_max),
        min_df=CONFIG.min_df,
        max_features=CONFIG.max_features,
        sublinear_tf=CONFIG.sublinear_tf,
        dtype=np.float32,
    )
    start = time.perf_counter()
    matrices = [vectorizer.fit_transform(train), vectorizer.transform(test)]
    return time.perf_counter() - start, vectorizer, matrices


def main() -> None:
    session.connect(local=True, num_cpus=NUM_CPUS)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        build_cold, build_warm = _build(directory / "first"), _build(directory / "corpus")
        corpus = Corpus.open(directory / "corpus")
        tfidf_cold, _ = _ours(corpus, directory)
        tfidf_warm, tfidf = _ours(corpus, directory)
        texts = {split: corpus.texts(split).to_pylist() for split in ("train", "test")}
        seconds, vectorizer, theirs = _scikit_learn(texts["train"], texts["test"])
        ours = [load_matrix(directory / split) for split in ("train", "test")]

        tfidf.transform_texts(texts["test"][:1])  # loads the kernels into this process
        start = time.perf_counter()
        tfidf.transform_texts(texts["test"])
        ours_one = time.perf_counter() - start
        start = time.perf_counter()
        vectorizer.transform(texts["test"])
        theirs_one = time.perf_counter() - start

    documents = len(texts["train"]) + len(texts["test"])
    record(
        "corpus_tfidf",
        {"data": "debian-deps", "cpus": NUM_CPUS, "tfidf": asdict(CONFIG)},
        {
            "documents": documents,
            "corpus_build_seconds": {"cold": round(build_cold, 2), "warm": round(build_warm, 2)},
            "corpus_build_documents_per_second": round(documents / build_warm),
            "tfidf_seconds": {"cold": round(tfidf_cold, 2), "warm": round(tfidf_warm, 2)},
            "tfidf_documents_per_second": round(documents / tfidf_warm),
            "scikit_learn_seconds": round(seconds, 2),
            "scikit_learn_documents_per_second": round(documents / seconds),
            "times_faster_than_scikit_learn": round(seconds / tfidf_warm, 2),
            "times_faster_cold": round(seconds / tfidf_cold, 2),
            "times_faster_transforming_in_one_process": round(theirs_one / ours_one, 2),
            "same_terms": tfidf.terms.to_pylist() == vectorizer.get_feature_names_out().tolist(),
            "largest_difference": max(
                float(abs(mine - peer).max()) for mine, peer in zip(ours, theirs, strict=True)
            ),
        },
    )


if __name__ == "__main__":
    main()
