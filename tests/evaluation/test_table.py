from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from xmc.evaluation.metrics import Metrics, MetricsConfig
from xmc.evaluation.table import format_table
from xmc.labels.topk import TopK


def result(num_unseen_labels=None):
    metrics = Metrics(np.array([1500, 40, 2]), 2000, MetricsConfig(ks=(1, 2), band_frequencies=(10, 100)))
    truth = sp.csr_matrix(np.array([[1, 1, 0], [0, 0, 1], [0, 0, 0]], np.float32))
    predicted = TopK(np.array([[0, 1], [0, 1], [0, 1]], np.int32), np.zeros((3, 2), np.float32))
    metrics.update(predicted, truth, np.array([0, 2, 0]))
    return metrics.result(num_unseen_labels)


def test_table_says_what_was_counted_and_left_out():
    lines = format_table(result(2)).splitlines()
    assert lines[0] == "documents    3, of which 1 without labels (in no average)"
    assert lines[1].startswith("assignments  5, of which 2 (40.0 %) of labels that train never saw")
    assert not any("not known" in line for line in lines)
    assert "not known" in format_table(result(None))


def test_table_is_aligned_and_complete():
    lines = format_table(result(2)).splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("%"))
    ranking = lines[header : lines.index("", header)]
    assert [line.split()[0] for line in ranking] == ["%", "P", "R", "nDCG", "PSP", "PSnDCG", "coverage"]
    assert len({len(line) for line in ranking}) == 1
    assert ranking[1].split() == ["P", "50.00", "50.00"]
    bands = lines[lines.index("", header) + 1 :]
    assert len(bands) == 10
    assert len({len(line) for line in bands}) == 1
    assert bands[1].split()[:2] == ["head", "100"]
    # Nothing of the tail was predicted: its precision is no number, its recall is zero.
    assert bands[-3].split()[-2:] == ["–", "–"]
    assert bands[-2].split()[-2:] == ["0.00", "0.00"]
