"""A label layer in which every document is scored against every label of the block: loss, gradients and update in one
pass over chunks of rows. The (documents × labels) matrix never exists, and no autograd graph is built over it.

Legend: B documents of all ranks, L_r rows of this rank's block, d width, c rows of a chunk, k top.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xmc.nn.label_rows import LabelRows
from xmc.nn.losses import PairLoss, bce
from xmc.nn.sharding import LabelBlock, best_keys, best_of_scores, fused_loss, merge_best_keys, unpack_keys


def positive_keys(labels: Tensor, documents: Tensor, block: LabelBlock, num_documents: int) -> Tensor:
    """The block's positives as rising unique flat indices row·B + document, from (label, document) pairs (n,)."""
    mine = block.owns(labels)
    return torch.unique((labels[mine] - block.start) * num_documents + documents[mine])


class DenseLabelLayer(LabelRows):
    """Linear scores E·Wᵀ + bias of every row.

    Chunks are held transposed (c × B): the rows of W then are the long side of each product, which is what BLAS does
    best when B is small; and a chunk's weights are read once from memory for scores, both gradients and the update.
    """

    _gradients: dict[str, Tensor] | None = None
    _num_stored = 0

    def loss(
        self,
        embeddings: Tensor,
        positives: Tensor,
        normaliser: float,
        *,
        pair_loss: PairLoss = bce,
        lr: float | None = None,
        top_k: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Σ loss over (B × L_r) / normaliser: this block's part of the loss, with the graph to `embeddings` (B × d).

        `positives`: of `positive_keys`. With `lr` the rows move at once; without, their gradient is stored for `step`.
        Under torch.no_grad() rows neither move nor get a gradient. With `top_k` the second value holds the block's best
        keys (B × k) by the scores before the move, else None.
        """
        train = torch.is_grad_enabled()
        best: list[Tensor] = []

        def compute(x: Tensor) -> tuple[Tensor, Tensor]:
            return self._pass(x, positives, normaliser, pair_loss, lr, train, top_k, best)

        loss = fused_loss(embeddings, compute)
        return loss, best[0] if best else None

    def _pass(
        self,
        embeddings: Tensor,
        positives: Tensor,
        normaliser: float,
        pair_loss: PairLoss,
        lr: float | None,
        train: bool,
        top_k: int,
        best: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        E = embeddings.to(self.weight.dtype)
        batch = E.shape[0]
        spans = list(self.spans(batch))
        E_t = E.t().contiguous()
        dE_t = torch.zeros_like(E_t)
        total = torch.zeros((), dtype=torch.float64, device=E.device)
        borders = torch.searchsorted(
            positives, positives.new_tensor([start * batch for start, _ in spans])
        ).tolist()
        borders.append(positives.numel())
        best_so_far: Tensor | None = None
        buffers = _Buffers(self, spans, batch)
        if train:
            self._prepare_gradients(lr)
        for i, (start, stop) in enumerate(spans):
            logits = self._scores(E_t, start, stop, buffers.logits)
            if top_k:
                best_so_far = self._better(best_so_far, logits, start, top_k)
            inside = positives[borders[i] : borders[i + 1]] - start * batch
            loss, derivative = pair_loss(logits, inside)
            total += loss
            if train:
                derivative.mul_(1.0 / normaliser)
                dE_t.addmm_(self.weight[start:stop].t(), derivative)
                self._learn(start, stop, derivative, E, lr, buffers.gradient)
        if top_k:
            best.append(best_so_far if best_so_far is not None else _no_keys(batch, top_k, E.device))
        return (total / normaliser).to(E.dtype), dE_t.t()

    def _scores(self, E_t: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        """(c × B) scores of rows [start, stop)."""
        logits = torch.mm(self.weight[start:stop], E_t, out=out[: stop - start])
        return logits if self.bias is None else logits.add_(self.bias[start:stop, None])

    def _better(self, best: Tensor | None, logits: Tensor, start: int, k: int) -> Tensor:
        """(B × k) best keys of those so far and of a chunk's logits (c × B)."""
        keys = best_of_scores(logits.t().contiguous(), self.block.start + start, k)
        return keys if best is None else best_keys(torch.cat([best, keys], 1), k)

    def _prepare_gradients(self, lr: float | None) -> None:
        if lr is not None:
            self.begin_step()
            return
        if self._gradients is None:
            self._gradients = {name: torch.zeros_like(table) for name, table in self.tables().items()}
        self._num_stored += 1

    def _learn(
        self, start: int, stop: int, derivative: Tensor, E: Tensor, lr: float | None, out: Tensor
    ) -> None:
        """Move rows [start, stop), or store their gradient, from d loss / d logits (c × B)."""
        if lr is None:
            assert self._gradients is not None
            self._gradients["weight"][start:stop].addmm_(derivative, E)
            if self.bias is not None:
                self._gradients["bias"][start:stop] += derivative.sum(1)
            return
        gradient = torch.mm(derivative, E, out=out[: stop - start])
        self.optimisers["weight"].update(self.weight, start, stop, gradient, lr)
        if self.bias is not None:
            self.optimisers["bias"].update(self.bias, start, stop, derivative.sum(1), lr)

    def gradient_square_sum(self) -> Tensor:
        """Sum of squares (float64 scalar) of the mean of the stored gradients, of this block."""
        total = torch.zeros((), dtype=torch.float64, device=self.weight.device)
        for gradient in (self._gradients or {}).values():
            for start, stop in self.spans(1):
                total += gradient[start:stop].square().sum(dtype=torch.float64)
        return total / max(self._num_stored, 1) ** 2

    def step(self, lr: float, gradient_factor: float = 1.0) -> None:
        """Move every row by the mean of the stored gradients times `gradient_factor`, and forget them."""
        if self._gradients is None or self._num_stored == 0:
            return
        self.begin_step()
        for name, table in self.tables().items():
            gradient = self._gradients[name].mul_(gradient_factor / self._num_stored)
            self.optimisers[name].update(table, 0, self.block.size, gradient, lr)
            gradient.zero_()
        self._num_stored = 0

    @torch.no_grad()
    def best_keys(self, embeddings: Tensor, k: int) -> Tensor:
        """The best k of all ranks' rows, by raw score, as keys (B × k) of `sharding.rank_keys`."""
        E_t = embeddings.to(self.weight.dtype).t().contiguous()
        batch = E_t.shape[1]
        spans = list(self.spans(batch))
        buffers = _Buffers(self, spans, batch)
        best: Tensor | None = None
        for start, stop in spans:
            best = self._better(best, self._scores(E_t, start, stop, buffers.logits), start, k)
        return merge_best_keys(best if best is not None else _no_keys(batch, k, E_t.device), k)

    def top_k(self, embeddings: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The best k of all ranks' rows: raw scores (B × k) float32 and ids (B × k); ties by id."""
        return unpack_keys(self.best_keys(embeddings, k))


class _Buffers:
    """Memory reused by every chunk: new pages for each would cost more than the arithmetic."""

    def __init__(self, layer: DenseLabelLayer, spans: list[tuple[int, int]], batch: int) -> None:
        rows = spans[0][1] - spans[0][0] if spans else 0
        self.logits = layer.weight.new_empty(rows, batch)
        self.gradient = layer.weight.new_empty(rows, layer.width)


def _no_keys(batch: int, k: int, device: torch.device) -> Tensor:
    return best_keys(torch.empty(batch, 0, dtype=torch.int64, device=device), k)
