"""Labels to ranks, and what crosses between ranks: embeddings, targets, best labels.

The labels stay, the text moves: a rank owns a block of label rows and sees every rank's documents. This module knows
torch.distributed only; without an initialised process group the world has one rank and nothing is sent.

Legend: L labels, b documents of this rank, B documents of all ranks, d width, k top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PADDING_KEY = torch.iinfo(torch.int64).min
_MAX_ID = 2**31 - 1


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank_index() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


# --- blocks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelBlock:
    """The contiguous rows [start, stop) of `num_labels` that a rank owns; empty if ranks outnumber rows."""

    start: int
    stop: int
    num_labels: int
    rank: int
    world: int

    @classmethod
    def of_rank(cls, num_labels: int, rank: int | None = None, world: int | None = None) -> LabelBlock:
        """The block of a rank (this process's by default): sizes differ by one row at most."""
        rank = rank_index() if rank is None else rank
        world = world_size() if world is None else world
        return cls(rank * num_labels // world, (rank + 1) * num_labels // world, num_labels, rank, world)

    @property
    def size(self) -> int:
        return self.stop - self.start

    def owns(self, ids: Tensor) -> Tensor:
        """Mask of the ids (any shape) that lie in this block."""
        return (ids >= self.start) & (ids < self.stop)


# --- ragged lists ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ragged:
    """Lists of ids, one a document: `ids` (n,) int64 and `offsets` (B+1,) int64."""

    ids: Tensor
    offsets: Tensor

    @classmethod
    def from_lists(cls, lists: list[list[int]], device: torch.device | str = "cpu") -> Ragged:
        lengths = torch.tensor([0] + [len(ids) for ids in lists], dtype=torch.int64, device=device)
        flat = torch.tensor([i for ids in lists for i in ids], dtype=torch.int64, device=device)
        return cls(flat, lengths.cumsum(0))

    @classmethod
    def from_padded(cls, ids: Tensor) -> Ragged:
        """From (B × C) ids padded with −1."""
        kept = ids >= 0
        lengths = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.sum(1)])
        return cls(ids[kept].to(torch.int64), lengths.cumsum(0))

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    def documents(self) -> Tensor:
        """(n,) the document of each id."""
        rows = torch.arange(len(self), device=self.offsets.device)
        return torch.repeat_interleave(rows, self.offsets.diff(), output_size=self.ids.numel())


# --- gathering ------------------------------------------------------------------------------------------------------


def gather_counts(*counts: int, device: torch.device | str = "cpu") -> list[list[int]]:
    """Each rank's counts: a list a rank, in one small collective."""
    if world_size() == 1:
        return [list(counts)]
    mine = torch.tensor(counts, dtype=torch.int64, device=device)
    everyone = mine.new_empty(world_size() * len(counts))
    dist.all_gather_single(everyone, mine)
    return everyone.view(world_size(), len(counts)).tolist()


def gather_rows(x: Tensor, sizes: list[int]) -> Tensor:
    """Concatenate every rank's x (sizes[rank] × …) in rank order; no gradient. Unequal sizes are padded on the way."""
    if len(sizes) == 1:
        return x
    largest = max(sizes)
    if largest == 0:
        return x
    if x.shape[0] < largest:
        x = torch.cat([x, x.new_zeros(largest - x.shape[0], *x.shape[1:])])
    everyone = x.new_empty(len(sizes) * largest, *x.shape[1:])
    dist.all_gather_single(everyone, x.contiguous())
    if min(sizes) == largest:
        return everyone
    return torch.cat([everyone[r * largest : r * largest + size] for r, size in enumerate(sizes)])


