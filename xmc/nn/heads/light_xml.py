"""LightXML's head: recall over label clusters, rank over the labels of the recalled ones; or recall alone.

Formula: recall r = W e + b over K clusters (or, flat, over L labels); rank s_l = E_l · h for labels l of the best
clusters; loss = BCE(r) + BCE(s), each a mean over its own terms; probability σ(r of its cluster) · σ(s_l).
Needs: the outputs of `LightXmlModule`, (e,) flat or (e, h). Flat suits up to some 30K labels; beyond, recall and rank.

Legend: B documents of all ranks, b of this rank, K clusters, L labels, d width of e, h width of the rank space.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from xmc.errors import InputError
from xmc.nn.candidates import CandidateLabelLayer, best_of_pairs, group_candidates
from xmc.nn.dense_layer import DenseLabelLayer, positive_keys
from xmc.nn.encoders import Encoder
from xmc.nn.heads.base import LabelHead, document_rates, own_rows
from xmc.nn.optimisers import RowOptimiserConfig
from xmc.nn.sharding import (
    LabelBlock,
    Ragged,
    gather_counts,
    gather_embeddings,
    gather_ragged,
    gather_rows,
    merge_best_keys,
    sum_over_ranks,
    unpack_keys,
)


@dataclass(frozen=True)
class LightXmlHeadConfig:
    # clusters whose labels are ranked for a document
    recalled_clusters: int = 75
    # width of the rank space
    rank_width: int = 400
    # on the bottleneck: sigmoid (the paper) or none (its program)
    bottleneck_activation: str = "sigmoid"
    # dynamic: candidates are drawn by the present recall at each step; static: recall is trained first, then drawn once
    negatives: str = "dynamic"
    recall_optimiser: RowOptimiserConfig = field(default_factory=RowOptimiserConfig)
    rank_optimiser: RowOptimiserConfig = field(default_factory=lambda: RowOptimiserConfig(name="lazy_adam"))

    def __post_init__(self) -> None:
        if self.recalled_clusters < 1 or self.rank_width < 1:
            raise InputError("light_xml: recalled_clusters and rank_width must be at least 1")
        if self.bottleneck_activation not in ("sigmoid", "none"):
            raise InputError(
                f"light_xml: bottleneck_activation is {self.bottleneck_activation!r}; use sigmoid or none"
            )
        if self.negatives not in ("dynamic", "static"):
            raise InputError(f"light_xml: negatives is {self.negatives!r}; use dynamic or static")
        if self.rank_optimiser.name != "lazy_adam":
            raise InputError("light_xml: rank_optimiser must be lazy_adam: a step touches few of the labels")


@dataclass(frozen=True)
class LabelClusters:
    """A division of the labels: `order` (L,) label ids cluster by cluster, `offsets` (K+1,) where each begins."""

    order: Tensor
    offsets: Tensor

    @classmethod
    def from_assignment(cls, cluster_of_label: Tensor, num_clusters: int) -> LabelClusters:
        """From each label's cluster (L,)."""
        clusters = cluster_of_label.to(torch.int64)
        sizes = torch.bincount(clusters, minlength=num_clusters)
        return cls(
            torch.sort(clusters, stable=True).indices, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        )

    @property
    def num_clusters(self) -> int:
        return self.offsets.numel() - 1


