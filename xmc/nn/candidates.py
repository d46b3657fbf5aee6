"""Row-sparse scoring: each document is scored against its own candidate labels only, and only touched rows move.

Candidates come in groups of neighbouring rows (the labels of a cluster, the children of a tree node), or as plain lists
of labels, which are groups of one. A rank keeps the part of each group that lies in its block.

Legend: B documents, G groups, T touched groups, e entries (group, document), p pairs (row, document), U touched rows,
L_r rows of this rank's block, d width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xmc.nn import row_kernels
from xmc.nn.label_rows import LabelRows
from xmc.nn.losses import PairLoss, bce
from xmc.nn.sharding import PADDING_KEY, LabelBlock, Ragged, best_keys, fused_loss, rank_keys


@dataclass(frozen=True)
class Candidates:
    """Which rows of this rank's block each document is scored against, sorted by group, then document.

    The flat order of pairs, in which scores and derivatives are held, is: entry by entry, the group's rows in order.
    """

    row_starts: Tensor  # (T,) first local row of each touched group; rising
    row_offsets: Tensor  # (T+1,) touched rows before each group
    entry_offsets: Tensor  # (T+1,) entries before each group
    documents: Tensor  # (e,) the document of each entry
    pair_offsets: Tensor  # (e+1,) pairs before each entry
    num_documents: int
    groups: Tensor  # (e,) the group of each entry

    @property
    def num_pairs(self) -> int:
        return int(self.pair_offsets[-1])

    def rows(self) -> Tensor:
        """(U,) touched local rows, rising and unique."""
        return _expand(self.row_starts, self.row_offsets)

    def entry_of_pair(self) -> Tensor:
        """(p,) the entry of each pair."""
        entries = torch.arange(self.documents.numel(), device=self.documents.device)
        return torch.repeat_interleave(entries, self.pair_offsets.diff())

    def rows_of_pairs(self) -> Tensor:
        """(p,) the local row of each pair."""
        return _expand(torch.repeat_interleave(self.row_starts, self.entry_offsets.diff()), self.pair_offsets)

    def locate(self, rows: Tensor, documents: Tensor) -> Tensor:
        """Flat pair indices of the given (local row, document) pairs (n,); those that are no candidates drop out."""
        if self.documents.numel() == 0 or rows.numel() == 0:
            return rows.new_zeros(0)
        touched = torch.searchsorted(self.row_starts, rows, right=True) - 1
        inside = touched >= 0
        touched = touched.clamp_min(0)
        row_in_group = rows - self.row_starts[touched]
        inside &= row_in_group < self.row_offsets.diff()[touched]
        group_of_entry = torch.repeat_interleave(
            torch.arange(self.row_starts.numel(), device=rows.device), self.entry_offsets.diff()
        )
        keys = group_of_entry * self.num_documents + self.documents
        wanted = touched * self.num_documents + documents
        entry = torch.searchsorted(keys, wanted).clamp_max(keys.numel() - 1)
        inside &= keys[entry] == wanted
        return (self.pair_offsets[entry] + row_in_group)[inside]


def _expand(starts: Tensor, offsets: Tensor) -> Tensor:
    """Concatenated ranges: starts[i], starts[i] + 1, … for offsets[i+1] − offsets[i] numbers each."""
    lengths = offsets.diff()
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
    return shift + torch.arange(shift.numel(), device=shift.device)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def group_candidates(
    groups: Tensor, documents: Tensor, group_offsets: Tensor, block: LabelBlock, num_documents: int
) -> Candidates:
    """Candidates of a block from (group, document) entries (n,), repeated ones counted once.

    Group g holds the rows [group_offsets[g], group_offsets[g+1]) of all labels.
    """
    starts = group_offsets[groups].clamp(block.start, block.stop)
    stops = group_offsets[groups + 1].clamp(block.start, block.stop)
    mine = stops > starts
    keys = torch.unique(groups[mine] * num_documents + documents[mine])
    entry_groups = keys // num_documents if num_documents else keys
    touched, counts = torch.unique_consecutive(entry_groups, return_counts=True)
    first = group_offsets[touched].clamp(block.start, block.stop) - block.start
    sizes = group_offsets[touched + 1].clamp(block.start, block.stop) - block.start - first
    return Candidates(
        row_starts=first,
        row_offsets=_offsets(sizes),
        entry_offsets=_offsets(counts),
        documents=keys - entry_groups * num_documents,
        pair_offsets=_offsets(torch.repeat_interleave(sizes, counts)),
        num_documents=num_documents,
        groups=entry_groups,
    )


def label_candidates(labels: Ragged, block: LabelBlock) -> Candidates:
    """Candidates of a block from each document's list of label ids."""
    ones = torch.arange(block.num_labels + 1, device=labels.ids.device)
    return group_candidates(labels.ids, labels.documents(), ones, block, len(labels))


