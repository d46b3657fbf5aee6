from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from xmc.errors import InputError
from xmc.labels.partition import (
    PartitionConfig,
    approximate_cost_ratio,
    cost,
    document_rates,
    flat_cost,
    format_plan,
    num_flat_parameters,
    num_parameters,
    partition_labels,
    tail_widths,
    touch_probabilities,
)


def test_labels_by_falling_frequency_then_id():
    partition = partition_labels(np.array([5, 9, 1, 9, 5, 2]), PartitionConfig(sizes=(2, 3, 1)))
    assert partition.cluster_of.tolist() == [1, 0, 2, 0, 1, 1]
    tied = partition_labels(np.array([5, 5, 5]), PartitionConfig(sizes=(1, 2)))
    assert tied.cluster_of.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "fractions", [(0.5, 0.5), (1 / 3, 1 / 3, 1 / 3), (0.7, 0.2, 0.1), (1.0,), (0.25,) * 4]
)
@pytest.mark.parametrize("num_labels", [10, 101, 4001])
def test_fractions(fractions, num_labels):
    frequency = np.random.default_rng(0).integers(1, 50, num_labels)
    partition = partition_labels(frequency, PartitionConfig(fractions))
    assert partition.sizes.sum() == num_labels
    np.testing.assert_allclose(partition.sizes, np.array(fractions) * num_labels, atol=1)
    np.testing.assert_array_equal(np.bincount(partition.cluster_of), partition.sizes)
    rarest = [frequency[partition.cluster_of == cluster].min() for cluster in range(len(fractions))]
    most = [frequency[partition.cluster_of == cluster].max() for cluster in range(len(fractions))]
    assert all(low >= high for low, high in zip(rarest, most[1:], strict=False))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fractions": (0.5, 0.4)}, "add up to 0.9"),
        ({"fractions": (0.7, 0.4)}, "add up to 1.1"),
        ({"fractions": (1.5, -0.5)}, "above 0"),
        ({"fractions": ()}, "above 0"),
        ({"sizes": (3, 0)}, "at least one"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        PartitionConfig(**settings)


def test_settings_that_do_not_fit_the_labels_are_refused():
    with pytest.raises(InputError, match="cluster 1 of 10 labels empty"):
        partition_labels(np.ones(10), PartitionConfig((0.97, 0.03)))
    with pytest.raises(InputError, match="add up to 9"):
        partition_labels(np.ones(10), PartitionConfig(sizes=(4, 5)))


def test_size_equations_by_hand():
    """d 8, q 2, clusters 10, 20, 40: head 8 (10 + 2), tail 1 at width 4: 4 (8 + 20), tail 2 at width 2: 2 (8 + 40)."""
    sizes = (10, 20, 40)
    assert num_parameters(sizes, 8, 2) == 96 + 112 + 96
    assert num_flat_parameters(70, 8) == 560


def test_cost_equations_by_hand():
    sizes, touch = (10, 20, 40), np.array([0.5, 0.25])
    assert cost(sizes, touch, 8, 2, batch_size=3) == pytest.approx(3 * (96 + 0.5 * 112 + 0.25 * 96))
    assert flat_cost(70, 8, 3) == 3 * 560
    assert approximate_cost_ratio(sizes, touch, 2) == pytest.approx(70 / (10 + 0.5 * 20 / 2 + 0.25 * 40 / 4))


def test_the_approximation_holds_where_the_paper_says():
    """K ≪ l_h and d ≪ l_i: Amazon-670K in quarters with d 512, q 2."""
    sizes = (167_523, 167_522, 167_523, 167_523)
    touch = np.array([0.9, 0.6, 0.3])
    exact = flat_cost(sum(sizes), 512, 32) / cost(sizes, touch, 512, 2, 32)
    assert exact == pytest.approx(approximate_cost_ratio(sizes, touch, 2), rel=0.01)


def test_document_rates_from_the_label_matrix():
    partition = partition_labels(np.array([4, 3, 2, 1]), PartitionConfig(sizes=(1, 2, 1)))
    labels = sp.csr_matrix(np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]], np.float32))
    assert document_rates(labels, partition).tolist() == [0.5, 0.25]
    np.testing.assert_allclose(touch_probabilities(np.array([0.5, 0.25]), 2), [0.75, 1 - 0.75**2])


def test_no_tails_is_a_flat_layer():
    partition = partition_labels(np.ones(7), PartitionConfig((1.0,)))
    assert num_parameters(partition.sizes, 16, 2) == num_flat_parameters(7, 16)
    assert cost(partition.sizes, np.zeros(0), 16, 2, 4) == flat_cost(7, 16, 4)


def test_widths_that_vanish_are_refused():
    assert tail_widths(3, 768, 2).tolist() == [384, 192, 96]
    with pytest.raises(InputError, match="tail 3"):
        tail_widths(4, 4, 2)
    with pytest.raises(InputError, match="at least 1"):
        tail_widths(2, 64, 0.5)


def test_plan_names_every_cluster_and_both_ratios():
    partition = partition_labels(np.arange(1, 71), PartitionConfig(sizes=(10, 20, 40)))
    lines = format_plan(partition, np.array([0.5, 0.25]), hidden=8, decay=2, batch_size=1).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["head", "tail", "tail"]
    assert "304" in lines[4]
    assert f"{560 / 304:.2f}" in lines[4]
    assert f"{560 / (96 + 56 + 24):.2f}" in lines[5]