class LightXmlModule(nn.Module):
    """The engine's part: encoder, and with `rank_width` the bottleneck. Outputs (e,) or (e, h)."""

    def __init__(
        self, encoder: Encoder, rank_width: int | None, bottleneck_activation: str = "sigmoid"
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.bottleneck = nn.Linear(encoder.width, rank_width) if rank_width else None
        self.squash = bottleneck_activation == "sigmoid"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        e = self.encoder(input_ids, attention_mask)
        if self.bottleneck is None:
            return (e,)
        h = self.bottleneck(e)
        return e, torch.sigmoid(h) if self.squash else h


class LightXmlHead(LabelHead):
    """Recall rows over clusters and, unless flat, a label table in cluster order; both divided over the ranks.

    As labels of a cluster are neighbours in the table, a recalled cluster is one run of rows. A cluster that lies
    across the border of two blocks is ranked by both ranks, each its part.
    """

    def __init__(
        self,
        config: LightXmlHeadConfig,
        num_labels: int,
        width: int,
        clusters: LabelClusters | None,
        *,
        seed: int,
        averaging_engine: bool = True,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`width`: of e. `clusters`: None for flat."""
        super().__init__(averaging_engine=averaging_engine)
        self.config = config
        self.num_labels = num_labels
        self.num_recalled = num_labels if clusters is None else clusters.num_clusters
        self.recall = DenseLabelLayer(
            LabelBlock.of_rank(self.num_recalled),
            width,
            config.recall_optimiser,
            bound=1.0 / math.sqrt(width),
            seed=seed,
            bias=True,
            dtype=dtype,
            device=device,
        )
        self.layers = {"recall": self.recall}
        self.order: Tensor | None = None
        if clusters is not None:
            self._build_rank(clusters, seed, dtype, device)

    def _build_rank(
        self, clusters: LabelClusters, seed: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        if clusters.order.numel() != self.num_labels or int(clusters.offsets[-1]) != self.num_labels:
            raise InputError(
                f"light_xml: the clusters hold {clusters.order.numel()} labels, the corpus {self.num_labels}"
            )
        self.order = clusters.order.to(device)
        self.offsets = clusters.offsets.to(device)
        self.position = torch.empty_like(self.order)
        self.position[self.order] = torch.arange(self.num_labels, device=device)
        self.rank = CandidateLabelLayer(
            LabelBlock.of_rank(self.num_labels),
            self.config.rank_width,
            self.config.rank_optimiser,
            bound=math.sqrt(6.0 / (self.num_labels + self.config.rank_width)),
            seed=seed + 1,
            dtype=dtype,
            device=device,
        )
        self.layers["rank"] = self.rank

    def begin(self, targets: Ragged) -> None:
        if self.order is not None:
            targets = Ragged(self._clusters(self.position[targets.ids]), targets.offsets)
        self.recall.start_at(document_rates(targets, self.num_recalled))

    def _clusters(self, positions: Tensor) -> Tensor:
        return torch.searchsorted(self.offsets, positions, right=True) - 1

    def loss(
        self,
        outputs: tuple[Tensor, ...],
        targets: Ragged,
        *,
        lr: float | None = None,
        static_clusters: Tensor | None = None,
    ) -> Tensor:
        """See LabelHead. With static negatives: recall alone is trained while `static_clusters` is None; afterwards
        rank alone, on each document's given clusters (b × n, −1 padding; of `recalled`)."""
        counts = gather_counts(len(targets), targets.ids.numel(), device=targets.ids.device)
        sizes = [c[0] for c in counts]
        lists = gather_ragged(targets, counts)
        documents = lists.documents()
        if self.order is None:
            part, _ = self._recall_loss(outputs[0], sizes, lists.ids, documents, lr, 0)
            return sum_over_ranks(part)
        positions = self.position[lists.ids]
        clusters = self._clusters(positions)
        if self.config.negatives == "dynamic":
            recall, keys = self._recall_loss(
                outputs[0], sizes, clusters, documents, lr, self.config.recalled_clusters
            )
            assert keys is not None
            _, drawn = unpack_keys(merge_best_keys(keys, self.config.recalled_clusters))
            rank = self._rank_loss(outputs[1], sizes, positions, clusters, documents, drawn, lr)
            return sum_over_ranks(recall + rank)
        if static_clusters is None:
            part, _ = self._recall_loss(outputs[0], sizes, clusters, documents, lr, 0)
            return sum_over_ranks(part)
        drawn = gather_rows(static_clusters, sizes)
        return sum_over_ranks(self._rank_loss(outputs[1], sizes, positions, clusters, documents, drawn, lr))

    def _recall_loss(
        self, e: Tensor, sizes: list[int], ids: Tensor, documents: Tensor, lr: float | None, top: int
    ) -> tuple[Tensor, Tensor | None]:
        E = gather_embeddings(e, sizes, self.gradient_scale)
        positives = positive_keys(ids, documents, self.recall.block, E.shape[0])
        return self.recall.loss(E, positives, max(1, E.shape[0] * self.num_recalled), lr=lr, top_k=top)

    def _rank_loss(
        self,
        h: Tensor,
        sizes: list[int],
        positions: Tensor,
        clusters: Tensor,
        documents: Tensor,
        drawn: Tensor,
        lr: float | None,
    ) -> Tensor:
        H = gather_embeddings(h, sizes, self.gradient_scale)
        groups, owners = with_true_clusters(drawn, clusters, documents, self.num_recalled)
        candidates = group_candidates(groups, owners, self.offsets, self.rank.block, H.shape[0])
        mine = self.rank.block.owns(positions)
        located = candidates.locate(positions[mine] - self.rank.block.start, documents[mine])
        num_terms = int((self.offsets[groups + 1] - self.offsets[groups]).sum())
        return self.rank.loss(H, candidates, torch.unique(located), max(1, num_terms), lr=lr)

    @torch.no_grad()
    def recalled(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """(b × recalled_clusters) this rank's documents' best clusters, −1 padding: what static negatives are drawn."""
        sizes = [c[0] for c in gather_counts(outputs[0].shape[0], device=outputs[0].device)]
        keys = self.recall.best_keys(gather_rows(outputs[0], sizes), self.config.recalled_clusters)
        return own_rows(unpack_keys(keys)[1], sizes)

    @torch.no_grad()
    def top_k(self, outputs: tuple[Tensor, ...], k: int) -> tuple[Tensor, Tensor]:
        sizes = [c[0] for c in gather_counts(outputs[0].shape[0], device=outputs[0].device)]
        E = gather_rows(outputs[0], sizes)
        if self.order is None:
            scores, ids = self.recall.top_k(E, k)
            return own_rows(torch.sigmoid(scores).masked_fill(ids < 0, float("-inf")), sizes), own_rows(
                ids, sizes
            )
        H = gather_rows(outputs[1], sizes)
        recall, drawn = self.recall.top_k(E, self.config.recalled_clusters)
        valid = drawn >= 0
        owners = torch.arange(E.shape[0], device=E.device)[:, None].expand_as(drawn)[valid]
        candidates = group_candidates(drawn[valid], owners, self.offsets, self.rank.block, E.shape[0])
        # Candidates lie in the order of (cluster, document): find each entry's recall score by that key.
        keys, order = torch.sort(drawn[valid] * E.shape[0] + owners)
        found = torch.searchsorted(keys, candidates.groups * E.shape[0] + candidates.documents)
        of_cluster = torch.sigmoid(recall[valid][order][found])
        scores = (
            torch.sigmoid(self.rank.scores(H, candidates)).float() * of_cluster[candidates.entry_of_pair()]
        )
        labels = self.order[candidates.rows_of_pairs() + self.rank.block.start]
        best = merge_best_keys(best_of_pairs(candidates, scores, labels, k), k)
        scores, ids = unpack_keys(best)
        return own_rows(scores, sizes), own_rows(ids, sizes)

    def shared_state(self) -> dict[str, Tensor]:
        """With the clusters: `label_order` (L,) and `cluster_offsets` (K+1,), which rows on disk are ordered by."""
        state = super().shared_state()
        if self.order is not None:
            state |= {"label_order": self.order, "cluster_offsets": self.offsets}
        return state

    def load_shared_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_shared_state(state)
        if self.order is not None and not torch.equal(self.order.cpu(), state["label_order"].cpu()):
            raise InputError("light_xml: the saved rows belong to another clustering of the labels")


def with_true_clusters(
    drawn: Tensor, clusters: Tensor, documents: Tensor, num_clusters: int
) -> tuple[Tensor, Tensor]:
    """(group, document) entries (n,): every true cluster, then the best drawn ones (B × m, falling, −1 padding) until a
    document has m. True (cluster, document) pairs (p,) may repeat."""
    num_documents, limit = drawn.shape
    true_keys = torch.unique(documents * num_clusters + clusters)
    num_true = torch.bincount(true_keys // num_clusters, minlength=num_documents)
    keys = torch.arange(num_documents, device=drawn.device)[:, None] * num_clusters + drawn
    other = (drawn >= 0) & ~torch.isin(keys, true_keys)
    other &= other.cumsum(1) <= (limit - num_true)[:, None]
    entries = torch.cat([true_keys, keys[other]])
    return entries % num_clusters, entries // num_clusters
