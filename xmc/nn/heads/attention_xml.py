"""AttentionXML's head: every label reads a text by an attention of its own; one perceptron for all labels judges it.

Formula: α_lt = softmax over words t of w_l · s_t; m_l = Σ_t α_lt s_t; logit = MLP(m_l); loss = mean BCE over the labels
that are scored; probability σ(logit), times that of the node's parent where it has one.
Needs: the outputs of `AttentionXmlModule`. Without groups every label is scored: small label sets, and the first level
of a tree. With groups (the children of each node of the level above), only those of a document's candidate parents.

The perceptron's first layer is linear, so the module applies it to the states before they are mixed:
W m_l = Σ_t α_lt (W s_t). That is the same number for a fraction of the work, as labels outnumber words.

Legend: B documents of all ranks, b of this rank, T words, d width of a state, q width of the first hidden layer, L_r
label rows of this rank's block, c rows of a chunk, n candidates of a document, p candidate pairs, C parents, k top.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmc.errors import InputError
from xmc.nn.candidates import CandidateLabelLayer, Candidates, best_of_pairs, group_candidates
from xmc.nn.dense_layer import positive_keys
from xmc.nn.heads.base import LabelHead, own_rows
from xmc.nn.heads.light_xml import LabelClusters, with_true_clusters
from xmc.nn.losses import bce
from xmc.nn.optimisers import RowOptimiserConfig
from xmc.nn.sharding import (
    LabelBlock,
    Ragged,
    best_keys,
    best_of_scores,
    gather_counts,
    gather_embeddings,
    gather_ragged,
    gather_rows,
    known_gradients,
    merge_best_keys,
    sum_over_ranks,
    unpack_keys,
)
from xmc.nn.words import BiLstm

_CHUNK_BYTES = {"cpu": 32 * 2**20, "cuda": 2**30}
_LEAST_ROWS = 16  # of a chunk: fewer would starve the matrix products


class LentLinear(nn.Linear):
    """A linear layer that somebody outside the module applies: it gives copies of its weight and bias, so that their
    gradients take the ordinary way to the parameters. A module of its own, as ZeRO 3 gathers what a module holds."""

    def forward(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.weight.clone(), self.bias.clone()


class AttentionXmlModule(nn.Module):
    """The engine's part: BiLSTM and perceptron. Outputs the states (b × T × d), the first layer of them (b × T × q),
    the mask (b × T), and the weights of the perceptron's other layers, which the head applies to the mixed states."""

    def __init__(self, encoder: BiLstm, hidden_widths: tuple[int, ...]) -> None:
        super().__init__()
        self.encoder = encoder
        widths = (encoder.width, *hidden_widths, 1)
        self.first = nn.Linear(widths[0], widths[1])
        self.others = nn.ModuleList(LentLinear(a, b) for a, b in itertools.pairwise(widths[1:]))
        for layer in (self.first, *self.others):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, vectors: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        states = self.encoder(vectors, mask)
        return states, self.first(states), mask, *(x for layer in self.others for x in layer())