def best_of_pairs(candidates: Candidates, scores: Tensor, labels: Tensor, k: int) -> Tensor:
    """Each document's best k as keys (B × k) of `sharding.rank_keys`, from the pairs' scores (p,) and label ids (p,).

    The work space is documents × the longest candidate list."""
    lengths = candidates.pair_offsets.diff()
    order = torch.argsort(candidates.documents, stable=True)
    totals = torch.zeros(candidates.num_documents, dtype=torch.int64, device=scores.device)
    totals.index_add_(0, candidates.documents, lengths)
    before = _offsets(lengths[order])[:-1] - _offsets(totals)[:-1][candidates.documents[order]]
    column_of_entry = torch.empty_like(before)
    column_of_entry[order] = before
    entries = candidates.entry_of_pair()
    columns = (
        column_of_entry[entries]
        - candidates.pair_offsets[entries]
        + torch.arange(entries.numel(), device=scores.device)
    )
    width = int(totals.max()) if totals.numel() else 0
    keys = torch.full((candidates.num_documents, width), PADDING_KEY, device=scores.device)
    keys[candidates.documents[entries], columns] = rank_keys(scores, labels)
    return best_keys(keys, k)


class CandidateLabelLayer(LabelRows):
    """Scores W_l · E_i of the candidate pairs.

    On a CPU a compiled loop over the touched rows does it: a row is read once for all its documents. (Gathering rows
    for a batched product copies each row once a pair; a dense product over the union of all documents' candidates costs
    B times the arithmetic, as documents share few candidates.) Other devices gather, in chunks.
    """

    def loss(
        self,
        embeddings: Tensor,
        candidates: Candidates,
        positives: Tensor,
        normaliser: float,
        *,
        pair_loss: PairLoss = bce,
        lr: float | None = None,
    ) -> Tensor:
        """Σ loss over the block's candidate pairs / normaliser, with the graph to `embeddings` (B × d).

        `positives`: flat pair indices, of `Candidates.locate`. With `lr` touched rows move at once; without, their
        gradient is stored for `step`. Under torch.no_grad() rows neither move nor get a gradient.
        """
        train = torch.is_grad_enabled()

        def compute(x: Tensor) -> tuple[Tensor, Tensor]:
            E = x.to(self.weight.dtype).contiguous()
            total, derivative = pair_loss(self.scores(E, candidates), positives)
            dE = torch.zeros_like(E)
            if train:
                dE = self._learn(E, candidates, derivative.mul_(1.0 / normaliser), lr)
            return (total / normaliser).to(E.dtype), dE

        return fused_loss(embeddings, compute)

    @torch.no_grad()
    def scores(self, embeddings: Tensor, candidates: Candidates) -> Tensor:
        """(p,) scores of the candidate pairs."""
        E = embeddings.to(self.weight.dtype).contiguous()
        if E.device.type == "cpu":
            return _scores_cpu(self.weight, E, candidates)
        return _scores_torch(self.weight, E, candidates, self.pairs_at_once)

    @property
    def pairs_at_once(self) -> int:
        return max(1, self.chunk_bytes // (self.weight.element_size() * self.width))

    def _learn(self, E: Tensor, candidates: Candidates, derivative: Tensor, lr: float | None) -> Tensor:
        """Move touched rows, or store their gradient, from d loss / d score (p,); returns d loss / d E (B × d)."""
        rows = candidates.rows()
        if lr is not None:
            self.begin_step()
        if E.device.type != "cpu":
            dW, dE = _gradients_torch(self.weight, E, candidates, derivative, self.pairs_at_once)
            self._move_or_store(rows, dW, lr)
            return dE
        if rows.numel() == 0 and lr is None:
            self.add_gradient(rows, E.new_empty(0, self.width))  # the step counts on every rank alike
        parts = E.new_zeros(row_kernels.PARTS, *E.shape)
        limit = self.pairs_at_once if lr is not None else rows.numel()
        buffer = E.new_empty(0, self.width)
        for first, last, row_first, row_last in _chunks(candidates, limit):
            if lr is None or row_last - row_first > buffer.shape[0]:
                buffer = E.new_empty(row_last - row_first, self.width)
            gradient = buffer[: row_last - row_first]
            _gradients_cpu(self.weight, E, candidates, derivative, first, last, gradient, parts)
            self._move_or_store(rows[row_first:row_last], gradient, lr)
        return parts.sum(0)

    def _move_or_store(self, rows: Tensor, gradient: Tensor, lr: float | None) -> None:
        if lr is None:
            self.add_gradient(rows, gradient)
        else:
            self.optimisers["weight"].update_rows(self.weight, rows, gradient, lr)

    _stored: list[tuple[Tensor, Tensor]] | None = None

    def add_gradient(self, rows: Tensor, gradient: Tensor) -> None:
        """Store a micro-batch's gradient (U × d) of unique local rows (U,) for `step`. Also the way in for heads that
        score rows by autograd: they take `weight[rows]` as a leaf."""
        self._stored = [*(self._stored or []), (rows, gradient)]

    def _mean_gradient(self) -> tuple[Tensor, Tensor]:
        """Touched rows (U,) and the mean over micro-batches of their stored gradients (U × d)."""
        assert self._stored is not None
        if len(self._stored) == 1:
            return self._stored[0]
        rows, position = torch.unique(torch.cat([rows for rows, _ in self._stored]), return_inverse=True)
        total = self.weight.new_zeros(rows.numel(), self.width)
        for part, (_, gradient) in zip(
            position.split([rows.numel() for rows, _ in self._stored]), self._stored, strict=True
        ):
            total.index_add_(0, part, gradient)
        return rows, total.div_(len(self._stored))

    def gradient_square_sum(self) -> Tensor:
        """Sum of squares (float64 scalar) of the mean of the stored gradients, of this block."""
        if not self._stored:
            return torch.zeros((), dtype=torch.float64, device=self.weight.device)
        rows, gradient = self._mean_gradient()
        self._stored = [(rows, gradient)]
        return gradient.double().square().sum()

    def step(self, lr: float, gradient_factor: float = 1.0) -> None:
        """Move the touched rows by the mean of the stored gradients times `gradient_factor`, and forget them."""
        if self._stored is None:
            return
        self.begin_step()
        rows, gradient = self._mean_gradient()
        if gradient_factor != 1.0:
            gradient = gradient * gradient_factor
        self.optimisers["weight"].update_rows(self.weight, rows, gradient, lr)
        self._stored = None


def _chunks(candidates: Candidates, limit: int) -> Iterator[tuple[int, int, int, int]]:
    """Runs of touched groups of about `limit` rows: (first group, last + 1, first row, last + 1)."""
    num_groups, num_rows = candidates.row_starts.numel(), int(candidates.row_offsets[-1])
    if num_rows == 0:
        return
    goals = torch.arange(limit, num_rows + limit, limit, device=candidates.row_offsets.device)
    lasts = torch.searchsorted(candidates.row_offsets, goals).clamp_max(num_groups)
    borders = [0, *torch.unique(lasts).tolist()]
    rows = candidates.row_offsets[borders].tolist()
    for i in range(len(borders) - 1):
        yield borders[i], borders[i + 1], rows[i], rows[i + 1]


def _arrays(candidates: Candidates) -> tuple:
    c = candidates
    return tuple(
        x.numpy() for x in (c.row_starts, c.row_offsets, c.entry_offsets, c.documents, c.pair_offsets)
    )


def _scores_cpu(weight: Tensor, E: Tensor, candidates: Candidates) -> Tensor:
    scores = E.new_empty(candidates.num_pairs)
    row_kernels.use_torch_threads()
    row_kernels.score_groups(weight.numpy(), E.numpy(), *_arrays(candidates), scores.numpy())
    return scores


def _gradients_cpu(
    weight: Tensor,
    E: Tensor,
    candidates: Candidates,
    derivative: Tensor,
    first: int,
    last: int,
    row_gradient: Tensor,
    embedding_gradient_parts: Tensor,
) -> None:
    row_kernels.use_torch_threads()
    arrays = weight.numpy(), E.numpy(), *_arrays(candidates), derivative.numpy()
    row_kernels.group_gradients(*arrays, first, last, row_gradient.numpy(), embedding_gradient_parts.numpy())


def _scores_torch(weight: Tensor, E: Tensor, candidates: Candidates, at_once: int) -> Tensor:
    documents = candidates.documents[candidates.entry_of_pair()]
    rows = candidates.rows_of_pairs()
    parts = [
        (weight[r] * E[i]).sum(1) for r, i in zip(rows.split(at_once), documents.split(at_once), strict=True)
    ]
    return torch.cat(parts) if parts else E.new_zeros(0)


def _gradients_torch(
    weight: Tensor, E: Tensor, candidates: Candidates, derivative: Tensor, at_once: int
) -> tuple[Tensor, Tensor]:
    """(d loss / d touched rows (U × d), d loss / d E (B × d)) from d loss / d score (p,)."""
    documents = candidates.documents[candidates.entry_of_pair()]
    rows = candidates.rows_of_pairs()
    touched = candidates.rows()
    place = torch.searchsorted(touched, rows)
    dW, dE = E.new_zeros(touched.numel(), E.shape[1]), torch.zeros_like(E)
    for pairs in torch.arange(rows.numel(), device=E.device).split(at_once):
        g = derivative[pairs, None]
        dW.index_add_(0, place[pairs], g * E[documents[pairs]])
        dE.index_add_(0, documents[pairs], g * weight[rows[pairs]])
    return dW, dE
