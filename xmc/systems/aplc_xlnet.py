"""APLC-XLNet (Ye et al. 2020): an encoder, a hidden layer, and labels in clusters by frequency.

Method: the summary token (XLNet's last) goes through a hidden layer with tanh and dropout 0.1. Labels are divided by
falling frequency into a head and tails. The head scores its own labels and one logit a tail; a tail scores its labels
on a narrower projection of the hidden state, and in training only for the documents that have a label there.
Loss: BCE of the probabilities p(tail) · p(label | tail), a mean over the terms that were computed. Score: the same.
Stages: corpus → tokens, partition → train → label_layer → model → evaluate. What the partition costs by the paper's
equations is printed before training; `label_layer` times the layer beside a flat one after it.
Three learning rates: train.encoder_rate, train.hidden_rate, train.label_rate (rows, projections and tails' logits).
The paper's clipping to norm 1 is engine.clip_norm. Label rows are not clipped: a mean over so many terms keeps their
gradient's norm far below 1 (that of the head's rows below √(d / its labels), as tanh bounds the hidden state).
Needs text, and frequencies that fall steeply: else a flat layer (light_xml, model.mode=flat) does as well.
Switches for the paper's ablations: model.partition.fractions (Figures 4 and 5).

    python -m xmc.train aplc_xlnet corpus.path=DIR run.dir=DIR
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

from raycluster.job import Learner, TrainConfig
from raycluster.stages import Stage
from xmc.config import CommonConfig
from xmc.corpus.store import Corpus
from xmc.errors import InputError
from xmc.files import atomic_write_text
from xmc.labels.partition import (
    PartitionConfig,
    approximate_cost_ratio,
    document_rates,
    format_plan,
    partition_labels,
    touch_probabilities,
)
from xmc.nn.encoders import EncoderConfig, load_encoder
from xmc.nn.engine import EngineConfig
from xmc.nn.heads.aplc import AplcHead, AplcHeadConfig, AplcModule, TailInputs
from xmc.nn.heads.light_xml import LabelClusters
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

__all__ = ["Config", "assemble", "build", "load_predictor", "stages", "time_layers"]

PARTITION, PLAN, LAYER_TIMES = "partition.safetensors", "plan.txt", "label_layer.json"
# Weights of the flat layer that is timed: larger layers are timed as a model with the same proportions.
_TIMED_WEIGHTS = 2**24
_WARM_UP, _TIMED_STEPS = 2, 7


@dataclass(frozen=True)
class ModelConfig:
    # Width of the hidden layer; every label of the head costs so many weights.
    hidden_width: int = 768
    # On the hidden layer.
    dropout: float = 0.1
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    head: AplcHeadConfig = field(default_factory=AplcHeadConfig)

    def __post_init__(self) -> None:
        if self.hidden_width < 1:
            raise InputError(f"model.hidden_width is {self.hidden_width}; it must be at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"model.dropout is {self.dropout}; it must lie in [0, 1)")
        clusters = self.partition.sizes or self.partition.fractions
        self.head.widths(len(clusters) - 1, self.hidden_width)


@dataclass(frozen=True)
class Config(CommonConfig):
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def stages(config: Config, corpus: Corpus, on_steps: StepCallback) -> list[Stage]:
    """All between the corpus and the trained network; `on_steps` gets the rows of step metrics."""

    def run(out: Path, given: Mapping[str, Path]) -> None:
        print((given["partition"] / PLAN).read_text(), flush=True)
        settings = Settings(config.encoder, config.model, given["partition"] / PARTITION, config.seed)
        train_network(config, build, settings, out, given, on_steps)

    return [
        shared_stages.tokens_stage(config.encoder),
        partition_stage(config),
        Stage(
            "train",
            made_from(config, "encoder", "model"),
            run,
            ("corpus", "tokens", "partition"),
            resumes=True,
        ),
        label_layer_stage(config),
    ]


def partition_stage(config: Config) -> Stage:
    """Labels to clusters by their frequency in train, and what that costs."""
    model, batch_size = config.model, config.train.batch_size

    def run(out: Path, given: Mapping[str, Path]) -> None:
        corpus = shared_stages.open_corpus(given)
        partition = partition_labels(corpus.labels.train_frequency[: corpus.num_labels], model.partition)
        rates = document_rates(corpus.label_matrix("train"), partition)
        save_file({"cluster_of": partition.cluster_of, "document_rates": rates}, out / PARTITION)
        plan = format_plan(partition, rates, model.hidden_width, model.head.decay, batch_size)
        atomic_write_text(out / PLAN, plan + "\n")

    settings = {
        "partition": asdict(model.partition),
        "width": model.hidden_width,
        "decay": model.head.decay,
        "batch_size": batch_size,
    }
    return Stage("partition", settings, run, ("corpus",))


def load_partition(path: Path) -> LabelClusters:
    """The clusters of a partition, the head first."""
    cluster_of = load_file(path)["cluster_of"]
    return LabelClusters.from_assignment(cluster_of, int(cluster_of.max()) + 1)


@dataclass(frozen=True)
class Settings:
    """What a rank builds the network from."""

    encoder: EncoderConfig
    model: ModelConfig
    partition: Path
    seed: int


def build(settings: Settings, device: torch.device) -> Learner:
    """The network before training, in a rank."""
    clusters = load_partition(settings.partition)
    module, head = _network(
        settings.encoder, settings.model, clusters, settings.seed, device, averaging_engine=True
    )
    return AplcLearner(module, head)


def _network(
    encoder_config: EncoderConfig,
    model: ModelConfig,
    clusters: LabelClusters,
    seed: int,
    device: torch.device,
    *,
    averaging_engine: bool,
) -> tuple[AplcModule, AplcHead]:
    encoder = load_encoder(encoder_config, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        num_tails = clusters.num_clusters - 1
        module = AplcModule(encoder, model.head, num_tails, model.hidden_width, model.dropout)
    head = AplcHead(
        model.head,
        clusters,
        model.hidden_width,
        seed=seed,
        averaging_engine=averaging_engine,
        device=device,
    )
    return module.to(device), head


class AplcLearner(Learner):
    """Tells the module which documents each tail is needed for, before it projects them."""

    label_parts = ("tails",)

    def begin(self, targets: Ragged) -> None:
        super().begin(targets)
        assert isinstance(self.module, AplcModule)
        assert isinstance(self.head, AplcHead)
        self.module.tails.start_at(self.head.tail_rates(targets))

    def before_forward(self, targets: Ragged) -> None:
        assert isinstance(self.module, AplcModule)
        assert isinstance(self.head, AplcHead)
        self.module.tails.expect(self.head.members(targets))


def load_predictor(directory: Path, config: Config, num_labels: int) -> NetworkPredictor:
    """The predictor of a model directory."""
    from transformers import AutoTokenizer

    shared = load_file(directory / "network" / "head.safetensors")
    clusters = LabelClusters(shared["label_order"], shared["cluster_offsets"])
    if clusters.order.numel() != num_labels:
        raise InputError(
            f"{directory}: the network knows {clusters.order.numel():,} labels, labels.parquet {num_labels:,}"
        )
    encoder = replace(
        config.encoder, name=str(directory / "network" / "encoder"), gradient_checkpointing=False
    )
    module, head = _network(
        encoder, config.model, clusters, config.seed, prediction_device(), averaging_engine=False
    )
    load_network(module, head, directory / "network", config.engine)
    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer", local_files_only=True)
    return NetworkPredictor(tokenizer, config.encoder.max_tokens, module, head)


# --- what the layer costs -------------------------------------------------------------------------------------------


def label_layer_stage(config: Config) -> Stage:
    """Time steps of the label layer beside those of a flat one, in this process, on batches of the corpus."""
    model, batch_size = config.model, config.train.batch_size

    def run(out: Path, given: Mapping[str, Path]) -> None:
        file = given["partition"] / PARTITION
        rates = load_file(file)["document_rates"].numpy()
        clusters = load_partition(file)
        small, renamed = _shrunk(clusters, _TIMED_WEIGHTS // model.hidden_width)
        matrix = shared_stages.open_corpus(given).label_matrix("train")
        batches = _draw_batches(matrix, batch_size, _WARM_UP + _TIMED_STEPS, config.seed)
        batches = [Ragged(renamed[batch.ids], batch.offsets) for batch in batches]
        times = time_layers(model.head, small, batches, model.hidden_width, prediction_device())
        touch = touch_probabilities(rates, batch_size)
        sizes = clusters.offsets.diff().numpy()
        results = {
            "labels": clusters.order.numel(),
            "labels_timed": small.order.numel(),
            "batch_size": batch_size,
            "step_seconds": times.aplc,
            "flat_step_seconds": times.flat,
            "measured_ratio": times.flat / times.aplc,
            "equation_14_ratio": approximate_cost_ratio(sizes, touch, model.head.decay),
        }
        atomic_write_text(out / LAYER_TIMES, json.dumps(results, indent=2))
        timed, labels = results["labels_timed"], results["labels"]
        of_fewer = "" if timed == labels else f", timed with {timed:,} of {labels:,} labels"
        print(
            f"  label layer{of_fewer}: {1e3 * times.aplc:.2f} ms a step, a flat layer {1e3 * times.flat:.2f} ms: "
            f"{results['measured_ratio']:.2f} times as long (equation 14: {results['equation_14_ratio']:.2f})",
            flush=True,
        )

    settings = {"model": asdict(model), "batch_size": batch_size, "seed": config.seed}
    return Stage("label_layer", settings, run, ("corpus", "partition", "train"))


@dataclass(frozen=True)
class LayerTimes:
    """Median seconds of a training step of a label layer, the tails' inputs with it."""

    aplc: float
    flat: float


