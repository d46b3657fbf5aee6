"""X-Transformer's matcher: which label clusters a document belongs to.

Formula: scores s = W e + b over K clusters; loss = mean over documents and clusters of max(0, 1 − t·s)², t = ±1, where
a cluster is positive if it holds one of the document's labels. With one label a cluster it matches labels themselves.
Needs: the outputs (e,) of `MatcherModule`. Ranks nothing within a cluster: that is the linear ranker's work.

Legend: B documents of all ranks, b of this rank, K clusters, L labels, d width of e.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from xmc.nn.dense_layer import DenseLabelLayer, positive_keys
from xmc.nn.encoders import Encoder
from xmc.nn.heads.base import LabelHead, own_rows
from xmc.nn.losses import squared_hinge
from xmc.nn.optimisers import RowOptimiserConfig
from xmc.nn.sharding import (
    LabelBlock,
    Ragged,
    gather_counts,
    gather_embeddings,
    gather_ragged,
    gather_rows,
    sum_over_ranks,
)


@dataclass(frozen=True)
class MatcherConfig:
    # the paper has no weight decay
    optimiser: RowOptimiserConfig = field(default_factory=lambda: RowOptimiserConfig(weight_decay=0.0))


class MatcherModule(nn.Module):
    """The engine's part: the encoder alone."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        return (self.encoder(input_ids, attention_mask),)


class MatcherHead(LabelHead):
    """Rows over clusters, divided over the ranks. `cluster_of` (L,): each label's cluster."""

    def __init__(
        self,
        config: MatcherConfig,
        cluster_of: Tensor,
        num_clusters: int,
        width: int,
        *,
        seed: int,
        averaging_engine: bool = True,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(averaging_engine=averaging_engine)
        self.cluster_of = cluster_of.to(device=device, dtype=torch.int64)
        self.num_clusters = num_clusters
        self.rows = DenseLabelLayer(
            LabelBlock.of_rank(num_clusters),
            width,
            config.optimiser,
            bound=1.0 / math.sqrt(width),
            seed=seed,
            bias=True,
            dtype=dtype,
            device=device,
        )
        self.layers = {"match": self.rows}

    def classes_of(self, labels: Tensor) -> Tensor:
        return self.cluster_of[labels]

    def loss(self, outputs: tuple[Tensor, ...], targets: Ragged, *, lr: float | None = None) -> Tensor:
        counts = gather_counts(len(targets), targets.ids.numel(), device=targets.ids.device)
        lists = gather_ragged(targets, counts)
        E = gather_embeddings(outputs[0], [c[0] for c in counts], self.gradient_scale)
        positives = positive_keys(self.classes_of(lists.ids), lists.documents(), self.rows.block, E.shape[0])
        normaliser = max(1, E.shape[0] * self.num_clusters)
        part, _ = self.rows.loss(E, positives, normaliser, pair_loss=squared_hinge, lr=lr)
        return sum_over_ranks(part)

    @torch.no_grad()
    def top_k(self, outputs: tuple[Tensor, ...], k: int) -> tuple[Tensor, Tensor]:
        """This rank's documents' best clusters: margins (b × k), falling, and cluster ids (b × k)."""
        sizes = [c[0] for c in gather_counts(outputs[0].shape[0], device=outputs[0].device)]
        scores, ids = self.rows.top_k(gather_rows(outputs[0], sizes), k)
        return own_rows(scores, sizes), own_rows(ids, sizes)