class MaxPoolModule(nn.Module):
    """The paper's comparison without attention: one vector a text, the largest states of its words through a hidden
    layer, for a flat label layer. Outputs (e,)."""

    def __init__(self, encoder: BiLstm, hidden_width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.hidden = nn.Linear(encoder.width, hidden_width)

    def forward(self, vectors: Tensor, mask: Tensor) -> tuple[Tensor]:
        states = self.encoder(vectors, mask).masked_fill(mask[:, :, None] == 0, float("-inf"))
        return (torch.relu(self.hidden(states.amax(1))),)


@dataclass(frozen=True)
class Texts:
    """What label rows read: states (B × T × d), the first layer of them (B × T × q), mask (B × T) bool, and the weights
    and biases of the perceptron's other layers in turn."""

    states: Tensor
    first: Tensor
    mask: Tensor
    weights: tuple[Tensor, ...]

    def logits(self, rows: Tensor) -> Tensor:
        """(B × c) logits of label rows: (c × d) for all documents, or (B × c × d) each document's own."""
        x = attention(self.states, self.mask, rows) @ self.first
        for weight, bias in zip(self.weights[::2], self.weights[1::2], strict=True):
            x = F.linear(torch.relu(x), weight, bias)
        return x.squeeze(-1)

    def of(self, documents: slice) -> Texts:
        return Texts(self.states[documents], self.first[documents], self.mask[documents], self.weights)

    def to(self, dtype: torch.dtype) -> Texts:
        return Texts(
            self.states.to(dtype), self.first.to(dtype), self.mask, tuple(w.to(dtype) for w in self.weights)
        )

    def leaves(self, dtype: torch.dtype) -> Texts:
        """The same numbers as leaves of a new graph."""
        fresh = [x.detach().to(dtype).requires_grad_() for x in self.differentiable]
        return Texts(fresh[0], fresh[1], self.mask, tuple(fresh[2:]))

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        return (self.states, self.first, *self.weights)


def attention(states: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """α (B × c × T): how much each label row, (c × d) or (B × c × d), reads of each word; padding gets 0."""
    scores = torch.matmul(rows, states.transpose(1, 2))
    return scores.masked_fill(~mask[:, None, :], float("-inf")).softmax(-1)


class AttentionRows(CandidateLabelLayer):
    """Attention rows w_l of a block. Logits, loss and gradients are made chunk by chunk; the graph of a chunk is gone
    before the next one begins, and no (documents × labels × words) array ever exists."""

    def loss_of_all(
        self, texts: Texts, positives: Tensor, normaliser: float, lr: float | None, scale: float
    ) -> Tensor:
        """Σ BCE over (B × L_r) / normaliser, with the graph to `texts`. `positives`: of `positive_keys`. `scale`: what
        the perceptron's gradient is multiplied by. Rows as in CandidateLabelLayer.loss."""
        work = _Work(texts, self.weight.dtype, normaliser)
        batch = texts.states.shape[0]
        if work.train and lr is not None:
            self.begin_step()
        stored = [self.weight[:0]]
        for start, stop in self._row_spans(texts):
            first, last = torch.searchsorted(positives, positives.new_tensor([start * batch, stop * batch]))
            inside = positives[first:last] - start * batch
            flat = (inside % batch) * (stop - start) + inside // batch
            gradient = work.add(slice(0, batch), self.weight[start:stop], flat)
            if gradient is None:
                continue
            if lr is None:
                stored.append(gradient)
            else:
                self.optimisers["weight"].update(self.weight, start, stop, gradient, lr)
        if work.train and lr is None:
            self.add_gradient(torch.arange(self.block.size, device=self.weight.device), torch.cat(stored))
        return work.loss(scale)

    def loss_of_candidates(
        self,
        texts: Texts,
        candidates: Candidates,
        positives: Tensor,
        normaliser: float,
        lr: float | None,
        scale: float,
    ) -> Tensor:
        """The same over candidate pairs alone. `positives`: flat pair indices, of `Candidates.locate`."""
        work = _Work(texts, self.weight.dtype, normaliser)
        pairs = _ByDocument(candidates)
        is_positive = torch.zeros(candidates.num_pairs, dtype=torch.bool, device=positives.device)
        is_positive[positives] = True
        is_positive = is_positive[pairs.order]
        touched = candidates.rows()
        total = self.weight.new_zeros(touched.numel() if work.train else 0, self.width)
        for documents, first, last, rows, kept in pairs.chunks(self._documents_at_once(texts, pairs.longest)):
            flat = is_positive[first:last].nonzero()[:, 0]
            gradient = work.add(documents, self.weight[rows], flat, kept)
            if gradient is not None:
                total.index_add_(0, torch.searchsorted(touched, rows[kept]), gradient[kept])
        if work.train:
            if lr is not None:
                self.begin_step()
            self._move_or_store(touched, total, lr)
        return work.loss(scale)

    @torch.no_grad()
    def best_of_all(self, texts: Texts, k: int) -> Tensor:
        """The best k of all ranks' rows by logit, as keys (B × k) of `sharding.rank_keys`."""
        best = torch.empty(texts.states.shape[0], 0, dtype=torch.int64, device=texts.states.device)
        for start, stop in self._row_spans(texts):
            keys = best_of_scores(texts.logits(self.weight[start:stop]), self.block.start + start, k)
            best = best_keys(torch.cat([best, keys], 1), k)
        return merge_best_keys(best_keys(best, k), k)

    @torch.no_grad()
    def logits_of_candidates(self, texts: Texts, candidates: Candidates) -> Tensor:
        """(p,) in the order of the candidates' pairs."""
        pairs = _ByDocument(candidates)
        logits = texts.states.new_empty(candidates.num_pairs)
        for documents, first, last, rows, kept in pairs.chunks(self._documents_at_once(texts, pairs.longest)):
            logits[pairs.order[first:last]] = texts.of(documents).logits(self.weight[rows])[kept]
        return logits

    def _row_spans(self, texts: Texts) -> Iterator[tuple[int, int]]:
        batch, length, _ = texts.states.shape
        numbers = max(1, batch) * self._numbers_a_pair(texts, length)
        step = max(_LEAST_ROWS, self._chunk_numbers() // numbers)
        for start in range(0, self.block.size, step):
            yield start, min(start + step, self.block.size)

    def _documents_at_once(self, texts: Texts, longest: int) -> int:
        # Here rows, and their gradients, are copied for each document.
        numbers = self._numbers_a_pair(texts, texts.states.shape[1]) + 2 * self.width
        return max(1, self._chunk_numbers() // (max(1, longest) * numbers))

    def _chunk_numbers(self) -> int:
        return _CHUNK_BYTES[self.weight.device.type] // self.weight.element_size()

    @staticmethod
    def _numbers_a_pair(texts: Texts, length: int) -> int:
        """About how many numbers the graph of one (document, row) pair holds."""
        return 4 * length + 3 * (texts.first.shape[2] + sum(w.shape[0] for w in texts.weights[::2]))


class _Work:
    """Loss and gradients of a batch, summed over chunks."""

    def __init__(self, texts: Texts, dtype: torch.dtype, normaliser: float) -> None:
        self.train = torch.is_grad_enabled()
        self._given, self._texts, self._normaliser = texts, texts.leaves(dtype), normaliser
        self._total = torch.zeros((), dtype=torch.float64, device=texts.states.device)
        self._gradients = [torch.zeros_like(x) for x in self._texts.differentiable] if self.train else []

    def add(
        self, documents: slice, rows: Tensor, positives: Tensor, kept: Tensor | None = None
    ) -> Tensor | None:
        """Take in the pairs of some documents and rows, (c × d) or (documents × c × d): all, or those `kept` (documents
        × c). `positives` are flat indices of them. Returns the gradient of the rows when training."""
        rows = rows.detach().requires_grad_(self.train)
        part = self._texts.of(documents)
        logits = part.logits(rows)
        if kept is not None:
            logits = logits[kept]
        loss, derivative = bce(logits.detach(), positives)
        self._total += loss
        if not self.train:
            return None
        wanted = (*part.differentiable, rows)
        *gradients, of_rows = torch.autograd.grad(logits, wanted, derivative.mul_(1.0 / self._normaliser))
        for i, gradient in enumerate(gradients):
            (self._gradients[i][documents] if i < 2 else self._gradients[i]).add_(gradient)
        return of_rows

    def loss(self, scale: float) -> Tensor:
        """This block's part of the loss, with the graph to the texts given. The perceptron, which all ranks share and
        the engine averages, has its gradient scaled; that of the states is scaled where they are gathered."""
        total = (self._total / self._normaliser).to(self._texts.states.dtype)
        if not self.train:
            return total
        gradients = [*self._gradients[:2], *(g * scale for g in self._gradients[2:])]
        return known_gradients(total, gradients, self._given.differentiable)


class _ByDocument:
    """Candidate pairs document by document."""

    def __init__(self, candidates: Candidates) -> None:
        documents = candidates.documents[candidates.entry_of_pair()]
        self.order = torch.argsort(documents, stable=True)  # (p,) places in the candidates' own order
        self._rows = candidates.rows_of_pairs()[self.order]
        self._lengths = torch.bincount(documents, minlength=candidates.num_documents)
        self._ends = self._lengths.cumsum(0)
        self.longest = int(self._lengths.max()) if self._lengths.numel() else 0

    def chunks(self, at_once: int) -> Iterator[tuple[slice, int, int, Tensor, Tensor]]:
        """(documents, first pair, last + 1, local rows padded with 0, which of them are real), both (documents × n)."""
        columns = torch.arange(self.longest, device=self._rows.device)
        for start in range(0, self._lengths.numel(), at_once):
            documents = slice(start, start + at_once)
            lengths = self._lengths[documents]
            longest = int(lengths.max())
            if longest == 0:
                continue
            last = int(self._ends[documents][-1])
            first = last - int(lengths.sum())
            kept = columns[:longest] < lengths[:, None]
            rows = self._rows.new_zeros(kept.shape)
            rows[kept] = self._rows[first:last]
            yield documents, first, last, rows, kept


class AttentionXmlHead(LabelHead):
    """Attention rows of all labels, or of one level of a label tree, divided over the ranks.

    With `groups` the rows lie in their order, so that the children of a node are one run of rows.
    """

    def __init__(
        self,
        num_labels: int,
        width: int,
        groups: LabelClusters | None,
        *,
        node_of: Tensor | None = None,
        seed: int,
        optimiser: RowOptimiserConfig | None = None,
        averaging_engine: bool = True,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Rows for the `num_labels` labels, or nodes of a level, over states of `width` d. `groups`: those under each
        node of the level above; None for none. `node_of` (L,): the node of each label where nodes are scored."""
        super().__init__(averaging_engine=averaging_engine)
        if groups is not None and groups.order.numel() != num_labels:
            raise InputError(
                f"attention_xml: the level above has {groups.order.numel()} children, the level {num_labels} nodes"
            )
        self.rows = AttentionRows(
            LabelBlock.of_rank(num_labels),
            width,
            optimiser or RowOptimiserConfig(name="lazy_adam", weight_decay=0.0),
            bound=math.sqrt(6.0 / (num_labels + width)),
            seed=seed,
            dtype=dtype,
            device=device,
        )
        self.layers["attention"] = self.rows
        self.num_labels = num_labels
        self._node_of = None if node_of is None else node_of.to(device=device, dtype=torch.int64)
        self.groups = groups
        if groups is not None:
            self._order, self._offsets = groups.order.to(device), groups.offsets.to(device)
            self._position = torch.empty_like(self._order)
            self._position[self._order] = torch.arange(num_labels, device=device)

    def classes_of(self, labels: Tensor) -> Tensor:
        return labels if self._node_of is None else self._node_of[labels]

    def loss(
        self,
        outputs: tuple[Tensor, ...],
        targets: Ragged,
        *,
        lr: float | None = None,
        parents: Tensor | None = None,
    ) -> Tensor:
        """See LabelHead. With groups, `parents` (b × C, −1 padding, best first) are the documents' candidates on the
        level above. True parents always are candidates, and take the places of the last of the others."""
        counts = gather_counts(len(targets), targets.ids.numel(), device=targets.ids.device)
        lists = gather_ragged(targets, counts)
        sizes = [c[0] for c in counts]
        texts = self._gather(outputs, sizes)
        batch, documents, ids = texts.states.shape[0], lists.documents(), self.classes_of(lists.ids)
        if self.groups is None:
            positives = positive_keys(ids, documents, self.rows.block, batch)
            normaliser = max(1, batch * self.num_labels)
            return sum_over_ranks(
                self.rows.loss_of_all(texts, positives, normaliser, lr, self.gradient_scale)
            )
        assert parents is not None
        positions = self._position[ids]
        true = torch.searchsorted(self._offsets, positions, right=True) - 1
        entries = with_true_clusters(gather_rows(parents, sizes), true, documents, self.groups.num_clusters)
        candidates, num_pairs = self._candidates(*entries, batch)
        mine = self.rows.block.owns(positions)
        positives = candidates.locate(positions[mine] - self.rows.block.start, documents[mine])
        return sum_over_ranks(
            self.rows.loss_of_candidates(
                texts, candidates, positives, max(1, num_pairs), lr, self.gradient_scale
            )
        )

    @torch.no_grad()
    def top_k(
        self, outputs: tuple[Tensor, ...], k: int, beam: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """See LabelHead. With groups, `beam` holds the documents' best nodes of the level above (b × C, −1 padding) and
        their probabilities (b × C), which those of their children are multiplied by."""
        sizes = [c[0] for c in gather_counts(outputs[0].shape[0], device=outputs[0].device)]
        # The module may compute in 16 bits; rows are read in their own.
        texts = self._gather(outputs, sizes).to(self.rows.weight.dtype)
        if self.groups is None:
            logits, ids = unpack_keys(self.rows.best_of_all(texts, k))
            scores = torch.sigmoid(logits).masked_fill(ids < 0, float("-inf"))
            return own_rows(scores, sizes), own_rows(ids, sizes)
        assert beam is not None
        nodes, probabilities = (gather_rows(part, sizes) for part in beam)
        owners = torch.arange(nodes.shape[0], device=nodes.device)[:, None].expand_as(nodes)
        candidates, _ = self._candidates(nodes[nodes >= 0], owners[nodes >= 0], nodes.shape[0])
        of_parent = _of_entries(candidates, nodes, probabilities)[candidates.entry_of_pair()]
        scores = torch.sigmoid(self.rows.logits_of_candidates(texts, candidates).float()) * of_parent
        labels = self._order[candidates.rows_of_pairs() + self.rows.block.start]
        scores, ids = unpack_keys(merge_best_keys(best_of_pairs(candidates, scores, labels, k), k))
        return own_rows(scores, sizes), own_rows(ids, sizes)

    @torch.no_grad()
    def attention(self, outputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        """(b × n × T): how much each of a document's labels (b × n) reads of each word. One rank has all rows: for
        explanations, not for training."""
        positions = labels if self.groups is None else self._position[labels]
        return attention(outputs[0].to(self.rows.weight.dtype), outputs[2] != 0, self.rows.weight[positions])

    def _gather(self, outputs: tuple[Tensor, ...], sizes: list[int]) -> Texts:
        """All ranks' documents, padded to the longest."""
        states, first, mask, *weights = outputs
        longest = max(c[0] for c in gather_counts(mask.shape[1], device=mask.device))
        missing = longest - mask.shape[1]
        states, first = (
            gather_embeddings(F.pad(x, (0, 0, 0, missing)), sizes, self.gradient_scale)
            for x in (states, first)
        )
        return Texts(states, first, gather_rows(F.pad(mask, (0, missing)), sizes) != 0, tuple(weights))

    def _candidates(self, groups: Tensor, owners: Tensor, num_documents: int) -> tuple[Candidates, int]:
        """This block's candidates from all documents' entries (group, document); and how many pairs all blocks have."""
        distinct = torch.unique(groups * num_documents + owners) // max(1, num_documents)
        num_pairs = int((self._offsets[distinct + 1] - self._offsets[distinct]).sum())
        return group_candidates(groups, owners, self._offsets, self.rows.block, num_documents), num_pairs

    def shared_state(self) -> dict[str, Tensor]:
        """With the groups, which rows on disk are ordered by."""
        state = super().shared_state()
        if self.groups is not None:
            state |= {"label_order": self._order, "group_offsets": self._offsets}
        return state

    def load_shared_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_shared_state(state)
        if self.groups is not None and not torch.equal(self._order.cpu(), state["label_order"].cpu()):
            raise InputError("attention_xml: the saved rows belong to another label tree")


def _of_entries(candidates: Candidates, nodes: Tensor, values: Tensor) -> Tensor:
    """The values (B × C) of nodes (B × C, −1 padding) for each entry (e,) of the candidates made of them."""
    num_documents = nodes.shape[0]
    owners = torch.arange(num_documents, device=nodes.device)[:, None].expand_as(nodes)
    keys, order = torch.sort((nodes * num_documents + owners)[nodes >= 0])
    found = torch.searchsorted(keys, candidates.groups * num_documents + candidates.documents)
    return values[nodes >= 0][order][found]
