"""X-Transformer (Chang et al. 2020): a transformer matches label clusters, linear rankers order their labels.

Method: labels are indexed by a representation (`index`) and clustered; an encoder learns which clusters a document
belongs to; a one-vs-all linear ranker per label, trained on documents with a label in its cluster (TFN) and on those
that the matcher sends there (MAN), orders the labels of the best clusters.
Index: pifa_tfidf (mean TF-IDF of a label's documents), pifa_neural (mean vector of its documents, from a matcher that
is first trained on the pifa_tfidf clusters), text_emb (the encoder's mean state over the label's own text).
Loss: matcher, mean squared hinge over all clusters; ranker, ½|w|² + C·Σ max(0, 1 − t·w·x)².
Score: `ranker.combine`: the product of the cluster's and the label's exp(−max(0, 1 − v)^p), of their sigmoids, or the
ranker's margin alone.
Stages: corpus → tokens, tfidf → clusters → train → vectors [→ neural_clusters → neural_train → neural_vectors] →
ranker → model → evaluate.
Needs text. Suits label sets of any size; with clusters.max_leaf_size=1 the matcher matches labels themselves, which
pays off up to some thousands.
Switches for the paper's Table 5: index, encoder.name, ranker.inputs, ranker.negatives, members.

    python -m xmc.train x_transformer corpus.path=DIR run.dir=DIR
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch

from raycluster.inference import read_vectors, write_vectors
from raycluster.job import Learner, TrainConfig
from raycluster.stages import Stage
from xmc.config import CommonConfig
from xmc.corpus.store import Corpus
from xmc.corpus.tfidf import Tfidf, TfidfConfig
from xmc.corpus.tokens import SubwordEncoder, TokensConfig, write_sequences
from xmc.errors import InputError
from xmc.labels.clustering import ClusterConfig, LabelClusters
from xmc.labels.features import pifa
from xmc.labels.topk import TopK
from xmc.linear.problem import Groups, Negatives, Problem
from xmc.linear.scoring import CombineConfig, activate, score_children
from xmc.linear.solver import SolverConfig
from xmc.linear.tree import flat_tree
from xmc.linear.weights import LevelWeights
from xmc.nn.encoders import EncoderConfig, load_encoder, load_tokenizer
from xmc.nn.engine import EngineConfig
from xmc.nn.heads.matcher import MatcherConfig, MatcherHead, MatcherModule
from xmc.systems import shared_stages
from xmc.systems.neural import (
    StepCallback,
    link_file,
    link_tree,
    load_network,
    made_from,
    prediction_device,
    train_network,
)
from xmc.systems.ranking import Level, teach
from xmc.systems.vectors import (
    CLUSTERS,
    SCORES,
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
class RankerConfig:
    # What the rankers read of a document: its TF-IDF features, its vector from the matcher's encoder, or both.
    inputs: Kind = "both"
    # Training documents of a label: tfn, man or tfn+man. all: every document, and every label is ranked; the matcher
    # then serves for its vectors alone. For up to a few thousand labels.
    negatives: Negatives = "tfn+man"
    # Clusters of a document whose labels are ranked, and which count as matched in training: b of the paper. Without
    # effect where all labels are ranked.
    beam: int = 10
    solver: SolverConfig = field(default_factory=SolverConfig)
    combine: CombineConfig = field(default_factory=CombineConfig)

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise InputError(f"ranker.beam is {self.beam}; rank the labels of at least one cluster")


@dataclass(frozen=True)
class Config(CommonConfig):
    # What labels are clustered by.
    index: Literal["pifa_tfidf", "pifa_neural", "text_emb"] = "pifa_tfidf"
    tfidf: TfidfConfig = field(default_factory=TfidfConfig)
    clusters: ClusterConfig = field(default_factory=ClusterConfig)
    encoder: EncoderConfig = field(default_factory=lambda: EncoderConfig(layers_pooled=1, dropout=0.1))
    matcher: MatcherConfig = field(default_factory=MatcherConfig)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(weight_decay=0.0, clip_norm=1.0))
    train: TrainConfig = field(default_factory=TrainConfig)
    ranker: RankerConfig = field(default_factory=RankerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clusters.seed != ClusterConfig().seed:
            raise InputError("clusters.seed follows from seed: set that")

    def validates_labels(self, num_labels: int) -> bool:
        return False


# ------------------------------------------------------------------------------------------------ stages


def stages(config: Config, corpus: Corpus, on_steps: StepCallback) -> list[Stage]:
    """All between the corpus and the trained rankers; `on_steps` gets the matcher's step metrics."""
    own = [shared_stages.tokens_stage(config.encoder), shared_stages.tfidf_stage(config.tfidf)]
    if config.index == "text_emb":
        own.append(_label_vectors_stage(config))
        by_text = ("corpus", "label_vectors")
        own.append(shared_stages.clusters_stage(config.clusters, config.seed, _text_vectors, by_text))
    else:
        own.append(shared_stages.clusters_stage(config.clusters, config.seed))
    own += _matcher_stages(config, corpus, on_steps, "")
    last = ""
    if config.index == "pifa_neural":
        last = "neural_"
        by_vector = ("corpus", "vectors")
        own.append(
            shared_stages.clusters_stage(
                config.clusters, config.seed, _pifa_of_vectors, by_vector, "neural_clusters"
            )
        )
        own += _matcher_stages(config, corpus, on_steps, last)
    return [*own, _ranker_stage(config, last)]


