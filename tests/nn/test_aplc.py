"""APLC's head and module on one rank: work that is not done, 16 bits, learning, saving. Ranks: test_aplc_ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycluster.job import Learner, TrainConfig, rate_factor, rate_groups
from xmc.errors import InputError
from xmc.nn.block_files import BlockReader, write_blocks
from xmc.nn.encoders import EncoderConfig, load_encoder
from xmc.nn.heads.aplc import AplcHead, AplcHeadConfig, AplcModule, ClusterLayer, TailInputs, product_logit
from xmc.nn.heads.light_xml import LabelClusters
from xmc.nn.losses import bce
from xmc.nn.optimisers import RowOptimiser, parameter_groups
from xmc.nn.sharding import LabelBlock, Ragged

WIDTH, NUM_LABELS = 16, 24
CLUSTER_OF = torch.tensor([0] * 8 + [1] * 8 + [2] * 8)
CLUSTERS = LabelClusters.from_assignment(CLUSTER_OF, 3)
CONFIG = AplcHeadConfig()


def new_head(config: AplcHeadConfig = CONFIG, **options) -> AplcHead:
    return AplcHead(config, CLUSTERS, WIDTH, seed=0, **options)


def outputs_of(h: Tensor, config: AplcHeadConfig = CONFIG) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return h, *TailInputs(config, 2, WIDTH).to(h.dtype)(h)


# --- work that is not done ------------------------------------------------------------------------------------------


class Counter:
    """Counts (rows × documents) scored, rows moved, and documents projected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scored: dict[int, int] = {}
        self.moved: dict[int, int] = {}
        self.projected: list[int] = []
        scores, linear = ClusterLayer._scores, nn.Linear.forward

        def counted_scores(layer, E_t, start, stop, out):
            self.scored[layer.width] = self.scored.get(layer.width, 0) + (stop - start) * E_t.shape[1]
            return scores(layer, E_t, start, stop, out)

        def counted_linear(layer, x):
            self.projected.append(x.shape[0])
            return linear(layer, x)

        monkeypatch.setattr(ClusterLayer, "_scores", counted_scores)
        monkeypatch.setattr(nn.Linear, "forward", counted_linear)
        for kind in RowOptimiser.__subclasses__():
            monkeypatch.setattr(kind, "update", self._counted_update(kind.update))

    def _counted_update(self, update):
        def counted(optimiser, table, start, stop, gradient, lr):
            self.moved[table.shape[-1]] = self.moved.get(table.shape[-1], 0) + stop - start
            update(optimiser, table, start, stop, gradient, lr)

        return counted


def test_a_tail_costs_only_the_documents_that_have_a_label_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    head, inputs, count = new_head(), TailInputs(CONFIG, 2, WIDTH), Counter(monkeypatch)
    h = torch.randn(5, WIDTH, requires_grad=True)
    targets = Ragged.from_lists([[0], [1, 9], [2], [], [10, 11]])  # two documents in tail 1, none in tail 2
    inputs.expect(head.members(targets))
    head.loss((h, *inputs(h)), targets, lr=0.1).backward()
    assert count.projected == [5, 2, 0]  # the tails' logits, then each projection
    assert count.scored == {16: 8 * 5, 8: 8 * 2}
    assert count.moved == {16: 8, 8: 8}
    assert [layer.step_count for layer in head.layers.values()] == [1, 1, 0]
    zeros = [p.grad for name, p in inputs.named_parameters() if name.startswith("projections.1")]
    assert all(g is not None and not g.any() for g in zeros), "engines want a gradient of every parameter"


def test_without_a_label_in_any_tail_no_tail_does_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    head, inputs, count = new_head(), TailInputs(CONFIG, 2, WIDTH), Counter(monkeypatch)
    before = {name: tensor.clone() for name, tensor in head.trained_tensors().items()}
    h = torch.randn(3, WIDTH, requires_grad=True)
    for lr in (0.1, None):
        targets = Ragged.from_lists([[0], [], [7]])
        inputs.expect(head.members(targets))
        head.loss((h, *inputs(h)), targets, lr=lr).backward()
    head.step(0.1, max_norm=1.0)
    assert count.scored == {16: 2 * 8 * 3}
    assert set(count.moved) == {16}
    assert torch.equal(head.trained_tensors()["tail_a.weight"], before["tail_a.weight"])
    assert torch.equal(head.trained_tensors()["tail_b.weight"], before["tail_b.weight"])
    assert not torch.equal(head.trained_tensors()["head.weight"], before["head.weight"])


