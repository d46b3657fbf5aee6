"""Stages that several systems begin with: the corpus, its token ids, TF-IDF features, label features and clusters."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
from safetensors.numpy import load_file, save_file

from raycluster.stages import Stage
from xmc.config import CommonConfig
from xmc.corpus import sample_path
from xmc.corpus.build import build, fingerprint
from xmc.corpus.settings import CorpusConfig
from xmc.corpus.store import MANIFEST, Corpus
from xmc.corpus.tfidf import TfidfConfig, fit_transform, load_matrix
from xmc.corpus.tokens import Encoder, SubwordEncoder, TokensConfig, gather, write_sequences
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
    """Sub-word ids of the training and validation documents, and the tokenizer that made them."""
    settings = {"encoder": asdict(encoder)} if encoder.random_kind else {"encoder": encoder.name}

    def run(out: Path, inputs: Mapping[str, Path]) -> None:
        tokenizer = load_tokenizer(encoder)
        subwords = SubwordEncoder(
            tokenizer, TokensConfig(tokenizer=encoder.name, max_tokens=encoder.max_tokens)
        )
        write_splits(open_corpus(inputs), subwords, out)
        tokenizer.save_pretrained(out / "tokenizer")

    return Stage("tokens", settings | {"max_tokens": encoder.max_tokens}, run, ("corpus",))


def write_splits(corpus: Corpus, encoder: Encoder, out: Path) -> None:
    """The id sequences of train and, where there is one, of the validation part."""
    for split in ("train", "valid"):
        if split in corpus.splits and corpus.num_documents(split):
            write_sequences(corpus.shards(split), encoder, out / split)


def tfidf_stage(config: TfidfConfig) -> Stage:
    """TF-IDF fitted on train, and the training documents' matrix; a corpus without text keeps its own features."""

    def run(out: Path, inputs: Mapping[str, Path]) -> None:
        corpus = open_corpus(inputs)
        if corpus.has_text:
            fit_transform(corpus.shards("train"), config, out / "train").save(out / "tfidf")

    return Stage("tfidf", asdict(config), run, ("corpus",))


def training_features(inputs: Mapping[str, Path]) -> Any:
    """(N × D) csr float32 of the training documents, from the stages `tfidf` and `corpus`."""
    corpus = open_corpus(inputs)
    return load_matrix(inputs["tfidf"] / "train") if corpus.has_text else corpus.features("train")


def clusters_stage(
    config: ClusterConfig,
    seed: int,
    features: Callable[[Mapping[str, Path]], Any] | None = None,
    inputs: tuple[str, ...] = ("corpus", "tfidf"),
    name: str = "clusters",
) -> Stage:
    """Labels grouped by `features(inputs)` (L × D), a module-level function: their PIFA features if none is given.

    A Ray task of its own, so that the clusterings of several members are made at once, each where there is room.
    """
    seeded, made_by = replace(config, seed=seed), features or pifa_of_tfidf

    def run(out: Path, inputs: Mapping[str, Path]) -> None:
        task = ray.remote(num_cpus=1)(_cluster)
        gather([task.remote(made_by, dict(inputs), seeded, (out / "clusters.safetensors").resolve())])

    return Stage(name, asdict(seeded) | {"features": made_by.__name__}, run, inputs)


def _cluster(
    features: Callable[[Mapping[str, Path]], Any],
    inputs: Mapping[str, Path],
    config: ClusterConfig,
    path: Path,
) -> None:
    save_clusters(cluster_labels(features(inputs), config), path)


def pifa_of_tfidf(inputs: Mapping[str, Path]) -> Any:
    """(L × D): the mean TF-IDF features of each label's training documents."""
    return pifa(open_corpus(inputs).label_matrix("train"), training_features(inputs))


def save_clusters(clusters: LabelClusters, path: Path) -> None:
    save_file({"order": clusters.order, "offsets": clusters.offsets}, path)


def load_clusters(path: Path) -> LabelClusters:
    arrays = load_file(path)
    return LabelClusters.of(arrays["order"], arrays["offsets"])