def _matcher_stages(config: Config, corpus: Corpus, on_steps: StepCallback, prefix: str) -> list[Stage]:
    """The matcher's training on the clusters of the stage `<prefix>clusters`, and what it says of each document."""
    clusters = f"{prefix}clusters"

    def run(out: Path, given: Mapping[str, Path]) -> None:
        path = given[clusters] / "clusters.safetensors"
        settings = Settings(config.encoder, config.matcher, path, config.seed)
        train_network(config, build, settings, out, given, on_steps)
        # The rows of the network are named by these clusters: they stay together.
        link_file(path, out / "network" / "clusters.safetensors")

    settings = made_from(config, "encoder", "matcher")
    train = Stage(f"{prefix}train", settings, run, ("corpus", "tokens", clusters), resumes=True)
    make = partial(_matcher_of, config, f"{prefix}train")
    beam = {"beam": config.ranker.beam}
    return [train, vectors_stage(f"{prefix}vectors", make, beam, ("corpus", "tokens", train.name))]


def _ranker_stage(config: Config, prefix: str) -> Stage:
    """Rankers of all labels, in blocks as Ray tasks."""
    ranker, names = config.ranker, (f"{prefix}clusters", f"{prefix}vectors")

    def run(out: Path, given: Mapping[str, Path]) -> None:
        clusters = shared_stages.load_clusters(given[names[0]] / "clusters.safetensors")
        found = read_vectors(given[names[1]])
        # Nobody here holds them: the object store's copy is the only one while rankers are trained.
        inputs = ray.put(
            ranker_inputs(
                ranker.inputs,
                shared_stages.training_features(given) if ranker.inputs != "embedding" else None,
                found.pop(VECTORS),
            )
        )
        matched = TopK(found[CLUSTERS], found[SCORES])
        labels = shared_stages.open_corpus(given).label_matrix("train")
        problem = Problem.build(labels, _groups(clusters, ranker), ranker.negatives, matched)
        teach(inputs, [Level(problem, config.seed, out / "weights.safetensors")], ranker.solver)

    settings = asdict(replace(ranker, combine=CombineConfig())) | {"seed": config.seed}
    return Stage("ranker", settings, run, ("corpus", "tfidf", *names), resumes=True)


def _groups(clusters: LabelClusters, ranker: RankerConfig) -> Groups:
    """The labels that are ranked together: those of a cluster, or all."""
    if ranker.negatives == "all":
        return Groups.of_level(flat_tree(len(clusters.cluster_of)), 0)
    return Groups.of_clusters(clusters)


def _pifa_of_vectors(inputs: Mapping[str, Path]) -> Any:
    """(L × d): the mean of the matcher's vectors of each label's training documents."""
    return pifa(
        shared_stages.open_corpus(inputs).label_matrix("train"), read_vectors(inputs["vectors"])[VECTORS]
    )


def _text_vectors(inputs: Mapping[str, Path]) -> Any:
    """(L × d): unit vectors of the labels' own texts."""
    return ranker_inputs("embedding", None, read_vectors(inputs["label_vectors"])[VECTORS]).dense