def test_prediction_skips_tails_that_cannot_reach_the_kth_best(monkeypatch: pytest.MonkeyPatch) -> None:
    head, count = new_head(), Counter(monkeypatch)
    h, a, *t = outputs_of(torch.randn(4, WIDTH))
    a = torch.tensor([[-9.0, -9.0], [9.0, -9.0], [-9.0, -9.0], [9.0, 9.0]])
    _, ids = head.top_k((h, a, *t), 3)
    assert count.scored == {16: 8 * 4, 8: 8 * 2, 4: 8 * 1}
    assert (ids[0] < 8).all()
    count.scored.clear()
    head.top_k(
        (h, a, *t), 9
    )  # the head has eight labels: each document needs a tail, and the best one is not known
    assert count.scored[8] == 8 * 4


@pytest.mark.parametrize("k", [1, 3, 8, 24])
def test_best_labels_equal_those_of_all_probabilities(k: int) -> None:
    head = new_head(averaging_engine=False, dtype=torch.float64)
    generator = torch.Generator().manual_seed(k)
    h = 3 * torch.randn(200, WIDTH, generator=generator, dtype=torch.float64)
    a = 4 * torch.randn(200, 2, generator=generator, dtype=torch.float64)
    t = [3 * torch.randn(200, w, generator=generator, dtype=torch.float64) for w in (8, 4)]
    p = torch.cat(
        [torch.sigmoid(x @ y.weight.t()) for x, y in zip((h, *t), head.layers.values(), strict=True)], 1
    )
    p[:, 8:16] *= torch.sigmoid(a[:, :1])
    p[:, 16:] *= torch.sigmoid(a[:, 1:])
    scores, ids = head.top_k((h, a, *t), k)
    assert torch.equal(ids, p.sort(dim=1, descending=True).indices[:, :k])
    torch.testing.assert_close(scores, p.sort(dim=1, descending=True).values[:, :k].float())


# --- numbers --------------------------------------------------------------------------------------------------------


def test_product_logit() -> None:
    a, b = torch.meshgrid(torch.linspace(-30, 30, 61), torch.linspace(-30, 30, 61), indexing="ij")
    a, b = a.double(), b.double()
    p = torch.sigmoid(a) * torch.sigmoid(b)
    # 1 − p without the rounding of 1 − p
    rest = torch.sigmoid(-a) + torch.sigmoid(-b) - torch.sigmoid(-a) * torch.sigmoid(-b)
    torch.testing.assert_close(product_logit(a, b), torch.log(p) - torch.log(rest), rtol=1e-9, atol=1e-9)
    far = torch.tensor([-1e4, 0.0, 1e4])
    assert torch.isfinite(product_logit(far[:, None], far)).all()
    assert (product_logit(far[:, None], far) <= torch.minimum(far[:, None], far)).all()


