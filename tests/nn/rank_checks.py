"""Checks that run on every rank of a group and compare the sharded computation with an unsharded one in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from xmc.nn.candidates import CandidateLabelLayer, group_candidates, label_candidates
from xmc.nn.dense_layer import DenseLabelLayer, positive_keys
from xmc.nn.heads.light_xml import LabelClusters, LightXmlHead, LightXmlHeadConfig
from xmc.nn.label_rows import uniform_rows
from xmc.nn.losses import LOSSES
from xmc.nn.optimisers import RowOptimiserConfig
from xmc.nn.sharding import (
    LabelBlock,
    Ragged,
    gather_counts,
    gather_embeddings,
    gather_ragged,
    gather_rows,
    merge_top_k,
    rank_index,
    sum_over_ranks,
    world_size,
)

WIDTH = 6


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=_generator(seed), dtype=torch.float64)


def _sizes(kind: str) -> list[int]:
    return {"equal": [4, 4, 4], "unequal": [5, 2, 3], "one empty": [0, 3, 1]}[kind][: world_size()]


def _mine(x: Tensor, sizes: list[int]) -> Tensor:
    start = sum(sizes[: rank_index()])
    return x[start : start + sizes[rank_index()]]


def _labels(num_documents: int, num_labels: int, seed: int, highest: int | None = None) -> Tensor:
    """(B × L) 0/1 targets; the first document has none."""
    targets = torch.rand(num_documents, num_labels, generator=_generator(seed)) < 0.2
    targets[0] = False
    if highest is not None:
        targets[:, highest:] = False
    return targets.double()


def _ragged(targets: Tensor) -> Ragged:
    return Ragged.from_lists([row.nonzero()[:, 0].tolist() for row in targets])


def check_gather_embeddings() -> None:
    for kind in ("equal", "unequal", "one empty"):
        sizes = _sizes(kind)
        everyone = _normal(sum(sizes), WIDTH, seed=1)
        mine = _mine(everyone, sizes).clone().requires_grad_()
        gathered = gather_embeddings(mine, gradient_scale=2.0)
        assert torch.equal(gathered, everyone), kind
        # Each rank's loss weighs E by its own factors: the gradient is twice their sum over the ranks.
        factors = [_normal(*everyone.shape, seed=10 + rank) for rank in range(world_size())]
        (gathered * factors[rank_index()]).sum().backward()
        expected = _mine(2 * torch.stack(factors).sum(0), sizes)
        torch.testing.assert_close(mine.grad, expected, rtol=1e-12, atol=1e-12)


def check_gather_embeddings_of_tokens() -> None:
    mine = torch.full((2, 3, 4), float(rank_index()), requires_grad=True)
    gathered = gather_embeddings(mine)
    assert gathered.shape == (2 * world_size(), 3, 4)
    gathered.sum().backward()
    assert torch.equal(mine.grad, torch.full_like(mine, float(world_size())))


def check_gather_ragged() -> None:
    for kind in ("equal", "unequal", "one empty"):
        sizes = _sizes(kind)
        lists = [list(range(i % 4)) for i in range(sum(sizes))]
        start = sum(sizes[: rank_index()])
        everyone = gather_ragged(Ragged.from_lists(lists[start : start + sizes[rank_index()]]))
        expected = Ragged.from_lists(lists)
        assert torch.equal(everyone.ids, expected.ids), kind
        assert torch.equal(everyone.offsets, expected.offsets), kind


def check_gather_counts() -> None:
    assert gather_counts(rank_index(), 7) == [[rank, 7] for rank in range(world_size())]


def check_merge_top_k_breaks_ties_by_id() -> None:
    scores = torch.tensor([[0.5, 0.5, -1.0, 0.5, 2.0, -0.0, 0.0], [0.0] * 7])
    block = LabelBlock.of_rank(7)
    ids = torch.arange(7).expand(2, 7)
    best, labels = merge_top_k(scores[:, block.start : block.stop], ids[:, block.start : block.stop], 5)
    assert labels.tolist() == [[4, 0, 1, 3, 5], [0, 1, 2, 3, 4]]
    assert best.tolist() == [[2.0, 0.5, 0.5, 0.5, 0.0], [0.0] * 5]
    best, labels = merge_top_k(scores[:, block.start : block.stop], ids[:, block.start : block.stop], 9)
    assert labels[1].tolist() == [0, 1, 2, 3, 4, 5, 6, -1, -1]
    assert best[1, 7:].tolist() == [float("-inf")] * 2


# --- dense ----------------------------------------------------------------------------------------------------------


def _reference_optimiser(name: str, weight: Tensor, bias: Tensor) -> torch.optim.Optimizer:
    if name == "sgd":
        groups = [{"params": [weight], "weight_decay": 0.01}, {"params": [bias], "weight_decay": 0.0}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    groups = [{"params": [weight], "weight_decay": 0.01}, {"params": [bias], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1)


def _reference_loss(name: str, logits: Tensor, targets: Tensor) -> Tensor:
    if name == "bce":
        return F.binary_cross_entropy_with_logits(logits, targets)
    return (1 - (2 * targets - 1) * logits).clamp_min(0).square().mean()


def _dense_case(
    num_labels: int, optimiser: str, loss: str, micro_batches: int, highest: int | None = None
) -> None:
    """Train 4 steps of (encoder = one matrix) + label rows, sharded and not; everything must agree."""
    block = LabelBlock.of_rank(num_labels)
    config = RowOptimiserConfig(name=optimiser)
    options = {"bound": 0.5, "seed": 3, "bias": True, "dtype": torch.float64}
    layer = DenseLabelLayer(block, WIDTH, config, chunk_bytes=WIDTH * 8 * 5, **options)  # 5 rows a chunk
    whole = LabelBlock.of_rank(num_labels, 0, 1)
    weight = uniform_rows(whole, WIDTH, 0.5, 3).double().requires_grad_()
    bias = torch.zeros(num_labels, dtype=torch.float64, requires_grad=True)
    reference = _reference_optimiser(optimiser, weight, bias)
    for step in range(4):
        lr = 0.1 / (step + 1)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.zero_grad()
        for micro in range(micro_batches):
            sizes = _sizes(("equal", "unequal", "one empty")[(step + micro) % 3])
            embeddings = _normal(max(sum(sizes), 1), WIDTH, seed=100 * step + micro)[: sum(sizes)]
            if not sum(sizes):
                continue
            targets = _labels(sum(sizes), num_labels, seed=step + 50 * micro, highest=highest)
            # sharded
            mine = _mine(embeddings, sizes).clone().requires_grad_()
            lists = gather_ragged(_ragged(_mine(targets, sizes)))
            E = gather_embeddings(mine)
            positives = positive_keys(lists.ids, lists.documents(), block, E.shape[0])
            fused_lr = lr if micro_batches == 1 else None
            part, _ = layer.loss(E, positives, E.shape[0] * num_labels, pair_loss=LOSSES[loss], lr=fused_lr)
            total = sum_over_ranks(part)
            total.backward()
            # unsharded
            all_of_it = embeddings.clone().requires_grad_()
            expected = _reference_loss(loss, all_of_it @ weight.t() + bias, targets)
            (expected / micro_batches).backward()
            torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(
                mine.grad / micro_batches, _mine(all_of_it.grad, sizes), rtol=1e-9, atol=1e-12
            )
        if micro_batches > 1:
            layer.step(lr)
        reference.step()
        rows = slice(block.start, block.stop)
        torch.testing.assert_close(layer.weight, weight.detach()[rows], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(layer.bias, bias.detach()[rows], rtol=1e-8, atol=1e-10)


def check_dense_adamw() -> None:
    _dense_case(103, "adamw", "bce", 1)


def check_dense_sgd() -> None:
    _dense_case(103, "sgd", "bce", 1)


def check_dense_squared_hinge() -> None:
    _dense_case(47, "sgd", "squared_hinge", 1)


def check_dense_accumulation() -> None:
    if world_size() > 1:  # one rank alone would have micro-batches without any document
        _dense_case(103, "adamw", "bce", 3)
        _dense_case(31, "sgd", "squared_hinge", 2)


def check_dense_rank_without_positives() -> None:
    _dense_case(40, "adamw", "bce", 1, highest=8)  # the last rank owns rows from 26 or 20 on


def check_dense_more_ranks_than_labels() -> None:
    _dense_case(2, "adamw", "bce", 1)
    _dense_case(1, "sgd", "bce", 1)


def check_dense_without_gradient_learns_nothing() -> None:
    block = LabelBlock.of_rank(10)
    layer = DenseLabelLayer(block, WIDTH, RowOptimiserConfig(), bound=0.5, seed=0)
    before = layer.weight.clone()
    with torch.no_grad():
        E = gather_embeddings(torch.ones(2, WIDTH))
        layer.loss(E, torch.zeros(0, dtype=torch.int64), 1.0, lr=0.1)
    assert torch.equal(layer.weight, before)
    layer.step(0.1)
    assert torch.equal(layer.weight, before)
    assert layer.step_count == 0


def check_dense_top_k() -> None:
    for num_labels in (2, 57):
        layer = DenseLabelLayer(
            LabelBlock.of_rank(num_labels),
            WIDTH,
            RowOptimiserConfig(),
            bound=0.5,
            seed=3,
            chunk_bytes=5 * WIDTH * 4,
        )
        weight = uniform_rows(LabelBlock.of_rank(num_labels, 0, 1), WIDTH, 0.5, 3)
        E = _normal(9, WIDTH, seed=4).float()
        E[0] = 0.0  # all scores tie
        scores, ids = layer.top_k(E, 5)
        expected = E @ weight.t()
        order = torch.sort(expected, dim=1, descending=True, stable=True).indices[:, :5]
        assert torch.equal(ids[:, : order.shape[1]], order)
        torch.testing.assert_close(scores[:, : order.shape[1]], expected.gather(1, order))
        assert (ids[:, num_labels:] == -1).all()


# --- candidates -----------------------------------------------------------------------------------------------------


def _candidate_case(micro_batches: int, grouped: bool) -> None:
    """Lazy Adam over candidates against SparseAdam and BCE over a mask of the full matrix."""
    num_labels, batch = 61, 7
    block = LabelBlock.of_rank(num_labels)
    config = RowOptimiserConfig(name="lazy_adam", weight_decay=0.0)
    layer = CandidateLabelLayer(
        block, WIDTH, config, bound=0.5, seed=5, dtype=torch.float64, chunk_bytes=WIDTH * 8 * 4
    )
    table = torch.nn.Embedding(num_labels, WIDTH, sparse=True, dtype=torch.float64)
    table.weight.data.copy_(uniform_rows(LabelBlock.of_rank(num_labels, 0, 1), WIDTH, 0.5, 5))
    reference = torch.optim.SparseAdam(table.parameters(), lr=0.05)
    offsets = torch.tensor([0, 9, 10, 10, 33, 50, num_labels])  # an empty group; borders inside groups
    for step in range(5):
        reference.zero_grad()
        for micro in range(micro_batches):
            seed = 10 * step + micro
            E = _normal(batch, WIDTH, seed=seed).requires_grad_()
            targets = _labels(batch, num_labels, seed)
            mask = torch.zeros(batch, num_labels, dtype=torch.bool)
            if grouped:
                chosen = torch.rand(batch, 6, generator=_generator(seed + 1)) < 0.3
                chosen[1] = False  # a document without candidates
                documents, groups = torch.cat([chosen.nonzero(), chosen.nonzero()[:2]]).unbind(
                    1
                )  # some twice
                candidates = group_candidates(groups, documents, offsets, block, batch)
                for document, group in zip(documents.tolist(), groups.tolist(), strict=True):
                    mask[document, offsets[group] : offsets[group + 1]] = True
            else:
                mask = torch.rand(batch, num_labels, generator=_generator(seed + 1)) < 0.1
                mask[1] = False
                candidates = label_candidates(_ragged(mask), block)
            documents, labels = targets.nonzero(as_tuple=True)
            inside = block.owns(labels)
            positives = candidates.locate(labels[inside] - block.start, documents[inside])
            normaliser = float(mask.sum())
            shared = gather_embeddings(E, [batch]) if world_size() == 1 else E
            part = layer.loss(
                shared, candidates, positives, normaliser, lr=0.05 if micro_batches == 1 else None
            )
            total = sum_over_ranks(part)
            total.backward()
            gradient = E.grad.clone()
            if world_size() > 1:
                torch.distributed.all_reduce(gradient)
            plain = E.detach().clone().requires_grad_()
            rows = torch.arange(num_labels).expand(batch, -1)[mask]
            owners = torch.arange(batch)[:, None].expand(-1, num_labels)[mask]
            logits = (table(rows) * plain[owners]).sum(1)
            expected = F.binary_cross_entropy_with_logits(logits, targets[mask])
            (expected / micro_batches).backward()
            torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(gradient / micro_batches, plain.grad, rtol=1e-9, atol=1e-12)
        if micro_batches > 1:
            layer.step(0.05)
        reference.step()
        mine = table.weight.detach()[block.start : block.stop]
        torch.testing.assert_close(layer.weight, mine, rtol=1e-8, atol=1e-9)


def check_candidate_groups() -> None:
    _candidate_case(1, grouped=True)


def check_candidate_lists() -> None:
    _candidate_case(1, grouped=False)


def check_candidate_accumulation() -> None:
    _candidate_case(3, grouped=True)
    _candidate_case(2, grouped=False)


def check_empty_candidates_move_nothing() -> None:
    block = LabelBlock.of_rank(11)
    layer = CandidateLabelLayer(block, WIDTH, RowOptimiserConfig(name="lazy_adam"), bound=0.5, seed=0)
    before = layer.weight.clone()
    E = torch.ones(3, WIDTH, requires_grad=True)
    candidates = label_candidates(Ragged.from_lists([[], [], []]), block)
    nothing = torch.zeros(0, dtype=torch.int64)
    loss = layer.loss(E, candidates, nothing, 1.0, lr=0.1)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(E.grad, torch.zeros_like(E))
    assert torch.equal(layer.weight, before)
    layer.loss(E, candidates, nothing, 1.0)
    layer.step(0.1)
    assert torch.equal(layer.weight, before)
    assert layer.step_count == 2  # the table's steps count on every rank alike


# --- LightXML -------------------------------------------------------------------------------------------------------


class _Naive:
    """LightXML on one rank with dense matrices and autograd."""

    def __init__(
        self, num_labels: int, width: int, config: LightXmlHeadConfig, cluster_of: Tensor | None
    ) -> None:
        self.config, self.cluster_of = config, cluster_of
        num_recalled = num_labels if cluster_of is None else int(cluster_of.max()) + 1
        bound = width**-0.5
        self.recall = (
            uniform_rows(LabelBlock.of_rank(num_recalled, 0, 1), width, bound, 7).double().requires_grad_()
        )
        self.bias = torch.zeros(num_recalled, dtype=torch.float64, requires_grad=True)
        groups = [
            {"params": [self.recall], "weight_decay": 0.01},
            {"params": [self.bias], "weight_decay": 0.0},
        ]
        self.optimisers = [torch.optim.AdamW(groups, lr=0.02)]
        if cluster_of is not None:
            order = LabelClusters.from_assignment(cluster_of, num_recalled).order
            bound = (6.0 / (num_labels + config.rank_width)) ** 0.5
            rows = uniform_rows(LabelBlock.of_rank(num_labels, 0, 1), config.rank_width, bound, 8).double()
            self.table = torch.nn.Embedding(num_labels, config.rank_width, sparse=True, dtype=torch.float64)
            self.table.weight.data[order] = rows
            self.optimisers.append(torch.optim.SparseAdam(self.table.parameters(), lr=0.02))

    def loss(self, e: Tensor, h: Tensor, targets: Tensor) -> Tensor:
        recall = e @ self.recall.t() + self.bias
        if self.cluster_of is None:
            return F.binary_cross_entropy_with_logits(recall, targets)
        truth = torch.zeros_like(recall).index_add_(1, self.cluster_of, targets).clamp_max(1.0)
        # True clusters first, then by score, `recalled_clusters` in all (or all true ones, if more).
        ranked = (recall.detach() + truth * 1e6).argsort(1, descending=True)
        mask = torch.zeros_like(targets, dtype=torch.bool)
        for i, row in enumerate(ranked):
            count = max(self.config.recalled_clusters, int(truth[i].sum()))
            mask[i] = torch.isin(self.cluster_of, row[:count])
        owners, labels = mask.nonzero(as_tuple=True)
        logits = (self.table(labels) * h[owners]).sum(1)
        rank = F.binary_cross_entropy_with_logits(logits, targets[mask])
        return F.binary_cross_entropy_with_logits(recall, truth) + rank

    def step(self) -> None:
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()

    def top_k(self, e: Tensor, h: Tensor, k: int) -> tuple[Tensor, Tensor]:
        recall = (e @ self.recall.t() + self.bias).detach()
        if self.cluster_of is None:
            scores = torch.sigmoid(recall)
        else:
            kept = recall.topk(self.config.recalled_clusters, dim=1)
            recalled = torch.zeros_like(recall).scatter_(1, kept.indices, torch.sigmoid(kept.values))
            scores = recalled[:, self.cluster_of] * torch.sigmoid(h @ self.table.weight.detach().t())
        return scores.topk(k, dim=1)


def _light_xml_case(cluster_of: Tensor | None, num_labels: int, accumulate: bool) -> None:
    width, rank_width = 8, 5
    config = LightXmlHeadConfig(
        recalled_clusters=3,
        rank_width=rank_width,
        rank_optimiser=RowOptimiserConfig(name="lazy_adam", weight_decay=0.0),
    )
    clusters = (
        None if cluster_of is None else LabelClusters.from_assignment(cluster_of, int(cluster_of.max()) + 1)
    )
    head = LightXmlHead(
        config, num_labels, width, clusters, seed=7, averaging_engine=False, dtype=torch.float64
    )
    naive = _Naive(num_labels, width, config, cluster_of)
    for step in range(4):
        sizes = _sizes("equal" if accumulate else "unequal")
        for micro in range(2 if accumulate else 1):
            e = _normal(sum(sizes), width, seed=step + 90 * micro)
            h = torch.sigmoid(_normal(sum(sizes), rank_width, seed=step + 1000 + micro))
            targets = _labels(sum(sizes), num_labels, seed=step)
            outputs = [_mine(x, sizes).clone().requires_grad_() for x in (e, h)]
            loss = head.loss(
                tuple(outputs if clusters else outputs[:1]),
                _ragged(_mine(targets, sizes)),
                lr=None if accumulate else 0.02,
            )
            loss.backward()
            plain = [x.clone().requires_grad_() for x in (e, h)]
            expected = naive.loss(*plain, targets)
            (expected / (2 if accumulate else 1)).backward()
            torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-11)
            for sharded, whole in zip(outputs, plain, strict=True):
                if whole.grad is not None:
                    whole_grad = whole.grad * (2 if accumulate else 1)
                    torch.testing.assert_close(sharded.grad, _mine(whole_grad, sizes), rtol=1e-8, atol=1e-11)
        if accumulate:
            head.step(0.02)
        naive.step()
    block = head.recall.block
    torch.testing.assert_close(
        head.recall.weight, naive.recall.detach()[block.start : block.stop], rtol=1e-7, atol=1e-9
    )
    if clusters is not None:
        block = head.rank.block
        mine = naive.table.weight.detach()[clusters.order[block.start : block.stop]]
        torch.testing.assert_close(head.rank.weight, mine, rtol=1e-7, atol=1e-9)
    scores, ids = head.top_k(tuple(_mine(x, sizes) for x in ((e, h) if clusters else (e,))), 4)
    expected_scores, expected_ids = naive.top_k(e, h, 4)
    torch.testing.assert_close(scores, _mine(expected_scores, sizes).float())
    assert torch.equal(ids, _mine(expected_ids, sizes))


def _clusters_of(num_labels: int) -> Tensor:
    return torch.arange(num_labels)[torch.randperm(num_labels, generator=_generator(2))] // 5


def check_light_xml_flat() -> None:
    _light_xml_case(None, 41, accumulate=False)
    _light_xml_case(None, 41, accumulate=True)


def check_light_xml_recall_and_rank() -> None:
    _light_xml_case(_clusters_of(42), 42, accumulate=False)
    _light_xml_case(_clusters_of(42), 42, accumulate=True)


def check_light_xml_static_negatives() -> None:
    cluster_of = _clusters_of(42)
    clusters = LabelClusters.from_assignment(cluster_of, int(cluster_of.max()) + 1)
    config = LightXmlHeadConfig(recalled_clusters=3, rank_width=5, negatives="static")
    head = LightXmlHead(config, 42, 8, clusters, seed=7, averaging_engine=False)
    sizes = _sizes("unequal")
    outputs = tuple(_mine(_normal(sum(sizes), n, seed=n), sizes).float().requires_grad_() for n in (8, 5))
    targets = _ragged(_mine(_labels(sum(sizes), 42, seed=1), sizes))
    before = head.rank.weight.clone()
    head.loss(outputs, targets, lr=0.02).backward()
    assert torch.equal(head.rank.weight, before), "rank must rest while recall is trained"
    assert outputs[1].grad is None
    drawn = head.recalled(outputs)
    assert drawn.shape == (sizes[rank_index()], 3)
    recall = head.recall.weight.clone()
    first = float(head.loss(outputs, targets, lr=0.02, static_clusters=drawn).detach())
    for _ in range(20):
        last = float(head.loss(outputs, targets, lr=0.02, static_clusters=drawn).detach())
    assert torch.equal(head.recall.weight, recall), "recall must rest while rank is trained"
    assert last < first


def check_clipping_is_by_the_norm_of_all_rows() -> None:
    config = LightXmlHeadConfig(
        recall_optimiser=RowOptimiserConfig(name="sgd", momentum=0.0, weight_decay=0.0)
    )
    head = LightXmlHead(config, 20, 4, None, seed=1, averaging_engine=False, dtype=torch.float64)
    before = gather_all_rows(head.recall.weight, head.recall.bias)
    e = _normal(2, 4, seed=1).requires_grad_()
    head.loss((e,), Ragged.from_lists([[1], [2, 19]]))
    norm = float(head.gradient_norm())
    assert norm > 0.01
    head.step(lr=1.0, max_norm=0.01)
    after = gather_all_rows(head.recall.weight, head.recall.bias)
    moved = torch.linalg.vector_norm(after - before).item()
    assert abs(moved - 0.01) < 1e-5


def gather_all_rows(weight: Tensor, bias: Tensor) -> Tensor:
    """Every rank's rows with their biases, on every rank."""
    rows = torch.cat([weight, bias[:, None]], 1)
    return gather_rows(rows, [count[0] for count in gather_counts(rows.shape[0])])


CHECKS: list[Callable[[], None]] = [
    function for name, function in sorted(globals().items()) if name.startswith("check_")
]
