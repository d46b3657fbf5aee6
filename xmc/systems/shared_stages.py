"""Stages that several systems begin with: the corpus, its token ids, TF-IDF features, label features and clusters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from raycluster.stages import Stage
from xmc.config import CommonConfig
from xmc.corpus import sample_path
from xmc.corpus.build import build, fingerprint
from xmc.corpus.settings import CorpusConfig
from xmc.corpus.store import MANIFEST, Corpus
from xmc.corpus.tfidf import TfidfConfig, fit_transform, load_matrix
from xmc.corpus.tokens import SubwordEncoder, TokensConfig, write_sequences
from xmc.labels.clustering import ClusterConfig, LabelClusters, cluster_labels
from xmc.labels.features import pifa
from xmc.nn.encoders import EncoderConfig, load_tokenizer


def corpus_stage(config: CommonConfig) -> Stage:
    """Build the corpus, or point to one that is built already."""
    section = asdict(config.corpus)
    given, _ = section.pop("path"), section.pop("name")
    path = sample_path() if given == "sample" else Path(given).expanduser()
    settings = CorpusConfig(**section)
    built = (path / MANIFEST).is_file()

    def run(out: Path, inputs: Mapping[str, Path]) -> None:
        if built:
            os.symlink(path.resolve(), out / "corpus")
        else:
            build(path, out / "corpus", settings, report=lambda line: print(f"  {line}", flush=True))

    source = Corpus.open(path).manifest["content_hash"] if built else fingerprint(path, settings)
    return Stage("corpus", {"settings": asdict(settings), "source": source}, run)


def open_corpus(inputs: Mapping[str, Path]) -> Corpus:
    return Corpus.open(inputs["corpus"] / "corpus")


def tokens_stage(encoder: EncoderConfig) -> Stage:
    """Sub-word ids of the training documents, and the tokenizer that made them."""
    settings = {"encoder": asdict(encoder)} if encoder.random_kind else {"encoder": encoder.name}

    def run(out: Path, inputs: Mapping[str, Path]) -> None:
        tokenizer = load_tokenizer(encoder)
        subwords = SubwordEncoder(
            tokenizer, TokensConfig(tokenizer=encoder.name, max_tokens=encoder.max_tokens)
        )
        write_sequences(open_corpus(inputs).shards("train"), subwords, out / "train")
        tokenizer.save_pretrained(out / "tokenizer")

    return Stage("tokens", settings | {"max_tokens": encoder.max_tokens}, run, ("corpus",))


def tfidf_stage(config: TfidfConfig) -> Stage:
    """TF-IDF fitted on train, and the training documents' matrix; a corpus with features keeps its own."""

    def run(out: Path, inputs: Mapping[str, Path]) -> None:
        corpus = open_corpus(inputs)
        if corpus.num_features is None:
            fit_transform(corpus.shards("train"), config, out / "train").save(out / "tfidf")

    return Stage("tfidf", asdict(config), run, ("corpus",))


def training_features(inputs: Mapping[str, Path]) -> Any:
    """(N × D) csr float32 of the training documents, from the stages `tfidf` and `corpus`."""
    corpus = open_corpus(inputs)
    return load_matrix(inputs["tfidf"] / "train") if corpus.num_features is None else corpus.features("train")


def clusters_stage(config: ClusterConfig, seed: int) -> Stage:
    """Labels grouped by their PIFA features."""
    seeded = replace(config, seed=seed)

    def run(out: Path, inputs: Mapping[str, Path]) -> None:
        features = pifa(open_corpus(inputs).label_matrix("train"), training_features(inputs))
        save_clusters(cluster_labels(features, seeded), out / "clusters.safetensors")

    return Stage("clusters", asdict(seeded), run, ("corpus", "tfidf"))


def save_clusters(clusters: LabelClusters, path: Path) -> None:
    save_file({"order": clusters.order, "offsets": clusters.offsets}, path)


def load_clusters(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(order (L,), offsets (K+1,)) of `LabelClusters`."""
    arrays = load_file(path)
    return arrays["order"], arrays["offsets"]