@pytest.mark.parametrize("normalisation", ["terms", "documents"])
def test_gradients_by_finite_differences(normalisation: str) -> None:
    config = AplcHeadConfig(normalisation=normalisation, projection="norm_relu", bias=True)
    head = AplcHead(config, CLUSTERS, WIDTH, seed=0, averaging_engine=False, dtype=torch.float64)
    torch.manual_seed(1)
    inputs = TailInputs(config, 2, WIDTH).double()
    targets = Ragged.from_lists([[0, 9], [1], [17, 18, 2]])

    def loss(h: Tensor) -> Tensor:
        return head.loss((h, *inputs(h)), targets)

    assert torch.autograd.gradcheck(loss, torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True))
    layer = head.tails[1]
    layer._gradients, layer._num_stored = None, 0
    h = torch.randn(3, WIDTH, dtype=torch.float64)
    loss(h)
    assert layer._gradients is not None
    moved = torch.zeros_like(layer.weight)
    for i in (0, 1, 7):
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                layer.weight[i, 2] += sign * 1e-5
                values.append(float(loss(h)))
                layer.weight[i, 2] -= sign * 1e-5
        moved[i, 2] = (values[0] - values[1]) / 2e-5
        assert float(layer._gradients["weight"][i, 2]) == pytest.approx(
            float(moved[i, 2]), rel=1e-5, abs=1e-10
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_safe_where_the_plain_product_is_not(dtype: torch.dtype) -> None:
    """Sure and wrong: σ(a)·σ(b) rounds to 1 and its loss is infinite; in logits it is some 18."""
    head = new_head(averaging_engine=False)
    head.tails[0].weight.fill_(0.0)
    head.tails[0].weight[:, 0] = torch.linspace(-20, 20, 8)
    h = torch.zeros(2, WIDTH, dtype=dtype, requires_grad=True)
    a = torch.tensor([[20.0, -20.0], [-20.0, 20.0]], dtype=dtype, requires_grad=True)
    t = [torch.ones(2, w, dtype=dtype, requires_grad=True) for w in (8, 4)]
    plain = torch.sigmoid(a[0, 0]) * torch.sigmoid((t[0] @ head.tails[0].weight.to(dtype).t())[0, -1])
    assert float(torch.log(1 - plain).detach()) == float("-inf")
    targets = [[8, 9], [8]]
    loss = head.loss((h, a, *t), Ragged.from_lists(targets))
    assert torch.isfinite(loss)
    scale = 2.0**14  # as an engine in fp16 scales its loss
    (loss * scale).backward()
    wide = [x.detach().double().requires_grad_() for x in (h, a, *t)]
    expected = _expected(wide, head, targets)
    torch.testing.assert_close(float(loss.detach()), float(expected.detach()), rtol=1e-5, atol=1e-6)
    expected.backward()
    for got, wanted in zip((h, a, t[0]), wide, strict=False):
        assert torch.isfinite(got.grad).all()
        torch.testing.assert_close(got.grad.double() / scale, wanted.grad, rtol=2e-2, atol=1e-5)


def _expected(outputs: list[Tensor], head: AplcHead, targets: list[list[int]]) -> Tensor:
    """The loss in float64 from 1 − σ(a)σ(b) = σ(−a) + σ(a)σ(−b)."""
    h, a, t, _ = outputs
    y = torch.zeros(2, NUM_LABELS, dtype=torch.float64)
    for document, labels in enumerate(targets):
        y[document, labels] = 1.0
    of_head = F.binary_cross_entropy_with_logits(h @ head.head.weight.double().t(), y[:, :8], reduction="sum")
    b = t @ head.tails[0].weight.double().t()
    log_p = F.logsigmoid(a[:, :1]) + F.logsigmoid(b)
    log_rest = torch.log(torch.sigmoid(-a[:, :1]) + torch.sigmoid(a[:, :1]) * torch.sigmoid(-b))
    of_tail = -(y[:, 8:16] * log_p + (1 - y[:, 8:16]) * log_rest).sum()
    return (of_head + of_tail + F.softplus(a[:, 1]).sum()) / (2 * (8 + 8 + 1))


def test_both_means() -> None:
    """Document 0 has 8 + 8 + 1 terms, document 1 has 8 + 1 + 1."""
    values = {}
    for normalisation in ("terms", "documents"):
        head = new_head(AplcHeadConfig(normalisation=normalisation), averaging_engine=False)
        for layer in head.layers.values():
            layer.weight.zero_()
        h = torch.ones(2, WIDTH)
        outputs = (h, torch.zeros(2, 2), torch.zeros(2, 8), torch.zeros(2, 4))
        with torch.no_grad():
            values[normalisation] = float(head.loss(outputs, Ragged.from_lists([[0, 8], [1]])))
    log = torch.log(torch.tensor([2.0, 4.0, 4.0 / 3])).tolist()
    first, second = 9 * log[0] + log[1] + 7 * log[2], 10 * log[0]
    assert values["terms"] == pytest.approx((first + second) / (17 + 10), rel=1e-6)
    assert values["documents"] == pytest.approx((first / 17 + second / 10) / 2, rel=1e-6)


# --- learning and keeping -------------------------------------------------------------------------------------------


def _module(config: AplcHeadConfig = CONFIG) -> AplcModule:
    torch.manual_seed(0)
    encoder = load_encoder(EncoderConfig("random:xlnet", layers_pooled=1, dropout=0.0, max_tokens=16))
    return AplcModule(encoder, config, 2, WIDTH, dropout=0.0)


@pytest.mark.parametrize("projection", ["linear", "norm_relu"])
def test_it_learns(projection: str) -> None:
    config = AplcHeadConfig(projection=projection)
    module, head = _module(config), new_head(config)
    ids = torch.randint(10, 200, (NUM_LABELS, 6), generator=torch.Generator().manual_seed(1))
    ids[:, 1] = torch.arange(NUM_LABELS) + 10
    labels = [sorted({i, (i * 7 + 1) % NUM_LABELS}) for i in range(NUM_LABELS)]
    targets, mask = Ragged.from_lists(labels), torch.ones_like(ids)
    optimiser = torch.optim.AdamW(parameter_groups(module, 0.0), lr=5e-3)
    losses = []
    for _ in range(200):
        module.tails.expect(head.members(targets))
        loss = head.loss(module(ids, mask), targets, lr=2e-2)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
    module.eval()
    with torch.no_grad():
        scores, best = head.top_k(module(ids, mask), 2)
    hits = [len(set(got) & set(true)) for got, true in zip(best.tolist(), labels, strict=True)]
    assert sum(hits) > 0.8 * 2 * NUM_LABELS
    assert ((scores > 0) & (scores < 1)).all()


def test_saved_head_continues_as_if_never_stopped(tmp_path: Path) -> None:
    def train(head: AplcHead, steps: range) -> None:
        for step in steps:
            h = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
            head.loss(
                outputs_of(h.requires_grad_()),
                Ragged.from_lists([[step], [], [3, 4], [step + 5], [1]]),
                lr=0.1,
            )

    undisturbed, stopped, resumed = new_head(), new_head(), new_head()
    train(undisturbed, range(12))
    train(stopped, range(6))
    write_blocks(stopped.export_blocks(with_optimiser=True), tmp_path)
    resumed.load_rows(BlockReader(tmp_path), with_optimiser=True)
    resumed.load_shared_state(stopped.shared_state())
    train(resumed, range(6, 12))
    steps = [layer.step_count for layer in resumed.layers.values()]
    assert steps == [layer.step_count for layer in undisturbed.layers.values()]
    assert len(set(steps)) == 3, "each cluster counts its own steps"
    for name, tensor in undisturbed.trained_tensors().items():
        assert torch.equal(resumed.trained_tensors()[name], tensor), name


def test_rows_of_another_partition_are_refused() -> None:
    other = LabelClusters.from_assignment(CLUSTER_OF.flip(0), 3)
    with pytest.raises(InputError, match="another partition"):
        AplcHead(CONFIG, other, WIDTH, seed=0).load_shared_state(new_head().shared_state())


def test_validation_loss_learns_nothing() -> None:
    head = new_head()
    before = {name: tensor.clone() for name, tensor in head.trained_tensors().items()}
    with torch.no_grad():
        loss = head.loss(outputs_of(torch.ones(2, WIDTH)), Ragged.from_lists([[1], [9]]), lr=0.1)
    head.step(0.1)
    assert float(loss) > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in head.trained_tensors().items())


