"""APLC's head at 1, 2 and 3 real ranks: loss, gradients, training and best labels equal plain autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nn.ranks import run_checks
from xmc.nn.heads.aplc import AplcHead, AplcHeadConfig, TailInputs
from xmc.nn.heads.base import own_rows
from xmc.nn.heads.light_xml import LabelClusters
from xmc.nn.label_rows import uniform_rows
from xmc.nn.sharding import LabelBlock, Ragged, rank_index, world_size

WIDTH, NUM_LABELS = 16, 53
CLUSTER_OF = torch.arange(NUM_LABELS)[torch.randperm(NUM_LABELS, generator=torch.Generator().manual_seed(1))]
CLUSTER_OF = torch.bucketize(CLUSTER_OF, torch.tensor([20, 40, 51]), right=True)  # 20, 20, 11 and 2 labels
LR = 0.02


def clusters() -> LabelClusters:
    return LabelClusters.from_assignment(CLUSTER_OF, 4)


class Plain:
    """APLC on one rank: probabilities multiplied, dense rows, autograd and torch's own AdamW."""

    def __init__(self, config: AplcHeadConfig, num_clusters: int = 4) -> None:
        self.config = config
        self.members = [(i == CLUSTER_OF).nonzero()[:, 0] for i in range(num_clusters)]
        widths = [WIDTH, *config.widths(num_clusters - 1, WIDTH)]
        self.rows = [
            uniform_rows(LabelBlock.of_rank(len(labels), 0, 1), w, w**-0.5, 5 + i).double().requires_grad_()
            for i, (labels, w) in enumerate(zip(self.members, widths, strict=True))
        ]
        self.bias = [torch.zeros(len(rows), dtype=torch.float64, requires_grad=True) for rows in self.rows]
        groups = [{"params": self.rows, "weight_decay": 0.01}, {"params": self.bias, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=LR)

    def probabilities(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """(B × L)."""
        h, a, *t = outputs
        result = h.new_zeros(h.shape[0], NUM_LABELS)
        for i, labels in enumerate(self.members):
            x = h if i == 0 else t[i - 1]
            p = torch.sigmoid(x @ self.rows[i].t() + (self.bias[i] if self.config.bias else 0.0))
            result = result.index_copy(1, labels, p if i == 0 else p * torch.sigmoid(a[:, i - 1 : i]))
        return result

    def loss(self, outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        p, a = self.probabilities(outputs), outputs[1]
        sums, counts = [], []
        for document in range(len(targets)):
            used = [self.members[0]]
            terms = []
            for i, labels in enumerate(self.members[1:]):
                if targets[document, labels].any():
                    used.append(labels)
                else:
                    terms.append(-torch.log(1 - torch.sigmoid(a[document, i])))
            used_labels = torch.cat(used)
            own = F.binary_cross_entropy(
                p[document, used_labels], targets[document, used_labels], reduction="none"
            )
            terms.append(own.sum())
            sums.append(torch.stack(terms).sum())
            counts.append(len(used_labels) + len(terms) - 1)
        totals, numbers = torch.stack(sums), torch.tensor(counts)
        if self.config.normalisation == "documents":
            return (totals / numbers).mean()
        return totals.sum() / numbers.sum()

    def rest_untouched(self) -> None:
        """A tail that nobody used stays as it is, which torch does for parameters without a gradient."""
        for table in (*self.rows, *self.bias):
            if table.grad is not None and not table.grad.any():
                table.grad = None


def module(config: AplcHeadConfig) -> TailInputs:
    torch.manual_seed(2)
    return TailInputs(config, 3, WIDTH).double()


def documents(step: int) -> tuple[list[int], Tensor, Tensor]:
    """Ranks' sizes, hidden states and 0/1 targets; tail 3 is used at steps 0 and 4 alone, tail 2 not at step 1."""
    sizes = ([4, 4, 4], [5, 2, 3], [1, 3, 2])[step % 3][: world_size()]
    generator = torch.Generator().manual_seed(step)
    h = torch.randn(sum(sizes), WIDTH, generator=generator, dtype=torch.float64).tanh()
    targets = torch.rand(sum(sizes), NUM_LABELS, generator=generator) < 0.06
    targets[:, CLUSTER_OF == 3] = False
    if step % 4 == 0:
        targets[-1, (CLUSTER_OF == 3).nonzero()[0, 0]] = True
    if step == 1:
        targets[:, CLUSTER_OF == 2] = False
    return sizes, h, targets.double()


def ragged(targets: Tensor) -> Ragged:
    return Ragged.from_lists([row.nonzero()[:, 0].tolist() for row in targets])


def _case(config: AplcHeadConfig, *, micro_batches: int = 1, told: bool = True) -> None:
    """Six steps of tail inputs and rows, sharded and plain; `told`: only members are projected."""
    head = AplcHead(config, clusters(), WIDTH, seed=5, averaging_engine=False, dtype=torch.float64)
    plain = Plain(config)
    sharded_inputs, plain_inputs = module(config), module(config)
    optimisers = [torch.optim.AdamW(m.parameters(), lr=LR) for m in (sharded_inputs, plain_inputs)]
    for step in range(6):
        for micro in range(micro_batches):
            sizes, h, targets = documents(step * micro_batches + micro)
            mine = own_rows(h, sizes).clone().requires_grad_()
            own_targets = ragged(own_rows(targets, sizes))
            if told:
                sharded_inputs.expect(head.members(own_targets))
            outputs = (mine, *sharded_inputs(mine))
            loss = head.loss(outputs, own_targets, lr=LR if micro_batches == 1 else None)
            (loss / micro_batches).backward()
            whole = h.clone().requires_grad_()
            expected = plain.loss((whole, *plain_inputs(whole)), targets)
            (expected / micro_batches).backward()
            torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(mine.grad, own_rows(whole.grad, sizes), rtol=1e-7, atol=1e-12)
        for (name, p), q in zip(sharded_inputs.named_parameters(), plain_inputs.parameters(), strict=True):
            assert p.grad is not None, f"{name} has no gradient, which engines want"
            total = p.grad.clone()
            if world_size() > 1:
                torch.distributed.all_reduce(total)
            p.grad.copy_(total)
            wanted = torch.zeros_like(q) if q.grad is None else q.grad
            torch.testing.assert_close(total, wanted, rtol=1e-7, atol=1e-12)
            if q.grad is None:
                q.grad = wanted
        if micro_batches > 1:
            head.step(LR)
        plain.rest_untouched()
        for optimiser in (*optimisers, plain.optimiser):
            optimiser.step()
            optimiser.zero_grad()
    for layer, rows, bias in zip(head.layers.values(), plain.rows, plain.bias, strict=True):
        mine = slice(layer.block.start, layer.block.stop)
        torch.testing.assert_close(layer.weight, rows.detach()[mine], rtol=1e-6, atol=1e-9)
        if layer.bias is not None:
            torch.testing.assert_close(layer.bias, bias.detach()[mine], rtol=1e-6, atol=1e-9)
    _compare_best(head, plain, sharded_inputs)


def _compare_best(head: AplcHead, plain: Plain, inputs: TailInputs) -> None:
    sizes, h, _ = documents(9)
    with torch.no_grad():
        mine = own_rows(h, sizes)
        p = own_rows(plain.probabilities((h, *inputs(h))), sizes)
        for k in (1, 5, NUM_LABELS, NUM_LABELS + 4):
            scores, ids = head.top_k((mine, *inputs(mine)), k)
            order = torch.sort(p, dim=1, descending=True, stable=True).indices[:, :k]
            assert torch.equal(ids[:, :NUM_LABELS], order)
            torch.testing.assert_close(scores[:, :NUM_LABELS], p.gather(1, order).float())
            assert (ids[:, NUM_LABELS:] == -1).all()


def check_linear() -> None:
    _case(AplcHeadConfig())


def check_norm_relu_with_biases() -> None:
    _case(AplcHeadConfig(projection="norm_relu", bias=True))


def check_mean_by_document() -> None:
    _case(AplcHeadConfig(normalisation="documents", projection="norm_relu"))


def check_all_documents_projected() -> None:
    _case(AplcHeadConfig(bias=True), told=False)


def check_accumulation() -> None:
    _case(AplcHeadConfig(), micro_batches=2)
    _case(AplcHeadConfig(normalisation="documents"), micro_batches=3)


def check_clipping_counts_all_micro_batches() -> None:
    """The norm is that of the mean gradient, also of a tail that one of two micro-batches does not use."""
    config = AplcHeadConfig()
    head = AplcHead(config, clusters(), WIDTH, seed=5, averaging_engine=False, dtype=torch.float64)
    plain = Plain(config)
    inputs = module(config)
    for step in (0, 1):
        sizes, h, targets = documents(step)
        mine = own_rows(h, sizes)
        head.loss((mine, *inputs(mine)), ragged(own_rows(targets, sizes)))
        (plain.loss((h, *inputs(h)), targets) / 2).backward()
    squares = sum(float(rows.grad.square().sum()) for rows in plain.rows if rows.grad is not None)
    assert float(head.gradient_norm()) == pytest.approx(squares**0.5, rel=1e-9)


def check_ties_go_by_label_id() -> None:
    head = AplcHead(AplcHeadConfig(), clusters(), WIDTH, seed=5, averaging_engine=False)
    for layer in head.layers.values():
        layer.weight.zero_()
    h, a = torch.ones(2, WIDTH), torch.full((2, 3), 200.0)  # σ(a) = 1: all labels are equally probable
    a[1, 1] = 0.0
    scores, ids = head.top_k((h, a, *(torch.ones(2, w) for w in (8, 4, 2))), 10)
    assert ids[0].tolist() == list(range(10))
    assert torch.equal(scores, torch.full_like(scores, 0.5))
    assert ids[1].tolist() == (CLUSTER_OF != 2).nonzero()[:10, 0].tolist()


def check_no_tails_is_a_flat_layer() -> None:
    flat = LabelClusters.from_assignment(torch.zeros(NUM_LABELS), 1)
    head = AplcHead(AplcHeadConfig(), flat, WIDTH, seed=5, averaging_engine=False, dtype=torch.float64)
    weight = uniform_rows(LabelBlock.of_rank(NUM_LABELS, 0, 1), WIDTH, WIDTH**-0.5, 5).double()
    sizes, h, targets = documents(0)
    mine = own_rows(h, sizes)
    outputs = (mine, *TailInputs(AplcHeadConfig(), 0, WIDTH)(mine))
    loss = head.loss(outputs, ragged(own_rows(targets, sizes)), lr=LR)
    expected = F.binary_cross_entropy_with_logits(h @ weight.t(), targets)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
    assert head.top_k(outputs, 3)[1].shape == (sizes[rank_index()], 3)


def check_averaging_engines_get_the_sum() -> None:
    """DDP and DeepSpeed divide by the number of ranks: the head scales by it."""
    config = AplcHeadConfig()
    inputs, plain_inputs = module(config), module(config)
    head = AplcHead(config, clusters(), WIDTH, seed=5, dtype=torch.float64)
    sizes, h, targets = documents(0)
    tower = nn.parallel.DistributedDataParallel(inputs) if world_size() > 1 else inputs
    inputs.expect(head.members(ragged(own_rows(targets, sizes))))
    mine = own_rows(h, sizes)
    head.loss((mine, *tower(mine)), ragged(own_rows(targets, sizes)), lr=LR).backward()
    Plain(config).loss((h, *plain_inputs(h)), targets).backward()
    for p, q in zip(inputs.parameters(), plain_inputs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-7, atol=1e-12)


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
_errors: dict[int, dict[str, list[str]]] = {}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_ranks(world: int, check: str) -> None:
    if world not in _errors:
        _errors[world] = run_checks(world, CHECKS)
    assert not any(_errors[world][check]), "\n".join(_errors[world][check])
