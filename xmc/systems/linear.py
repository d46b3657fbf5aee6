"""Linear classifiers over a shallow label tree: seconds to train, the baseline of everything else.

Method: labels are clustered by the mean features of their documents (few labels are not: all lie under the root);
above the clusters lie as few levels as their number asks for; each node has a squared-hinge classifier on unit-length
features, trained by dual coordinate descent against the documents that reach its parent. Prediction is a beam search
down the tree.
Loss: ½|w|² + C·Σ max(0, 1 − t·w·x)². Score: the product of the path's scores, see `linear.scores`.
Stages: corpus → tfidf → clusters → [tokens → vectors] → train → model → evaluate. With teacher-forced negatives all
levels train at once as Ray tasks; matcher-aware ones need the level above first.
Needs text, or a corpus with features of its own. Suits label sets of any size. What a new corpus should meet first.
Inputs: `tfidf`, `embedding` (of the encoder as it is: a pre-trained one, or the directory of a fine-tuned one), or
`both`: the three φ rows of the X-Transformer paper's Table 3.

    python -m xmc.train linear corpus.path=DIR run.dir=DIR
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import ray
import scipy.sparse as sp

from raycluster.inference import read_vectors
from raycluster.stages import Stage
from xmc.config import CommonConfig
from xmc.corpus.store import Corpus
from xmc.corpus.tfidf import Tfidf, TfidfConfig
from xmc.labels.clustering import ClusterConfig
from xmc.labels.topk import TopK
from xmc.labels.tree import TreeConfig, build_tree
from xmc.linear.tree import LinearConfig, LinearTree, flat_tree
from xmc.nn.encoders import EncoderConfig, load_encoder, save_encoder
from xmc.systems import shared_stages
from xmc.systems.neural import StepCallback, link_tree
from xmc.systems.ranking import train_tree
from xmc.systems.vectors import (
    VECTORS,
    Embedder,
    Kind,
    TextReader,
    load_subwords,
    pretrained,
    ranker_inputs,
    vectors_stage,
)


@dataclass(frozen=True)
class Config(CommonConfig):
    # What the classifiers read: tfidf, embedding or both.
    inputs: Kind = "tfidf"
    tfidf: TfidfConfig = field(default_factory=TfidfConfig)
    # Fewer labels than this are all children of the root: none is lost on the way down, and training is short anyway.
    flat_below: int = 1000
    clusters: ClusterConfig = field(default_factory=ClusterConfig)
    # Wide nodes: a path that is lost is lost for good, so there should be few levels.
    tree: TreeConfig = field(default_factory=lambda: TreeConfig(branching=512))
    linear: LinearConfig = field(default_factory=LinearConfig)
    # Of embeddings only.
    encoder: EncoderConfig = field(default_factory=lambda: EncoderConfig(layers_pooled=1, summary="mean"))


def stages(config: Config, corpus: Corpus, on_steps: StepCallback) -> list[Stage]:
    """All between the corpus and the trained tree."""
    before = [shared_stages.tfidf_stage(config.tfidf)]
    if corpus.num_labels >= config.flat_below:
        before.append(shared_stages.clusters_stage(config.clusters, config.seed))
    if config.inputs != "tfidf":
        before += [shared_stages.tokens_stage(config.encoder), _vectors_stage(config)]

    def run(out: Path, given: Mapping[str, Path]) -> None:
        tree = flat_tree(corpus.num_labels)
        if "clusters" in given:
            clusters = shared_stages.load_clusters(given["clusters"] / "clusters.safetensors")
            tree = build_tree(clusters, config.tree)
        # Nobody here holds them: the object store's copy is the only one while trees are trained.
        inputs = ray.put(
            ranker_inputs(
                config.inputs,
                shared_stages.training_features(given),
                read_vectors(given["vectors"])[VECTORS] if "vectors" in given else None,
            )
        )
        labels = shared_stages.open_corpus(given).label_matrix("train")
        train_tree(inputs, labels, tree, config.linear, config.seed, out)
        if "vectors" in given:
            save_encoder(load_encoder(config.encoder, config.seed), out / "encoder")

    settings = {"inputs": config.inputs, "tree": asdict(config.tree), "linear": asdict(config.linear)}
    inputs = ("corpus", *(stage.name for stage in before))
    return [*before, Stage("train", settings | {"seed": config.seed}, run, inputs, resumes=True)]


def _vectors_stage(config: Config) -> Stage:
    settings = {"encoder": asdict(config.encoder), "seed": config.seed}
    make = partial(_pretrained, config.encoder, config.seed)
    return vectors_stage("vectors", make, settings, ("corpus", "tokens"))


def _pretrained(
    encoder: EncoderConfig, seed: int, inputs: Mapping[str, Path], padding: tuple[int, str]
) -> Embedder:
    return pretrained(encoder, seed, padding)


def assemble(out: Path, given: Mapping[str, Path]) -> None:
    """A model's own files: the trees and what turns a text into their inputs."""
    link_tree(given["train"] / "tree", out / "tree")
    if (given["tfidf"] / "tfidf").exists():
        link_tree(given["tfidf"] / "tfidf", out / "tfidf")
    if "vectors" in given:
        link_tree(given["train"] / "encoder", out / "encoder")
        link_tree(given["tokens"] / "tokenizer", out / "tokenizer")


class LinearPredictor:
    """Best labels of texts by beam search."""

    def __init__(self, reader: TextReader, tree: LinearTree) -> None:
        self._reader, self._tree = reader, tree

    def top_k(self, texts: Sequence[str], k: int) -> TopK:
        """(N, k) for N texts."""
        inputs, _ = self._reader.read(texts)
        return self._tree.predict(inputs, k)

    def top_k_of_features(self, features: sp.csr_matrix, k: int) -> TopK:
        """(N, k) for documents that come as features (N × D)."""
        return self._tree.predict(ranker_inputs("tfidf", features, None), k)


def load_predictor(directory: Path, config: Config, num_labels: int) -> LinearPredictor:
    """The predictor of a model directory."""
    tfidf = Tfidf.load(directory / "tfidf") if (directory / "tfidf").exists() else None
    subwords = embedder = None
    if config.inputs != "tfidf":
        subwords, padding = load_subwords(directory / "tokenizer", config.encoder.max_tokens)
        encoder = replace(config.encoder, name=str(directory / "encoder"))
        embedder = pretrained(encoder, config.seed, padding)
    return LinearPredictor(
        TextReader(config.inputs, tfidf, subwords, embedder), LinearTree.load(directory / "tree")
    )