def test_rows_do_not_depend_on_the_number_of_ranks() -> None:
    whole = new_head().tails[0].weight
    parts = []
    for rank in range(3):
        block = LabelBlock.of_rank(8, rank, 3)
        layer = ClusterLayer(block, 8, CONFIG.optimiser, bound=8**-0.5, seed=1)
        parts.append(layer.weight)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    "bad",
    [{"decay": 0.5}, {"projection": "relu"}, {"normalisation": "batch"}],
    ids=lambda bad: next(iter(bad)),
)
def test_config_is_checked(bad: dict) -> None:
    with pytest.raises(InputError, match="aplc"):
        AplcHeadConfig(**bad)


def test_too_many_tails_are_refused() -> None:
    with pytest.raises(InputError, match="leaves nothing for tail 5"):
        CONFIG.widths(6, 16)
    with pytest.raises(InputError, match="at most 26"):
        AplcHeadConfig(decay=1.0).widths(27, 16)


# --- rates ----------------------------------------------------------------------------------------------------------


def test_three_rates() -> None:
    module = _module()
    learner = Learner(module, new_head())
    learner.label_parts = ("tails",)
    config = TrainConfig(encoder_rate=1e-5, hidden_rate=1e-4, label_rate=1e-3)
    rate_of = {id(p): g["lr"] for g in rate_groups(learner, config, 0.01) for p in g["params"]}
    assert len(rate_of) == len(list(module.parameters()))
    for name, p in module.named_parameters():
        part = name.split(".")[0]
        assert rate_of[id(p)] == {"encoder": 1e-5, "hidden": 1e-4, "tails": 1e-3}[part], name
    learner.label_parts = ()
    (one,) = {g["lr"] for g in rate_groups(learner, TrainConfig(encoder_rate=2e-5), 0.01)}
    assert one == 2e-5
    with pytest.raises(InputError, match="hidden_rate"):
        TrainConfig(hidden_rate=-1.0)


def test_linear_schedule_is_the_papers_slanted_triangle() -> None:
    """Equation 15: t / t_w up to t_w, then (t_a − t) / (t_a − t_w)."""
    total = 200
    falling = TrainConfig(schedule="linear")
    assert [rate_factor(t, total, falling) for t in range(total)] == pytest.approx(
        [1 - t / total for t in range(total)]
    )
    slanted, warm = TrainConfig(schedule="linear", warmup=0.2), 40
    for t in range(total):
        wanted = t / warm if t <= warm else (total - t) / (total - warm)
        assert rate_factor(t, total, slanted) == pytest.approx(wanted, abs=1 / warm)


def test_bce_of_a_sure_tail_is_that_of_its_labels() -> None:
    layer = ClusterLayer(LabelBlock.of_rank(8), 8, CONFIG.optimiser, bound=0.3, seed=1, dtype=torch.float64)
    T = torch.randn(3, 8, dtype=torch.float64)
    positives = torch.tensor([1, 5])
    sure = layer.product_loss(T, torch.full((3,), 60.0, dtype=torch.float64), positives, 24.0)
    loss, _ = bce((layer.weight @ T.t()).contiguous(), positives)
    assert float(sure) == pytest.approx(float(loss) / 24, rel=1e-9)
