"""Top-k of children against a plain dense computation, for batches and single documents."""

from __future__ import annotations

import numpy as np
import pytest

from tests.linear.problems import dense_inputs, even_groups, one_group, random_inputs, random_labels, unpacked
from xmc.errors import InputError
from xmc.labels.topk import TopK
from xmc.linear import scoring
from xmc.linear.inputs import Inputs
from xmc.linear.problem import Groups, Problem
from xmc.linear.scoring import CombineConfig, activate, score_children
from xmc.linear.solver import SolverConfig
from xmc.linear.training import train_block
from xmc.linear.weights import LevelWeights, concatenate

CONFIGS = [
    CombineConfig("product", 2),
    CombineConfig("product", 3),
    CombineConfig("sigmoid"),
    CombineConfig("margin"),
]


@pytest.fixture(scope="module")
def level() -> tuple[Inputs, Groups, LevelWeights]:
    """Six clusters of 60 children; the third is in two chunks."""
    rng = np.random.default_rng(0)
    inputs = random_inputs(rng, 90, 70, 4)
    groups = even_groups(rng, 60, 6)
    problem = Problem.build(random_labels(rng, 90, 60, 0.05), groups, "tfn")
    config = SolverConfig(threshold=0.02)
    parts = [train_block(inputs, problem, span, config) for span in ((0, 25), (25, 60))]
    return inputs, groups, concatenate(parts)


def by_hand(margins: np.ndarray, config: CombineConfig) -> np.ndarray:
    if config.combine == "margin":
        return margins
    if config.combine == "sigmoid":
        return 1 / (1 + np.exp(-margins))
    product = np.exp(-(np.maximum(0, 1 - margins) ** config.power))
    return product * (1 - 1e-3 * np.exp(np.minimum(0, 1 - margins)))


def wanted_top(
    level: tuple[Inputs, Groups, LevelWeights], parents: TopK | None, config: CombineConfig, k: int
) -> TopK:
    inputs, groups, weights = level
    margins = dense_inputs(inputs) @ unpacked(weights)
    ids = np.full((len(inputs), k), -1, np.int32)
    scores = np.full((len(inputs), k), -np.inf, np.float32)
    for document in range(len(inputs)):
        found = []
        known = (
            [(0, 1.0)]
            if parents is None
            else zip(*(part[document] for part in (parents.label_ids, parents.scores)), strict=True)
        )
        for cluster, parent in known:
            if cluster < 0:
                continue
            for position in range(groups.offsets[cluster], groups.offsets[cluster + 1]):
                score = by_hand(margins[document, position], config)
                score = score if config.combine == "margin" else score * parent
                found.append((-score, groups.order[position]))
        for place, (score, child) in enumerate(sorted(found)[:k]):
            ids[document, place], scores[document, place] = child, -score
    return TopK(ids, scores)


def some_parents(documents: int, seed: int = 1) -> TopK:
    rng = np.random.default_rng(seed)
    ids = np.array([rng.permutation(6)[:3] for _ in range(documents)], np.int32)
    scores = np.sort(rng.random((documents, 3)).astype(np.float32))[:, ::-1].copy()
    ids[::7, 2], scores[::7, 2] = -1, -np.inf
    ids[5], scores[5] = -1, -np.inf
    return TopK(ids, scores)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.combine}-{config.power}")
@pytest.mark.parametrize("k", [1, 5, 40])
def test_best_children_equal_a_plain_computation(level, config: CombineConfig, k: int):
    inputs, groups, weights = level
    parents = some_parents(len(inputs))
    found = score_children(weights, groups, inputs, parents, k, config)
    wanted = wanted_top(level, parents, config, k)
    np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(found.label_ids >= 0, wanted.label_ids >= 0)
    # Scores that are equal but for rounding may change places.
    assert (found.label_ids == wanted.label_ids).mean() > 0.98


def test_batches_and_single_documents_give_the_same(level, monkeypatch: pytest.MonkeyPatch):
    inputs, groups, weights = level
    parents = some_parents(len(inputs))
    whole = score_children(weights, groups, inputs, parents, 5, CombineConfig())
    for document in (0, 5, 7, 30):
        one = score_children(
            weights,
            groups,
            inputs.rows(document, document + 1),
            parents.rows(document, document + 1),
            5,
            CombineConfig(),
        )
        np.testing.assert_array_equal(one.label_ids[0], whole.label_ids[document])
        np.testing.assert_array_equal(one.scores[0], whole.scores[document])
    monkeypatch.setattr(scoring, "_CANDIDATES", 300)
    batches = score_children(weights, groups, inputs, parents, 5, CombineConfig())
    np.testing.assert_array_equal(batches.label_ids, whole.label_ids)
    np.testing.assert_array_equal(batches.scores, whole.scores)


def test_all_children_under_the_root():
    rng = np.random.default_rng(2)
    inputs = random_inputs(rng, 40, 30)
    problem = Problem.build(random_labels(rng, 40, 30), one_group(30), "all")
    weights = train_block(inputs, problem, (0, 30), SolverConfig(threshold=0.0))
    found = score_children(weights, one_group(30), inputs, None, 4, CombineConfig("margin"))
    wanted = wanted_top((inputs, one_group(30), weights), None, CombineConfig("margin"), 4)
    np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-4, atol=1e-6)


def test_a_matchers_margins_become_scores_and_padding_stays():
    margins = np.array([[2.0, 0.5], [-1.0, -np.inf]], np.float32)
    for config in CONFIGS[:3]:
        wanted = by_hand(margins, config)
        wanted[1, 1] = -np.inf
        np.testing.assert_allclose(activate(margins, config), wanted, rtol=1e-5)


def test_margins_beyond_one_keep_their_order():
    margins = np.array([0.99, 1.0, 1.01, 1.5, 3.0, 6.0], np.float32)
    for power in (2, 3):
        scores = activate(margins, CombineConfig("product", power))
        assert (np.diff(scores) > 0).all()
        assert (scores <= 1).all()


def test_other_documents_and_parts_of_weights_are_refused(level):
    inputs, groups, weights = level
    with pytest.raises(InputError, match="same TF-IDF"):
        score_children(weights, groups, Inputs(inputs.sparse), some_parents(90), 5, CombineConfig())
    rng = np.random.default_rng(0)
    problem = Problem.build(random_labels(rng, 90, 60, 0.05), groups, "tfn")
    part = train_block(inputs, problem, (0, 25), SolverConfig())
    with pytest.raises(InputError, match="concatenate"):
        score_children(part, groups, inputs, some_parents(90), 5, CombineConfig())
    with pytest.raises(InputError, match="power"):
        CombineConfig(power=4)
    with pytest.raises(InputError, match="combine"):
        CombineConfig("sum")  # type: ignore[arg-type]
