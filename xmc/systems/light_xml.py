"""LightXML (Jiang et al. 2021): a transformer that recalls label clusters and ranks their labels in one network.

Method: the summary token's states of the last five layers, dropout 0.5, feed (flat) a linear layer over all labels,
or (clustered) a recall layer over label clusters and a rank layer over the labels of the best ones; the candidates are
drawn anew by the present recall scores at each step (dynamic negatives), true clusters always among them.
Loss: mean BCE of recall + mean BCE of rank. Score: σ(recall of the label's cluster) · σ(rank); flat: σ(recall).
Stages: corpus → tokens → [tfidf → clusters] → train → model → evaluate.
Needs text. Suits label sets of any size: flat up to some 30,000 labels, clustered beyond.
Switches for the paper's ablations: model.head.negatives=static (Table 5), encoder.layers_pooled=1 (Figure 2).

    python -m xmc.train light_xml corpus.path=DIR run.dir=DIR
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from raycluster.job import Learner, TrainConfig
from raycluster.stages import Stage
from xmc.config import CommonConfig
from xmc.corpus.store import Corpus
from xmc.corpus.tfidf import TfidfConfig
from xmc.errors import InputError
from xmc.labels.clustering import ClusterConfig
from xmc.nn.encoders import EncoderConfig, load_encoder
from xmc.nn.engine import EngineConfig
from xmc.nn.heads.light_xml import LabelClusters, LightXmlHead, LightXmlHeadConfig, LightXmlModule
from xmc.nn.sharding import Ragged
from xmc.systems import shared_stages
from xmc.systems.neural import (
    NetworkPredictor,
    StepCallback,
    assemble,
    load_network,
    made_from,
    prediction_device,
    train_network,
)

__all__ = ["Config", "assemble", "build", "load_predictor", "stages"]

# Beyond this many labels the paper clusters them.
_FLAT_UP_TO = 31_000


@dataclass(frozen=True)
class ModelConfig:
    # flat scores every label; clustered ranks the labels of recalled clusters; auto: flat up to 31,000 labels.
    mode: Literal["auto", "flat", "clustered"] = "auto"
    # With static negatives: epochs of recall alone, before the candidates are drawn once and rank is trained.
    recall_epochs: int = 0
    head: LightXmlHeadConfig = field(default_factory=LightXmlHeadConfig)

    def __post_init__(self) -> None:
        if (self.head.negatives == "static") != (self.recall_epochs > 0):
            raise InputError(
                "model.recall_epochs goes with model.head.negatives=static: give both or neither"
            )
        if self.head.negatives == "static" and self.mode == "flat":
            raise InputError(
                "model.mode=flat has no negatives to draw; leave model.head.negatives at dynamic"
            )


@dataclass(frozen=True)
class Config(CommonConfig):
    tfidf: TfidfConfig = field(default_factory=TfidfConfig)
    clusters: ClusterConfig = field(default_factory=ClusterConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clusters.seed != ClusterConfig().seed:
            raise InputError("clusters.seed follows from seed: set that")
        if self.model.recall_epochs >= self.train.epochs:
            raise InputError(
                f"model.recall_epochs is {self.model.recall_epochs} of train.epochs={self.train.epochs}: "
                "leave at least one epoch for rank"
            )


def stages(config: Config, corpus: Corpus, on_steps: StepCallback) -> list[Stage]:
    """All between the corpus and the trained network; `on_steps` gets the rows of step metrics."""
    mode = config.model.mode
    clustered = mode == "clustered" or (mode == "auto" and corpus.num_labels > _FLAT_UP_TO)
    before = [shared_stages.tokens_stage(config.encoder)]
    if clustered:
        before.append(shared_stages.tfidf_stage(config.tfidf))
        before.append(shared_stages.clusters_stage(config.clusters, config.seed))

    def run(out: Path, given: Mapping[str, Path]) -> None:
        clusters = given["clusters"] / "clusters.safetensors" if clustered else None
        settings = Settings(config.encoder, config.model, corpus.num_labels, clusters, config.seed)
        train_network(config, build, settings, out, given, on_steps)

    inputs = ("corpus", *(stage.name for stage in before))
    return [*before, Stage("train", made_from(config, "encoder", "model"), run, inputs, resumes=True)]


@dataclass(frozen=True)
class Settings:
    """What a rank builds the network from."""

    encoder: EncoderConfig
    model: ModelConfig
    num_labels: int
    clusters: Path | None
    seed: int


def build(settings: Settings, device: torch.device) -> Learner:
    """The network before training, in a rank."""
    clusters = None
    if settings.clusters is not None:
        saved = shared_stages.load_clusters(settings.clusters)
        clusters = LabelClusters(torch.from_numpy(saved.order).long(), torch.from_numpy(saved.offsets))
    module, head = _network(settings, clusters, device, averaging_engine=True)
    if settings.model.recall_epochs:
        return StaticNegatives(module, head, settings.model.recall_epochs)
    return Learner(module, head)


def _network(
    settings: Settings, clusters: LabelClusters | None, device: torch.device, *, averaging_engine: bool
) -> tuple[LightXmlModule, LightXmlHead]:
    encoder = load_encoder(settings.encoder, settings.seed)
    head_config = settings.model.head
    width = None if clusters is None else head_config.rank_width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        module = LightXmlModule(encoder, width, head_config.bottleneck_activation)
    head = LightXmlHead(
        head_config,
        settings.num_labels,
        encoder.width,
        clusters,
        seed=settings.seed,
        averaging_engine=averaging_engine,
        device=device,
    )
    return module.to(device), head


class StaticNegatives(Learner):
    """The paper's comparison: recall is trained first; then each document's candidates are drawn once, for good."""

    def __init__(self, module: LightXmlModule, head: LightXmlHead, recall_epochs: int) -> None:
        super().__init__(module, head)
        self._recall_epochs = recall_epochs
        self._drawn = np.zeros((0, 0), np.int64)

    def before_epoch(self, epoch: int, outputs: Callable[[], Iterator[tuple[np.ndarray, Any]]]) -> None:
        if epoch == self._recall_epochs:
            assert isinstance(self.head, LightXmlHead)
            # Rows come in rising order, so the parts line up.
            self._drawn = np.concatenate([self.head.recalled(o).cpu().numpy() for _, o in outputs()])

    def loss(self, outputs: Any, targets: Ragged, rows: np.ndarray, lr: float | None) -> Tensor:
        assert isinstance(self.head, LightXmlHead)
        drawn = torch.from_numpy(self._drawn[rows]).to(outputs[0].device) if len(self._drawn) else None
        return self.head.loss(outputs, targets, lr=lr, static_clusters=drawn)

    def state(self) -> dict[str, Tensor]:
        return {"drawn": torch.from_numpy(self._drawn)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._drawn = state["drawn"].numpy()


def load_predictor(directory: Path, config: Config, num_labels: int) -> NetworkPredictor:
    """The predictor of a model directory."""
    from transformers import AutoTokenizer

    shared = load_file(directory / "network" / "head.safetensors")
    clusters = (
        LabelClusters(shared["label_order"], shared["cluster_offsets"]) if "label_order" in shared else None
    )
    encoder = replace(
        config.encoder, name=str(directory / "network" / "encoder"), gradient_checkpointing=False
    )
    settings = Settings(encoder, config.model, num_labels, None, config.seed)
    module, head = _network(settings, clusters, prediction_device(), averaging_engine=False)
    load_network(module, head, directory / "network", config.engine)
    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer", local_files_only=True)
    return NetworkPredictor(tokenizer, config.encoder.max_tokens, module, head)