def _label_vectors_stage(config: Config) -> Stage:
    """The pre-trained encoder's mean state over each label's text (or name), by Ray Data's actors."""
    encoder = replace(config.encoder, layers_pooled=1, summary="mean")

    def run(out: Path, given: Mapping[str, Path]) -> None:
        tokenizer = load_tokenizer(encoder)
        subwords = SubwordEncoder(tokenizer, TokensConfig(encoder.name, encoder.max_tokens))
        corpus = shared_stages.open_corpus(given)
        texts = corpus.labels.texts[: corpus.num_labels].fill_null(corpus.labels.names[: corpus.num_labels])
        pq.write_table(pa.table({"text": texts}), out / "texts.parquet")
        write_sequences([out / "texts.parquet"], subwords, out / "tokens")
        make = partial(pretrained, encoder, config.seed, (subwords.pad_id, tokenizer.padding_side))
        write_vectors((out / "tokens").resolve(), make, out.resolve(), "label vectors")

    settings = {"encoder": asdict(encoder), "seed": config.seed}
    return Stage("label_vectors", settings, run, ("corpus",), resumes=True)


# ------------------------------------------------------------------------------------------------ the network


@dataclass(frozen=True)
class Settings:
    """What a rank builds the network from."""

    encoder: EncoderConfig
    matcher: MatcherConfig
    clusters: Path
    seed: int


def build(settings: Settings, device: torch.device) -> Learner:
    """The network before training, in a rank."""
    return Learner(*_network(settings, device, averaging_engine=True))


def _network(
    settings: Settings, device: torch.device, *, averaging_engine: bool
) -> tuple[MatcherModule, MatcherHead]:
    encoder = load_encoder(settings.encoder, settings.seed)
    clusters = shared_stages.load_clusters(settings.clusters)
    head = MatcherHead(
        settings.matcher,
        torch.from_numpy(clusters.cluster_of),
        clusters.num_clusters,
        encoder.width,
        seed=settings.seed,
        averaging_engine=averaging_engine,
        device=device,
    )
    return MatcherModule(encoder).to(device), head


def _matcher_of(config: Config, stage: str, inputs: Mapping[str, Path], padding: tuple[int, str]) -> Embedder:
    return _load_matcher(config, inputs[stage] / "network", padding)


def _load_matcher(config: Config, network: Path, padding: tuple[int, str]) -> Embedder:
    """The trained matcher that lies in `network`."""
    encoder = replace(config.encoder, name=str(network / "encoder"), gradient_checkpointing=False)
    settings = Settings(encoder, config.matcher, network / "clusters.safetensors", config.seed)
    module, head = _network(settings, prediction_device(), averaging_engine=False)
    load_network(module, head, network, config.engine)
    return Embedder(module, padding, head, min(config.ranker.beam, head.num_clusters))


# ------------------------------------------------------------------------------------------------ the model


def assemble(out: Path, given: Mapping[str, Path]) -> None:
    """A model's own files: the matcher, the rankers, and what turns a text into their inputs."""
    trained = given["neural_train"] if "neural_train" in given else given["train"]
    link_tree(trained / "network", out / "network")
    link_tree(given["tokens"] / "tokenizer", out / "tokenizer")
    link_tree(given["tfidf"] / "tfidf", out / "tfidf")
    link_file(given["ranker"] / "weights.safetensors", out / "ranker.safetensors")


class XTransformerPredictor:
    """Best labels of texts: the matcher's clusters, then the rankers of their labels."""

    def __init__(
        self, reader: TextReader, clusters: LabelClusters, weights: LevelWeights, ranker: RankerConfig
    ) -> None:
        self._reader, self._weights, self._combine = reader, weights, ranker.combine
        self._groups, self._ranks_all = _groups(clusters, ranker), ranker.negatives == "all"

    def top_k(self, texts: Sequence[str], k: int) -> TopK:
        """(N, k) for N texts."""
        inputs, clusters = self._reader.read(texts)
        assert clusters is not None
        parents = None
        if not self._ranks_all:
            parents = TopK(clusters.label_ids, activate(clusters.scores, self._combine))
        return score_children(self._weights, self._groups, inputs, parents, k, self._combine)


def load_predictor(directory: Path, config: Config, num_labels: int) -> XTransformerPredictor:
    """The predictor of a model directory."""
    subwords, padding = load_subwords(directory / "tokenizer", config.encoder.max_tokens)
    tfidf = Tfidf.load(directory / "tfidf") if config.ranker.inputs != "embedding" else None
    embedder = _load_matcher(config, directory / "network", padding)
    clusters = shared_stages.load_clusters(directory / "network" / "clusters.safetensors")
    weights = LevelWeights.load(directory / "ranker.safetensors")
    reader = TextReader(config.ranker.inputs, tfidf, subwords, embedder)
    return XTransformerPredictor(reader, clusters, weights, config.ranker)
