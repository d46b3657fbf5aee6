"""Run directories without training: a real corpus, models that are only settings and labels, chosen predictions."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from raycluster.stages import RECORD
from xmc import config
from xmc.corpus import CorpusConfig, build
from xmc.corpus.store import Corpus
from xmc.labels.topk import TopK, top_k_of_csr
from xmc.run import METRICS, PREDICTIONS, measure, point, write_common_files

WORDS = ("red", "green", "blue", "round", "square", "heavy", "light", "old")


def make_corpus(directory: Path, seed: int = 0, valid_fraction: float = 0.2, documents: int = 60) -> Corpus:
    """Documents of words that are their labels, in train, valid and test; needs Ray."""
    random = np.random.default_rng(seed)
    given = directory / "input"
    given.mkdir(parents=True)
    for split, count in (("train", 2 * documents), ("test", documents)):
        rows = []
        for i in range(count):
            labels = random.choice(WORDS, random.integers(1, 4), replace=False).tolist()
            rows.append({"id": f"{split}{seed}-{i}", "text": " ".join(labels), "labels": labels})
        (given / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build(given, directory / "corpus", CorpusConfig(valid_fraction=valid_fraction))


def guess(corpus: Corpus, split: str, noise: float, seed: int, k: int) -> TopK:
    """The truth under noise, as probabilities."""
    truth = corpus.label_matrix(split).toarray()
    odds = 3 * truth - 2 + noise * np.random.default_rng(seed).standard_normal(truth.shape)
    return top_k_of_csr(sp.csr_matrix((1 / (1 + np.exp(-odds))).astype(np.float32)), k)


def make_run(directory: Path, corpus: Corpus, top_k: TopK | None = None, *overrides: str) -> Path:
    """A finished run of `corpus`; with the predictions `top_k` for its test part if given."""
    settings = [f"corpus.path={corpus.path}", f"run.dir={directory}", "run.top_k=5", *overrides]
    chosen = config.load("light_xml", settings)
    stages = directory / "stages"
    # A key stands for what a model was made from: here that is its settings and its name.
    key = hashlib.sha256(repr((directory.name, overrides)).encode()).hexdigest()
    model = stages / f"model-{key[:10]}"
    model.mkdir(parents=True)
    write_common_files(chosen, corpus, model)
    (stages / "train-0").mkdir()
    rows = [{"step": step, "time": 0.0, "loss": 1 / step} for step in range(1, 61)]
    (stages / "train-0" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (stages / "corpus-0").mkdir()
    os.symlink(corpus.path.resolve(), stages / "corpus-0" / "corpus")
    record = {"key": key, "inputs": {"corpus": "corpus-0", "train": "train-0"}}
    (model / RECORD).write_text(json.dumps(record))
    point(directory / "model", model)
    if top_k is not None:
        evaluated = stages / f"evaluate-{key[:10]}"
        evaluated.mkdir()
        top_k.save(evaluated / PREDICTIONS)
        (evaluated / METRICS).write_text(json.dumps(measure(top_k, corpus, "test", chosen).to_dict()))
        record = {"settings": {"model": model.name}, "inputs": {"corpus": "corpus-0"}}
        (evaluated / RECORD).write_text(json.dumps(record))
    return directory