class _Gather(torch.autograd.Function):
    """Forward: all documents' embeddings. Backward: the sum over ranks, of which each rank keeps its own part."""

    @staticmethod
    def forward(ctx: Any, e: Tensor, sizes: list[int], gradient_scale: float) -> Tensor:
        ctx.sizes, ctx.gradient_scale = sizes, gradient_scale
        # An autograd function must not hand back its input itself.
        return e.clone() if len(sizes) == 1 else gather_rows(e, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        sizes, total = ctx.sizes, gradients[0].contiguous()
        if len(sizes) > 1:
            start = sum(sizes[: rank_index()])
            mine = total.new_empty(sizes[rank_index()], *total.shape[1:])
            if min(sizes) == max(sizes):
                dist.reduce_scatter_single(mine, total)
            else:
                total = total.clone()
                dist.all_reduce(total)
                mine.copy_(total[start : start + mine.shape[0]])
            total = mine
        return (total * ctx.gradient_scale if ctx.gradient_scale != 1.0 else total), None, None


def gather_embeddings(e: Tensor, sizes: list[int] | None = None, gradient_scale: float = 1.0) -> Tensor:
    """Every rank's embeddings e (b × …) as one E (B × …), in rank order, with the graph kept.

    The gradient that arrives at E on each rank is that of the rank's own label block; the backward pass sums them and
    gives each rank the part of its documents. `sizes` are the ranks' b if already known. Data-parallel engines that
    *average* parameter gradients over ranks need `gradient_scale` = number of ranks: the loss is one mean over all B
    documents, so its encoder gradient is the ranks' sum.
    """
    if sizes is None:
        sizes = [count[0] for count in gather_counts(e.shape[0], device=e.device)]
    return _Gather.apply(e, sizes, gradient_scale)


def gather_ragged(lists: Ragged, counts: list[list[int]] | None = None) -> Ragged:
    """Every rank's lists, in rank order. `counts` are each rank's (documents, ids) if already known."""
    if world_size() == 1:
        return lists
    if counts is None:
        counts = gather_counts(len(lists), lists.ids.numel(), device=lists.ids.device)
    lengths = gather_rows(lists.offsets.diff(), [c[0] for c in counts])
    ids = gather_rows(lists.ids, [c[1] for c in counts])
    return Ragged(ids, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        total = part.clone()
        if world_size() > 1:
            dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def sum_over_ranks(part: Tensor) -> Tensor:
    """The sum of every rank's part of a loss. The gradient goes to this rank's part: the others have their own."""
    return _SumOverRanks.apply(part)


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, known: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*known)
        ctx.dtypes = [x.dtype for x in inputs]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Rounded to 16 bits only once the loss scale is in: before it, small gradients would become 0.
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *((known * gradients[0]).to(dtype) for known, dtype in pairs)


def known_gradients(loss: Tensor, gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """A scalar loss whose gradients for its inputs are known already. They, and the loss, may be of a wider dtype than
    the inputs."""
    return _KnownGradients.apply(loss, gradients, *inputs)


def fused_loss(x: Tensor, compute: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """A scalar loss whose gradient for x is computed with it: `compute(x)` returns (loss, d loss / d x)."""
    with torch.no_grad():
        loss, gradient = compute(x.detach())
    return known_gradients(loss, [gradient], [x])


# --- best labels ----------------------------------------------------------------------------------------------------


def rank_keys(scores: Tensor, ids: Tensor) -> Tensor:
    """One int64 a (score, id) whose falling order is: falling score, then rising id. Exact, so that any division of
    the labels over chunks and ranks gives the same best k. Scores count as float32; ids (broadcast) lie under 2³¹."""
    bits = (scores.to(torch.float32) + 0.0).view(torch.int32)  # + 0.0: −0 and 0 are one score
    ordered = bits ^ ((bits >> 31) & _MAX_ID)
    return (ordered.to(torch.int64) << 32) | (_MAX_ID - ids)


def unpack_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """(scores float32, ids int64) of `rank_keys`; padding becomes (−inf, −1)."""
    padding = keys == PADDING_KEY
    ordered = (keys >> 32).to(torch.int32)
    scores = (ordered ^ ((ordered >> 31) & _MAX_ID)).view(torch.float32)
    ids = _MAX_ID - (keys & _MAX_ID)
    return scores.masked_fill(padding, float("-inf")), ids.masked_fill(padding, -1)


def best_keys(keys: Tensor, k: int) -> Tensor:
    """(B × k) the largest keys of (B × n), falling; padded where n < k."""
    if keys.shape[1] < k:
        keys = torch.nn.functional.pad(keys, (0, k - keys.shape[1]), value=PADDING_KEY)
    return keys.topk(k, dim=1).values


def best_of_scores(scores: Tensor, first_id: int, k: int) -> Tensor:
    """(B × k) best keys of scores (B × n) whose columns are the ids first_id, first_id + 1, …

    Keys of all scores are made only where the k-th best ties with the next one: otherwise the floats alone decide.
    """
    scores = scores.to(torch.float32)
    values, columns = scores.topk(min(k + 1, scores.shape[1]), dim=1)
    if values.shape[1] <= k:
        return best_keys(rank_keys(values, columns + first_id), k)
    if bool((values[:, k] == values[:, k - 1]).any()):
        ids = torch.arange(first_id, first_id + scores.shape[1], device=scores.device)
        return best_keys(rank_keys(scores, ids), k)
    return best_keys(rank_keys(values[:, :k], columns[:, :k] + first_id), k)


def merge_best_keys(keys: Tensor, k: int) -> Tensor:
    """The best k (B × k) of all ranks from each rank's own best (B × k) for the same B documents."""
    if world_size() == 1:
        return best_keys(keys, k)
    batch, width = keys.shape
    everyone = keys.new_empty(world_size() * batch, width)
    dist.all_gather_single(everyone, keys.contiguous())
    return best_keys(everyone.view(world_size(), batch, width).transpose(0, 1).reshape(batch, -1), k)


def merge_top_k(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Merge each rank's best (scores, ids; B × n, padded with −inf, −1) to all ranks' best k, ties by id.

    Returns scores (B × k) float32 and ids (B × k) int64, the same on every rank.
    """
    keys = rank_keys(scores, ids.clamp_min(0)).masked_fill(ids < 0, PADDING_KEY)
    return unpack_keys(merge_best_keys(best_keys(keys, k), k))