def time_layers(
    config: AplcHeadConfig,
    clusters: LabelClusters,
    batches: Sequence[Ragged],
    width: int,
    device: torch.device,
) -> LayerTimes:
    """Steps of APLC and of a flat layer of the same labels by turns, so that other work on the machine hits both."""
    num_labels = clusters.order.numel()
    flat = LabelClusters(clusters.order, torch.tensor([0, num_labels]))
    layers = [_TimedLayer(config, each, width, device) for each in (clusters, flat)]
    for number, targets in enumerate(batches):
        on_device = Ragged(targets.ids.to(device), targets.offsets.to(device))
        for layer in layers:
            layer.step(on_device, kept=number >= _WARM_UP)
    return LayerTimes(*(statistics.median(layer.seconds) for layer in layers))


class _TimedLayer:
    def __init__(
        self, config: AplcHeadConfig, clusters: LabelClusters, width: int, device: torch.device
    ) -> None:
        self._head = AplcHead(config, clusters, width, seed=0, averaging_engine=False, device=device)
        self._tails = TailInputs(config, clusters.num_clusters - 1, width).to(device)
        self._width, self._device = width, device
        self.seconds: list[float] = []

    def step(self, targets: Ragged, kept: bool) -> None:
        h = torch.rand(len(targets), self._width, device=self._device, requires_grad=True)
        began = self._now()
        self._tails.expect(self._head.members(targets))
        self._head.loss((h, *self._tails(h)), targets, lr=1e-3).backward()
        if kept:
            self.seconds.append(self._now() - began)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _shrunk(clusters: LabelClusters, most_labels: int) -> tuple[LabelClusters, Tensor]:
    """Clusters in the same proportions with about `most_labels` labels in all, and each label's (L,) new id there."""
    num_labels = clusters.order.numel()
    sizes = clusters.offsets.diff()
    small = (sizes * min(1.0, most_labels / num_labels)).ceil().to(torch.int64)
    offsets = torch.cat([small.new_zeros(1), small.cumsum(0)])
    cluster = torch.repeat_interleave(torch.arange(sizes.numel()), sizes)
    place = torch.arange(num_labels) - clusters.offsets[cluster]
    renamed = torch.empty(num_labels, dtype=torch.int64)
    renamed[clusters.order] = offsets[cluster] + place * small[cluster] // sizes[cluster]
    return LabelClusters(torch.arange(int(offsets[-1])), offsets), renamed


def _draw_batches(matrix: sp.csr_matrix, batch_size: int, count: int, seed: int) -> list[Ragged]:
    """Label lists of random documents (rows of an N × L matrix)."""
    random = np.random.default_rng(seed)
    parts = (matrix[random.integers(0, matrix.shape[0], batch_size)] for _ in range(count))
    return [
        Ragged(
            torch.from_numpy(part.indices.astype(np.int64)), torch.from_numpy(part.indptr.astype(np.int64))
        )
        for part in parts
    ]
