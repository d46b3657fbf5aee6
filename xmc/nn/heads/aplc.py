"""APLC's head, Adaptive Probabilistic Label Clusters (Ye et al. 2020): frequent labels in a head that every document is
scored against, the others in tails that a document pays for only if it has a label there.

Formula: with h the hidden state, a_i its logit for tail i and t_i its projection to width d / q^i,
p(l) = σ(W_l h) for labels of the head, p(l) = σ(a_i) · σ(W_l t_i) for labels of tail i.
Loss of a document: BCE of every label of the head; of every label of the tails in which it has one; for each other tail
BCE of a_i against 0. Probabilities of tails stay logits throughout, so that no product is rounded to 0 or 1:
logit of σ(a)·σ(b) = a − softplus(softplus(a) − b).
Needs: the outputs of `AplcModule`. With no tails it is a flat layer. Suits label sets whose frequencies fall steeply.

Legend: B documents of all ranks, b of this rank, K tails, L labels, d width of h, w width of a tail, c rows of a chunk.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmc.errors import InputError
from xmc.labels.partition import tail_widths
from xmc.nn.dense_layer import DenseLabelLayer, positive_keys
from xmc.nn.encoders import Encoder
from xmc.nn.heads.base import LabelHead, document_rates, own_rows
from xmc.nn.heads.light_xml import LabelClusters
from xmc.nn.losses import PairLoss, bce
from xmc.nn.optimisers import RowOptimiserConfig
from xmc.nn.sharding import (
    LabelBlock,
    Ragged,
    best_keys,
    fused_loss,
    gather_counts,
    gather_embeddings,
    gather_ragged,
    gather_rows,
    rank_index,
    rank_keys,
    sum_over_ranks,
    unpack_keys,
)

_EXACT_SOFTPLUS = 50.0  # beyond it softplus(x) is x, to float64
_MOST_TAILS = len(string.ascii_lowercase)


@dataclass(frozen=True)
class AplcHeadConfig:
    # tail i sees the hidden state at its width / decay^i: a larger decay is a smaller and faster layer
    decay: float = 2.0
    # of the hidden state to a tail: linear (the paper), or norm_relu, with LayerNorm and ReLU behind it (its program)
    projection: Literal["linear", "norm_relu"] = "linear"
    # a bias a label and a tail; the paper counts none and its program has none
    bias: bool = False
    # terms: the mean over all terms of a batch (the paper's equation 5); documents: over a document's own terms, then
    # over documents (its program), which gives a document with labels in tails no more weight than another
    normalisation: Literal["terms", "documents"] = "terms"
    optimiser: RowOptimiserConfig = field(default_factory=RowOptimiserConfig)

    def __post_init__(self) -> None:
        if self.decay < 1.0:
            raise InputError(f"aplc: decay is {self.decay}; it must be at least 1")
        if self.projection not in ("linear", "norm_relu"):
            raise InputError(f"aplc: projection is {self.projection!r}; use linear or norm_relu")
        if self.normalisation not in ("terms", "documents"):
            raise InputError(f"aplc: normalisation is {self.normalisation!r}; use terms or documents")

    def widths(self, num_tails: int, hidden: int) -> list[int]:
        """(K) width of each tail for a hidden width d."""
        if num_tails > _MOST_TAILS:
            raise InputError(f"aplc: {num_tails} tails are too many; use at most {_MOST_TAILS}")
        return tail_widths(num_tails, hidden, self.decay).tolist()


# --- the engine's part ----------------------------------------------------------------------------------------------


class TailInputs(nn.Module):
    """What the tails need of a hidden state h (b × d): a logit each and a projection each. The same on every rank."""

    def __init__(self, config: AplcHeadConfig, num_tails: int, width: int) -> None:
        super().__init__()
        widths = config.widths(num_tails, width)
        self.logits = nn.Linear(width, num_tails, bias=config.bias) if num_tails else None
        self.projections = nn.ModuleList(_projection(width, w, config.projection) for w in widths)
        self._rows: Sequence[Tensor] | None = None

    @torch.no_grad()
    def start_at(self, rates: Tensor) -> None:
        """Set the biases, where there are any, so that each tail starts with its rate (K,) as probability."""
        if self.logits is not None and self.logits.bias is not None:
            self.logits.bias.copy_(torch.logit(rates))

    def expect(self, rows: Sequence[Tensor]) -> None:
        """Project in the next forward pass only these documents (n_i,) to tail i. A tail without any gets a gradient of
        zeros for its projection, and no other work."""
        self._rows = rows

    def forward(self, h: Tensor) -> tuple[Tensor, ...]:
        """Logits (b × K), then for each tail the projections (n_i × w_i) of the expected documents, or of all."""
        rows, self._rows = self._rows, None
        seen = [h] * len(self.projections) if rows is None else [h[n] for n in rows]
        logits = h.new_zeros(h.shape[0], 0) if self.logits is None else self.logits(h)
        return logits, *(project(x) for project, x in zip(self.projections, seen, strict=True))


def _projection(width: int, tail_width: int, kind: str) -> nn.Module:
    linear = nn.Linear(width, tail_width, bias=False)
    if kind == "linear":
        return linear
    return nn.Sequential(linear, nn.LayerNorm(tail_width), nn.ReLU())


class AplcModule(nn.Module):
    """Encoder, hidden layer with tanh and dropout, and the tails' inputs. Outputs (h, a, t_1, …, t_K)."""

    def __init__(
        self, encoder: Encoder, config: AplcHeadConfig, num_tails: int, hidden_width: int, dropout: float
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.hidden = nn.Linear(encoder.width, hidden_width)
        self.dropout = nn.Dropout(dropout)
        self.tails = TailInputs(config, num_tails, hidden_width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        h = self.dropout(torch.tanh(self.hidden(self.encoder(input_ids, attention_mask))))
        return h, *self.tails(h)


# --- the rows' part -------------------------------------------------------------------------------------------------


def product_logit(a: Tensor, b: Tensor) -> Tensor:
    """The logit of σ(a)·σ(b), broadcast; never above a nor b."""
    return a - F.softplus(F.softplus(a, threshold=_EXACT_SOFTPLUS) - b, threshold=_EXACT_SOFTPLUS)


class _Product:
    """A pair loss of logits b (c × n) under the tail's logits a (n,): `pair_loss` of the product's logit u.

    ∂u/∂b = σ(softplus(a) − b) and ∂u/∂a = 1 − σ(a)·∂u/∂b; the gradient for a adds up over the chunks.
    """

    def __init__(self, a: Tensor, pair_loss: PairLoss) -> None:
        self._a, self._soft = a, F.softplus(a, threshold=_EXACT_SOFTPLUS)
        self._pair_loss = pair_loss
        self.gradient = torch.zeros_like(a)

    def __call__(self, logits: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
        s = self._soft - logits
        u = F.softplus(s, threshold=_EXACT_SOFTPLUS).neg_().add_(self._a)
        loss, derivative = self._pair_loss(u, positives)
        self.gradient += derivative.sum(0)
        derivative.mul_(s.sigmoid_())
        self.gradient -= torch.sigmoid(self._a) * derivative.sum(0)
        return loss, derivative


class ClusterLayer(DenseLabelLayer):
    """The rows of the head or of a tail. A tail rests in steps in which nobody has a label there: its rows, their
    moments and their step count stay as they are."""

    _num_skipped = 0

    def product_loss(
        self,
        T: Tensor,
        a: Tensor,
        positives: Tensor,
        normaliser: float,
        *,
        pair_loss: PairLoss = bce,
        lr: float | None = None,
    ) -> Tensor:
        """As `loss`, of the product with the tail's logits a (n,), with the graph to a and to projections T (n × w)."""
        train = torch.is_grad_enabled()

        def compute(x: Tensor) -> tuple[Tensor, Tensor]:
            product = _Product(x[:, -1].to(self.weight.dtype), pair_loss)
            loss, dT = self._pass(x[:, :-1].contiguous(), positives, normaliser, product, lr, train, 0, [])
            return loss, torch.cat([dT, (product.gradient / normaliser)[:, None]], 1)

        return fused_loss(torch.cat([T, a[:, None]], 1), compute)

    def _scores(self, E_t: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        """(c × n) scores; where the tail's own logits stand behind the projections (w+1 × n), of the product."""
        logits = super()._scores(E_t[: self.width], start, stop, out)
        return logits if E_t.shape[0] == self.width else product_logit(E_t[self.width], logits)

    def skip(self) -> None:
        """Count a micro-batch without a label here: the mean gradient is over all micro-batches."""
        self._num_skipped += 1

    @property
    def _touched_share(self) -> float:
        return self._num_stored / max(self._num_stored + self._num_skipped, 1)

    def gradient_square_sum(self) -> Tensor:
        if not self._num_stored:
            return torch.zeros((), dtype=torch.float64, device=self.weight.device)
        return super().gradient_square_sum() * self._touched_share**2

    def step(self, lr: float, gradient_factor: float = 1.0) -> None:
        super().step(lr, gradient_factor * self._touched_share)
        self._num_skipped = 0


class _Mean:
    """How terms are averaged: a `normaliser` of everything, and a weight (B,) of each document's terms."""

    def __init__(self, terms: Tensor, by_document: bool, dtype: torch.dtype) -> None:
        """`terms` (B,): each document's number of terms."""
        self._by_document = by_document
        self.normaliser = 1.0 if by_document else float(terms.sum().clamp_min(1))
        terms = terms.to(dtype)
        self.weights = 1.0 / (terms * terms.numel()) if by_document else torch.ones_like(terms)

    def pair_loss(self, documents: Tensor | slice = slice(None)) -> PairLoss:
        """Of logits (c × n) of these documents (n,)."""
        return _weighted_bce(self.weights[documents]) if self._by_document else bce


def _weighted_bce(weights: Tensor) -> PairLoss:
    """BCE in which each document's terms have its weight (n,)."""

    def loss(logits: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
        of_document = F.softplus(logits, threshold=_EXACT_SOFTPLUS).sum(0, dtype=torch.float64)
        found = logits.view(-1)[positives].double()
        of_document.index_add_(0, positives % max(weights.numel(), 1), found, alpha=-1)
        derivative = torch.sigmoid(logits)
        derivative.view(-1)[positives] -= 1.0
        return of_document @ weights.double(), derivative.mul_(weights)

    return loss


@dataclass(frozen=True)
class _Targets:
    """All ranks' labels of a batch: n (label, document) pairs by cluster and row, and who has labels in which tail."""

    sizes: list[int]  # documents of each rank
    documents: Tensor  # (n,)
    clusters: Tensor  # (n,) 0 is the head
    rows: Tensor  # (n,) the label's place in its cluster
    in_tail: Tensor  # (B × K)
    in_tail_sizes: list[list[int]]  # for each rank, its documents in each tail


class AplcHead(LabelHead):
    """Rows of the head and of each tail, every cluster divided over the ranks.

    In a cluster rows stand by label id, so that equal scores are told apart by id wherever they lie.
    """

    def __init__(
        self,
        config: AplcHeadConfig,
        clusters: LabelClusters,
        width: int,
        *,
        seed: int,
        averaging_engine: bool = True,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`clusters`: cluster 0 is the head, the others are the tails. `width`: of h."""
        super().__init__(averaging_engine=averaging_engine)
        self.config = config
        self.order = clusters.order.to(device)
        self.offsets = clusters.offsets.to(device)
        self.position = torch.empty_like(self.order)
        self.position[self.order] = torch.arange(self.order.numel(), device=device)
        self.dtype = dtype
        self._sizes = self.offsets.diff()
        sizes = self._sizes.tolist()
        self.head, *self.tails = (
            ClusterLayer(
                LabelBlock.of_rank(size),
                w,
                config.optimiser,
                bound=1.0 / math.sqrt(w),
                seed=seed + number,
                bias=config.bias,
                dtype=dtype,
                device=device,
            )
            for number, (size, w) in enumerate(
                zip(sizes, [width, *config.widths(len(sizes) - 1, width)], strict=True)
            )
        )
        self.layers = {"head": self.head}
        self.layers |= {
            f"tail_{letter}": tail for letter, tail in zip(string.ascii_lowercase, self.tails, strict=False)
        }

    def begin(self, targets: Ragged) -> None:
        """See LabelHead; a tail's labels start from their rates among the documents that need the tail."""
        rates = document_rates(targets, self.order.numel())[self.order]
        among = [torch.ones_like(rates[:1]), *self.tail_rates(targets)]
        for layer, part, whole in zip(
            (self.head, *self.tails), rates.split(self._sizes.tolist()), among, strict=True
        ):
            layer.start_at((part / whole).clamp_max(1.0 - 1e-6))

    def tail_rates(self, targets: Ragged) -> Tensor:
        """(K,) the share of all ranks' documents that have a label in each tail."""
        clusters = self._clusters(self.position[targets.ids])
        return document_rates(Ragged(clusters, targets.offsets), 1 + len(self.tails))[1:]

    def members(self, targets: Ragged) -> list[Tensor]:
        """For each tail, which of this rank's documents (n_i,) have a label in it: what `TailInputs.expect` takes."""
        in_tail = self._in_tail(self._clusters(self.position[targets.ids]), targets.documents(), len(targets))
        return [column.nonzero()[:, 0] for column in in_tail.unbind(1)]

    def loss(self, outputs: tuple[Tensor, ...], targets: Ragged, *, lr: float | None = None) -> Tensor:
        """See LabelHead. A tail's projections may be those of all this rank's documents or of its `members` alone."""
        h, a, *projections = outputs
        batch = self._gather(targets)
        terms = torch.where(batch.in_tail, self._sizes[1:], 1).sum(1) + self._sizes[0]
        mean = _Mean(terms, self.config.normalisation == "documents", self.dtype)
        both = gather_embeddings(torch.cat([h, a], 1), batch.sizes, self.gradient_scale).to(self.dtype)
        H, A = both[:, : h.shape[1]], both[:, h.shape[1] :]
        part = self._head_loss(H, batch, mean, lr)
        # Every rank knows all documents' logits of the tails; each counts its own.
        others = (
            torch.where(batch.in_tail, 0.0, F.softplus(A, threshold=_EXACT_SOFTPLUS)).sum(1) * mean.weights
        )
        part = part + own_rows(others, batch.sizes).sum() / mean.normaliser
        for tail, t in enumerate(projections):
            part = part + self._tail_loss(tail, t, A, batch, mean, lr)
        return sum_over_ranks(part)

    def _head_loss(self, H: Tensor, batch: _Targets, mean: _Mean, lr: float | None) -> Tensor:
        of_head = batch.clusters == 0
        positives = positive_keys(batch.rows[of_head], batch.documents[of_head], self.head.block, H.shape[0])
        part, _ = self.head.loss(H, positives, mean.normaliser, pair_loss=mean.pair_loss(), lr=lr)
        return part

    def _tail_loss(
        self, tail: int, t: Tensor, A: Tensor, batch: _Targets, mean: _Mean, lr: float | None
    ) -> Tensor:
        layer, inside = self.tails[tail], batch.in_tail[:, tail]
        sizes = [counts[tail] for counts in batch.in_tail_sizes]
        if not any(sizes):
            if lr is None and torch.is_grad_enabled():
                layer.skip()
            return t[:0].sum()  # 0, with the graph: engines want a gradient of every parameter
        documents = inside.nonzero()[:, 0]
        if t.shape[0] != sizes[rank_index()]:
            t = t[own_rows(inside, batch.sizes)]
        T = gather_embeddings(t, sizes, self.gradient_scale).to(self.dtype)
        of_tail = batch.clusters == tail + 1
        places = (inside.cumsum(0) - 1)[batch.documents[of_tail]]
        positives = positive_keys(batch.rows[of_tail], places, layer.block, documents.numel())
        return layer.product_loss(
            T, A[documents, tail], positives, mean.normaliser, pair_loss=mean.pair_loss(documents), lr=lr
        )

    def _gather(self, targets: Ragged) -> _Targets:
        counts = gather_counts(len(targets), targets.ids.numel(), device=targets.ids.device)
        sizes = [c[0] for c in counts]
        lists = gather_ragged(targets, counts)
        documents, positions = lists.documents(), self.position[lists.ids]
        clusters = self._clusters(positions)
        in_tail = self._in_tail(clusters, documents, len(lists))
        in_tail_sizes = torch.stack([part.sum(0) for part in in_tail.split(sizes)]).tolist()
        rows = positions - self.offsets[clusters]
        return _Targets(sizes, documents, clusters, rows, in_tail, in_tail_sizes)

    def _clusters(self, positions: Tensor) -> Tensor:
        return torch.searchsorted(self.offsets, positions, right=True) - 1

    def _in_tail(self, clusters: Tensor, documents: Tensor, num_documents: int) -> Tensor:
        """(documents × K) whether a document has a label in a tail."""
        found = torch.zeros(num_documents, 1 + len(self.tails), dtype=torch.bool, device=clusters.device)
        found[documents, clusters] = True
        return found[:, 1:]

    @torch.no_grad()
    def top_k(self, outputs: tuple[Tensor, ...], k: int) -> tuple[Tensor, Tensor]:
        """See LabelHead; exact. No label of a tail is more probable than the tail: a document whose k-th best so far is
        above that is not scored there, and a tail that no document reaches costs nothing."""
        h, a, *projections = outputs
        sizes = [c[0] for c in gather_counts(h.shape[0], device=h.device)]
        both = gather_rows(torch.cat([h, a], 1), sizes).to(self.dtype)
        H, A = both[:, : h.shape[1]], both[:, h.shape[1] :]
        best = self._label_keys(self.head.best_keys(H, k), 0)
        for tail, t in enumerate(projections):
            reached = A[:, tail].float() >= unpack_keys(best)[0][:, -1]
            reached_sizes = [int(part.sum()) for part in reached.split(sizes)]
            if any(reached_sizes):
                T = gather_rows(t[own_rows(reached, sizes)], reached_sizes).to(self.dtype)
                keys = self.tails[tail].best_keys(torch.cat([T, A[reached, tail, None]], 1), k)
                keys = self._label_keys(keys, tail + 1)
                best[reached] = best_keys(torch.cat([best[reached], keys], 1), k)
        scores, ids = unpack_keys(best)
        scores = torch.sigmoid(scores).masked_fill(ids < 0, float("-inf"))
        return own_rows(scores, sizes), own_rows(ids, sizes)

    def _label_keys(self, keys: Tensor, cluster: int) -> Tensor:
        """Keys by label id from keys by row of a cluster."""
        scores, rows = unpack_keys(keys)
        labels = self.order[rows.clamp_min(0) + self.offsets[cluster]]
        return torch.where(rows < 0, keys, rank_keys(scores, labels))

    def shared_state(self) -> dict[str, Tensor]:
        """With the partition: `label_order` (L,) and `cluster_offsets` (K+2,), which rows on disk are ordered by."""
        return super().shared_state() | {"label_order": self.order, "cluster_offsets": self.offsets}

    def load_shared_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_shared_state(state)
        for name, own in (("label_order", self.order), ("cluster_offsets", self.offsets)):
            if not torch.equal(own.cpu(), state[name].cpu()):
                raise InputError("aplc: the saved rows belong to another partition of the labels")
